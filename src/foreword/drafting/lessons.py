"""Training: which rows of a sequence a draft head learns from, and its loss.

Head i, from 1, reads position t and predicts token t + 1 + i. Token t + 1 is the root, which it is conditioned on. A row
counts for head i if the target wrote all tokens that heads 1 to i predict. Logits [rows, V] are computed for a few rows at a
time, the target's own once for all heads, and then dropped: the target's head is frozen, and only the gradient of the rows
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.target import Target
from foreword.errors import InputError
from foreword.ops.losses import log_mass, lose
from foreword.ops.sending import sent_along

Labels = Literal["hard", "soft"]
Taught = tuple[Tensor, Tensor]  # the target's own logits [R, V] and their logsumexp [R]
ROWS_AT_A_TIME = 2048


def check_labels(method: str, labels: str) -> None:
    if labels not in get_args(Labels):
        raise InputError(f"{method}: labels is {labels!r}; choose from {', '.join(get_args(Labels))}")


@dataclass(frozen=True)
class Answers:
    """What one draft head hands to the target's head, and the wanted answer."""

    rows: Tensor  # [R, H]
    labels: Tensor  # [R]
    counts: Tensor  # [R] bool
    ahead: int = 0  # how many rows later its teacher is


@dataclass(frozen=True)
class Lesson:
    """The R rows out of [b, n] to learn from."""

    rows: Tensor  # [R] places in the flattened [b * n]
    ahead: Tensor  # [R, heads + 2] the tokens at t, t + 1, ...
    counts: Tensor  # [R, heads] bool

    @staticmethod
    def of(tokens: Tensor, mask: Tensor, heads: int) -> Lesson:
        """mask [b, n]: tokens that the target wrote. Sequences are padded on the right.

        The mask is on the host, so the number of rows is known without waiting for the device.
        """
        written = functional.pad(mask, (0, heads + 1)).unfold(1, heads + 2, 1)[:, :, 2:]  # [b, n, heads]
        counts = written.cumprod(-1).bool().flatten(0, 1)
        chosen = counts[:, 0].nonzero().squeeze(1)
        rows, counts = (sent_along(part, tokens.device) for part in (chosen, counts[chosen]))
        padded = functional.pad(tokens, (0, heads + 1))
        return Lesson(rows, padded.unfold(1, heads + 2, 1).flatten(0, 1)[rows], counts)

    def of_rows(self, values: Tensor) -> Tensor:
        """[b, n, H] -> [R, H]."""
        return values.flatten(0, 1)[self.rows]

    def teacher(self, values: Tensor) -> Tensor:
        """[b, n, H] -> [R + heads - 1, H]: row j + i - 1 is where the target decides what head i predicts in row j.

        Where head i counts in row j, rows j to j + i - 1 are neighbours in the sequence, so one list serves all heads.
        """
        return functional.pad(values.flatten(0, 1)[self.rows + 1], (0, 0, 0, self.counts.shape[1] - 1))

    def token(self, head: int) -> Tensor:
        """[R]: the last token that a head is conditioned on, which the head before it predicts."""
        return self.ahead[:, head]

    def label(self, head: int) -> Tensor:
        return self.ahead[:, head + 1]

    def asked(self, head: int, rows: Tensor) -> Answers:
        return Answers(rows, self.label(head), self.counts[:, head - 1], head - 1)


@dataclass
class HeadLosses:
    """The answers of all heads, collected one by one; then their loss, and its figures."""

    lesson: Lesson
    target: Target
    labels: Labels
    hidden: Tensor  # [b, n, H] of the target, before its final norm
    regression: float = 0.0  # weight of the distance to the target's own state
    answers: dict[int, Answers] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, head: int, rows: Tensor, weight: float) -> None:
        """rows [R, H]: what a draft head hands to the target's head."""
        self.answers[head], self.weights[head] = self.lesson.asked(head, rows), weight

    @property
    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        own = self._own() if self.labels == "soft" or self.regression else None
        teacher = own if self.labels == "soft" else None
        found = losses(list(self.answers.values()), self.target.head, self.target.dtype, teacher)
        total = self.hidden.new_zeros((), dtype=torch.float32)
        figures: dict[str, Tensor] = {}
        for (head, asked), (loss, places) in zip(self.answers.items(), found, strict=True):
            if self.regression and own is not None:
                near = own[asked.ahead :][: asked.rows.shape[0]]
                far = functional.smooth_l1_loss(asked.rows.float(), near.float(), reduction="none").mean(-1)
                loss = loss + self.regression * _mean(far, asked.counts)
            total = total + self.weights[head] * loss
            figures |= figures_of(head, places, asked.counts)
        return total, figures

    @torch.no_grad()
    def _own(self) -> Tensor:
        """[R + heads - 1, H]: the target's own states where it decides what the heads predict."""
        return self.target.norm(self.lesson.teacher(self.hidden))


def losses(
    asked: Sequence[Answers], head: Callable[[Tensor], Tensor], dtype: torch.dtype, teacher: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """For each draft head: its mean cross-entropy over the rows that count, and the rank [R] of each label, 0 the best.

    With `teacher` [R or more, H] the wanted answer is the teacher's distribution `ahead` rows later, else the label.
    """
    learns = torch.is_grad_enabled() and any(one.rows.requires_grad for one in asked)
    sums = [torch.zeros((), device=one.rows.device) for one in asked]
    gradients, places = [torch.zeros_like(one.rows) for one in asked], [torch.zeros_like(one.labels) for one in asked]
    most = max(one.ahead for one in asked)
    for first in range(0, asked[0].rows.shape[0], ROWS_AT_A_TIME):
        part = slice(first, first + ROWS_AT_A_TIME)
        taught = None if teacher is None else _taught(head, teacher[first : part.stop + most].to(dtype))
        for i, one in enumerate(asked):
            lost, places[i][part], gradient = _part(one, part, head, dtype, taught, learns)
            sums[i] += lost.sum()
            if gradient is not None:
                gradients[i][part] = gradient
    found = []
    for one, loss, gradient in zip(asked, sums, gradients, strict=True):
        total = one.counts.sum().clamp(min=1)  # after the products: mean gradients are too small for half precision
        found.append(_Known.apply(one.rows, loss / total, gradient / total) if learns else loss / total)
    return list(zip(found, places, strict=True))


def _part(
    asked: Answers,
    part: slice,
    head: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    taught: Taught | None,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses and ranks of some rows, and the gradient of the sum of losses."""
    leaf = asked.rows[part].detach().requires_grad_(learns)
    with torch.set_grad_enabled(learns):
        logits = head(leaf.to(dtype))
    if taught is not None:
        taught = taught[0][asked.ahead :][: leaf.shape[0]], taught[1][asked.ahead :][: leaf.shape[0]]
    lost, places = lose(logits.detach(), asked.labels[part], asked.counts[part], taught, learns)
    return lost, places, torch.autograd.grad(logits, leaf, logits.detach())[0] if learns else None


@torch.no_grad()
def _taught(head: Callable[[Tensor], Tensor], rows: Tensor) -> Taught:
    logits = head(rows)
    return logits, log_mass(logits)


class _Known(torch.autograd.Function):
    """A loss whose gradient was computed along with it."""

    @staticmethod
    def forward(context: Any, rows: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        context.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * above[0], None, None


def figures_of(head: int, places: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """How often a head's label was its first candidate, and among the first five; and the number of rows of these means."""
    right = {f"top{most}/{head}": _mean((places < most).float(), counts) for most in (1, 5)}
    return right | {f"rows/{head}": counts.sum()}


def rank_rates(places: Tensor, counts: Tensor, ranks: int) -> list[float]:
    """How often the label had rank 0, 1, ... among the candidates."""
    return [float(_mean((places == rank).float(), counts)) for rank in range(ranks)]


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum() / counts.sum().clamp(min=1)
