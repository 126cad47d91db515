"""The table of methods: name -> where it lives. File name = method name = CLI name = docs page.

Reading the table imports no method and no torch, so it also says what a listing of the methods needs; the paper stands on
the method's class too, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreword.errors import InputError, UnknownMethod

if TYPE_CHECKING:
    from foreword.core.drafter import Drafter


@dataclass(frozen=True)
class Method:
    place: str  # "module:Class"
    summary: str
    paper: str
    trained: bool = False

    def load(self) -> type[Drafter]:
        module, name = self.place.split(":")
        return getattr(import_module(f"foreword.methods.{module}"), name)


METHODS: dict[str, Method] = {
    "plain": Method("plain:Plain", "no speculation: one token a round, the baseline of every figure", paper="-"),
    "prompt_lookup": Method(
        "prompt_lookup:PromptLookup",
        "repeats what followed the same words earlier in the text",
        paper="Prompt Lookup Decoding, Saxena 2023; LLMA, arXiv 2304.04487",
    ),
    "token_recycling": Method(
        "token_recycling:TokenRecycling",
        "reuses the target's own runner-up tokens",
        paper="Token Recycling, arXiv 2408.08696",
    ),
}

# The fastest on the default model and the open prompts: see results/.
DEFAULT_METHOD = "prompt_lookup"


def find(name: str) -> Method:
    if name in METHODS:
        return METHODS[name]
    near = get_close_matches(name, METHODS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownMethod(f"no method is called {name!r}; {hint}there are: {', '.join(METHODS)}")


def make(name: str, /, rows: int | None = None, **options: Any) -> Drafter:
    """A drafter by its name. `rows` bounds the rows of a pass, the root included; None means: what pays here."""
    if rows is not None and rows < 1:
        raise InputError(f"rows is {rows}; a pass has at least 1 row, the root")
    kind = find(name).load()
    try:
        return kind(rows=rows, **options)  # type: ignore[call-arg]
    except TypeError as error:
        raise InputError(f"{name}: {error}") from error
