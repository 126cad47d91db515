"""Training: which rows of a text a head learns from, and what it loses where it guesses wrong.

Head i (from 1 on) stands at position t and guesses token t + 1 + i; token t + 1 is the root that it is told. A row counts
for head i where the target wrote all of the tokens that heads 1 to i guess. Logits are [rows, V]: they are computed for a
few rows at a time and dropped again, since the head that makes them is frozen and only the rows' gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.sampling import widened
from foreword.core.target import Target
from foreword.errors import InputError

Labels = Literal["hard", "soft"]
ROWS_AT_A_TIME = 2048


def check_labels(method: str, labels: str) -> None:
    if labels not in get_args(Labels):
        raise InputError(f"{method}: labels is {labels!r}; choose from {', '.join(get_args(Labels))}")


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
        rows, counts = (_sent(part, tokens.device) for part in (chosen, counts[chosen]))
        padded = functional.pad(tokens, (0, heads + 1))
        return Lesson(rows, padded.unfold(1, heads + 2, 1).flatten(0, 1)[rows], counts)

    def of_rows(self, values: Tensor) -> Tensor:
        """[b, n, H] -> [R, H]."""
        return values.flatten(0, 1)[self.rows]

    def teacher(self, values: Tensor, head: int) -> Tensor:
        """The same `head` positions later: the rows at which the target itself decides what the head guesses."""
        flat = values.flatten(0, 1)
        return flat[(self.rows + head).clamp(max=flat.shape[0] - 1)]

    def token(self, head: int) -> Tensor:
        """[R]: the last token that a head is told, which the head before it was to guess."""
        return self.ahead[:, head]

    def label(self, head: int) -> Tensor:
        return self.ahead[:, head + 1]


@dataclass
class Marks:
    """A loss that is summed up head by head, and the figures that go with it."""

    lesson: Lesson
    target: Target
    labels: Labels
    hidden: Tensor  # [b, n, H] of the target, before its final norm
    regression: float = 0.0  # weight of the distance to the target's own state
    loss: Tensor | float = 0.0
    figures: dict[str, Tensor] = field(default_factory=dict)

    def add(self, head: int, rows: Tensor, weight: float) -> None:
        """`rows` [R, H]: what a head would hand to the target's head."""
        counts = self.lesson.counts[:, head - 1]
        own = self._own(head) if self.labels == "soft" or self.regression else None
        soft = own if self.labels == "soft" else None
        loss, place = head_loss(rows, self.lesson.label(head), counts, self.target.head, self.target.dtype, soft)
        if self.regression and own is not None:
            far = functional.smooth_l1_loss(rows.float(), own.float(), reduction="none").mean(-1)
            loss = loss + self.regression * _mean(far, counts)
        self.loss = self.loss + weight * loss
        some = counts[: place.shape[0]]
        self.figures[f"top1/{head}"] = _mean((place < 1).float(), some)
        self.figures[f"top5/{head}"] = _mean((place < 5).float(), some)
        self.figures[f"rows/{head}"] = some.sum()

    @torch.no_grad()
    def _own(self, head: int) -> Tensor:
        """[R, H]: the target's own state where it decides what the head guesses."""
        return self.target.norm(self.lesson.teacher(self.hidden, head))

    @property
    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.as_tensor(self.loss), self.figures


def head_loss(
    rows: Tensor,
    labels: Tensor,
    counts: Tensor,
    head: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    teacher: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of rows [R, H] where `counts` [R], and each label's place [R] among the guesses, 0 the best.

    With `teacher` [R, H] the wanted answer is the head's distribution there, else the label alone. While learning, only the
    first rows have their places looked up: that costs another reading of the logits.
    """
    learns = torch.is_grad_enabled() and rows.requires_grad
    total = counts.sum().clamp(min=1)
    loss, gradient, places = rows.new_zeros((), dtype=torch.float32), torch.zeros_like(rows), [labels[:0]]
    for first in range(0, rows.shape[0], ROWS_AT_A_TIME):
        part = slice(first, first + ROWS_AT_A_TIME)
        with torch.set_grad_enabled(learns):
            leaf = rows[part].detach().requires_grad_(learns)
            logits = widened(head(leaf.to(dtype)))
            wanted = labels[part] if teacher is None else _answers(head, teacher[part].to(dtype))
            each = functional.cross_entropy(logits, wanted, reduction="none")
            lost = (each * counts[part]).sum()
        if learns:  # divided afterwards: a mean over many rows has gradients too small for half precision
            gradient[part] = torch.autograd.grad(lost, leaf)[0] / total
        loss = loss + lost.detach() / total
        if first == 0 or not learns:
            best = logits.detach()
            places.append((best > best.gather(1, labels[part].unsqueeze(1))).sum(1))
    return (_Known.apply(rows, loss, gradient) if learns else loss), torch.cat(places)


@torch.no_grad()
def _answers(head: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return widened(head(rows)).softmax(-1)


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


def rank_rates(places: Tensor, counts: Tensor, ranks: int) -> list[float]:
    """How often the label stood at place 0, 1, ... among the guesses."""
    return [float(_mean((places == rank).float(), counts)) for rank in range(ranks)]


def _sent(part: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is doing."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum() / counts.sum().clamp(min=1)
