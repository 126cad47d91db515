"""The table of methods: name -> where it lives. File name = method name = CLI name = docs page.

Reading the table imports no method and no torch, so it also says what a listing of the methods needs; the paper stands on
the method's class too, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from foreword.errors import DrafterError, InputError, UnknownMethod

if TYPE_CHECKING:
    from foreword.core.drafter import Drafter


@dataclass(frozen=True)
class Method:
    place: str  # "module:Class"
    summary: str
    paper: str
    trained: bool = False
    trained_as: str = ""  # of which method its drafters are, where not of its own
    takes_models: bool = False  # in place of a trained drafter it takes any model with the target's vocabulary
    beside: bool = False  # it drafts while the target checks

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
    "medusa": Method(
        "medusa:Medusa",
        "heads on the last state guess the tokens ahead, each for itself",
        paper="Medusa, arXiv 2401.10774",
        trained=True,
    ),
    "hydra": Method(
        "hydra:Hydra",
        "heads that are told the tokens guessed before them",
        paper="Hydra, arXiv 2402.05109",
        trained=True,
    ),
    "clover": Method(
        "clover:Clover",
        "a layer reads the text, a small recurrent cell goes on from it",
        paper="Clover, arXiv 2405.00263",
        trained=True,
    ),
    "clover2": Method(
        "clover2:Clover2",
        "two layers read the text with each row's next token, a cell goes on",
        paper="Clover-2, arXiv 2408.00264",
        trained=True,
    ),
    "echo": Method(
        "echo:Echo",
        "what the text said before, in one tree with the guesses of clover2",
        paper="-",
        trained=True,
        trained_as="clover2",
    ),
    "hidden_transfer": Method(
        "hidden_transfer:HiddenTransfer",
        "tree nodes carry states of later tokens through the checking pass",
        paper="Hidden Transfer, arXiv 2404.12022",
        trained=True,
    ),
    "firp": Method(
        "firp:Firp",
        "middle states of later tokens, walked through the upper layers",
        paper="FIRP, arXiv 2410.20488",
        trained=True,
        trained_as="hidden_transfer",
    ),
    "draft_model": Method(
        "draft_model:DraftModel",
        "a second, smaller model writes on, and the target checks",
        paper="Speculative decoding, arXiv 2211.17192; sampling, arXiv 2302.01318",
        trained=True,
        takes_models=True,
    ),
    "gsd": Method(
        "gsd:Gsd",
        "a draft model whose guesses form a graph: what comes back is drafted once",
        paper="GSD, arXiv 2407.16207",
        trained=True,
        trained_as="draft_model",
        takes_models=True,
    ),
    "amusd": Method(
        "amusd:Amusd",
        "a draft model on a device of its own writes on while the target checks",
        paper="AMUSD, arXiv 2410.17375",
        trained=True,
        trained_as="draft_model",
        takes_models=True,
        beside=True,
    ),
}

# What is expected to be fastest on the machine at hand: methods/auto.py.
AUTO = "auto"
DEFAULT_METHOD = AUTO

# What an option may be where it is declared so: True is no whole number, and 2.5 heads fail only when they are built.
PLAIN_TYPES: dict[object, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "True or False"),
}

# A tree knows who sees whom, which is rows x rows; past this no machine gains from another row.
MOST_ROWS = 1024


def find(name: str) -> Method:
    if name in METHODS:
        return METHODS[name]
    near = get_close_matches(name, METHODS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownMethod(f"no method is called {name!r}; {hint}there are: {', '.join(METHODS)}")


def trained_as(name: str) -> str:
    """The method whose trained drafters a method takes: mostly its own."""
    return METHODS[name].trained_as or name


def make(name: str, /, rows: int | None = None, **options: Any) -> Drafter:
    """A drafter without weights by its name, ready to serve. `rows` bounds the rows of a pass, the root included; None:
    what pays here."""
    drafter = untrained(name, rows, **options)
    if METHODS[name].trained:
        raise DrafterError(
            f"{name} has weights of its own, trained for one model, and none are given; "
            f"`foreword train {trained_as(name)}` makes them"
        )
    return drafter


def check_rows(rows: int | None) -> None:
    if rows is not None and (type(rows) is not int or not 1 <= rows <= MOST_ROWS):
        raise InputError(f"rows is {rows!r}; a pass has at least 1 row, the root, and at most {MOST_ROWS}")


def untrained(name: str, /, rows: int | None = None, **options: Any) -> Drafter:
    """The same with no weights read: a trained method is as it starts, for the training loop to bind and teach."""
    check_rows(rows)
    kind = find(name).load()
    known = signature(kind, eval_str=True).parameters
    for option, value in options.items():
        if option not in known:
            raise InputError(f"{name}: no option is called {option!r}; there are: {', '.join(known)}")
        takes, called = PLAIN_TYPES.get(known[option].annotation, ((type(value),), ""))
        if type(value) not in takes:
            raise InputError(f"{name}: {option} is {value!r}; it must be {called}")
    try:
        return kind(rows=rows, **options)  # type: ignore[call-arg]
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise InputError(f"{name}: an option is of the wrong type in {given} ({error})") from error
