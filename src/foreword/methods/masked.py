"""DRAFT: a masked language model predicts a block of tokens in one pass. A few decoder layers read each committed row, fused
with its next token. After these rows come those of a block: the root and masks, which attend to earlier and later ones.

Row k, from 0, predicts the token k + 1 places after the root. Every row of a block starts from the newest committed row,
and so from the target's state. The likeliest paths of the predictions form the draft tree; low-rank edges correct candidates
for the token before. Later passes show some predictions to the layers. The first also reads newly committed rows.
Papers: GMLM (arXiv 2407.21046), DisCo (arXiv 2001.05136).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.choosing import likeliest
from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import Batch, State
from foreword.core.target import Target
from foreword.drafting.blocks import (
    BlockLosses,
    BlockRows,
    all_masked,
    as_slots,
    easier,
    kept,
    partly_shown,
    random_views,
)
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.edges import CANDIDATES, Edges, Transitions
from foreword.drafting.heads import SideBySideLinear, check_taps_of, linear, norm_like, remember
from foreword.drafting.lessons import Anchors, Labels, check_labels, chunks_of
from foreword.drafting.small_model import check_layers
from foreword.drafting.trees import USUAL_RATES, TreeKind, TreePlan, unconditional
from foreword.errors import InputError
from foreword.model.cache import SlotCache
from foreword.model.draft_linears import DraftLinears
from foreword.model.stack import Rows
from foreword.model.widening import FROM_RANK, INTO_RANK, NORM, SEVERAL, layers_at
from foreword.ops.rows import conditioned, conditioned_on_next, rms_of, unit_rms, unit_rms_embeddings

FillOrder = Literal["mask", "disco"]
MOST_BLOCK = 32
SCRATCH = 64  # rows of a pass after the cached ones: at most two blocks, and one more
LEVEL_KERNELS = 2  # per level: the candidates after the live nodes, and the choice of those to continue


class Places(nn.Module):
    """What tells the rows of a block apart: a vector for each place, and one for a token that is not known."""

    def __init__(self, target: Target, block: int) -> None:
        super().__init__()
        size = target.hidden_size
        self.place = nn.Parameter(torch.randn(size, block, device=target.device, dtype=target.dtype))
        self.mask = nn.Parameter(torch.randn(size, device=target.device, dtype=target.dtype))

    def forward(self, embeddings: Tensor, shown: Tensor) -> Tensor:
        """Return the inputs of a block: embeddings [.., B or 1, H] where `shown` [.., B], otherwise the mask: [.., B, H]."""
        return torch.where(shown.unsqueeze(-1), embeddings, self.mask) + self.place.t()


class MaskedWeights(nn.Module):
    def __init__(self, target: Target, layers: nn.ModuleList, taps: int, block: int, edges: int) -> None:
        super().__init__()
        size = target.hidden_size
        self.taps = linear(target, taps * size, size, bias=False) if taps else None
        self.fuse, self.enter = SideBySideLinear(target), SideBySideLinear(target)
        self.places, self.block, self.norm = Places(target, block), layers, norm_like(target)
        self.edges = Edges(target, edges) if edges else None
        self._draft_taps = None if self.taps is None else DraftLinears(self.taps)
        if self.taps is not None:
            nn.init.zeros_(self.taps.weight)

    def fused(self, taps: Tensor, state: Tensor, following: Tensor, size: Tensor) -> Tensor:
        """Return what the layers read of rows [.., H]: states fused with taps and with the tokens after them. See
        `ops.rows.conditioned`."""
        state = state if self._draft_taps is None else self._draft_taps.onto(state, taps)
        return self.fuse.onto(state, following, times=size)

    def entered(self, newest: Tensor, inputs: Tensor) -> Tensor:
        """Return what the layers read of a block: the newest row [.., H], fused with the inputs [.., m, H]: [.., m, H]."""
        state = unit_rms(newest).unsqueeze(-2).expand_as(inputs)
        size = rms_of(newest).unsqueeze(-2).expand(*inputs.shape[:-1], 1)
        return self.enter.onto(state, inputs, times=size)


class Masked(Drafter):
    paper = "GMLM, arXiv 2407.21046; DisCo, arXiv 2001.05136"
    copies = True
    wide = {
        "taps": SEVERAL,
        "*.product": SEVERAL,
        "places": FROM_RANK,
        "edges.gate": INTO_RANK,
        "edges.before": INTO_RANK,
        "edges.after": FROM_RANK,
        "norm": NORM,
        **layers_at("block"),
    }
    module: MaskedWeights
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        block: int = 8,
        layers: int = 3,
        taps: Sequence[int] | None = None,
        edges: int = 64,
        steps: int = 1,
        order: FillOrder = "mask",
        tree: TreeKind = "best",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        labels: Labels = "soft",
        anchors: int = 64,
        given: float | None = None,
    ) -> None:
        """`block`: how many tokens ahead are drafted. `layers`: copied from the target's last ones. `taps`: layers of the
        target whose states are read too; None: three, evenly spread. `edges`: the rank of the edges, 0 for none. `steps`:
        passes over a block. `order`: later passes see the surest predictions ("mask"), or each prediction sees those that
        are surer than itself ("disco"). In training, `anchors`: blocks per sequence; `given`: the share of them that shows
        true tokens; None: half if there are later passes, else none."""
        check_labels("masked", labels)
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.block, self.layers, self.edges, self.steps, self.order = block, layers, edges, steps, order
        self.labels, self.anchors = labels, anchors
        self.given = given if given is not None else 0.5 if steps > 1 else 0.0
        self.taps = None if taps is None else tuple(taps)
        self._check()
        taps_read = tuple(sorted(set(self.taps or ())))
        self.needs = Needs(hidden=True, taps=taps_read, prompt="all", follower=True, deferred=True)
        self.plan = TreePlan(tree, rows, width, USUAL_RATES, paths)
        self.plan.check("masked")
        named = None if taps is None else list(self.needs.taps)
        self.config: dict[str, Any] = dict(block=block, layers=layers, taps=named, edges=edges)

    def _check(self) -> None:
        if not 2 <= self.block <= MOST_BLOCK:
            raise InputError(f"masked: block is {self.block}; it must be from 2 to {MOST_BLOCK}")
        if self.layers < 1 or self.steps < 1 or self.anchors < 1 or self.edges < 0:
            found = f"layers={self.layers}, steps={self.steps}, anchors={self.anchors} and edges={self.edges}"
            raise InputError(f"masked: got {found}; edges must be 0 or more, and the others 1 or more")
        if not all(type(layer) is int for layer in self.taps or ()):
            raise InputError(f"masked: taps is {self.taps!r}; each is the number of a layer")
        if self.order not in get_args(FillOrder):
            raise InputError(f"masked: order is {self.order!r}; choose from {', '.join(get_args(FillOrder))}")
        if self.order == "disco" and self.steps < 2:
            raise InputError("masked: order is 'disco' and steps is 1, but only later passes see predictions; set steps=2")
        if not 0 <= self.given <= 1:
            raise InputError(f"masked: given is {self.given}; it is a share of the blocks, from 0 to 1")

    def build(self, target: Target) -> None:
        check_layers("masked", self.layers, target)
        if self.taps is None:
            spread = {target.layers * quarter // 4 for quarter in (1, 2, 3)}
            self.needs = replace(self.needs, taps=tuple(sorted(spread)))
        check_taps_of("masked", self.needs.taps, target)
        self.stack = target.stack(0, self.layers, init=range(target.layers - self.layers, target.layers))
        self.module = MaskedWeights(target, self.stack.layers, len(self.needs.taps), self.block, self.edges)

    def bind(self, target: Target, slots: int) -> None:
        self.target, device = target, target.device
        self.vocabulary.bind(target)
        self.stack.allocate(slots, target.context, max(SCRATCH, 2 * self.block + 1))
        self.growth = self.plan.on(target, self.block, kernels=LEVEL_KERNELS)
        self.shape = self.growth.shape
        self.embedding = target.head_weight()
        self.number = torch.arange(1, self.block + 1, device=device)
        self.depth, self.root_only = self.number - 1, self.number == 1
        self.all_rows = torch.ones(self.block, self.block, dtype=torch.bool, device=device)
        self.itself = torch.eye(self.block, dtype=torch.bool, device=device)
        self.first_depth, self.first_sees = _after_unread(self.block + 1, self.depth, self._first_view(self.order))
        self.newest = torch.zeros(slots, target.hidden_size, dtype=target.dtype, device=device)
        # Committed rows that no pass has read yet, and how many of them count.
        self.unread = torch.zeros(slots, self.block + 1, target.hidden_size, dtype=target.dtype, device=device)
        self.unread_count = torch.zeros(slots, dtype=torch.long, device=device)

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.stack.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.stack.restart(state.batch, state.length)
        self.newest.index_fill_(0, state.slots, 0)
        self.unread_count.index_fill_(0, state.slots, 0)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.stack.read(self._fused(state, scores, None, chunk.size), state.batch, chunk.size)

    def propose(self, state: State) -> Draft:
        if self.growth.depth(len(state.batch.ids)) == 0:
            self._read_unread(state.batch)
            return Draft.nothing(state.root)
        root = state.root
        rows = self._first_pass(state.batch, self._filled(root.unsqueeze(-1), self.root_only, self.all_rows))
        found = first = self._candidates(state, rows)
        for step in range(1, self.steps):
            rows = self._pass(state.batch, self._next_block(self.order, root, found, first, step))
            found = self._candidates(state, rows)
        if self.module.edges is None:
            return unconditional(self.growth, state, *found)
        normed, branch = self.module.norm(rows), self.growth.branch
        paths = Transitions.of(self.module.edges, normed, found, self.embedding, self.target, state.sampling, branch)
        return self.growth.draft(state, paths.after)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        rows = self._fused(state, scores, accepted.path, accepted.count)
        rows = functional.pad(rows, (0, 0, 0, self.unread.shape[1] - rows.shape[1]))
        self.unread.index_copy_(0, state.slots, rows)
        self.unread_count.index_copy_(0, state.slots, accepted.count)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        anchors = Anchors.of(tokens, mask, self.block, self.anchors, self.module.training)
        losses = BlockLosses(anchors, scores.require_hidden(), target, self.vocabulary, self.labels)
        following = self.embedding[functional.pad(tokens[:, 1:], (0, 1))]
        context = self.module.fused(*conditioned(scores.require_hidden(), self._taps(scores), following))
        block, counts, order = self._first_lesson(anchors)
        parts, first = [], None
        for step in range(1, self.steps + 1):
            rows = self._learned_rows(context, anchors, block)
            loss, figures = losses.of(rows, counts, self._conditioned(rows, anchors))
            parts.append(loss)
            if step == self.steps or (order == "disco" and self.module.training):
                break
            found = self._best(rows)
            first = first or found
            block, counts = self._next_block(order, anchors.before, found, first, step), anchors.counts
        return torch.stack(parts).sum(), figures

    def _first_lesson(self, anchors: Anchors) -> tuple[BlockRows, Tensor, FillOrder]:
        """Return the blocks of the first pass, which of their predictions count, and the order in which passes go on. An
        evaluation does what a round does. Training shows some true tokens; for "disco", half of the steps learn from tokens
        that each prediction sees or not, at random, and the others learn the order "mask"."""
        masked = all_masked(anchors)
        if not self.module.training:
            return self._filled(masked.tokens, masked.shown, self._first_view(self.order)), masked.counts, self.order
        if self.order == "disco" and torch.rand(()) < 0.5:
            return self._easy_first(masked.tokens, random_views(anchors, self.given)), masked.counts, "disco"
        shown = partly_shown(anchors, self.given, self.target.vocab_size)
        return self._filled(shown.tokens, shown.shown, self.all_rows), shown.counts, "mask"

    # Blocks: the same code for a round, where [..] is [b], and for training, where it is [b, A].

    def _first_view(self, order: FillOrder) -> Tensor:
        """Return which rows of a block attend to which in the first pass: [B, B]."""
        return self.all_rows if order == "mask" else self.itself

    def _filled(self, tokens: Tensor, shown: Tensor, sees: Tensor) -> BlockRows:
        """Return a block with tokens [.., B or 1] where `shown` [.., B], and masks elsewhere."""
        return BlockRows(self.module.places(self._embedded(tokens), shown), self.depth, sees)

    def _next_block(
        self, order: FillOrder, root: Tensor, found: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor], step: int
    ) -> BlockRows:
        """Return the block of the pass after `step` passes. found, first: candidates and log-probabilities [.., B, K] of the
        last and the first pass."""
        tokens = as_slots(root, found[0][..., 0])
        if order == "disco":
            return self._easy_first(tokens, easier(first[1][..., 0]))
        count = (self.block - 1) * step // self.steps
        return self._filled(tokens, kept(tokens, found[1][..., :-1, 0], count), self.all_rows)

    def _easy_first(self, tokens: Tensor, visible: Tensor) -> BlockRows:
        """Return the rows that predict, and one for each token [.., B] after the root that attends to nothing else in its
        block. visible [.., B, B - 1]: the tokens that each prediction sees."""
        embeddings = self._embedded(tokens)
        queries, holders = (self.module.places(embeddings, shown) for shown in (self.root_only, ~self.root_only))
        alone = torch.eye(2 * self.block - 1, dtype=torch.bool, device=tokens.device)
        sees = alone.expand(*visible.shape[:-2], -1, -1).clone()
        sees[..., : self.block, self.block :] = visible
        return BlockRows(torch.cat([queries, holders[..., 1:, :]], -2), torch.cat([self.depth, self.depth[1:]]), sees)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return embeddings of unit RMS: [..] -> [.., H]."""
        return unit_rms_embeddings(self.embedding, tokens.flatten()).view(*tokens.shape, -1)

    # Rounds

    @property
    def cache(self) -> SlotCache:
        assert self.stack.cache is not None
        return self.stack.cache

    def _fused(self, state: State, scores: Scores, path: Tensor | None, count: Tensor) -> Tensor:
        """Return the committed rows as the layers read them, and keep the last one. They are the first `count` rows of the
        pass, along the `path` if there is one; the others are 0."""
        hidden, taps = scores.require_hidden(), self._taps(scores)
        inputs = conditioned_on_next(hidden, taps, path, count, self.embedding, state, self.cache.length)
        rows = self.module.fused(*inputs)
        remember(self.newest, state.slots, rows, count)
        return rows

    def _read_unread(self, batch: Batch) -> None:
        """Read the rows that were committed since the last pass, without a block."""
        self.stack.read(batch.take(self.unread), batch, batch.take(self.unread_count))
        self.unread_count.index_fill_(0, batch.slots, 0)

    def _first_pass(self, batch: Batch, block: BlockRows) -> Tensor:
        """Read the rows that were committed since the last pass, and a block after them. Return the block's rows [b, B,
        H]."""
        count = batch.take(self.unread_count)
        hidden = torch.cat([batch.take(self.unread), self.module.entered(batch.take(self.newest), block.rows)], dim=1)
        depth, sees = (table.index_select(0, count) for table in (self.first_depth, self.first_sees))
        rows = Rows(batch.take(self.cache.length), depth, sees, batch, causal=False)
        walked = self.stack.walk(hidden, rows).hidden
        self.cache.advance(batch, count)
        self.unread_count.index_fill_(0, batch.slots, 0)
        return walked[:, -self.block :]

    def _pass(self, batch: Batch, block: BlockRows) -> Tensor:
        """Run the layers over a block alone. Return the rows that predict: [b, B, H]."""
        sees = block.sees.expand(len(batch.ids), -1, -1)
        rows = Rows(batch.take(self.cache.length), block.depth.unsqueeze(0), sees, batch, causal=False)
        hidden = self.module.entered(batch.take(self.newest), block.rows)
        return self.stack.walk(hidden, rows).hidden[:, : self.block]

    def _candidates(self, state: State, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return candidates of rows [b, B, H] and their log-probabilities: [b, B, K] twice."""
        more = 0 if self.module.edges is None else min(CANDIDATES, self.vocabulary.count)
        count, position = max(self.growth.branch, more), state.ahead(self.number)
        return self.vocabulary.candidates(rows, position, state.sampling, count, self.module.norm)

    def _taps(self, scores: Scores) -> list[Tensor]:
        return [scores.taps[layer] for layer in self.needs.taps]

    # Training

    def _learned_rows(self, context: Tensor, anchors: Anchors, block: BlockRows) -> Tensor:
        """Return the rows that predict, normed: [b, A, B, H]. context [b, n, H]: the sequences as the layers read them."""
        length, shape = context.shape[1], block.rows.shape[:-1]
        hidden = self.module.entered(anchors.of_rows(context), block.rows).flatten(1, 2)
        rows = Rows.with_blocks(length, anchors.place, 1 + block.depth, block.sees.expand(*shape, -1))
        walked = self.stack.walk_sequences(torch.cat([context, hidden], dim=1), rows=rows)
        return self.module.norm(walked[:, length:].view(*shape, -1)[:, :, : self.block])

    def _conditioned(self, rows: Tensor, anchors: Anchors) -> Tensor | None:
        """Return the rows from the second on, conditioned on the true token before: [b, A, B - 1, H]."""
        edges = self.module.edges
        return None if edges is None else edges(rows[:, :, 1:], self._embedded(anchors.labels[..., :-1]))

    @torch.no_grad()
    def _best(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token after normed rows [b, A, B, H], and its log-probability: [b, A, B, 1] twice."""
        flat = rows.flatten(0, -2).to(self.target.dtype)
        chunks = chunks_of(flat.shape[0], self.vocabulary.count)
        found = [likeliest(self.vocabulary.head(flat[chunk]), 1, self.vocabulary.tokens) for chunk in chunks]
        tokens, chances = (torch.cat(column).view(*rows.shape[:-1], 1) for column in zip(*found, strict=True))
        return tokens, chances


def _after_unread(most: int, depth: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out a pass over `most` rows, of which the first c count, and then a block: entry c, from 0 to `most`, of depths
    [most + 1, n] and of what each row attends to [most + 1, n, n]. depth [B], sees [B, B]: of the block."""
    order, counts, rows = (torch.arange(count, device=depth.device) for count in (most, most + 1, most + depth.shape[0]))
    depths = torch.cat([order.expand(most + 1, -1), counts.unsqueeze(1) + depth], dim=1)
    whole = (rows.unsqueeze(1) >= rows).expand(most + 1, -1, -1).clone()
    whole[:, most:, :most] = (order < counts.unsqueeze(1)).unsqueeze(1)
    whole[:, most:, most:] = sees
    return depths, whole
