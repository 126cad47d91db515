"""DRAFT: Clover, conditioned on the next token earlier. Each committed row is fused with the token that follows it, then two
decoder layers read the sequence. Their newest row has seen the root; a light recurrent cell continues from it.

The layers run once per round over the accepted rows, with a cache of their own. The cell runs once per level. States after
some of the target's layers (taps) can be added to the last state. The target's own head, frozen, makes the logits. Training
fits the target's distribution, and optionally its states.
Paper: Clover-2 (arXiv 2408.00264).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

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
from foreword.drafting.heads import (
    CosineAttention,
    SideBySideLinear,
    check_taps,
    check_taps_of,
    linear,
    near_identity,
    norm_like,
    plain_norm,
    remember,
)
from foreword.drafting.lessons import HeadLosses, Labels, Lesson, check_labels
from foreword.drafting.trees import EAGLE_COUNTS, LEVEL_KERNELS, USUAL_RATES, TreeKind, TreePlan, level_paths
from foreword.errors import InputError
from foreword.model.draft_linears import DraftLinears
from foreword.model.widening import NORM, SEVERAL, WITHIN, layers_at
from foreword.ops.rows import carried_and_embedded, conditioned, conditioned_on_next, unit_rms

Fuse = Literal["attention", "linear"]
LAYERS = 2
DECAY = 0.7
GAIN = 2.05  # draft tokens per round that a tree of 64 rows gets accepted: results/trees_cpu/rows_clover2.json


class FusionInputs(NamedTuple):
    """Rows of the target and what they are fused with, each normalised to a root mean square of 1."""

    taps: Tensor  # [.., T H]: states of lower layers
    state: Tensor  # [.., H]
    following: Tensor  # [.., H]: embeddings of the tokens after the rows
    size: Tensor  # [.., 1]: the root mean square that the rows had


class Clover2Weights(nn.Module):
    def __init__(self, target: Target, layers: nn.ModuleList, taps: int, fuse: Fuse) -> None:
        super().__init__()
        size = target.hidden_size
        self.taps = linear(target, taps * size, size, bias=False) if taps else None
        self.fuse = CosineAttention(target, bias=True) if fuse == "attention" else SideBySideLinear(target)
        self.step = CosineAttention(target, bias=True)
        self.block, self.norm = layers, norm_like(target)
        self.first, self.later = linear(target, size, size), linear(target, 2 * size, size)
        self.last_norm = plain_norm(target)
        self._draft_taps = None if self.taps is None else DraftLinears(self.taps)
        self._draft_first, self._draft_later = DraftLinears(self.first), DraftLinears(self.later)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Start near the identity, with a little noise."""
        if self.taps is not None:
            self.taps.weight.zero_()
        for look in (part for part in (self.fuse, self.step) if isinstance(part, CosineAttention)):
            near_identity(look.query.weight, _little(look.query.weight))
            near_identity(look.key.weight, _little(look.key.weight))
            look.value.weight.copy_(_little(look.value.weight))
        for product in (self.first, self.later):
            near_identity(product.weight, _little(product.weight))
            product.bias.zero_()
        # Rows arrive at the size that the final norm gives them, and should keep it.
        self.last_norm.weight.fill_(self.norm.weight.square().mean().sqrt())

    def fused(self, inputs: FusionInputs) -> Tensor:
        """What the layers read [.., H]: rows fused with what follows, at the size that the rows had."""
        state = inputs.state if self._draft_taps is None else self._draft_taps.onto(inputs.state, inputs.taps)
        return self.fuse.onto(state, inputs.following, times=inputs.size)

    def guess_first(self, state: Tensor) -> Tensor:
        """The row that the first level's candidates come from, before `last_norm`."""
        return self._draft_first(state)

    def guess_later(self, state: Tensor, embedding: Tensor) -> Tensor:
        """The same for later levels, from the state and the embedding of the chosen token."""
        return self._draft_later(state, embedding)


def _little(weight: Tensor) -> Tensor:
    return 0.01 * torch.rand_like(weight)


class Clover2(Drafter):
    paper = "Clover-2, arXiv 2408.00264"
    copies = True
    wide = {
        "taps": SEVERAL,
        "*.query": WITHIN,
        "*.key": WITHIN,
        "*.value": WITHIN,
        "fuse.product": SEVERAL,
        "first": WITHIN,
        "later": SEVERAL,
        "norm": NORM,
        "*_norm": NORM,
        "*.norm": NORM,
        **layers_at("block"),
    }
    module: Clover2Weights
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        heads: int = 5,
        taps: Sequence[int] = (),
        fuse: Fuse = "linear",
        tree: TreeKind = "best",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        labels: Labels = "soft",
        regression: float = 0.0,
    ) -> None:
        """`heads`: how many tokens ahead it drafts. `taps`: layers of the target whose states are added. `fuse`: how a row
        is conditioned on the token after it: by Clover's "attention", or by one "linear" over both. `tree`: the likeliest
        paths ("best"), or "static", the paper's 25 nodes unless `paths` names others. `labels`: learn the target's
        distribution or its tokens. `regression`: the weight of learning its states too."""
        if heads < 1:
            raise InputError(f"clover2: needs at least one head, got heads={heads}")
        check_taps("clover2", taps)
        if fuse not in get_args(Fuse):
            raise InputError(f"clover2: fuse is {fuse!r}; choose from {', '.join(get_args(Fuse))}")
        check_labels("clover2", labels)
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.heads, self.fuse, self.labels, self.regression = heads, fuse, labels, regression
        self.needs = Needs(hidden=True, taps=tuple(sorted(set(taps))), prompt="all", follower=True)
        template = level_paths(EAGLE_COUNTS, USUAL_RATES) if paths is None else paths
        self.plan = TreePlan(tree, rows, width, USUAL_RATES, template, gain=GAIN)
        self.plan.check("clover2")
        self.config: dict[str, Any] = dict(heads=heads, taps=list(self.needs.taps), fuse=fuse)

    def build(self, target: Target) -> None:
        check_taps_of("clover2", self.needs.taps, target)
        self.stack = target.stack(0, LAYERS, init=target.layers - 1)
        self.module = Clover2Weights(target, self.stack.layers, len(self.needs.taps), self.fuse)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocabulary.bind(target)
        self.stack.allocate(slots, target.context)
        self.growth = self.plan.on(target, self.heads, self.vocabulary.read_cost(target), LEVEL_KERNELS)
        self.shape = self.growth.shape
        self.embedding = target.head_weight()
        self.state = torch.zeros(slots, target.hidden_size, dtype=target.dtype, device=target.device)

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.stack.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.stack.restart(state.batch, state.length)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self._follow(state, scores, None, chunk.size)

    def propose(self, state: State) -> Draft:
        known = state.batch.take(self.state).unsqueeze(1)  # [b, 1, H]

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal known
            if level == 1:  # the state is conditioned on the root already
                rows = self.module.guess_first(known)
            else:
                known, rows = self._step(*carried_and_embedded(known, origin, self.embedding, tokens))
            return self.vocabulary.candidates(
                rows, state.ahead(level), state.sampling, self.growth.branch, self.module.last_norm
            )

        return self.growth.draft(state, guess)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self._follow(state, scores, accepted, accepted.count)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = scores.require_hidden()
        marks = HeadLosses(
            Lesson.of(tokens, mask, self.heads), target, self.vocabulary, self.labels, hidden, self.regression
        )
        following = self.embedding[functional.pad(tokens[:, 1:], (0, 1))]
        inputs = FusionInputs(*conditioned(hidden, self._taps(scores), following))
        walked = self.stack.walk_sequences(self.module.fused(inputs))
        known = self.module.norm(marks.lesson.of_rows(walked))
        rows = self.module.guess_first(known)
        for number in range(1, self.heads + 1):
            if number > 1:
                known, rows = self._step(known, unit_rms(self.embedding[marks.lesson.token(number)]))
            marks.add(number, self.module.last_norm(rows), DECAY ** (number - 1))
        return marks.result

    def _follow(self, state: State, scores: Scores, accepted: Accepted | None, count: Tensor) -> None:
        """Let the layers read the committed rows, and keep the last one. They are the first `count` rows of the pass, taken
        along the accepted path if there is one."""
        path = None if accepted is None else accepted.path
        hidden, taps, cached = scores.require_hidden(), self._taps(scores), self.stack.cache.length
        inputs = FusionInputs(*conditioned_on_next(hidden, taps, path, count, self.embedding, state, cached))
        walked = self.stack.read(self.module.fused(inputs), state.batch, count)
        remember(self.state, state.slots, walked, count, norm=self.module.norm)

    def _taps(self, scores: Scores) -> list[Tensor]:
        return [scores.taps[layer] for layer in self.needs.taps]

    def _step(self, known: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """The state after a token is chosen, and the row that its candidates come from."""
        known = self.module.step.onto(known, embedding)
        return known, self.module.guess_later(known, embedding)
