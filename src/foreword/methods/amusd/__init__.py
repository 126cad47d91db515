"""AMUSD: a draft model on a device or core of its own writes on while the target verifies."""
