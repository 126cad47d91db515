"""DRAFT: graphs of candidates, as a drafter uses them. ops/graphs.py says what such a graph is.

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
from foreword.ops.graphs import NOWHERE, GraphCandidates, Rule, TorchGraph, growing_graph


class DraftGraph:
    """The graphs of one round, one per sequence."""

    def __init__(self, rule: Rule, root: Tensor, depth: int) -> None:
        """Graphs after roots [b], to which at most `depth` levels will be added."""
        self.rule, self.graph = rule, growing_graph(root, rule, depth)

    @property
    def guesses(self) -> GraphCandidates:
        return self.graph.guesses

    @property
    def counts(self) -> Tensor:
        """[2, b]: rows that were read so far, and rows that were saved by merging."""
        return self.graph.counts

    def add(self, guessed: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
        """`GrowingGraph.add`."""
        return self.graph.add(guessed, likely)

    def pays(self, costs: RowCosts, levels: int) -> bool:
        """Whether reading one more level after `levels` is expected to pay off. Waits for values, so only for the CPU."""
        assert isinstance(self.graph, TorchGraph), "where rows are fixed, so are levels"
        found = self.graph.found
        return costs.go_on(len(found), found, self.graph.chance, self.graph.sure, levels)

    def draft(self, state: State, growth: BestFirst) -> Draft:
        """The likeliest walks as a tree of the shape that `growth` has at this batch size."""
        batch = len(state.batch.ids)
        shape, cost = growth.shape_at(batch), growth.cost(batch)
        tokens, parent, size = self.graph.unrolled(state, shape.depth, growth.width, shape.nodes, cost)
        return Draft(tokens, Tree(parent), size)


def sketch(guesses: GraphCandidates, branch: int, root: int, row: int) -> dict[str, Any]:
    """`Drafter.sketch` of one sequence. Nodes are numbered in the order they were found; the root is 0."""
    tokens, chances, _, goal, read = (part[row].tolist() for part in guesses)
    nodes = [guess for guess, to in enumerate(goal) if to == guess]
    number = {guess: place for place, guess in enumerate(nodes, start=1)}
    reader = {read[guess]: place for guess, place in number.items()} | {0: 0}
    edges = [
        {"start": reader[guess // branch], "goal": number[to], "chance": math.exp(chances[guess]), "alias": to != guess}
        for guess, to in enumerate(goal)
        if to != NOWHERE
    ]
    return {"nodes": [{"token": root}, *({"token": tokens[guess]} for guess in nodes)], "edges": edges}
