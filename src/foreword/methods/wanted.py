"""What a user asks for, a method or a trained drafter or neither, on its way to a Drafter that serves.

`Wanted.of` refuses what can be refused before a model is loaded; `on` gives the drafter for the loaded target, with its
weights. A trained method without a folder takes the drafter that ships for the target; "auto" what is expected fastest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.core.drafter import Drafter
from foreword.errors import DrafterError, InputError
from foreword.methods import AUTO, DEFAULT_METHOD, METHODS, check_rows, find, make, trained_as, untrained
from foreword.methods.auto import expectations, fitting
from foreword.methods.saved import holds_model, outline, read_config, restore
from foreword.methods.shipped import model_of, shipped
from foreword.methods.words import read_word
from foreword.model.cost import curve_for
from foreword.model.guesser import check_vocabulary
from foreword.model.loading import load_weights
from foreword.model.model import Model
from foreword.text import Tokenizer

APART = {"rows": "give it by itself (--rows)", "model": "name its folder: NAME=FOLDER"}


@dataclass(frozen=True)
class Wanted:
    method: str
    folder: Path | None = None
    rows: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ships: bool = False  # the folder is ours, not one that the user named

    @staticmethod
    def of(
        method: str = DEFAULT_METHOD,
        drafter: str | os.PathLike[str] | None = None,
        rows: int | None = None,
        **options: Any,
    ) -> Wanted:
        """`method` may be NAME=FOLDER, which is both in one word, with options behind it (`words.py`). A folder alone says
        itself whose drafter it holds."""
        name, folder, more = read_word(method)
        if twice := sorted(more.keys() & options.keys()):
            raise InputError(f"method {method!r} says {twice[0]}, and it is given too; say it once")
        if apart := sorted(more.keys() & APART.keys()):
            raise InputError(f"method {method!r} says {apart[0]}, which is no option of a method; {APART[apart[0]]}")
        options |= more
        if folder is not None and drafter is not None:
            raise InputError(f"method {method!r} names a drafter, and {str(drafter)!r} is given too; give one of them")
        check_rows(rows)
        given = drafter if folder is None else folder
        if given is not None:
            return _from_folder(name, Path(given).expanduser(), rows, options)
        if name == AUTO:
            if options:
                raise InputError(f"{', '.join(options)}: an option belongs to one method; name the method too")
            return Wanted(AUTO, None, rows)
        untrained(name, rows, **options)
        if not METHODS[name].trained:
            return Wanted(name, None, rows, options)
        if name not in shipped():
            raise _none_shipped(name, "this model")
        outline(shipped()[name], rows, name, **options)
        return Wanted(name, shipped()[name], rows, options, ships=True)

    def on(self, model: Model) -> tuple[str, Drafter]:
        """The method's name, and the drafter."""
        if self.method == AUTO:
            best = expectations(model, self.rows)[0].method
            return Wanted(best, shipped().get(best), self.rows).on(model)
        if self.ships and self.folder is not None and self.method not in fitting(model):
            raise _none_shipped(self.method, f"{model.name} (there is one for {model_of(self.folder)})")
        if self.folder is None:
            drafter = make(self.method, self.rows, **self.options)
        elif holds_model(self.folder):
            drafter = untrained(self.method, self.rows, model=_second(self.method, self.folder, model), **self.options)
        else:
            drafter = restore(self.folder, model, self.rows, self.method, **self.options)
        if drafter.wants_cost and model.curve is None:
            model.curve = curve_for(model)
        return self.method, drafter


def _from_folder(name: str, folder: Path, rows: int | None, options: dict[str, Any]) -> Wanted:
    if name != AUTO and not find(name).trained:
        raise DrafterError(f"{name} has no weights of its own, so it takes no drafter; leave {folder} out")
    if holds_model(folder):
        return _from_model(name if name != AUTO else "draft_model", folder, rows, options)
    held = read_config(folder)["method"]
    if name != AUTO and trained_as(name) != held:
        raise DrafterError(f"{folder} holds a drafter of {held}, not of {name}; choose {held}, or leave the method out")
    method = held if name == AUTO else name
    outline(folder, rows, method, **options)
    return Wanted(method, folder, rows, options)


def _from_model(name: str, folder: Path, rows: int | None, options: dict[str, Any]) -> Wanted:
    """A model as transformers keeps it, to guess with."""
    if not METHODS[name].takes_models:
        known = ", ".join(other for other, method in METHODS.items() if method.takes_models)
        raise DrafterError(f"{folder} holds a whole model, which {name} does not guess with; {known} would")
    if "layers" in options:
        raise InputError(
            f"{name}: layers are those of a trained drafter, but {folder} holds a whole model; leave layers out"
        )
    untrained(name, rows, **options)
    return Wanted(name, folder, rows, options)


def _second(method: str, folder: Path, target: Model) -> Model:
    """The model of a folder, where the target lies and in its dtype."""
    model = Model(load_weights(folder, target.device, target.dtype), folder.name)
    words = Tokenizer.load(folder)
    model.pieces = lambda: words.pieces
    check_vocabulary(method, model, target)
    return model


def _none_shipped(method: str, model: str) -> DrafterError:
    return DrafterError(
        f"{method} has weights of its own, and no drafter of it ships for {model}; "
        f"train one with `foreword train {trained_as(method)}`, or name its folder with drafter=... (--drafter FOLDER)"
    )
