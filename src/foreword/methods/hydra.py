"""DRAFT: Medusa's heads, conditioned on the tokens drafted before them. Head i reads the target's last state, the input
embedding of the root and those of the i - 1 tokens chosen after it, concatenated.

With `prefix` (Hydra++), a decoder layer over the whole sequence, with a cache of its own, stands between the target's state
and the heads. The target's own head, frozen, makes the logits. Training fits the target's distribution.
Paper: Hydra (arXiv 2402.05109).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.heads import ResBlock, linear, near_identity, norm_like, remember
from foreword.drafting.lessons import HeadLosses, Labels, Lesson, check_labels
from foreword.drafting.trees import LEVEL_KERNELS, USUAL_RATES, Rates, TreeKind, TreePlan
from foreword.errors import InputError
from foreword.model.draft_linears import DraftLinears
from foreword.model.widening import NORM, SEVERAL, WITHIN, layers_at
from foreword.ops.rows import carried, counted, unit_rms


class Head(nn.Module):
    """R c + SiLU(W c) over `parts` concatenated states, then residual blocks. R starts as the first state, W as 0."""

    def __init__(self, target: Target, parts: int, layers: int) -> None:
        super().__init__()
        size = target.hidden_size
        self.through, self.bent = linear(target, parts * size, size, bias=False), linear(target, parts * size, size)
        near_identity(self.through.weight, 0.01 * torch.randn_like(self.through.weight))
        nn.init.zeros_(self.bent.weight)
        nn.init.zeros_(self.bent.bias)
        self.blocks = nn.Sequential(*(ResBlock(target) for _ in range(layers - 1)))
        self._draft_linears = DraftLinears(self.through, self.bent)

    def forward(self, rows: Tensor) -> Tensor:
        through, bent = self._draft_linears(rows).chunk(2, dim=-1)
        return self.blocks(through + functional.silu(bent))


class HydraWeights(nn.Module):
    def __init__(self, target: Target, heads: int, layers: int, prefix: nn.ModuleList | None) -> None:
        super().__init__()
        self.prefix = prefix
        self.norm = None if prefix is None else norm_like(target)
        self.heads = nn.ModuleList(Head(target, number + 1, layers) for number in range(1, heads + 1))


class Hydra(Drafter):
    paper = "Hydra, arXiv 2402.05109"
    copies = True
    wide = {
        "heads.*.through": SEVERAL,
        "heads.*.bent": SEVERAL,
        "heads.*.blocks.*.linear": WITHIN,
        "norm": NORM,
        **layers_at("prefix"),
    }
    module: HydraWeights
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        heads: int = 4,
        layers: int = 1,
        prefix: bool = False,
        tree: TreeKind = "best",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        rates: Rates = USUAL_RATES,
        labels: Labels = "soft",
    ) -> None:
        """`heads` of `layers` layers each. `prefix`: a decoder layer over the sequence comes before them. `tree`: the
        likeliest paths ("best"); "static", a template built from `rates` or made of `paths`; or Clover's "budget"."""
        if heads < 1 or layers < 1:
            raise InputError(f"hydra: needs at least one head of one layer, got heads={heads} and layers={layers}")
        check_labels("hydra", labels)
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.heads, self.layers, self.prefix, self.labels = heads, layers, prefix, labels
        self.needs = Needs(hidden=True, prompt="all" if prefix else "last")
        self.plan = TreePlan(tree, rows, width, rates, paths)
        self.plan.check("hydra")
        self.config: dict[str, Any] = dict(heads=heads, layers=layers, prefix=prefix)

    def build(self, target: Target) -> None:
        self.stack = target.stack(0, init=target.layers - 1) if self.prefix else None
        self.module = HydraWeights(target, self.heads, self.layers, None if self.stack is None else self.stack.layers)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocabulary.bind(target)
        if self.stack is not None:
            self.stack.allocate(slots, target.context)
        self.growth = self.plan.on(target, self.heads, self.vocabulary.read_cost(target), LEVEL_KERNELS)
        self.shape = self.growth.shape
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
        known = state.batch.take(self.state).unsqueeze(1)  # [b, 1, H]; each level appends one embedding

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal known
            known = torch.cat([carried(known, origin), unit_rms(self.target.embed(tokens))], dim=-1)
            rows = self.module.heads[level - 1](known)
            return self.vocabulary.candidates(rows, state.ahead(level), state.sampling, self.growth.branch)

        return self.growth.draft(state, guess)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self._follow(state, scores.require_hidden(), accepted.count, accepted.path)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = scores.require_hidden()
        marks = HeadLosses(Lesson.of(tokens, mask, self.heads), target, self.vocabulary, self.labels, hidden)
        walked = hidden if self.stack is None else self.stack.walk_sequences(hidden)
        known = self._normed(marks.lesson.of_rows(walked))
        for number, head in enumerate(self.module.heads, start=1):
            known = torch.cat([known, unit_rms(target.embed(marks.lesson.token(number)))], dim=-1)
            marks.add(number, head(known), 1.0)
        return marks.result

    def _follow(self, state: State, hidden: Tensor, count: Tensor, path: Tensor | None = None) -> None:
        """Keep the last committed row. The committed rows are the first `count` of `hidden` [b, n, H], taken along `path` if
        there is one."""
        if self.stack is not None:
            hidden = self.stack.read(counted(hidden, count, path), state.batch, count)
            path = None
        remember(self.state, state.slots, self._normed(hidden), count, path)

    def _normed(self, hidden: Tensor) -> Tensor:
        return self.target.norm(hidden) if self.module.norm is None else self.module.norm(hidden)
