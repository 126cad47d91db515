"""Find the layers that pseudo rows should join: one short run per step trains its matrices at several layers together.

In: a target, training sequences and held-out sequences. Out: the accuracy of each step by layer, the chosen layers, and two
more figures: the cosine between pseudo rows and real rows after every layer, and what step 2 loses if it cannot see step 1.
The best layer of a step and its matrix are kept for the steps after it. Paper: Hidden Transfer (arXiv 2404.12022).
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
from foreword.drafting.lessons import Anchors, LearnedHead, losses
from foreword.drafting.transfer import Transfer, walked
from foreword.errors import InputError, NumericsError
from foreword.model.model import Model
from foreword.train.evaluate import autocast_for
from foreword.train.schedule import Order, TrainingData, TrainingSettings, padded
from foreword.train.step import Stepper

STEPS = 200  # per run, by default
ANCHORS = 16  # per sequence: few, because many layers are trained at once
HELD_OUT = 128  # held-out sequences that are read

ShowProgress = Callable[[str, int, int], None]  # what is running, steps done, steps in all


@dataclass(frozen=True)
class JoinVariant:
    """One variant of a step: the layer that it joins after, and whether it sees the steps before it."""

    layer: int
    sees: bool = True


def layers_tried(layers: int, after: int | None = None) -> list[int]:
    """Return the layers to try: every eighth of the target. A later step tries those after the layer of the step before it,
    that layer itself and the next two."""
    grid = {min(round(layers * eighth / 8), layers - 1) for eighth in range(1, 8)}
    if after is None:
        return sorted(grid)
    near = {min(after + more, layers - 1) for more in range(3)}
    return sorted(near | {layer for layer in grid if layer > after})


class Sweep:
    def __init__(
        self,
        model: Model,
        options: Transfer,
        data: TrainingData,
        held_out: TrainingData,
        settings: TrainingSettings,
        show: ShowProgress,
    ) -> None:
        """Find the layers for `options`. The run of each step has `settings.steps` training steps."""
        steps = settings.steps or (None if settings.tokens else STEPS)
        self.settings = replace(settings, steps=steps, texts_apart=min(settings.texts_apart, HELD_OUT))
        self.model, self.data, self.held_out, self.show = model, data, held_out, show
        self.options = replace(options, anchors=min(options.anchors, ANCHORS))
        self.order = Order(data.lengths, self.settings)
        self.settings = replace(self.settings, warm_up=min(settings.warm_up, self.order.steps // 10))  # runs are short
        if settings.max_length > model.max_context:
            raise InputError(f"max_length is {settings.max_length}, {model.name} takes {model.max_context} tokens at most")
        self.chosen: list[int] = []
        self.kept: list[nn.Module] = []  # the matrices of the steps whose layer is chosen
        model.hf.requires_grad_(False)

    def run(self) -> dict[str, Any]:
        started, steps = perf_counter(), {}
        blind: dict[int, dict[str, float]] = {}
        for step in range(1, self.options.steps + 1):
            layers = layers_tried(self.model.layers, self.chosen[-1] if self.chosen else None)
            variants = [JoinVariant(layer, sees) for layer in layers for sees in ((True, False) if step == 2 else (True,))]
            found = dict(zip(variants, self._train(step, variants), strict=True))
            steps[step] = {variant.layer: figures for variant, figures in found.items() if variant.sees}
            blind |= {variant.layer: figures for variant, figures in found.items() if not variant.sees}
        return {
            "model": self.model.name,
            "layers": self.chosen,
            "accuracy": steps,
            "step 2 without sight of step 1": blind,
            "cosine": self._cosines(),
            "seconds": round(perf_counter() - started, 1),
            "settings": asdict(self.settings),
        }

    def _train(self, step: int, variants: Sequence[JoinVariant]) -> list[dict[str, float]]:
        """Train one matrix per variant. Return their accuracies on held-out sequences, and keep the best."""
        torch.manual_seed(self.settings.seed + step)
        one = replace(self.options, steps=len(variants), layers=None, conditioned=False)
        matrices = one.module(self.model).to(torch.promote_types(self.model.dtype, torch.float32))
        stepper = Stepper(matrices, self.settings.clip, self.settings.weight_decay)
        joins = self._joins(step, variants, matrices)
        for number in range(self.order.steps):
            torch.manual_seed((self.settings.seed * 1_000_003 + number) * 4099)
            stepper.zero_gradients()
            passes = self._passes(self.order.batch_at(number))
            for indices in passes:
                total = torch.stack([loss for loss, _, _ in self._losses(indices, step, joins, training=True)]).sum()
                (total / len(passes)).backward()
            stepper.step(self.settings.rate(number, self.order.steps))
            self.show(f"step {step}, {len(variants)} variants", number + 1, self.order.steps)
        if stepper.check() is not None:
            raise NumericsError(
                f"the loss of step {step} or its gradient is not a number; "
                f"try a lower learning rate than {self.settings.learning_rate}"
            )
        figures = self._accuracies(step, joins, len(variants))
        best = max((one for one in range(len(variants)) if variants[one].sees), key=lambda one: figures[one]["top1"])
        self.chosen.append(variants[best].layer)
        self.kept.append(matrices[best].requires_grad_(False))
        return figures

    def _joins(self, step: int, variants: Sequence[JoinVariant], matrices: nn.ModuleList) -> list[Join]:
        """Return the joins of the chosen steps, then one per variant of this step. No variant sees another."""
        before = len(self.kept)

        def make(matrix: nn.Module, previous: int) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
            chained = self.options.source == "chain" and previous >= 0
            return lambda anchors, earlier: matrix(earlier[previous] if chained else anchors)

        joins = [
            Join(layer, number + 1, make(matrix, number - 1), tuple(range(number)))
            for number, (layer, matrix) in enumerate(zip(self.chosen, self.kept, strict=True))
        ]
        for variant, matrix in zip(variants, matrices, strict=True):
            joins.append(Join(variant.layer, step, make(matrix, before - 1), tuple(range(before)) if variant.sees else ()))
        return joins

    def _passes(self, chosen: list[int]) -> list[list[int]]:
        at_once = self.settings.at_once or len(chosen)
        return [chosen[first : first + at_once] for first in range(0, len(chosen), at_once)]

    @contextmanager
    def _read(self, indices: list[int], layer: int, steps: int, training: bool) -> Iterator[tuple[Anchors, Scores]]:
        """Run the target over some sequences. Anchors are at random in training, and fixed in an evaluation."""
        data = self.data if training else self.held_out
        tokens, mask = padded(data, indices, self.settings.max_length, self.model.device)
        with autocast_for(self.model):
            scores = self.model.read(tokens, Needs(taps=(layer,)))
            yield Anchors.of(tokens, mask, steps, self.options.anchors, training), scores

    def _losses(
        self, indices: list[int], step: int, joins: list[Join], training: bool
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each variant: the loss, the rank of each label, and which labels count."""
        with self._read(indices, joins[0].layer, step, training) as (anchors, scores):
            walk = walked(joins, anchors, scores, self.model)
            outputs = [anchors.outputs(step, one) for one in walk.rows[len(self.kept) :]]
            teacher = self.model.norm(anchors.teacher(step, walk.hidden)) if self.options.labels == "soft" else None
            found = losses(outputs, LearnedHead.of(self.model), teacher)
        return [(loss, ranks, one.counts) for one, (loss, ranks) in zip(outputs, found, strict=True)]

    @torch.no_grad()
    def _accuracies(self, step: int, joins: list[Join], variants: int) -> list[dict[str, float]]:
        """Return the top-1 and top-5 accuracy of each variant on held-out sequences."""
        right, total = torch.zeros(variants, 2, dtype=torch.float64), 0
        for indices in self._held_out_passes():
            found = self._losses(indices, step, joins, training=False)
            total += int(found[0][2].sum())
            for variant, (_, ranks, counts) in enumerate(found):
                right[variant] += torch.tensor([int(((ranks < most) & counts).sum()) for most in (1, 5)])
        return [{"top1": round(one, 4), "top5": round(five, 4)} for one, five in (right / max(total, 1)).tolist()]

    def _held_out_passes(self) -> list[list[int]]:
        return self._passes(list(range(min(self.settings.texts_apart, len(self.held_out.lengths)))))

    @torch.no_grad()
    def _cosines(self) -> dict[int, dict[int, float]]:
        """Return, by step and layer, the mean cosine between a pseudo row and the real row at its position."""
        joins, steps = self._joins(0, [], nn.ModuleList()), len(self.chosen)
        sums: dict[tuple[int, int], float] = {}
        counted = [0.0] * steps
        for indices in self._held_out_passes():
            with self._read(indices, joins[0].layer, steps, training=False) as (anchors, scores):
                first = joins[0].layer
                for found in self.model.alongside(scores.taps[first], first, anchors.place, joins):
                    for step, rows in enumerate(found.rows):
                        real = anchors.teacher(step + 1, found.sequences).view(rows.shape)
                        near = functional.cosine_similarity(rows.float(), real.float(), dim=-1)
                        total = float((near * anchors.counts[:, :, step]).sum())
                        sums[step, found.layer] = sums.get((step, found.layer), 0.0) + total
            counted = [count + int(anchors.counts[:, :, step].sum()) for step, count in enumerate(counted)]
        means = {place: round(value / max(counted[place[0]], 1.0), 4) for place, value in sums.items()}
        return {step + 1: {layer: mean for (s, layer), mean in means.items() if s == step} for step in range(steps)}
