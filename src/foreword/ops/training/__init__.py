"""Kernels of training."""
