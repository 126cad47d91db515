"""DRAFT: the target's own runner-up tokens, used again. A table remembers, for every token of the vocabulary, the K
candidates that the target last ranked best after it. A draft is a walk through the table along a tree template.

After each round, the table rows of all tokens in the tree, accepted or not, are overwritten with what the target ranked
there. Prompts fill the table too. No training, a few megabytes. Only the nodes of the template are drafted that are expected
to gain more than a row costs on this machine.
Paper: Token Recycling (arXiv 2408.08696).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from foreword.core.choosing import likeliest
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.trees import FixedRows, RowCosts
from foreword.errors import InputError
from foreword.ops.device import fixes_shapes
from foreword.ops.recycling import CandidateTable, RankTemplate, SlotNoise, learnt, walked

TableMode = Literal["slot", "shared", "session", "reset"]
RecyclingTree = Literal["static", "chain"]

CANDIDATES = 8
CHAIN_ROWS = 8
ROWS_ON_GPU = 64
BEND = 0.0  # tokens per round grow with the logarithm of the rows: 1.56, 1.73 and 2.18 with 8, 16 and 81 rows
DRAFTING = 0.2  # what drafting costs, in passes over one row: it reads a table and no weights

# The paper's tree: how many candidates follow each node, by its path of candidate ranks. 80 nodes and the root.
CHILDREN: dict[tuple[int, ...], int] = (
    {(): 8}
    | {(0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1}
    | {(0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1}
    | {(1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1}
    | {(0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1}
    | {(0, 1, 0): 1, (0, 2, 0): 1, (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1}
    | {(0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1}
    | {(0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1}
)


def template() -> list[tuple[int, ...]]:
    """The template's nodes as paths of candidate ranks, level by level, the root first."""
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        paths += [(*path, rank) for rank in range(CHILDREN.get(path, 0))]
    return paths


def chain(rows: int) -> list[tuple[int, ...]]:
    """A template with one path: the best candidate after each node."""
    return [(0,) * depth for depth in range(max(rows, 2))]


def rank_template(fade: float, device: torch.device, paths: list[tuple[int, ...]] | None = None) -> RankTemplate:
    """A template as tensors, the paper's tree if no `paths` are given. `fade`: how much of a probability is left after one
    more step."""
    paths = paths or template()
    index = {path: i for i, path in enumerate(paths)}
    depths = [len(path) for path in paths]
    deepest = max(depths)
    ways = [path + (0,) * (deepest - len(path)) for path in paths]
    at_depth = torch.tensor(depths, dtype=torch.int32, device=device)
    return RankTemplate(
        ways=torch.tensor(ways, dtype=torch.int32, device=device),
        depths=at_depth,
        parents=torch.tensor([index[path[:-1]] for path in paths], device=device),
        fading=at_depth * math.log(fade),
        level_sizes=tuple(depths.count(depth) for depth in range(1, deepest + 1)),
    )


class TokenRecycling(Drafter):
    paper = "Token Recycling, arXiv 2408.08696"
    copies = True
    learns = True
    needs = Needs(logits=True, prompt="all")

    def __init__(
        self, rows: int | None = None, table: TableMode = "slot", fade: float = 0.75, tree: RecyclingTree = "static"
    ) -> None:
        """`table`: "slot", one for each slot, kept from request to request; "shared", one for all slots, where sequences of
        a batch overwrite each other's candidates; "session", one for each slot, cleared when a new conversation begins;
        "reset", cleared for every request. `fade`: how much of a remembered probability is left after one more step.
        `tree`: the paper's template ("static"), or the best candidate after each token ("chain")."""
        if table not in get_args(TableMode):
            raise InputError(f"token_recycling: table is {table!r}; choose from {', '.join(get_args(TableMode))}")
        if tree not in get_args(RecyclingTree):
            raise InputError(f"token_recycling: tree is {tree!r}; choose from {', '.join(get_args(RecyclingTree))}")
        if not 0 < fade <= 1:
            raise InputError(f"token_recycling: fade is {fade}; it must be above 0 and at most 1")
        self.wants_cost = rows is None
        self.rows, self.mode, self.fade, self.tree = rows, table, fade, tree

    def isolate(self) -> None:
        self.mode = "reset" if self.mode == "reset" else "session"

    def bind(self, target: Target, slots: int) -> None:
        tables, device = 1 if self.mode == "shared" else slots, target.device
        tokens = torch.zeros(tables, target.vocab_size + 1, CANDIDATES, dtype=torch.int32, device=device)
        self.table = CandidateTable(tokens, torch.full(tokens.shape, -math.inf, dtype=torch.float32, device=device))
        paths = chain(self.rows or CHAIN_ROWS) if self.tree == "chain" else None
        self.template = rank_template(self.fade, device, paths)
        depth, most = len(self.template.level_sizes), len(self.template.parents)
        fixes = fixes_shapes(device)
        nodes = min(self.rows or (ROWS_ON_GPU if fixes else most), most)
        self.shape = Shape(nodes, min(depth, nodes - 1))
        # Where shapes are fixed, their rows are decided by batch size. Elsewhere each draft has as many as pay off.
        decides = self.rows is None
        self.fixed = FixedRows(target, self.shape, bend=BEND, drafting=DRAFTING) if decides and fixes else None
        self.costs = RowCosts(target, nodes) if decides and not fixes else None

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Take over all candidates of the slot, which include those of its other tokens."""
        if self.mode != "shared":
            for held in self.table:
                held[slot] = held[source]

    def begin(self, state: State) -> None:
        if self.mode in ("slot", "shared"):
            return
        fresh = state.slots if self.mode == "reset" else state.slots[state.length == 0]
        self.table.chances[fresh] = -math.inf

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self._learn(state, chunk, scores)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self._learn(state, draft, scores, accepted)

    def propose(self, state: State) -> Draft:
        """Draft the nodes of the template that are likeliest to be reached, as many as pay off on this machine."""
        batch, columns = len(state.batch.ids), state.sampling.table
        nodes = (self.shape if self.fixed is None else self.fixed.shape(batch)).nodes
        noise = SlotNoise(state.lengths, columns["key"], columns["temperature"]) if state.sampling.kind.noise else None
        cost = None if self.costs is None else self.costs.of(batch)
        tokens, parent, size = walked(
            self.table, self.template, state.slots, state.roots, nodes, self.mode != "shared", noise, cost
        )
        return Draft(tokens, Tree(parent), size)

    def _learn(self, state: State, draft: Draft, scores: Scores, accepted: Accepted | None = None) -> None:
        """Overwrite the table rows of a draft's tokens with what the target ranks after them."""
        ranked = likeliest(scores.require_logits(), CANDIDATES)
        path = None if accepted is None else (accepted.path, accepted.count)
        learnt(self.table, state.slots, draft.tokens, draft.size, ranked, path, self.mode != "shared")

    def end(self, slots: Sequence[int]) -> None:
        if self.mode == "reset":
            self.table.chances[list(slots)] = -math.inf
