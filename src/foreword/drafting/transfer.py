"""Pseudo rows: a matrix predicts, in the middle of the target, a later token's hidden row from an earlier token's.

Step i turns the row at t into a row at t + i. The layers above treat it as any other row: it attends to the sequence up to t
and to the steps before it, and the target's head predicts token t + 1 + i from it. Token t + 1 is not known when the rows
pass these layers, so a second matrix per step conditions them on it afterwards. Training runs the rows through the frozen
layers, and only the matrices learn. `firp` and `hidden_transfer` share them, and compute the rows at different times.
Papers: Hidden Transfer (arXiv 2404.12022), FIRP (arXiv 2410.20488).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from foreword.core.needs import Graft, Join, on_device
from foreword.core.scores import Scores
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.heads import linear
from foreword.drafting.lessons import Anchors, HeadOutputs, Labels, LearnedHead, check_labels, losses, rank_rates
from foreword.drafting.trees import BRANCH, Rates
from foreword.errors import DrafterError, InputError
from foreword.model.draft_linears import DraftLinears
from foreword.model.widening import WITHIN, Table, Wide
from foreword.ops.pseudo_rows import projected, with_pseudo_rows
from foreword.ops.rows import unit_rms_embeddings

Source = Literal["anchor", "chain"]


@dataclass(frozen=True)
class Transfer:
    """The options of a drafter's steps."""

    steps: int
    layers: tuple[int, ...] | None = None  # the layer after which each step joins; None: from the middle on
    source: Source = "anchor"  # what a step starts from: the anchor's own row, or that of the step before
    bias: bool = True
    squeeze: int = 1  # a divisor of H: a matrix has rank H / squeeze, and is smaller
    norm: bool = True  # matrices see rows of unit RMS; the result is scaled back
    conditioned: bool = True  # rows are conditioned on the token before them once it is decided
    labels: Labels = "soft"
    anchors: int = 64  # per sequence, in a training step

    def check(self, method: str) -> None:
        if self.steps < 1 or self.squeeze < 1 or self.anchors < 1:
            found = f"steps={self.steps}, squeeze={self.squeeze} and anchors={self.anchors}"
            raise InputError(f"{method}: each must be 1 or more, got {found}")
        if self.layers is not None and not all(type(layer) is int for layer in self.layers):
            raise InputError(f"{method}: layers is {self.layers!r}; each is the number of a layer")
        if self.layers is not None and (len(self.layers) != self.steps or list(self.layers) != sorted(self.layers)):
            raise InputError(f"{method}: layers is {list(self.layers)}; {self.steps} steps need one each, in rising order")
        if self.source not in get_args(Source):
            raise InputError(f"{method}: source is {self.source!r}; choose from {', '.join(get_args(Source))}")
        check_labels(method, self.labels)

    def layers_of(self, target: Target, method: str) -> tuple[int, ...]:
        """The layers after which the steps join this target."""
        if self.layers is None:
            return tuple(min(target.layers // 2 + step, target.layers - 1) for step in range(self.steps))
        outside = [layer for layer in self.layers if not 0 <= layer < target.layers]
        if outside:
            raise DrafterError(
                f"{method}: no step can join after layer {outside[0]} of {target.name}, which has "
                f"{target.layers}; at least one layer must follow the step, so choose from 0 to {target.layers - 1}"
            )
        return self.layers

    @property
    def config(self) -> dict[str, Any]:
        layers = None if self.layers is None else list(self.layers)
        shape = {"steps": self.steps, "layers": layers, "source": self.source}
        return shape | {"bias": self.bias, "squeeze": self.squeeze, "norm": self.norm, "told": self.conditioned}

    @property
    def wide(self) -> Table:
        size: Literal["normed", "stream"] = "normed" if self.norm else "stream"
        return {"*.linear": Wide(size, size), "*.down": Wide(size, size), "*.of_step.*": WITHIN}

    def module(self, target: Target) -> nn.ModuleList:
        """The matrices of the steps, and after them those that condition the steps on a token, if there are any."""
        matrices = nn.ModuleList(Projection(target, self) for _ in range(self.steps))
        return matrices.append(TokenConditioning(target, self.steps)) if self.conditioned else matrices


class Projection(nn.Module):
    """h + |h| (W h / |h| + b), where |h| is the row's root mean square. W and b start at 0, so rows start as copies.

    Rows of the residual stream grow from layer to layer and differ in size between tokens. At unit RMS, the weights of all
    layers and models learn at one rate.
    """

    def __init__(self, target: Target, options: Transfer) -> None:
        super().__init__()
        size = target.hidden_size
        inner, left = divmod(size, options.squeeze)
        if left:
            raise InputError(f"squeeze is {options.squeeze}, which does not divide the {size} columns of {target.name}")
        self.norm = options.norm
        self.down = linear(target, size, inner, bias=False) if options.squeeze > 1 else None
        self.linear = linear(target, inner, size, options.bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, rows: Tensor) -> Tensor:
        return projected(rows, self.weights, self.linear.bias, self.norm)

    @property
    def weights(self) -> list[Tensor]:
        """The matrices, in the order that rows go through them."""
        return [one.weight for one in (self.down, self.linear) if one is not None]


class TokenConditioning(nn.Module):
    """Conditions the steps on the token after their anchor, once it is decided. One matrix per step maps the token's
    embedding, and the result is added to the row that the step hands to the target's head. The matrices start at 0."""

    def __init__(self, target: Target, steps: int) -> None:
        super().__init__()
        size = target.hidden_size
        self.of_step = nn.ModuleList(linear(target, size, size, bias=False) for _ in range(steps))
        for weight in self.parameters():
            nn.init.zeros_(weight)
        self._first = [DraftLinears(*self.of_step[:count]) for count in range(1, steps + 1)]

    def forward(self, rows: Tensor, embedding: Tensor) -> Tensor:
        """Condition the rows of the first n steps [.., n, H] on a token with this embedding of unit RMS [.., H]."""
        return self._first[rows.shape[-2] - 1].onto(rows.flatten(-2), embedding).view_as(rows)


def conditioned_steps(module: nn.ModuleList, rows: Tensor, tokens: Tensor, table: Tensor) -> Tensor:
    """Condition the rows [.., n, H] that the first n steps hand to the target's head on the tokens [..] before them, if the
    module learned to. table [V, H]: embeddings."""
    last = module[-1]
    if not isinstance(last, TokenConditioning):
        return rows
    return last(rows, unit_rms_embeddings(table, tokens))


def joins_of(module: nn.ModuleList, options: Transfer) -> list[Join]:
    """Return the steps as joins, for training. Each attends to all before it."""
    assert options.layers is not None, "bind says where steps join"

    def join(step: int, layer: int) -> Join:
        def make(anchors: Tensor, earlier: Sequence[Tensor]) -> Tensor:
            return module[step](earlier[-1] if options.source == "chain" and step else anchors)

        return Join(layer, step + 1, make, tuple(range(step)))

    return [join(step, layer) for step, layer in enumerate(options.layers)]


def append_step(matrix: nn.Module, rows: Tensor, source: Tensor, which: Tensor) -> Tensor:
    """Append to rows [b, n, H] of a pass those of a step, from rows `which` [R] of the source [b, m, H]. See
    `ops.pseudo_rows.with_pseudo_rows`."""
    assert isinstance(matrix, Projection)
    return with_pseudo_rows(rows, source, which, matrix.weights, matrix.linear.bias, matrix.norm)


def steps_after(
    module: nn.ModuleList, layers: Sequence[int], source: Source, known: Tensor
) -> tuple[Tensor, tuple[Graft, ...]]:
    """Start the steps after the last row of a sequence. known [b, steps, H]: its states after the layers.

    Returns the first step's row [b, 1, H], from which `Target.onward` continues at its layer, and grafts of the later steps.
    """

    def graft(step: int) -> Graft:
        def onto(hidden: Tensor, real: int) -> Tensor:
            origin, row = (hidden, step - 1) if source == "chain" else (known, step)
            return append_step(module[step], hidden, origin, on_device((row,), known.device))

        return Graft(layers[step], (0,), (step,), onto)

    first = append_step(module[0], known[:, :0], known, on_device((0,), known.device))
    return first, tuple(graft(step) for step in range(1, len(layers)))


# Training ----------------------------------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """Sequences and steps after the last layer."""

    rows: tuple[Tensor, ...]  # [b, A, H] for each step: the rows that it hands to the target's head
    hidden: Tensor  # [b, n, H] the sequences' own states after the last layer, before the final norm


def walked(joins: Sequence[Join], anchors: Anchors, scores: Scores, target: Target) -> Walk:
    """Run sequences, and the steps that join them, through the layers from the first join on. `scores.taps` has the states
    of the sequences at that layer."""
    first = joins[0].layer
    for found in target.alongside(scores.taps[first], first, anchors.place, joins):
        last = found
    return Walk(tuple(target.norm(one) for one in last.rows), last.sequences)


def _outputs(module: nn.ModuleList, anchors: Anchors, walk: Walk, target: Target) -> list[HeadOutputs]:
    """Return the rows that the steps hand to the target's head, with what they should predict."""
    rows = conditioned_steps(module, torch.stack(walk.rows, dim=2), anchors.before, target.head_weight())  # [b, A, steps, H]
    return [anchors.outputs(step, one) for step, one in enumerate(rows.unbind(2), start=1)]


def learn(
    module: nn.ModuleList,
    options: Transfer,
    vocabulary: VocabularyHead,
    tokens: Tensor,
    mask: Tensor,
    scores: Scores,
    target: Target,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of all steps, and their figures, as `Trainable.loss` does. vocabulary: what can be drafted."""
    anchors = Anchors.of(tokens, mask, options.steps, options.anchors, module.training)
    walk = walked(joins_of(module, options), anchors, scores, target)
    return anchors.loss(_outputs(module, anchors, walk, target), walk.hidden, target, vocabulary, options.labels)


@torch.no_grad()
def right_by_rank(
    module: nn.ModuleList,
    options: Transfer,
    vocabulary: VocabularyHead,
    tokens: Tensor,
    mask: Tensor,
    scores: Scores,
    target: Target,
) -> Rates:
    """Return how often the candidates of each step are right, by rank. Trees are built from these rates."""
    anchors = Anchors.of(tokens, mask, options.steps, options.anchors, at_random=False)
    outputs = _outputs(module, anchors, walked(joins_of(module, options), anchors, scores, target), target)
    found = losses(outputs, LearnedHead.of(target, vocabulary.tokens))
    return [rank_rates(ranks, one.counts, BRANCH) for one, (_, ranks) in zip(outputs, found, strict=True)]
