"""Evaluate a drafter: loss and accuracies on held-out sequences, and tokens per round in the real engine.

In: the weights at some step of training. Out: figures; tokens per round decide which weights are kept. A second drafter,
bound to an engine once, loads the weights as a user would, in the target's dtype.
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
from foreword.train.schedule import TrainingData, TrainingSettings, padded

SLOTS = {"cpu": 4, "cuda": 32}
HELD_OUT = "held out"


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt that was never trained on."""

    prompt: tuple[int, ...]
    category: str = HELD_OUT


@dataclass(frozen=True)
class DrafterFigures:
    """Figures of greedy decoding in the real engine: over all prompts, and by category."""

    tokens_per_round: float
    accepted_per_position: list[float]
    categories: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def held_out_prompts(data: TrainingData, count: int, longest: int) -> list[HeldOutPrompt]:
    """Return the first prompts of held-out sequences: the tokens before the first one that the target generated."""
    found: list[HeldOutPrompt] = []
    for index in range(len(data.lengths)):
        tokens, mask = data[index]
        first = int(mask.int().argmax()) if bool(mask.any()) else 0
        if 0 < first <= longest:
            found.append(HeldOutPrompt(tuple(tokens[:first].tolist())))
        if len(found) == count:
            break
    return found


def prompts_in_file(file: str | Path, count: int, longest: int, tokenizer: Tokenizer) -> list[HeldOutPrompt]:
    """Return prompts of a file, spread evenly over its categories: the first turn of each, if it leaves room to answer."""
    prompts = read_prompts(file)
    chosen = groups(spread(prompts, -(-count // len(groups(prompts)))))
    encoded = [(group, tokenizer.encode(one.first())) for group, some in chosen.items() for one in some]
    found = [HeldOutPrompt(tuple(ids), group) for group, ids in encoded if len(ids) <= longest]
    if not found:
        raise PromptError(
            f"every prompt of {file} has more than {longest} tokens; raise --max-context or lower --new-tokens"
        )
    return found


def prompts_digest(prompts: Sequence[HeldOutPrompt]) -> str:
    """Identify the prompts that tokens per round are measured on: figures of other prompts cannot be compared."""
    content = json.dumps([(one.category, one.prompt) for one in prompts])
    return f"{len(prompts)}, sha256 {hashlib.sha256(content.encode()).hexdigest()[:16]}"


class Evaluator:
    """Measures tokens per round of a drafter, whose weights may change between runs."""

    def __init__(
        self,
        model: Model,
        make: Callable[[], Drafter],
        prompts: Sequence[HeldOutPrompt],
        new_tokens: int,
        graph: bool = True,
    ) -> None:
        if not prompts:
            raise InputError("no prompts to measure tokens per round on; give some with --prompts")
        self.prompts, self.new_tokens, self.drafter = list(prompts), new_tokens, make()
        context = max(len(one.prompt) for one in prompts) + new_tokens
        if context > model.max_context:
            raise InputError(f"prompt and answer have up to {context} tokens, {model.name} takes {model.max_context}")
        slots = min(SLOTS[model.device.type], len(self.prompts))
        self.engine = Engine(model, self.drafter, slots=slots, max_context=context, graph=graph)

    @torch.no_grad()
    def run(self, weights: dict[str, torch.Tensor] | None = None) -> DrafterFigures:
        """Measure with these weights, or with those that the drafter holds now."""
        if weights is not None:
            cast(Trainable, self.drafter).module.load_state_dict(weights)
        self.engine.loop.forget()
        requests = [Request(one.prompt, Sampling(seed=0), max_new_tokens=self.new_tokens) for one in self.prompts]
        runs = self.engine.generate(requests)
        groups: dict[str, list[Running]] = {}
        for prompt, run in zip(self.prompts, runs, strict=True):
            groups.setdefault(prompt.category, []).append(run)
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
def held_out_figures(
    drafter: Trainable, model: Model, data: TrainingData, settings: TrainingSettings, at_once: int
) -> dict[str, float]:
    """Return loss and accuracies on held-out sequences: means over all rows of a head, independent of the batches."""
    count = min(settings.texts_apart, len(data.lengths))
    order = data.lengths[:count].argsort(stable=True).tolist()
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for first in range(0, count, at_once):
        tokens, mask = padded(data, order[first : first + at_once], settings.max_length, model.device)
        with autocast_for(model):
            loss, found = drafter.loss(tokens, mask, model.read(tokens, drafter.needs), model)
        figures = {name: float(value) for name, value in found.items()}
        figures |= {"loss": float(loss), "rows/loss": float(mask.sum())}
        for name in [name for name in figures if not name.startswith("rows/")]:
            rows = figures[f"rows/{name.split('/')[-1]}"]
            sums[name] = sums.get(name, 0.0) + rows * figures[name]
            weights[name] = weights.get(name, 0.0) + rows
    return {name: value / max(weights[name], 1.0) for name, value in sums.items()}


@torch.no_grad()
def held_out_rates(
    drafter: Any, model: Model, data: TrainingData, settings: TrainingSettings, at_once: int
) -> list[list[float]]:
    """Return how often a head's candidates are right, by rank, on held-out sequences. A tree template is built from it."""
    total = 0
    sums = torch.zeros(())
    for first in range(0, min(settings.texts_apart, len(data.lengths)), at_once):
        last = min(first + at_once, len(data.lengths))
        tokens, mask = padded(data, list(range(first, last)), settings.max_length, model.device)
        with autocast_for(model):
            rates = drafter.calibrate(tokens, mask, model.read(tokens, drafter.needs), model)
        written = int(mask.sum())
        sums, total = sums + written * torch.tensor(rates), total + written
    return [[round(rate, 4) for rate in row] for row in (sums / max(total, 1)).tolist()]


def autocast_for(model: Model) -> torch.autocast:
    """Compute in bfloat16 if the target has half precision. The trained weights stay in float32."""
    half = model.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(model.device.type, torch.bfloat16, enabled=half)
