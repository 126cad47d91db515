"""Training: which rows of a sequence a draft head learns from, and its loss.

Head i, from 1, reads position t and predicts token t + 1 + i. It is conditioned on token t + 1, the root. A row counts for
head i if the target wrote all tokens that heads 1 to i predict. A `Lesson` has all such rows, `Anchors` a sample of them.
Logits [rows, V] are computed for a few rows at a time and then dropped; the target's own logits are computed once for all
heads. The target's head is frozen, so only the gradient of the rows is needed. Drafters that choose among a draft
vocabulary learn over it alone: no other token is ever drafted, and the products are a fraction as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.errors import InputError
from foreword.ops.losses import cross_entropies, log_mass
from foreword.ops.rows import along
from foreword.ops.sending import sent_along
from foreword.ops.top import at_least_float32

Labels = Literal["hard", "soft"]
TeacherLogits = tuple[Tensor, Tensor]  # the target's own logits [R, V] and their logsumexp [R]
LOGITS_AT_A_TIME = 1 << 27  # 8,192 rows of a vocabulary of 16,384: on a GPU fewer would be many short kernels


def check_labels(method: str, labels: str) -> None:
    if labels not in get_args(Labels):
        raise InputError(f"{method}: labels is {labels!r}; choose from {', '.join(get_args(Labels))}")


@dataclass(frozen=True)
class LearnedHead:
    """The target's head as training uses it: exact, and for the tokens that can be drafted."""

    logits: Callable[[Tensor], Tensor]  # [R, H] -> [R, W]
    width: int  # W
    dtype: torch.dtype  # of the rows that it takes
    columns: Tensor | None = None  # [V]: the column of each token, -1 for one that cannot be drafted; None: W is V

    @staticmethod
    def of(target: Target, tokens: Tensor | None = None) -> LearnedHead:
        """tokens [W]: the draft vocabulary; None: all tokens."""
        if tokens is None:
            return LearnedHead(target.head, target.vocab_size, target.dtype)
        weight, columns = target.head_weight()[tokens], torch.full((target.vocab_size,), -1, device=tokens.device)
        columns[tokens] = torch.arange(tokens.shape[0], device=tokens.device)

        def logits(rows: Tensor) -> Tensor:
            return target.after_head(functional.linear(rows, weight))

        return LearnedHead(logits, tokens.shape[0], target.dtype, columns)

    def __call__(self, rows: Tensor) -> Tensor:
        return self.logits(rows.to(self.dtype))

    def column(self, labels: Tensor) -> Tensor:
        """Return the columns of labels [R]."""
        return labels if self.columns is None else self.columns[labels]


@dataclass(frozen=True)
class HeadOutputs:
    """The rows that one draft head hands to the target's head, and what should be predicted from them."""

    rows: Tensor  # [R, H]
    labels: Tensor  # [R]
    counts: Tensor  # [R] bool
    teacher_offset: int = 0  # the teacher's row comes this many rows later


@dataclass(frozen=True)
class Lesson:
    """The R rows out of [b, n] to learn from."""

    rows: Tensor  # [R] places in the flattened [b * n]
    tokens: Tensor  # [R, heads + 2] the tokens at t, t + 1, ...
    counts: Tensor  # [R, heads] bool

    @staticmethod
    def of(tokens: Tensor, mask: Tensor, heads: int) -> Lesson:
        """Choose the rows of sequences [b, n], padded on the right. mask [b, n]: tokens that the target wrote.

        The mask is on the host, so the number of rows is known without waiting for the device.
        """
        written = functional.pad(mask, (0, heads + 1)).unfold(1, heads + 2, 1)[:, :, 2:]  # [b, n, heads]
        counts = written.cumprod(-1).bool().flatten(0, 1)
        chosen = counts[:, 0].nonzero().squeeze(1)
        rows, counts = (sent_along(values, tokens.device) for values in (chosen, counts[chosen]))
        padded = functional.pad(tokens, (0, heads + 1))
        return Lesson(rows, padded.unfold(1, heads + 2, 1).flatten(0, 1)[rows], counts)

    def of_rows(self, values: Tensor) -> Tensor:
        """[b, n, H] -> [R, H]."""
        return values.flatten(0, 1)[self.rows]

    def teacher(self, values: Tensor) -> Tensor:
        """[b, n, H] -> [R + heads - 1, H]: in row j + i - 1 the target decides the token that head i predicts in row j.

        If head i counts in row j, rows j to j + i - 1 are neighbours in the sequence, so one list serves all heads.
        """
        return functional.pad(values.flatten(0, 1)[self.rows + 1], (0, 0, 0, self.counts.shape[1] - 1))

    def token(self, head: int) -> Tensor:
        """[R]: the last token that a head is conditioned on. The head before it predicts this token."""
        return self.tokens[:, head]

    def label(self, head: int) -> Tensor:
        """[R]: the token that a head should predict."""
        return self.tokens[:, head + 1]

    def outputs(self, head: int, rows: Tensor) -> HeadOutputs:
        return HeadOutputs(rows, self.label(head), self.counts[:, head - 1], head - 1)


@dataclass(frozen=True)
class Anchors:
    """The rows of sequences to learn from, A of each, and what the heads on them should predict."""

    place: Tensor  # [b, A]
    before: Tensor  # [b, A] the token after each anchor, which comes before the predicted ones
    labels: Tensor  # [b, A, heads]
    counts: Tensor  # [b, A, heads] bool: whether the target wrote all tokens that heads 1 to i predict

    @staticmethod
    def of(tokens: Tensor, mask: Tensor, heads: int, most: int, at_random: bool) -> Anchors:
        """Sample up to `most` rows of each sequence: `at_random` in training, else always the same ones.

        mask [b, n], on the host: tokens that the target wrote. If a sequence has fewer rows, rows that do not count pad it.
        """
        written = functional.pad(mask, (0, heads + 1)).unfold(1, heads + 2, 1)[:, :, 2:].cumprod(-1).bool()  # [b, n, heads]
        fixed = None if at_random else torch.Generator().manual_seed(0)
        priority = torch.rand(mask.shape, generator=fixed).masked_fill(~written[:, :, 0], -1)
        chosen = priority.topk(min(most, mask.shape[1]), dim=1).indices.sort(1).values
        counts = written.gather(1, chosen.unsqueeze(-1).expand(-1, -1, heads))
        place, counts = (sent_along(values, tokens.device) for values in (chosen, counts))
        ahead = (place.unsqueeze(-1) + 2 + torch.arange(heads, device=tokens.device)).clamp(max=tokens.shape[1] - 1)
        before = tokens.gather(1, (place + 1).clamp(max=tokens.shape[1] - 1))
        return Anchors(place, before, tokens.gather(1, ahead.flatten(1)).view(ahead.shape), counts)

    def outputs(self, head: int, rows: Tensor) -> HeadOutputs:
        """Return the rows [b, A, H] that a head, from 1, hands to the target's head, with what they should predict."""
        return HeadOutputs(rows.flatten(0, 1), self.labels[:, :, head - 1].flatten(), self.counts[:, :, head - 1].flatten())

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the anchors' own rows: [b, n, H] -> [b, A, H]."""
        return along(values, self.place)

    def teacher(self, head: int, hidden: Tensor) -> Tensor:
        """Return the target's states where it decides the token that a head predicts: [b, n, H] -> [b * A, H]."""
        return along(hidden, (self.place + head).clamp(max=hidden.shape[1] - 1)).flatten(0, 1)

    def loss(
        self,
        outputs: Sequence[HeadOutputs],
        hidden: Tensor,
        target: Target,
        vocabulary: VocabularyHead,
        labels: Labels,
        decay: float = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses of heads 1, 2, ..., each weighted `decay` times the one before, and their figures.

        hidden [b, n, H]: of the target, before its final norm. vocabulary: the tokens that can be drafted.
        """
        total, figures = hidden.new_zeros((), dtype=torch.float32), dict[str, Tensor]()
        learned = LearnedHead.of(target, vocabulary.tokens)
        for head, output in enumerate(outputs, start=1):
            own = target.norm(self.teacher(head, hidden)) if labels == "soft" else None
            [(loss, ranks)] = losses([output], learned, own)
            total = total + decay ** (head - 1) * loss
            figures |= figures_of(head, ranks, output.counts)
        return total, figures


@dataclass
class HeadLosses:
    """The outputs of all heads, collected one by one, then their loss and its figures."""

    lesson: Lesson
    target: Target
    vocabulary: VocabularyHead  # the tokens that can be drafted
    labels: Labels
    hidden: Tensor  # [b, n, H] of the target, before its final norm
    regression: float = 0.0  # weight of the distance to the target's own state
    outputs: dict[int, HeadOutputs] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, head: int, rows: Tensor, weight: float) -> None:
        """Add the rows [R, H] that a draft head hands to the target's head."""
        self.outputs[head], self.weights[head] = self.lesson.outputs(head, rows), weight

    @property
    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the heads' losses, and the figures of each head."""
        own = self._own() if self.labels == "soft" or self.regression else None
        teacher = own if self.labels == "soft" else None
        found = losses(list(self.outputs.values()), LearnedHead.of(self.target, self.vocabulary.tokens), teacher)
        total = self.hidden.new_zeros((), dtype=torch.float32)
        figures: dict[str, Tensor] = {}
        for (head, output), (loss, ranks) in zip(self.outputs.items(), found, strict=True):
            if self.regression and own is not None:
                goal = own[output.teacher_offset :][: output.rows.shape[0]]
                distance = functional.smooth_l1_loss(output.rows.float(), goal.float(), reduction="none").mean(-1)
                loss = loss + self.regression * _mean(distance, output.counts)
            total = total + self.weights[head] * loss
            figures |= figures_of(head, ranks, output.counts)
        return total, figures

    @torch.no_grad()
    def _own(self) -> Tensor:
        """[R + heads - 1, H]: the target's own normed states where it decides the tokens that the heads predict."""
        return self.target.norm(self.lesson.teacher(self.hidden))


@dataclass(frozen=True)
class RowLosses:
    """The losses of one head, row by row. Their gradient was computed along with them."""

    output: HeadOutputs
    losses: Tensor  # [R]: cross-entropies, 0 where a row does not count
    ranks: Tensor  # [R]: of the labels, 0 the best; of a label that cannot be drafted, the number of tokens that can be
    chances: Tensor  # [R]: log-probabilities of the labels, if they were asked for; -inf if a label cannot be drafted
    gradient: Tensor | None  # [R, H]: of the sum of losses

    def weighted(self, weights: Tensor) -> Tensor:
        """Return the sum of losses, each times its weight [R]. Weights come after the products of the head: gradients of a
        mean are too small for half precision."""
        total = (weights * self.losses).sum().to(self.losses.dtype)
        if self.gradient is None:
            return total
        scaled = self.gradient * weights.unsqueeze(1).to(self.gradient.dtype)
        return _WithGradient.apply(self.output.rows, total, scaled)

    @property
    def mean(self) -> Tensor:
        """The mean over the rows that count."""
        counts, dtype = self.output.counts, torch.promote_types(self.output.rows.dtype, torch.float32)
        return self.weighted(counts.to(dtype) / counts.sum().clamp(min=1))


def losses(outputs: Sequence[HeadOutputs], head: LearnedHead, teacher: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return for each head its mean cross-entropy over the rows that count, and the rank [R] of each label, 0 the best. See
    `row_losses`."""
    return [(one.mean, one.ranks) for one in row_losses(outputs, head, teacher)]


def row_losses(
    outputs: Sequence[HeadOutputs], head: LearnedHead, teacher: Tensor | None = None, with_chances: bool = False
) -> list[RowLosses]:
    """Return the losses of each head.

    With `teacher` [R or more, H] a head learns the teacher's distribution `teacher_offset` rows later, else the label. A
    label that cannot be drafted teaches nothing; the teacher's distribution is that over the tokens that can be.
    """
    with_gradient = torch.is_grad_enabled() and any(one.rows.requires_grad for one in outputs)
    found = [_no_losses(one, with_gradient) for one in outputs]
    most = max(one.teacher_offset for one in outputs)
    for chunk in chunks_of(outputs[0].rows.shape[0], head.width):
        of_teacher = None if teacher is None else _teacher_logits(head, teacher[chunk.start : chunk.stop + most])
        for one in found:
            _add_chunk(one, chunk, head, of_teacher, with_chances)
    return found


def chunks_of(rows: int, width: int) -> Iterator[slice]:
    """Split rows of logits [rows, width] into chunks that are computed one after the other."""
    size = max(LOGITS_AT_A_TIME // width, 1)
    return (slice(first, first + size) for first in range(0, rows, size))


def _no_losses(output: HeadOutputs, with_gradient: bool) -> RowLosses:
    """Return losses of 0, to be filled chunk by chunk."""
    losses, chances = torch.zeros(2, output.rows.shape[0], device=output.rows.device)
    gradient = torch.zeros_like(output.rows) if with_gradient else None
    return RowLosses(output, losses, torch.zeros_like(output.labels), chances, gradient)


def _add_chunk(
    found: RowLosses,
    chunk: slice,
    head: LearnedHead,
    teacher: TeacherLogits | None,
    with_chances: bool,
) -> None:
    """Compute the losses of some rows, and the gradient of their sum."""
    output, with_gradient = found.output, found.gradient is not None
    leaf, column = output.rows[chunk].detach().requires_grad_(with_gradient), head.column(output.labels[chunk])
    labels, known = column.clamp(min=0), column >= 0
    counts = output.counts[chunk] if teacher is not None else output.counts[chunk] & known
    with torch.set_grad_enabled(with_gradient):
        logits = head(leaf)
    if teacher is not None:
        offset, count = output.teacher_offset, leaf.shape[0]
        teacher = teacher[0][offset:][:count], teacher[1][offset:][:count]
    values = logits.detach()
    if with_chances:  # now: the gradient overwrites the logits
        chances = at_least_float32(values.gather(1, labels.unsqueeze(1))).squeeze(1) - log_mass(values)
        found.chances[chunk] = chances.where(known, -torch.inf)
    found.losses[chunk], ranks = cross_entropies(values, labels, counts, teacher, with_gradient)
    found.ranks[chunk] = ranks.where(known, values.shape[1])
    if found.gradient is not None:
        found.gradient[chunk] = torch.autograd.grad(logits, leaf, values)[0]


@torch.no_grad()
def _teacher_logits(head: LearnedHead, rows: Tensor) -> TeacherLogits:
    logits = head(rows)
    return logits, log_mass(logits)


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient was computed along with it."""

    @staticmethod
    def forward(context: Any, rows: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        context.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * above[0], None, None


def figures_of(head: int, ranks: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Return how often a head's label was its first candidate, and among its first five, and over how many rows."""
    right = {f"top{most}/{head}": _mean((ranks < most).float(), counts) for most in (1, 5)}
    return right | {f"rows/{head}": counts.sum()}


def rank_rates(ranks: Tensor, counts: Tensor, most: int) -> list[float]:
    """Return how often the label had rank 0, 1, ... below `most` among the candidates."""
    return [float(_mean((ranks == rank).float(), counts)) for rank in range(most)]


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum() / counts.sum().clamp(min=1)
