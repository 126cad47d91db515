"""The table of methods: name -> where it lives. File name = method name = CLI name = docs page.

Reading the table imports no method and no torch, so it holds what a listing needs. The paper is also named on the method's
class, and a test compares the two. Methods of other packages join the table by `register`, or by the entry-point group
`foreword.methods`, which is searched when a name is not in the table or when all names are listed.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import getdoc, signature
from typing import TYPE_CHECKING, Any, TypeAlias

from foreword.errors import DrafterError, ForewordWarning, InputError, UnknownMethod

if TYPE_CHECKING:
    from foreword.core.drafter import Drafter

MethodLike: TypeAlias = "str | os.PathLike[str] | Drafter | type[Drafter]"
"""How a user names a method: its name, the folder of a trained drafter, a drafter, or its class."""


@dataclass(frozen=True)
class Method:
    place: str  # "module:Class"
    summary: str
    paper: str
    trained: bool = False
    trained_as: str = ""  # the method whose trained drafters it uses, if not its own
    takes_models: bool = False  # it also takes any model with the target's vocabulary in place of a trained drafter
    searched: bool = False  # it has no weights but a plan for one model, which `foreword search` finds
    takes_plans: bool = False  # it also takes such a plan in place of a trained drafter
    drafts_alongside: bool = False  # it drafts while the target verifies
    looped: bool = False  # it works with looped models only
    kind: type[Drafter] | None = None  # the class itself, for a method of another package

    @property
    def fitted(self) -> bool:
        """Whether it needs what was made for one model, in a folder: trained weights, or a plan."""
        return self.trained or self.searched

    def load(self) -> type[Drafter]:
        if self.kind is not None:
            return self.kind
        module, name = self.place.split(":")
        return getattr(import_module(f"foreword.methods.{module}"), name)


METHODS: dict[str, Method] = {
    "plain": Method("plain:Plain", "no speculation: one token per round, the baseline of every figure", paper="-"),
    "prompt_lookup": Method(
        "prompt_lookup:PromptLookup",
        "repeats what followed the same tokens earlier in the sequence",
        paper="Prompt Lookup Decoding, Saxena 2023; LLMA, arXiv 2304.04487",
    ),
    "token_recycling": Method(
        "token_recycling:TokenRecycling",
        "reuses the target's own runner-up tokens",
        paper="Token Recycling, arXiv 2408.08696",
    ),
    "medusa": Method(
        "medusa:Medusa",
        "independent heads on the last state draft the tokens ahead",
        paper="Medusa, arXiv 2401.10774",
        trained=True,
    ),
    "hydra": Method(
        "hydra:Hydra",
        "heads that are conditioned on the tokens drafted before them",
        paper="Hydra, arXiv 2402.05109",
        trained=True,
    ),
    "chimera": Method(
        "chimera:Chimera",
        "a layer reads the target's states, then trigrams of the draft tokens",
        paper="Chimera, arXiv 2402.15758",
        trained=True,
    ),
    "clover": Method(
        "clover:Clover",
        "a layer reads the sequence, a small recurrent cell continues",
        paper="Clover, arXiv 2405.00263",
        trained=True,
    ),
    "clover2": Method(
        "clover2:Clover2",
        "two layers read each row with its next token, a cell continues",
        paper="Clover-2, arXiv 2408.00264",
        trained=True,
    ),
    "echo": Method(
        "echo:Echo",
        "prompt lookup and the tree of clover2 in one draft",
        paper="-",
        trained=True,
        trained_as="clover2",
    ),
    "hidden_transfer": Method(
        "hidden_transfer:HiddenTransfer",
        "tree nodes carry states of later tokens through the verifying pass",
        paper="Hidden Transfer, arXiv 2404.12022",
        trained=True,
    ),
    "firp": Method(
        "firp:Firp",
        "middle states of later tokens, run through the upper layers",
        paper="FIRP, arXiv 2410.20488",
        trained=True,
        trained_as="hidden_transfer",
    ),
    "masked": Method(
        "masked:Masked",
        "a few layers fill a block of masked tokens in one pass",
        paper="GMLM, arXiv 2407.21046; DisCo, arXiv 2001.05136",
        trained=True,
    ),
    "draft_model": Method(
        "draft_model:DraftModel",
        "a second, smaller model drafts, and the target verifies",
        paper="Speculative decoding, arXiv 2211.17192; sampling, arXiv 2302.01318",
        trained=True,
        takes_models=True,
    ),
    "gsd": Method(
        "gsd:Gsd",
        "a draft model whose candidates form a graph: repeats are drafted once",
        paper="GSD, arXiv 2407.16207",
        trained=True,
        trained_as="draft_model",
        takes_models=True,
        takes_plans=True,
    ),
    "amusd": Method(
        "amusd.drafter:Amusd",
        "a draft model on its own device drafts while the target verifies",
        paper="AMUSD, arXiv 2410.17375",
        trained=True,
        trained_as="draft_model",
        takes_models=True,
        drafts_alongside=True,
    ),
    "kangaroo": Method(
        "kangaroo:Kangaroo",
        "the target's first layers and a small adapter draft, the other layers verify",
        paper="Kangaroo, arXiv 2404.18911",
        trained=True,
    ),
    "self_speculative": Method(
        "self_speculative:SelfSpeculative",
        "the target without some half-layers drafts, by a plan for the model",
        paper="Self-Speculative Decoding, arXiv 2309.08168",
        searched=True,
    ),
    "swift": Method(
        "swift:Swift",
        "the target without some half-layers, chosen from what it writes",
        paper="SWIFT, arXiv 2410.06916",
    ),
    "speed": Method(
        "speed:Speed",
        "pipelines tokens through the repeats of a looped model",
        paper="SPEED, arXiv 2310.12072",
        looped=True,
    ),
}

ENTRY_POINTS = "foreword.methods"  # the group in which a package names its methods: name = "module:Class"
_NAME = re.compile(r"[a-z][a-z0-9_]*")  # the command line gives "=", ":" and "," a meaning

# The method that is expected to be fastest on this machine: drafters/auto.py.
AUTO = "auto"
DEFAULT_METHOD = AUTO

# What an option of a declared type may be. True is not a whole number, and 2.5 heads would fail only when they are built.
PLAIN_TYPES: dict[object, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "True or False"),
}

# How similar two names must be for one to be suggested: "favourites" and "amusd" score 0.40, "lookup" and "prompt_lookup"
# 0.63.
NEAR = 0.6

# The attention mask of a tree is rows x rows. Past this no machine gains from another row.
MOST_ROWS = 1024


def register(name: str, kind: type[Drafter]) -> None:
    """Add a method to the table, so that its name works wherever a method is named.

    `foreword methods` shows the first line of the class's docstring and its `paper`.
    """
    from foreword.core.drafter import Drafter  # noqa: PLC0415  imports torch, which reading the table does not

    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"a method cannot be called {name!r}; use small letters, digits and _, a letter first")
    if not (isinstance(kind, type) and issubclass(kind, Drafter)):
        raise InputError(f"method {name!r} is given as {kind!r}; give a class that inherits from foreword.Drafter")
    if name in METHODS and METHODS[name].kind is kind:
        return
    if name in METHODS or name == AUTO:
        raise InputError(f"a method is called {name!r} already; choose another name")
    summary = (getdoc(kind) if kind.__doc__ else None) or kind.__name__
    METHODS[name] = Method(
        place=f"{kind.__module__}:{kind.__qualname__}",
        summary=summary.splitlines()[0],
        paper=kind.paper or "-",
        trained=callable(getattr(kind, "loss", None)),
        kind=kind,
    )


def all_methods() -> dict[str, Method]:
    """The table with the methods of installed packages in it."""
    _discover()
    return METHODS


@cache
def _discover() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            register(entry.name, entry.load())
        except Exception as error:  # whatever a plugin raises, other methods work
            problem = f"the method {entry.name!r} of {_package(entry)} cannot be used ({type(error).__name__}: {error})"
            warnings.warn(f"{problem}; update or remove that package", ForewordWarning, stacklevel=3)


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def name_of(kind: type[Drafter]) -> str | None:
    """The name of a class in the table."""
    return next((name for name, method in all_methods().items() if method.kind is kind), None)


def find(name: str) -> Method:
    if name in METHODS or name in all_methods():
        return METHODS[name]
    near = get_close_matches(name, METHODS, n=1, cutoff=NEAR)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if os.path.isdir(name):
        hint = f"the folder of that name is {os.path.join('.', name)!r}; "
    raise UnknownMethod(f"no method is called {name!r}; {hint}there are: {', '.join(METHODS)}")


def trained_as(name: str) -> str:
    """The method whose trained drafters a method uses: usually itself."""
    return find(name).trained_as or name


def takes(name: str, held: str) -> bool:
    """Whether a method takes the folders of the method `held`."""
    return trained_as(name) == held or (find(name).takes_plans and held in METHODS and METHODS[held].searched)


def make(name: str, /, rows: int | None = None, **options: Any) -> Drafter:
    """Make a drafter that needs no trained weights. `rows` bounds the rows of a pass, the root included; None: as many as
    pay off on this machine."""
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
    """Make a drafter without reading weights. A trained method is as it is before training, for the training loop."""
    return construct(name, find(name).load(), rows, options)


def construct(name: str, kind: type[Drafter], rows: int | None, options: dict[str, Any]) -> Drafter:
    """Make a drafter of a class, called `name` in messages. A class without a `rows` parameter decides its rows itself."""
    check_rows(rows)
    known = signature(kind, eval_str=True).parameters
    if rows is not None and "rows" not in known:
        raise InputError(f"{name}: rows is {rows}, and this method takes no rows; leave rows out")
    for option, value in options.items():
        if option not in known:
            raise InputError(f"{name}: no option is called {option!r}; there are: {', '.join(known)}")
        takes, called = PLAIN_TYPES.get(known[option].annotation, ((type(value),), ""))
        if type(value) not in takes:
            raise InputError(f"{name}: {option} is {value!r}; it must be {called}")
    try:
        return kind(**({"rows": rows} if "rows" in known else {}), **options)
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise InputError(f"{name}: an option is of the wrong type in {given} ({error})") from error
