"""Which layers pseudo rows should join: matrices of one step at several layers learn side by side, in one short run a step.

In: a target, texts to learn from and texts kept apart. Out: accuracies of each step by layer, layers chosen, and two more
figures: how near pseudo rows come to real ones with every layer, and what step 2 loses where it cannot see step 1. The best
layer of a step is kept, with its matrix, for the steps after it. Paper: Hidden Transfer (arXiv 2404.12022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.needs import Join, Needs
from foreword.core.scores import Scores
from foreword.drafting.lessons import losses
from foreword.drafting.transfer import Anchors, Transfer, walked
from foreword.errors import InputError, NumericsError
from foreword.model.model import Model
from foreword.train.evaluate import computing
from foreword.train.schedule import Order, Texts, TrainingSettings, padded
from foreword.train.step import Stepper

STEPS = 200  # of a run, where nothing else is asked for
ANCHORS = 16  # of a text: many layers learn at once
TEXTS_APART = 128

Watch = Callable[[str, int, int], None]  # what, how many are done, of how many


@dataclass(frozen=True)
class Way:
    """How a step may be made: joining after a layer, and seeing the steps before it or not."""

    layer: int
    sees: bool = True


def layers_tried(layers: int, after: int | None = None) -> list[int]:
    """Every eighth of the target; for a later step those from the layer of the one before on, and the next two."""
    grid = {min(round(layers * part / 8), layers - 1) for part in range(1, 8)}
    if after is None:
        return sorted(grid)
    near = {min(after + more, layers - 1) for more in range(3)}
    return sorted(near | {layer for layer in grid if layer > after})


class Sweep:
    def __init__(
        self, model: Model, options: Transfer, texts: Texts, apart: Texts, settings: TrainingSettings, watch: Watch
    ) -> None:
        """Of `options` the layers are what is looked for. A run a step has `settings.steps` steps of learning."""
        asked = settings.steps or (None if settings.tokens else STEPS)
        self.settings = replace(settings, steps=asked, texts_apart=min(settings.texts_apart, TEXTS_APART))
        self.model, self.texts, self.apart, self.watch = model, texts, apart, watch
        self.options = replace(options, anchors=min(options.anchors, ANCHORS))
        self.order = Order(texts.lengths, self.settings)
        self.settings = replace(self.settings, warm_up=min(settings.warm_up, self.order.steps // 10))  # a run is short
        if settings.max_length > model.max_context:
            raise InputError(f"max_length is {settings.max_length}, {model.name} reads {model.max_context} tokens at most")
        self.chosen: list[int] = []
        self.kept: list[nn.Module] = []  # the matrices of the steps that are settled
        model.hf.requires_grad_(False)

    def run(self) -> dict[str, Any]:
        started, steps = perf_counter(), {}
        blind: dict[int, dict[str, float]] = {}
        for step in range(1, self.options.steps + 1):
            layers = layers_tried(self.model.layers, self.chosen[-1] if self.chosen else None)
            ways = [Way(layer, sees) for layer in layers for sees in ((True, False) if step == 2 else (True,))]
            found = dict(zip(ways, self._learned(step, ways), strict=True))
            steps[step] = {way.layer: figures for way, figures in found.items() if way.sees}
            blind |= {way.layer: figures for way, figures in found.items() if not way.sees}
        return {
            "model": self.model.name,
            "layers": self.chosen,
            "accuracy": steps,
            "step 2 without sight of step 1": blind,
            "cosine": self._nearness(),
            "seconds": round(perf_counter() - started, 1),
            "settings": asdict(self.settings),
        }

    def _learned(self, step: int, ways: Sequence[Way]) -> list[dict[str, float]]:
        """What each way's matrix gets right on texts kept apart, after a run; the best is kept."""
        torch.manual_seed(self.settings.seed + step)
        one = replace(self.options, steps=len(ways), layers=None, told=False)
        matrices = one.module(self.model).to(torch.promote_types(self.model.dtype, torch.float32))
        stepper = Stepper(matrices, self.settings.clip, self.settings.weight_decay)
        joins = self._joins(step, ways, matrices)
        for number in range(self.order.steps):
            torch.manual_seed((self.settings.seed * 1_000_003 + number) * 4099)
            stepper.forget()
            parts = self._parts(self.order.texts(number))
            for part in parts:
                total = torch.stack([loss for loss, _, _ in self._asked(part, step, joins, at_random=True)]).sum()
                (total / len(parts)).backward()
            stepper.step(self.settings.rate(number, self.order.steps))
            self.watch(f"step {step}, {len(ways)} ways", number + 1, self.order.steps)
        if stepper.check() is not None:
            raise NumericsError(
                f"the loss of step {step} or its gradient is not a number; "
                f"try a lower learning rate than {self.settings.learning_rate}"
            )
        figures = self._accuracies(step, joins, len(ways))
        best = max((way for way in range(len(ways)) if ways[way].sees), key=lambda way: figures[way]["top1"])
        self.chosen.append(ways[best].layer)
        self.kept.append(matrices[best].requires_grad_(False))
        return figures

    def _joins(self, step: int, ways: Sequence[Way], matrices: nn.ModuleList) -> list[Join]:
        """The steps that are settled, then each way of this one: none of them sees another."""
        before = len(self.kept)

        def make(matrix: nn.Module, elder: int) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
            chained = self.options.source == "chain" and elder >= 0
            return lambda anchors, earlier: matrix(earlier[elder] if chained else anchors)

        joins = [
            Join(layer, number + 1, make(matrix, number - 1), tuple(range(number)))
            for number, (layer, matrix) in enumerate(zip(self.chosen, self.kept, strict=True))
        ]
        for way, matrix in zip(ways, matrices, strict=True):
            joins.append(Join(way.layer, step, make(matrix, before - 1), tuple(range(before)) if way.sees else ()))
        return joins

    def _parts(self, chosen: list[int]) -> list[list[int]]:
        at_once = self.settings.at_once or len(chosen)
        return [chosen[first : first + at_once] for first in range(0, len(chosen), at_once)]

    @contextmanager
    def _read(self, part: list[int], layer: int, steps: int, at_random: bool) -> Iterator[tuple[Anchors, Scores]]:
        tokens, mask = padded(self.texts if at_random else self.apart, part, self.settings.max_length, self.model.device)
        with computing(self.model):
            scores = self.model.read(tokens, Needs(taps=(layer,)))
            yield Anchors.of(tokens, mask, steps, self.options.anchors, at_random), scores

    def _asked(self, part: list[int], step: int, joins: list[Join], at_random: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each way: the loss, the labels' places among its guesses, and which of them count."""
        with self._read(part, joins[0].layer, step, at_random) as (anchors, scores):
            walk = walked(joins, anchors, scores, self.model)
            asked = [anchors.asked(step, one) for one in walk.rows[len(self.kept) :]]
            teacher = self.model.norm(anchors.teacher(step, walk.hidden)) if self.options.labels == "soft" else None
            found = losses(asked, self.model.head, self.model.dtype, teacher)
        return [(loss, places, one.counts) for one, (loss, places) in zip(asked, found, strict=True)]

    @torch.no_grad()
    def _accuracies(self, step: int, joins: list[Join], ways: int) -> list[dict[str, float]]:
        """Top-1 and top-5 on texts kept apart."""
        right, total = torch.zeros(ways, 2, dtype=torch.float64), 0
        for part in self._apart():
            found = self._asked(part, step, joins, at_random=False)
            total += int(found[0][2].sum())
            for way, (_, places, counts) in enumerate(found):
                right[way] += torch.tensor([int(((places < most) & counts).sum()) for most in (1, 5)])
        return [{"top1": round(one, 4), "top5": round(five, 4)} for one, five in (right / max(total, 1)).tolist()]

    def _apart(self) -> list[list[int]]:
        return self._parts(list(range(min(self.settings.texts_apart, len(self.apart.lengths)))))

    @torch.no_grad()
    def _nearness(self) -> dict[int, dict[int, float]]:
        """By step and layer: the cosine between a pseudo row and the row that the text really has there, its mean."""
        joins, steps = self._joins(0, [], nn.ModuleList()), len(self.chosen)
        sums: dict[tuple[int, int], float] = {}
        counted = [0.0] * steps
        for part in self._apart():
            with self._read(part, joins[0].layer, steps, at_random=False) as (anchors, scores):
                first = joins[0].layer
                for found in self.model.alongside(scores.taps[first], first, anchors.place, joins):
                    for step, rows in enumerate(found.rows):
                        real = anchors.teacher(step + 1, found.texts).view(rows.shape)
                        near = functional.cosine_similarity(rows.float(), real.float(), dim=-1)
                        total = float((near * anchors.counts[:, :, step]).sum())
                        sums[step, found.layer] = sums.get((step, found.layer), 0.0) + total
            counted = [count + int(anchors.counts[:, :, step].sum()) for step, count in enumerate(counted)]
        means = {place: round(value / max(counted[place[0]], 1.0), 4) for place, value in sums.items()}
        return {step + 1: {layer: mean for (s, layer), mean in means.items() if s == step} for step in range(steps)}
