"""A tree and a chain in one draft: its paths are those of both, each once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from doubles import paths_of
from foreword.core.draft import Draft, Tree
from foreword.drafting.joining import attach, joined
from rounds import random_chain, random_draft


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6))
def test_the_paths_are_those_of_both(nodes: int, links: int, seed: int) -> None:
    tree = random_draft(seed, nodes, "cpu")
    chain = random_chain(seed, tree, links)
    both = joined(tree, chain, levels=nodes)
    assert both.nodes == nodes + links - 1 and both.tokens[:, 0].tolist() == tree.tokens[:, 0].tolist()
    for row in range(len(tree.size)):
        found, own = paths_of(both, row), paths_of(tree, row)
        assert found[: len(own)] == own, "the tree's rows keep their places"
        assert set(found) == {*own, *paths_of(chain, row)} and len(set(found)) == len(found)


def test_the_chain_continues_where_the_tree_ends() -> None:
    tree = Draft(torch.tensor([[7, 1, 2, 3]]), Tree.of((0, 0, 1, 0)), torch.tensor([4]))
    chain = Draft(torch.tensor([[7, 1, 2, 9, 8]]), Tree.chain(5), torch.tensor([5]))
    both = joined(tree, chain, levels=2)
    assert both.tokens[0, :6].tolist() == [7, 1, 2, 3, 9, 8] and int(both.size) == 6
    assert both.tree.parent[0, :6].tolist() == [0, 0, 1, 0, 2, 4]


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6))
def test_if_agreed_is_asked_for_the_tree_must_have_the_first_candidate(nodes: int, links: int, seed: int) -> None:
    tree = random_draft(seed, nodes, "cpu")
    chain = random_chain(seed, tree, links)
    both = attach(tree, chain, levels=nodes, agreed=torch.tensor([True]))
    for row in range(len(tree.size)):
        own, looked_up = paths_of(tree, row), paths_of(chain, row)
        begins = len(looked_up) > 1 and looked_up[1] in own
        assert set(paths_of(both, row)) == ({*own, *looked_up} if begins else set(own))
