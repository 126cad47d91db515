"""DRAFT: heads that are conditioned on the tokens drafted before them. One decoder layer after the target's last reads the
whole sequence. From its newest row a small recurrent cell continues, token by token; each state gives candidates.

In the cell (Attention Decoder) the state attends to the embedding of the token just chosen (Regressive Connection). The
layer (Augmenting Block) has a cache of its own over committed rows. Each of the three can be left out. The target's own
head, frozen, makes the logits.
Paper: Clover (arXiv 2405.00263).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs, Skip
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.heads import (
    CosineAttention,
    ResBlock,
    SideBySideLinear,
    near_identity,
    norm_like,
    remember,
)
from foreword.drafting.lessons import HeadLosses, Labels, Lesson, check_labels
from foreword.drafting.trees import LEVEL_KERNELS, USUAL_RATES, TreeKind, TreePlan
from foreword.errors import InputError
from foreword.model.widening import NORM, SEVERAL, WITHIN, layers_at
from foreword.ops.rows import carried, carried_and_embedded, counted, unit_rms

Block = Literal["full", "attention", "mlp", "none"]
HALVES = {"full": Skip(), "attention": Skip.of(mlp=(0,)), "mlp": Skip.of(attention=(0,))}
DECAY = 0.8


class Cell(nn.Module):
    """h + SiLU(attention of the state to the chosen token). With `attention` off, a linear over both, concatenated."""

    def __init__(self, target: Target, attention: bool) -> None:
        super().__init__()
        self.look: CosineAttention | SideBySideLinear = (
            CosineAttention(target, bias=False) if attention else SideBySideLinear(target)
        )
        with torch.no_grad():
            if isinstance(self.look, CosineAttention):
                for part in (self.look.query, self.look.key):
                    near_identity(part.weight, 0.01 * torch.randn_like(part.weight))
                self.look.value.weight.zero_()

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        return self.look.onto(state, embedding, silu=True)


class CloverWeights(nn.Module):
    def __init__(self, target: Target, heads: int, layers: nn.ModuleList | None, regressive: bool, attention: bool) -> None:
        super().__init__()
        self.block = layers
        self.norm = norm_like(target)  # the block's output is not normalised yet
        self.cell = Cell(target, attention) if regressive else None
        self.heads = nn.ModuleList(ResBlock(target) for _ in range(heads))


class Clover(Drafter):
    paper = "Clover, arXiv 2405.00263"
    copies = True
    needs = Needs(hidden=True, prompt="all")
    wide = {
        "cell.look.query": WITHIN,
        "cell.look.key": WITHIN,
        "cell.look.value": WITHIN,
        "cell.look.norm": NORM,
        "cell.look.product": SEVERAL,
        "heads.*.linear": WITHIN,
        "norm": NORM,
        **layers_at("block"),
    }
    module: CloverWeights
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        heads: int = 4,
        block: Block = "full",
        regressive: bool = True,
        attention: bool = True,
        tree: TreeKind = "best",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        top_p: float = 0.8,
        floor: float = 0.25,
        labels: Labels = "soft",
    ) -> None:
        """`block`: the "full" Augmenting Block, only its "attention" or its "mlp", or "none". `attention` off: the cell is a
        linear over state and embedding. `regressive` off: no cell, so that heads are not conditioned on earlier draft
        tokens. `tree`: the likeliest paths ("best"); "budget", the paper's rule with `top_p` and `floor`, whose tree of 4
        draft tokens is `rows=5`; or "static"."""
        if heads < 1:
            raise InputError(f"clover: needs at least one head, got heads={heads}")
        if block not in get_args(Block):
            raise InputError(f"clover: block is {block!r}; choose from {', '.join(get_args(Block))}")
        check_labels("clover", labels)
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.heads, self.block, self.regressive, self.attention, self.labels = heads, block, regressive, attention, labels
        self.plan = TreePlan(tree, rows, width, USUAL_RATES, paths, top_p, floor)
        self.plan.check("clover")
        self.config: dict[str, Any] = dict(heads=heads, block=block, regressive=regressive, attention=attention)

    def build(self, target: Target) -> None:
        self.stack = None if self.block == "none" else target.stack(0, init=target.layers - 1)
        layers = None if self.stack is None else self.stack.layers
        self.module = CloverWeights(target, self.heads, layers, self.regressive, self.attention)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocabulary.bind(target)
        if self.stack is not None:
            self.stack.allocate(slots, target.context)
        self.growth = self.plan.on(target, self.heads, self.vocabulary.read_cost(target), LEVEL_KERNELS)
        self.shape = self.growth.shape
        self.embedding = target.head_weight()
        self.state = torch.zeros(slots, target.hidden_size, dtype=target.dtype, device=target.device)

    def copy(self, source: int, slot: int, rows: int) -> None:
        if self.stack is not None:
            self.stack.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        if self.stack is not None:
            self.stack.restart(state.batch, state.length)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self._follow(state, scores.require_hidden(), chunk.size)

    def propose(self, state: State) -> Draft:
        known = state.batch.take(self.state).unsqueeze(1)  # [b, 1, H]

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal known
            if self.module.cell is None:
                known = carried(known, origin)
            else:
                known = self.module.cell(*carried_and_embedded(known, origin, self.embedding, tokens))
            rows = self.module.heads[level - 1](known)
            return self.vocabulary.candidates(rows, state.ahead(level), state.sampling, self.growth.branch)

        return self.growth.draft(state, guess)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self._follow(state, scores.require_hidden(), accepted.count, accepted.path)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = scores.require_hidden()
        marks = HeadLosses(Lesson.of(tokens, mask, self.heads), target, self.vocabulary, self.labels, hidden)
        walked = hidden if self.stack is None else self.stack.walk_sequences(hidden, HALVES[self.block])
        known = self.module.norm(marks.lesson.of_rows(walked))
        for number, head in enumerate(self.module.heads, start=1):
            if self.module.cell is not None:
                known = self.module.cell(known, unit_rms(self.embedding[marks.lesson.token(number)]))
            marks.add(number, head(known), DECAY**number)
        return marks.result

    def _follow(self, state: State, hidden: Tensor, count: Tensor, path: Tensor | None = None) -> None:
        """Let the block read the committed rows, and keep the last one. They are the first `count` of `hidden` [b, n, H],
        taken along `path` if there is one."""
        if self.stack is not None:
            hidden = self.stack.read(counted(hidden, count, path), state.batch, count, HALVES[self.block])
            path = None
        remember(self.state, state.slots, hidden, count, path, self.module.norm)
