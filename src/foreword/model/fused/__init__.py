"""Decoder layers as few calls: fused layers for CPU and CUDA."""
