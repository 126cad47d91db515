"""Kernels of drafters."""
