"""Kernels of a round around the pass."""
