"""Foreword: lossless speculative decoding for any Hugging Face model."""

__version__ = "0.1.0"
