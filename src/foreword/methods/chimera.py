"""DRAFT: one decoder layer over the whole sequence, and a head for each depth. For committed tokens the layer reads the
target's own last states. For the root and the nodes after it, which the target has not run yet, it reads their trigrams.

A node's row is made of the embeddings of its token, its parent and its grandparent. It attends to the committed rows, to its
ancestors and to itself. A head reads two states: the target's last one and the node's row. The target's own head, frozen,
makes the logits. Training fits the target's distribution.
Paper: Chimera (arXiv 2402.15758).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Join, Needs, on_device
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.heads import check_taps, check_taps_of, linear, norm_like, plain_norm, remember
from foreword.drafting.lessons import Anchors, Labels, check_labels
from foreword.drafting.level_rows import LevelRows
from foreword.drafting.trees import EAGLE_COUNTS, LEVEL_KERNELS, USUAL_RATES, TreeKind, TreePlan, level_paths
from foreword.errors import InputError
from foreword.model.draft_linears import DraftLinears
from foreword.model.widening import NORM, SEVERAL, layers_at
from foreword.ops.rows import along, counted, rms_of, unit_rms

DECAY = 0.7  # the weight of a head's loss, where the head before it has 1
LITTLE = 0.1  # of a node's row in what an untrained head predicts: much of it would predict the node's own token again
KERNELS = LEVEL_KERNELS + 12  # per level: six more for its nodes' rows and whom they attend to, and six for the layer


class ChimeraWeights(nn.Module):
    def __init__(self, target: Target, layer: nn.ModuleList, heads: int, taps: int) -> None:
        super().__init__()
        size = target.hidden_size
        self.taps = linear(target, taps * size, size, bias=False) if taps else None
        self.trigram = linear(target, 3 * size, size)  # three linears, one for each token, as one product
        self.layer = layer
        self.state_norm, self.row_norm, self.last_norm = norm_like(target), norm_like(target), plain_norm(target)
        self.heads = nn.ModuleList(linear(target, 2 * size, size, bias=False) for _ in range(heads))
        self._draft_taps = None if self.taps is None else DraftLinears(self.taps)
        self._draft_trigram, self._draft_heads = DraftLinears(self.trigram), [DraftLinears(head) for head in self.heads]
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """A node's row starts as its own embedding, and a head as the target's state with a little of the row."""
        if self.taps is not None:
            self.taps.weight.zero_()
        for weight in self.trigram.parameters():
            weight.zero_()
        for weight in self.heads.parameters():
            weight.copy_(torch.cat([torch.eye(weight.shape[0]), LITTLE * torch.eye(weight.shape[0])], dim=1))
        # Rows arrive at the size that the final norm gives them, and should keep it.
        self.last_norm.weight.fill_(self.row_norm.weight.square().mean().sqrt())

    def committed(self, sources: Tensor) -> Tensor:
        """What the layer reads of committed tokens: their last states, with taps added, at the size that they had.

        sources [.., 1 + T, H]: the last state of each token, then the taps.
        """
        state = sources[..., 0, :]
        if self._draft_taps is None:
            return state
        unit = unit_rms(sources)
        return self._draft_taps.onto(unit[..., 0, :], unit[..., 1:, :].flatten(-2), times=rms_of(state))

    def nodes(self, embeddings: Tensor, anchor: Tensor) -> Tensor:
        """What the layer reads of tokens that the target has not run, at the size of the last committed row before them.

        embeddings [.., 3, H]: of the token, its parent and its grandparent. anchor [.., H]: that committed row.
        """
        unit = unit_rms(embeddings)
        size = rms_of(anchor).expand(*unit.shape[:-2], 1)
        return self._draft_trigram.onto(unit[..., 0, :], unit.flatten(-2), silu=True, times=size)

    def guess(self, level: int, state: Tensor, rows: Tensor) -> Tensor:
        """The rows [.., H] that a level's candidates come from, before `last_norm`. Both inputs come after their norms."""
        return self._draft_heads[level - 1](state.expand_as(rows), rows)


def trigrams_at(tokens: Tensor, sequences: Tensor, place: Tensor) -> Tensor:
    """Return the tokens at places [b, m] of `sequences` [b] among tokens [B, n], each with the two before it: [b, m, 3], the
    latest first. Before the first token of a sequence, that token itself counts."""
    column = place.unsqueeze(-1) - on_device((0, 1, 2), tokens.device)
    return tokens[sequences.view(-1, 1, 1), column.clamp(0, tokens.shape[1] - 1)]


def next_trigrams(trigrams: Tensor, tokens: Tensor, origin: Tensor) -> Tensor:
    """Return the trigrams [b, w, 3] of tokens [b, w] that follow nodes `origin` [b, w] with trigrams [b, n, 3]."""
    return torch.cat([tokens.unsqueeze(-1), along(trigrams, origin)[..., :2]], dim=-1)


class Chimera(Drafter):
    paper = "Chimera, arXiv 2402.15758"
    copies = True
    wide = {"taps": SEVERAL, "trigram": SEVERAL, "heads.*": SEVERAL, "*_norm": NORM, **layers_at("layer")}
    module: ChimeraWeights
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        heads: int = 5,
        taps: Sequence[int] = (),
        tree: TreeKind = "best",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        labels: Labels = "soft",
        anchors: int = 128,
    ) -> None:
        """`heads`: how many tokens ahead it drafts. `taps`: layers of the target whose states are added to the last ones.
        `tree`: the likeliest paths ("best"), or "static", EAGLE's 25 nodes unless `paths` names others. `labels`: learn the
        target's distribution or its tokens. `anchors`: rows of each sequence that a training step learns from."""
        if heads < 1 or anchors < 1:
            raise InputError(f"chimera: needs at least one head and one anchor, got heads={heads} and anchors={anchors}")
        check_taps("chimera", taps)
        check_labels("chimera", labels)
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.heads, self.labels, self.anchors = heads, labels, anchors
        self.needs = Needs(hidden=True, taps=tuple(sorted(set(taps))), prompt="all", follower=True)
        template = level_paths(EAGLE_COUNTS, USUAL_RATES) if paths is None else paths
        self.plan = TreePlan(tree, rows, width, USUAL_RATES, template)
        self.plan.check("chimera")
        self.config: dict[str, Any] = dict(heads=heads, taps=list(self.needs.taps))

    def build(self, target: Target) -> None:
        check_taps_of("chimera", self.needs.taps, target)
        self.stack = target.stack(0, 1, init=target.layers - 1)
        self.module = ChimeraWeights(target, self.stack.layers, self.heads, len(self.needs.taps))

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocabulary.bind(target)
        self.growth = self.plan.on(target, self.heads, self._level_cost(target), KERNELS)
        self.shape = self.growth.shape
        self.stack.allocate(slots, target.context, max(self.shape.nodes, 2 + self.shape.depth * self.plan.width))
        size = slots, target.hidden_size
        self.anchor = torch.zeros(size, dtype=target.dtype, device=target.device)  # the last committed row of each slot
        self.row = torch.zeros_like(self.anchor)  # the root's row after the layer and its norm

    def _level_cost(self, target: Target) -> float:
        """What reading the weights of one level costs; a one-row pass of the target costs 1."""
        read = (self.module.layer, self.module.trigram, self.module.heads[0])
        weights = sum(weight.numel() for part in read for weight in part.parameters())
        return self.vocabulary.read_cost(target) + target.read_cost(weights)

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.stack.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.stack.restart(state.batch, state.length)
        for buffer in (self.anchor, self.row):  # they may be NaN, which must not reach the cache
            buffer.index_fill_(0, state.slots, 0)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self._follow(state, scores, chunk.size)

    def propose(self, state: State) -> Draft:
        length, anchor = (state.batch.take(held) for held in (self.stack.cache.length, self.anchor))
        anchor, rows = anchor.unsqueeze(1), state.batch.take(self.row).unsqueeze(1)  # [b, 1, H] each
        known, levels = self.module.state_norm(anchor), LevelRows(state.batch, length)
        trigrams = trigrams_at(state.tokens, state.slots, length.unsqueeze(1))

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal trigrams, rows
            if level > 1:  # the layer has read the root already
                trigrams = next_trigrams(trigrams, tokens, origin)
                nodes = self.module.nodes(self.target.embed(trigrams), anchor)
                rows = self.module.row_norm(self.stack.walk(nodes, levels.add(origin)).hidden)
            guessed = self.module.guess(level, known, rows)
            return self.vocabulary.candidates(
                guessed, state.ahead(level), state.sampling, self.growth.branch, self.module.last_norm
            )

        return self.growth.draft(state, guess)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self._follow(state, scores, accepted.count, accepted.path)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        anchors = Anchors.of(tokens, mask, self.heads, self.anchors, self.module.training)
        committed = self.module.committed(self._sources(scores))
        known = self.module.state_norm(along(committed, anchors.place))
        walked = self.stack.walk_joined(committed, anchors.place, self._joins(tokens, anchors.place, target))
        outputs = []
        for level, rows in enumerate(walked, start=1):
            guessed = self.module.guess(level, known, self.module.row_norm(rows))
            outputs.append(anchors.outputs(level, self.module.last_norm(guessed)))
        return anchors.loss(outputs, scores.require_hidden(), target, self.vocabulary, self.labels, DECAY)

    def _joins(self, tokens: Tensor, place: Tensor, target: Target) -> list[Join]:
        """The nodes after the anchors at places [b, A], with the tokens that do follow there. Each attends to its path."""
        everyone = torch.arange(len(tokens), device=tokens.device)

        def join(level: int) -> Join:
            def make(anchor: Tensor, earlier: Sequence[Tensor]) -> Tensor:
                return self.module.nodes(target.embed(trigrams_at(tokens, everyone, place + level)), anchor)

            return Join(0, level, make, tuple(range(level - 1)))

        return [join(level) for level in range(1, self.heads + 1)]

    def _follow(self, state: State, scores: Scores, count: Tensor, path: Tensor | None = None) -> None:
        """Let the layer read the committed rows and the root after them, and keep the last of both. Committed are the first
        `count` rows of the pass, taken along the accepted path if there is one."""
        sources = self._sources(scores)
        rows = counted(sources.flatten(2), count, path).unflatten(2, sources.shape[2:])
        rows = self.module.committed(rows)
        remember(self.anchor, state.slots, rows, count)
        place = (state.batch.take(self.stack.cache.length) + count).unsqueeze(1)
        embeddings = self.target.embed(trigrams_at(state.tokens, state.slots, place))
        root = self.module.nodes(embeddings, state.batch.take(self.anchor).unsqueeze(1))  # [b, 1, H]
        rows = torch.cat([rows, root], dim=1).scatter(1, count.view(-1, 1, 1).expand_as(root), root)
        walked = self.stack.read(rows, state.batch, count)  # the root becomes the first scratch row
        remember(self.row, state.slots, walked, count + 1, norm=self.module.row_norm)

    def _sources(self, scores: Scores) -> Tensor:
        """[b, n, 1 + T, H]: the target's last states and the taps."""
        return torch.stack([scores.require_hidden(), *(scores.taps[layer] for layer in self.needs.taps)], dim=2)
