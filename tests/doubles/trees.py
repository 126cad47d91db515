"""Drafts and trees: chains, random trees, and paths through them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreword.core.draft import Draft, Tree


def chain(tokens: Sequence[Sequence[int]]) -> Draft:
    """Return chains of equal length, one per sequence."""
    rows = torch.tensor([list(row) for row in tokens])
    return Draft(rows, Tree.chain(rows.shape[1]), torch.full((rows.shape[0],), rows.shape[1]))


def path_to(parent: Sequence[int], node: int) -> list[int]:
    """Return the rows from the root to a node."""
    path = [node]
    while path[-1] != 0:
        path.append(parent[path[-1]])
    return path[::-1]


def random_tree(batch: int, nodes: int, generator: torch.Generator) -> Tree:
    random = torch.rand(batch, nodes, generator=generator)
    return Tree((random * torch.arange(nodes).clamp(min=1)).long())


def paths_of(draft: Draft, index: int) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each valid row, without the root's."""
    parent, tokens = draft.tree.parent.expand_as(draft.tokens)[index].tolist(), draft.tokens[index].tolist()
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, int(draft.size[index])):
        assert parent[row] < row
        paths.append((*paths[parent[row]], tokens[row]))
    return paths
