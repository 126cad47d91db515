"""Foreword: lossless speculative decoding for Hugging Face models.

Only the public names. They are imported when first used: `import foreword` alone does not import torch, so a command that
loads no model answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreword.version import __version__ as __version__

if TYPE_CHECKING:
    from foreword.api import LLM, AsyncStream, Chat, Stream, default_model, load, wrap
    from foreword.core.draft import Draft, Shape, Tree
    from foreword.core.drafter import Drafter
    from foreword.core.needs import Needs
    from foreword.core.sampling import Sampling
    from foreword.core.scores import Accepted, Scores
    from foreword.core.state import State
    from foreword.core.target import Target
    from foreword.errors import ForewordError
    from foreword.methods import register
    from foreword.requests import Settings
    from foreword.results import Piece, Result, Stats
    from foreword.serve.async_llm import AsyncLLM

__all__ = [
    "LLM",
    "Accepted",
    "AsyncLLM",
    "AsyncStream",
    "Chat",
    "Draft",
    "Drafter",
    "ForewordError",
    "Needs",
    "Piece",
    "Result",
    "Sampling",
    "Scores",
    "Settings",
    "Shape",
    "State",
    "Stats",
    "Stream",
    "Target",
    "Tree",
    "default_model",
    "load",
    "register",
    "wrap",
]

_HOMES = {
    "AsyncLLM": "serve.async_llm",
    "Sampling": "core.sampling",
    "ForewordError": "errors",
    "register": "methods",
    "Settings": "requests",
}
_HOMES |= dict.fromkeys(["Accepted", "Draft", "Drafter", "Needs", "Scores", "Shape", "State", "Target", "Tree"], "core")
_HOMES |= dict.fromkeys(["Piece", "Result", "Stats"], "results")
_HOMES |= dict.fromkeys(["LLM", "AsyncStream", "Chat", "Stream", "default_model", "load", "wrap"], "api")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"foreword.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
