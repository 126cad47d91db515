"""Foreword: lossless speculative decoding for any Hugging Face model."""

from foreword.api import LLM, Chat, Stream, default_model, load, wrap
from foreword.core.sampling import Sampling
from foreword.errors import ForewordError
from foreword.results import Piece, Result, Stats

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Chat",
    "ForewordError",
    "Piece",
    "Result",
    "Sampling",
    "Stats",
    "Stream",
    "default_model",
    "load",
    "wrap",
]
