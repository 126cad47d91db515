"""Training: which rows of a text a head learns from, and what it loses where it guesses wrong.

Head i (from 1 on) stands at position t and guesses token t + 1 + i; token t + 1 is the root that it is told. A row counts
for head i where the target wrote all of the tokens that heads 1 to i guess. Logits are [rows, V]: they are computed for a
few rows at a time, the target's own once for all heads, and dropped again, since the head that makes them is frozen and only
the rows' gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.sampling import widened
from foreword.core.target import Target
from foreword.errors import InputError

Labels = Literal["hard", "soft"]
Taught = tuple[Tensor, Tensor]  # the target's own logits [R, V] and their logsumexp [R]
ROWS_AT_A_TIME = 2048


def check_labels(method: str, labels: str) -> None:
    if labels not in get_args(Labels):
        raise InputError(f"{method}: labels is {labels!r}; choose from {', '.join(get_args(Labels))}")


@dataclass(frozen=True)
class Answers:
    """What one head would hand to the target's head, and what is wanted of it."""

    rows: Tensor  # [R, H]
    labels: Tensor  # [R]
    counts: Tensor  # [R] bool
    ahead: int = 0  # how many rows later its teacher stands


@dataclass(frozen=True)
class Lesson:
    """R rows out of [b, n] to learn from."""

    rows: Tensor  # [R] places in the flattened [b * n]
    ahead: Tensor  # [R, heads + 2] the tokens at t, t + 1, ...
    counts: Tensor  # [R, heads] bool

    @staticmethod
    def of(tokens: Tensor, mask: Tensor, heads: int) -> Lesson:
        """`mask` [b, n]: tokens that the target wrote. Texts are padded on the right.

        The mask lies on the host: how many rows there are is known without waiting for the device.
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
        """[b, n, H] -> [R + heads - 1, H]: in row j + i - 1 stands the target where it decides what head i guesses in row j.

        Where head i counts in row j, rows j to j + i - 1 are neighbours in the text: so one list serves all heads.
        """
        return functional.pad(values.flatten(0, 1)[self.rows + 1], (0, 0, 0, self.counts.shape[1] - 1))

    def token(self, head: int) -> Tensor:
        """[R]: the last token that a head is told, which the head before it was to guess."""
        return self.ahead[:, head]

    def label(self, head: int) -> Tensor:
        return self.ahead[:, head + 1]

    def asked(self, head: int, rows: Tensor) -> Answers:
        return Answers(rows, self.label(head), self.counts[:, head - 1], head - 1)


@dataclass
class Marks:
    """What the heads answer, collected one by one; then the loss of all, and the figures that go with it."""

    lesson: Lesson
    target: Target
    labels: Labels
    hidden: Tensor  # [b, n, H] of the target, before its final norm
    regression: float = 0.0  # weight of the distance to the target's own state
    answers: dict[int, Answers] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, head: int, rows: Tensor, weight: float) -> None:
        """`rows` [R, H]: what a head would hand to the target's head."""
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
        """[R + heads - 1, H]: the target's own states where it decides what the heads guess."""
        return self.target.norm(self.lesson.teacher(self.hidden))


def losses(
    asked: Sequence[Answers], head: Callable[[Tensor], Tensor], dtype: torch.dtype, teacher: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Of each head: its mean cross-entropy where it counts, and each label's place [R] among its guesses, 0 the best.

    With `teacher` [R and more, H] the wanted answer is the head's distribution `ahead` rows later, else the label alone.
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
    """Losses and places of some rows, and the gradient of their sum."""
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
    if _has_kernel(logits):
        from foreword.kernels import cross_entropy  # noqa: PLC0415  Triton is there only where CUDA is

        return logits, cross_entropy.log_mass(logits)
    return logits, widened(logits).logsumexp(-1)


def lose(logits: Tensor, labels: Tensor, counts: Tensor, taught: Taught | None, learns: bool) -> tuple[Tensor, Tensor]:
    """Cross-entropies of logits [R, V] where `counts` [R], else 0; how many logits are larger than the label's: twice [R].

    With `learns` the logits become the gradient of the losses' sum.
    """
    if _has_kernel(logits):
        from foreword.kernels import cross_entropy  # noqa: PLC0415  Triton is there only where CUDA is

        return cross_entropy.lose(logits, labels, counts, taught, learns)
    wide, label = widened(logits), labels.unsqueeze(1)
    places = (wide > wide.gather(1, label)).sum(1)
    log_chances = wide.log_softmax(-1)
    if taught is None:
        lost, wanted = -log_chances.gather(1, label).squeeze(1), torch.zeros_like(log_chances).scatter_(1, label, 1)
    else:
        wanted = (widened(taught[0]) - taught[1].unsqueeze(1)).exp_()
        lost = -(wanted * log_chances).sum(1)
    if learns:
        logits.copy_(log_chances.exp_().sub_(wanted).where(counts.unsqueeze(1), 0))
    return lost.where(counts, 0), places


def _has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype.itemsize <= 4


class _Known(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(context: Any, rows: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        context.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * above[0], None, None


def figures_of(head: int, places: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """How often a head's label stood first, and among the first five of its guesses; over how many rows those are means."""
    right = {f"top{most}/{head}": _mean((places < most).float(), counts) for most in (1, 5)}
    return right | {f"rows/{head}": counts.sum()}


def rank_rates(places: Tensor, counts: Tensor, ranks: int) -> list[float]:
    """How often the label stood at place 0, 1, ... among the guesses."""
    return [float(_mean((places == rank).float(), counts)) for rank in range(ranks)]


def sent_along(part: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is doing."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum() / counts.sum().clamp(min=1)
