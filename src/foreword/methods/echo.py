"""DRAFT: what a text has said before, said again, beside what trained layers expect of it. The tree of `clover2` and the
chain of `prompt_lookup` are one draft: as far as they agree they share rows, and where they part both ways are checked.

A lookup is right for long where a text repeats itself or its prompt, and wrong elsewhere; trained guesses are right
everywhere, but not far ahead. Neither knows beforehand which of them will be right, and rows are cheaper than that question.
The drafters are those of `clover2`. Ours; no paper joins these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from foreword.core.draft import Draft, Shape
from foreword.core.drafter import Drafter
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.joining import hang, joined
from foreword.drafting.trees import MOST_NODES, TreeKind, chain_lengths
from foreword.errors import InputError
from foreword.methods.clover2 import Clover2, Fuse
from foreword.methods.prompt_lookup import PromptLookup

CHAIN = 15  # with the root as many rows as a matrix unit takes, which is what Clover-2's layers then read of a round


class Echo(Drafter):
    paper = "-"
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
        """Of the rows of a pass at most `chain`, and fewer than half, repeat what stands earlier in the text. The others are
        clover2's, and so are the other options."""
        if not 0 <= chain <= CHAIN:
            raise InputError(f"echo: chain is {chain}; so many tokens are looked up, from 0 to {CHAIN}")
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
        # A GPU checks as many rows each time, used or not, so that every match may be followed to the end. Where rows cost,
        # a chain is as long as pays, and followed only if the tree expects its first token too.
        self.frugal = target.device.type == "cpu" and self.wants_cost
        lengths = [rows for rows in chain_lengths(self.chain) if rows]
        self.lookups = {rows: PromptLookup(None if self.frugal else rows + 1) for rows in lengths}
        for lookup in self.lookups.values():
            lookup.bind(target, slots)
        grown = self.trees.shape
        self.shape = Shape(grown.nodes + self.chain, max(grown.depth, self.chain))

    def begin(self, state: State) -> None:
        self.trees.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.trees.read(state, chunk, scores)

    def propose(self, state: State) -> Draft:
        batch, growth = len(state.batch.ids), self.trees.growth
        tree, rows = self.trees.propose(state), growth.chain_rows(batch, self.chain)
        if not rows:
            return tree
        levels, chain = growth.depth(batch), self.lookups[rows].propose(state).head(rows + 1)
        return hang(tree, chain, levels, agreed=True) if self.frugal else joined(tree, chain, levels)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self.trees.observe(state, draft, scores, accepted)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return self.trees.loss(tokens, mask, scores, target)
