"""Evaluate a drafter: loss and accuracies on held-out sequences, and tokens per round in the real engine, which decides.

In: the weights at some step of training. Out: figures. A second drafter, bound to an engine once, loads the weights as a
user's would be loaded, in the target's dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.core.trainable import Trainable
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.errors import InputError, PromptError
from foreword.model.model import Model
from foreword.results import Stats
from foreword.text import Tokenizer
from foreword.text.prompts import groups, read_prompts, spread
from foreword.train.schedule import Texts, TrainingSettings, padded

SLOTS = {"cpu": 4, "cuda": 32}
HELD_OUT = "held out"


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt that was never trained on."""

    prompt: tuple[int, ...]
    category: str = HELD_OUT


@dataclass(frozen=True)
class DrafterFigures:
    """Figures of the real engine, greedy: pooled, and by category."""

    tokens_per_round: float
    accepted_per_position: list[float]
    categories: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def trials_of(texts: Texts, count: int, longest: int) -> list[HeldOutPrompt]:
    """Return the first prompts of the held-out sequences: the tokens before the first one that the target wrote."""
    found: list[HeldOutPrompt] = []
    for index in range(len(texts.lengths)):
        tokens, mask = texts[index]
        first = int(mask.int().argmax()) if bool(mask.any()) else 0
        if 0 < first <= longest:
            found.append(HeldOutPrompt(tuple(tokens[:first].tolist())))
        if len(found) == count:
            break
    return found


def trials_in(file: str | Path, count: int, longest: int, tokenizer: Tokenizer) -> list[HeldOutPrompt]:
    """Prompts of a file, evenly of its categories: the first turn of each, if it leaves room for an answer."""
    prompts = read_prompts(file)
    chosen = groups(spread(prompts, -(-count // len(groups(prompts)))))
    encoded = [(group, tokenizer.encode(one.first())) for group, some in chosen.items() for one in some]
    found = [HeldOutPrompt(tuple(ids), group) for group, ids in encoded if len(ids) <= longest]
    if not found:
        raise PromptError(f"every prompt of {file} has more than {longest} tokens; raise --max-context, or ask for less")
    return found


def told_of(trials: Sequence[HeldOutPrompt]) -> str:
    """Identify the prompts that tokens per round are measured on; figures of other prompts do not compare."""
    asked = json.dumps([(trial.category, trial.prompt) for trial in trials])
    return f"{len(trials)}, sha256 {hashlib.sha256(asked.encode()).hexdigest()[:16]}"


class Measure:
    def __init__(
        self, model: Model, make: Callable[[], Drafter], trials: Sequence[HeldOutPrompt], new_tokens: int, graph: bool = True
    ) -> None:
        if not trials:
            raise InputError("no prompts to measure tokens per round on; give some with --prompts")
        self.trials, self.new_tokens, self.drafter = list(trials), new_tokens, make()
        context = max(len(trial.prompt) for trial in trials) + new_tokens
        if context > model.max_context:
            raise InputError(f"prompt and answer have up to {context} tokens, {model.name} reads {model.max_context}")
        slots = min(SLOTS[model.device.type], len(self.trials))
        self.engine = Engine(model, self.drafter, slots=slots, max_context=context, graph=graph)

    @torch.no_grad()
    def run(self, weights: dict[str, torch.Tensor] | None = None) -> DrafterFigures:
        """With these weights, or with those that the drafter holds, which may be others than the last time."""
        if weights is not None:
            cast(Trainable, self.drafter).module.load_state_dict(weights)
        self.engine.loop.forget()
        asked = [Request(trial.prompt, Sampling(seed=0), max_new_tokens=self.new_tokens) for trial in self.trials]
        runs = self.engine.generate(asked)
        groups: dict[str, list[Running]] = {}
        for trial, one in zip(self.trials, runs, strict=True):
            groups.setdefault(trial.category, []).append(one)
        pooled = Stats.of(runs)
        return DrafterFigures(
            pooled.tokens_per_round, pooled.accepted_per_position, {name: _brief(some) for name, some in groups.items()}
        )


def _brief(runs: list[Running]) -> dict[str, Any]:
    stats = Stats.of(runs)
    return {
        "prompts": len(runs),
        "tokens_per_round": stats.tokens_per_round,
        "accepted_per_position": stats.accepted_per_position,
    }


@torch.no_grad()
def read_apart(drafter: Trainable, model: Model, texts: Texts, settings: TrainingSettings, at_once: int) -> dict[str, float]:
    """Return loss and accuracies on held-out sequences: means over all rows of a head, whatever their batch."""
    count = min(settings.texts_apart, len(texts.lengths))
    order = texts.lengths[:count].argsort(stable=True).tolist()
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for first in range(0, count, at_once):
        tokens, mask = padded(texts, order[first : first + at_once], settings.max_length, model.device)
        with computing(model):
            loss, found = drafter.loss(tokens, mask, model.read(tokens, drafter.needs), model)
        figures = {name: float(value) for name, value in found.items()}
        figures |= {"loss": float(loss), "rows/loss": float(mask.sum())}
        for name in [name for name in figures if not name.startswith("rows/")]:
            rows = figures[f"rows/{name.split('/')[-1]}"]
            sums[name] = sums.get(name, 0.0) + rows * figures[name]
            weights[name] = weights.get(name, 0.0) + rows
    return {name: value / max(weights[name], 1.0) for name, value in sums.items()}


@torch.no_grad()
def rates_apart(drafter: Any, model: Model, texts: Texts, settings: TrainingSettings, at_once: int) -> list[list[float]]:
    """How often a head's guesses are right by rank, on texts kept apart: what a template is built from."""
    total = 0
    sums = torch.zeros(())
    for first in range(0, min(settings.texts_apart, len(texts.lengths)), at_once):
        last = min(first + at_once, len(texts.lengths))
        tokens, mask = padded(texts, list(range(first, last)), settings.max_length, model.device)
        with computing(model):
            rates = drafter.calibrate(tokens, mask, model.read(tokens, drafter.needs), model)
        written = int(mask.sum())
        sums, total = sums + written * torch.tensor(rates), total + written
    return [[round(rate, 4) for rate in row] for row in (sums / max(total, 1)).tolist()]


def computing(model: Model) -> torch.autocast:
    """Products in bfloat16 where the target computes in half precision; the weights in training stay wider."""
    half = model.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(model.device.type, torch.bfloat16, enabled=half)
