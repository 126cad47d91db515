"""Every method of the table as the tests run it: with small options, and with random weights if it has weights."""

from __future__ import annotations

from typing import Any

import torch

from doubles.models import target
from foreword.core.drafter import Drafter
from foreword.methods import METHODS, make, trained_as, untrained
from foreword.model.model import Model

_SMALL: dict[str, dict[str, Any]] = {
    "medusa": dict(rows=16, heads=3),
    "hydra": dict(rows=40, heads=3, layers=2, prefix=True),
    "chimera": dict(rows=16, heads=3, taps=(0, 2)),
    "clover": dict(rows=16, heads=3, tree="budget", top_p=0.98, floor=0.01),
    "clover2": dict(rows=16, heads=3, taps=(0, 2)),
    "echo": dict(rows=24, heads=3, taps=(0, 2), chain=6),
    "hidden_transfer": dict(rows=32, steps=3, carry="all"),
    "firp": dict(rows=16, steps=3),
    "masked": dict(rows=16, block=3, layers=2, taps=(0, 2), edges=4),
    "draft_model": dict(rows=16, depth=3, layers=2),
    "gsd": dict(rows=16, depth=3, layers=2, repeat=0, siblings=0.0, sure=0.0),
    "kangaroo": dict(rows=10, width=3, depth=3),
    "amusd": dict(rows=4, layers=2, ahead=5, least=3, patience=60.0, worker="thread"),
    "self_speculative": dict(rows=5, attention=(1,), mlp=(2,), threshold=0.2),
    "swift": dict(rows=13, ratio=0.5, threshold=0.3, window=24, tries=6),
}
"""Options that fit the tiny models; a method without an entry runs with its defaults. amusd's target waits for every draft
token, so that its drafts are the same every time. swift tries plans after longer outputs than most tests have: a plan that
changes drops what was recorded."""
OPTIONS: dict[str, dict[str, Any]] = {name: _SMALL.get(name, {}) for name in METHODS}
"""The options of every method in the tests."""

IN_PROCESS: dict[str, dict[str, Any]] = {"amusd": {"worker": "thread"}}
"""Options of methods that would start another process, which takes seconds; tests/drafting/test_amusd.py does."""

TRAINED: dict[str, dict[str, Any]] = {name: _SMALL.get(name, {}) for name, method in METHODS.items() if method.trained}
"""Methods with weights, and their options in the tests."""
TRAINABLE = [name for name in TRAINED if trained_as(name) == name]
"""Those of them that are trained themselves; the others use drafters of these."""
WITHOUT_WEIGHTS = [name for name, method in METHODS.items() if not (method.fitted or method.looped) and name != "swift"]
"""Methods that work with any model at once. swift needs three layers, and models on disk have two in the tests."""
DRAFTING = [name for name, method in METHODS.items() if not method.looped]
"""Methods that draft. The others are for looped models alone."""


def family_for(name: str, family: str = "llama") -> str:
    """Return the family to try a method with: this one, or that of looped models if the method is for those alone."""
    return "foreword_looped" if name in METHODS and METHODS[name].looped else family


def target_for(name: str) -> Model:
    """Return a tiny model to try a method with."""
    return target(family_for(name))


def drafter(name: str, model: Model) -> Drafter:
    """Make a drafter of a method as the tests use it."""
    if METHODS[name].trained:
        return with_random_weights(name, model, **OPTIONS[name])
    return make(name, **OPTIONS[name])


def with_random_weights(name: str, model: Model, **options: Any) -> Any:
    """Make a drafter with random weights, the same ones every time. They are large, so that a lost weight is noticed."""
    made: Any = untrained(name, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made.prepare(model, 1)
        for weight in made.module.parameters():
            weight.data += torch.randn(weight.shape, dtype=torch.float64).to(weight) * 0.2
    return made
