"""Kernels of a decoder layer."""
