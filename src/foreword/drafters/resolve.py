"""From what a user asks for, a method or a trained drafter or neither, to a Drafter that is ready.

`DrafterRequest.of` refuses whatever can be refused before a model is loaded. `resolve` gives the drafter for the loaded
target, with its weights. A trained method without a folder uses the drafter that ships for the target; "auto" uses the
method that is expected to be fastest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from foreword.core.drafter import Drafter
from foreword.core.needs import Skip
from foreword.drafters.auto import choose, expectations, shipped_for
from foreword.drafters.saved import holds_model, outline, read_config, restore
from foreword.drafters.shipped import model_of, shipped
from foreword.drafters.spec import MethodSpec, parse_spec
from foreword.drafting.skipped_target import SkipPlan
from foreword.drafting.small_model import check_vocabulary
from foreword.errors import DrafterError, InputError
from foreword.methods import (
    AUTO,
    DEFAULT_METHOD,
    METHODS,
    MethodLike,
    check_rows,
    construct,
    find,
    make,
    name_of,
    takes,
    trained_as,
    untrained,
)
from foreword.model.cost import curve_for
from foreword.model.loading import load_weights
from foreword.model.model import Model
from foreword.model.slow import METHODS as SLOW_METHODS
from foreword.text import Tokenizer

# Parameters that look like options of a method in a spec, and how to give them instead.
_FOLDER = "name its folder: NAME=FOLDER"
NO_OPTIONS = {"rows": "give it by itself (--rows)", "model": _FOLDER, "plan": _FOLDER}


@dataclass(frozen=True)
class DrafterRequest:
    """What a user asked for, checked as far as possible without a model."""

    method: str
    folder: Path | None = None
    rows: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ships: bool = False  # the folder ships with Foreword; the user did not name it
    factory: Callable[[], Drafter] | None = None  # makes a drafter whose class is not registered

    @staticmethod
    def of(
        method: MethodLike = DEFAULT_METHOD,
        drafter: str | os.PathLike[str] | None = None,
        rows: int | None = None,
        **options: Any,
    ) -> DrafterRequest:
        """Check what a user asked for. `method` may be a spec such as NAME=FOLDER, with options after it (`spec.py`). A
        folder alone needs no name: its config names the method."""
        if not isinstance(method, str | os.PathLike):
            name_or_request = _from_object(method, drafter, rows, options)
            if isinstance(name_or_request, DrafterRequest):
                return name_or_request
            method = name_or_request
        spec = parse_spec(method) if isinstance(method, str) else MethodSpec(AUTO, os.fspath(method), {})
        return DrafterRequest._of_spec(str(method), spec, drafter, rows, options)

    @staticmethod
    def _of_spec(
        method: str, spec: MethodSpec, drafter: str | os.PathLike[str] | None, rows: int | None, options: dict[str, Any]
    ) -> DrafterRequest:
        name, folder, more = spec
        if twice := sorted(more.keys() & options.keys()):
            raise InputError(f"method {method!r} has the option {twice[0]}, and it is given as a keyword too; give it once")
        if wrong := sorted(more.keys() & NO_OPTIONS.keys()):
            raise InputError(f"method {method!r} says {wrong[0]}, which is no option of a method; {NO_OPTIONS[wrong[0]]}")
        options |= more
        if folder is not None and drafter is not None:
            raise InputError(f"method {method!r} names a drafter, and {str(drafter)!r} is given too; give one of them")
        check_rows(rows)
        given = drafter if folder is None else folder
        if given is not None:
            return _from_folder(name, Path(os.path.expanduser(given)), rows, options)
        if name == AUTO:
            if options:
                raise InputError(f"{', '.join(options)}: an option belongs to one method; name the method too")
            return DrafterRequest(AUTO, None, rows)
        unbound = untrained(name, rows, **options)
        if not find(name).fitted or _has_plan(unbound):
            return DrafterRequest(name, None, rows, options)
        if name not in shipped():
            raise _none_shipped(name, "this model")
        outline(shipped()[name], rows, name, **options)
        return DrafterRequest(name, shipped()[name], rows, options, ships=True)

    def resolve(self, model: Model) -> tuple[str, Drafter]:
        """Return the method's name, and the drafter for `model`."""
        if model.slow:
            self._check_slow(model)
        if self.factory is not None:
            return self.method, _with_cost(self.factory(), model)
        if self.method == AUTO and model.slow:  # the figures of other methods are of trees
            return DrafterRequest("prompt_lookup", None, self.rows).resolve(model)
        if self.method == AUTO:
            best = choose(model, expectations(model, self.rows), self.rows).method
            return DrafterRequest(best, shipped().get(best), self.rows).resolve(model)
        if self.ships and self.folder is not None and self.method not in shipped_for(model):
            raise _none_shipped(self.method, f"{model.name} (there is one for {model_of(self.folder)})")
        if self.folder is None:
            drafter = make(self.method, self.rows, **self.options)
        elif holds_model(self.folder):
            small = _load_draft_model(self.method, self.folder, model)
            drafter = untrained(self.method, self.rows, model=small, **self.options)
        else:
            drafter = restore(self.folder, model, self.rows, self.method, **self.options)
        return self.method, _with_cost(drafter, model)

    def _check_slow(self, model: Model) -> None:
        """Refuse a method that needs more of the target than its logits."""
        runs = self.method in SLOW_METHODS or self.method == AUTO
        if self.factory is not None:
            needs = self.factory().needs
            runs = not (needs.hidden or needs.taps or needs.grafts)
        if not runs:
            raise DrafterError(
                f"{model.name} runs slow, so it shows drafters its logits alone, and {self.method} needs more of it; "
                f"choose from {', '.join(SLOW_METHODS)}"
            )


def _with_cost(drafter: Drafter, model: Model) -> Drafter:
    """Measure what passes cost on this machine, if the drafter sizes its trees by that."""
    if drafter.wants_cost and model.curve is None:
        model.use_costs(curve_for(model))
    return drafter


def _from_object(
    method: object, drafter: str | os.PathLike[str] | None, rows: int | None, options: dict[str, Any]
) -> DrafterRequest | str:
    """Check a drafter or a drafter class. A registered class gives its name, anything else a request."""
    kind = method if isinstance(method, type) else type(method)
    if not issubclass(kind, Drafter):
        raise InputError(
            f"method is {method!r}; give a name that `foreword methods` lists, the folder of a drafter, or a "
            "foreword.Drafter or its class"
        )
    name = name_of(kind)
    if isinstance(method, type) and name is not None:
        return name
    if drafter is not None:
        given = f"method is {method!r} and drafter is {str(drafter)!r}"
        raise InputError(f"{given}: the folder of a drafter goes with a method's name; register the class, or leave it out")
    if isinstance(method, type):
        construct(kind.__name__, kind, rows, options)  # refuse a wrong option before a model is loaded
        return DrafterRequest(kind.__name__, rows=rows, factory=partial(construct, kind.__name__, kind, rows, options))
    extra = {name: value for name, value in {"rows": rows, **options}.items() if value is not None}
    if extra:
        given = f"method is a drafter that is made already, and {', '.join(extra)} is given too"
        raise InputError(f"{given}; give it to {kind.__name__}(...), or give the class as the method")
    return DrafterRequest(name or kind.__name__, factory=lambda: cast(Drafter, method))


def _has_plan(drafter: Drafter) -> bool:
    """Return whether the options of a drafter are its plan, so that it needs no folder."""
    return isinstance(plan := getattr(drafter, "skip_plan", None), SkipPlan) and plan.skip != Skip()


def _from_folder(name: str, folder: Path, rows: int | None, options: dict[str, Any]) -> DrafterRequest:
    if name != AUTO and not find(name).fitted:
        raise DrafterError(f"{name} has no weights of its own, so it takes no drafter; leave {folder} out")
    if holds_model(folder):
        return _from_model(name if name != AUTO else "draft_model", folder, rows, options)
    held = read_config(folder)["method"]
    if name != AUTO and not takes(name, held):
        raise DrafterError(f"{folder} holds a drafter of {held}, not of {name}; choose {held}, or leave the method out")
    method = held if name == AUTO else name
    outline(folder, rows, method, **options)
    return DrafterRequest(method, folder, rows, options)


def _from_model(name: str, folder: Path, rows: int | None, options: dict[str, Any]) -> DrafterRequest:
    """Check a request for a draft model, in a folder that transformers wrote."""
    if not METHODS[name].takes_models:
        known = ", ".join(other for other, method in METHODS.items() if method.takes_models)
        raise DrafterError(f"{folder} holds a whole model, which {name} cannot draft with; use {known}")
    if "layers" in options:
        raise InputError(
            f"{name}: layers are those of a trained drafter, but {folder} holds a whole model; leave layers out"
        )
    untrained(name, rows, **options)
    return DrafterRequest(name, folder, rows, options)


def _load_draft_model(method: str, folder: Path, target: Model) -> Model:
    """Load the draft model of a folder, on the target's device and in its dtype."""
    model = Model(load_weights(folder, target.device, target.dtype), folder.name)
    tokenizer = Tokenizer.load(folder)
    model.use_pieces(lambda: tokenizer.pieces)
    check_vocabulary(method, model, target)
    return model


def _none_shipped(method: str, model: str) -> DrafterError:
    its, how = ("weights of its own", "train") if find(method).trained else ("a plan of its own", "search")
    return DrafterError(
        f"{method} has {its}, and no drafter of it ships for {model}; "
        f"{how} one with `foreword {how} {trained_as(method)}`, or name its folder with drafter=... (--drafter FOLDER)"
    )
