"""DRAFT: graphs of candidates, as a drafter uses them. ops/candidate_graphs.py defines such a graph.

In: candidates after the nodes that were read last. Out: the nodes to read next, and in the end the draft that is unrolled
from the graph. Paper: GSD (arXiv 2407.16207).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from foreword.core.draft import Draft, Tree
from foreword.core.state import State
from foreword.drafting.trees import BestFirst, RowCosts
from foreword.ops.candidate_graphs import NOWHERE, GraphCandidates, Rule, TorchGraph, growing_graph


class DraftGraph:
    """The graphs of one round, one per sequence."""

    def __init__(self, rule: Rule, root: Tensor, depth: int) -> None:
        """Start graphs at roots [b], to which at most `depth` levels will be added."""
        self.rule, self.graph = rule, growing_graph(root, rule, depth)

    @property
    def candidates(self) -> GraphCandidates:
        return self.graph.candidates

    @property
    def counts(self) -> Tensor:
        """[2, b]: rows that were read so far, and rows that were saved by merging."""
        return self.graph.counts

    def add(self, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """`GrowingGraph.add`."""
        return self.graph.add(candidates, log_probs)

    def pays(self, costs: RowCosts, levels: int) -> bool:
        """Return whether one more level after `levels` is expected to pay off. It reads values: for the CPU only."""
        assert isinstance(self.graph, TorchGraph), "where rows are fixed, so are levels"
        found = self.graph.found
        return costs.go_on(len(found), found, self.graph.chance, self.graph.sure, levels)

    def draft(self, state: State, growth: BestFirst) -> Draft:
        """Return the likeliest walks as a tree of the shape that `growth` has at this batch size."""
        batch = len(state.batch.ids)
        shape, cost = growth.shape_at(batch), growth.cost(batch)
        tokens, parent, size = self.graph.unrolled(state, shape.depth, growth.width, shape.nodes, cost)
        return Draft(tokens, Tree(parent), size)


def sketch(candidates: GraphCandidates, branch: int, root: int, row: int) -> dict[str, Any]:
    """Return `Drafter.sketch` of one sequence. Nodes are numbered in the order they were found; the root is 0."""
    tokens, chances, _, goal, read = (column[row].tolist() for column in candidates)
    nodes = [one for one, to in enumerate(goal) if to == one]
    number = {one: place for place, one in enumerate(nodes, start=1)}
    reader = {read[one]: place for one, place in number.items()} | {0: 0}
    edges = [
        {"start": reader[one // branch], "goal": number[to], "chance": math.exp(chances[one]), "alias": to != one}
        for one, to in enumerate(goal)
        if to != NOWHERE
    ]
    return {"nodes": [{"token": root}, *({"token": tokens[one]} for one in nodes)], "edges": edges}
