"""DRAFT: the tree of `clover2` and the chain of `prompt_lookup` in one draft. Where the two agree they share rows. Where
they diverge, the target verifies both.

A lookup is right for long where a sequence repeats itself or its prompt, and wrong elsewhere. Trained layers are often right
everywhere, but not far ahead. Which of them will be right is not known beforehand, and verifying both costs few rows.
The trained drafters are those of `clover2`. Our own method; no paper joins these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from foreword.core.draft import LOOKUP, Draft, Shape
from foreword.core.drafter import Drafter
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.joining import attach, joined, with_origin
from foreword.drafting.trees import MOST_NODES, TreeKind, chain_lengths
from foreword.errors import InputError
from foreword.methods.clover2 import Clover2, Fuse
from foreword.methods.prompt_lookup import PromptLookup
from foreword.ops.device import fixes_shapes

CHAIN = 15  # with the root 16 rows, as many as a matrix unit takes; Clover-2's layers read as many per round


class Echo(Drafter):
    paper = "-"
    copies = True
    predicts = True
    wide = Clover2.wide

    def __init__(
        self,
        rows: int | None = None,
        chain: int = CHAIN,
        heads: int = 5,
        taps: Sequence[int] = (),
        fuse: Fuse = "linear",
        tree: TreeKind = "best",
        width: int = 8,
    ) -> None:
        """`chain`: how many rows of a pass may come from the lookup, always fewer than half. The other rows are clover2's,
        and so are the other options. In rounds with a prediction all of them may be used, at every batch size."""
        if not 0 <= chain <= CHAIN:
            raise InputError(f"echo: chain is {chain}; it must be from 0 to {CHAIN}")
        self.wants_cost = rows is None
        self.chain = min(chain, ((rows or MOST_NODES) - 1) // 2)
        self.trees = Clover2(rows, heads, taps, fuse, tree, width)
        self.trees.plan = replace(self.trees.plan, chain=self.chain)
        self.needs = self.trees.needs

    @property
    def config(self) -> dict[str, Any]:
        return self.trees.config

    @property
    def module(self) -> nn.Module:
        return self.trees.module

    @property
    def vocabulary(self) -> VocabularyHead:  # type: ignore[override]
        return self.trees.vocabulary

    def build(self, target: Target) -> None:
        self.trees.build(target)

    def bind(self, target: Target, slots: int) -> None:
        self.trees.bind(target, slots)
        # Where shapes are fixed, unused rows cost the same, so every match is followed to the end. Elsewhere a chain is as
        # long as pays off, and it is drafted only if the tree proposes its first token too, or if it is from a prediction.
        self.frugal = self.wants_cost and not fixes_shapes(target.device)
        lengths = [rows for rows in chain_lengths(self.chain) if rows]
        self.lookups = {rows: PromptLookup(None if self.frugal else rows + 1) for rows in lengths}
        for lookup in self.lookups.values():
            lookup.bind(target, slots)
        tree = self.trees.shape
        self.shape = Shape(tree.nodes + self.chain, max(tree.depth, self.chain))

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.trees.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.trees.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.trees.read(state, chunk, scores)

    def propose(self, state: State) -> Draft:
        batch, growth, kind = len(state.batch.ids), self.trees.growth, state.sampling.kind
        tree = self.trees.propose(state)
        rows = self.chain if kind.predictions else growth.chain_rows(batch, self.chain)
        if not rows:
            return tree
        chain, levels = self.lookups[rows].propose(state).head(rows + 1), growth.depth(batch)
        if self.frugal:
            assert chain.origin is not None
            both = attach(tree, chain, levels, agreed=chain.origin[:, -1] == LOOKUP)
        else:
            both = joined(tree, chain, levels)
        return with_origin(both, chain) if kind.origins else both

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self.trees.observe(state, draft, scores, accepted)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return self.trees.loss(tokens, mask, scores, target)
