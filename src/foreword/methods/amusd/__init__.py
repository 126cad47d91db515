"""AMUSD: a draft model on a device or core of its own keeps drafting while the target verifies."""
