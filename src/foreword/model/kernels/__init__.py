"""Kernels of our own in Triton, each against a reference in plain torch. Imported only where a kernel runs."""
