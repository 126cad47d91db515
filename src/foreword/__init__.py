"""Foreword: lossless speculative decoding for Hugging Face models.

The public names, and nothing else. They are looked up when first used: `import foreword` alone does not import torch,
so a command that loads no model answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {"Sampling": "core.sampling", "ForewordError": "errors"}
_HOMES |= dict.fromkeys(["Piece", "Result", "Stats"], "results")
_HOMES |= dict.fromkeys(["LLM", "Chat", "Stream", "default_model", "load", "wrap"], "api")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"foreword.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
