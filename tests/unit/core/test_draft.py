"""Tree, Draft and Shape against slow walks up the parents."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubles import path_to
from foreword.core.draft import Draft, Early, Shape, Tree
from foreword.errors import DrafterError

PARENTS = st.lists(st.integers(0, 10**6), min_size=0, max_size=20).map(
    lambda draws: [0, *(draw % (i + 1) for i, draw in enumerate(draws))]
)


def slow_ancestors(parent: list[int]) -> list[list[bool]]:
    return [[other in path_to(parent, node) for other in range(len(parent))] for node in range(len(parent))]


@given(PARENTS)
def test_ancestors_and_depth(parent: list[int]) -> None:
    tree = Tree(torch.tensor([parent]))
    assert tree.ancestors[0].tolist() == slow_ancestors(parent)
    assert tree.depth[0].tolist() == [len(path_to(parent, node)) - 1 for node in range(len(parent))]


@given(st.lists(PARENTS, min_size=1, max_size=4))
def test_trees_of_a_batch_are_independent(trees: list[list[int]]) -> None:
    width = min(map(len, trees))
    batch = [parent[:width] for parent in trees]
    tree = Tree(torch.tensor(batch))
    assert tree.ancestors.tolist() == [slow_ancestors(parent) for parent in batch]


@pytest.mark.parametrize("nodes", [1, 2, 3, 64, 65, 129])
def test_a_chain_of_any_length_reaches_its_root(nodes: int) -> None:
    tree = Tree.chain(nodes)
    assert tree.is_chain and tree.depth[0].tolist() == list(range(nodes))
    assert torch.equal(tree.ancestors[0], torch.ones(nodes, nodes).tril().bool())


@given(PARENTS, st.data())
def test_the_head_of_a_tree_is_the_tree_of_its_first_rows(parent: list[int], data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, len(parent)))
    for known in (False, True):
        tree = Tree(torch.tensor([parent]))
        if known:
            assert tree.depth.shape[1] == len(parent)
        head = tree.head(nodes)
        assert head.ancestors[0].tolist() == slow_ancestors(parent[:nodes])
        assert head.depth[0].tolist() == [len(path_to(parent, node)) - 1 for node in range(nodes)]


@given(PARENTS)
def test_a_static_tree_is_known_to_be_a_chain_or_not(parent: list[int]) -> None:
    assert Tree.of(tuple(parent)).is_chain == (parent == [0, *range(len(parent) - 1)])


def test_static_trees_are_built_once() -> None:
    assert Tree.of((0, 0, 1)) is Tree.of((0, 0, 1))


def test_chains_of_drafts_stay_where_they_are() -> None:
    """Captured rounds read them, and nothing else keeps them alive."""
    chain = Tree.chain(1)
    for nodes in range(1, 700):
        Tree.chain(nodes)
    assert Tree.chain(1) is chain


@pytest.mark.parametrize("nodes", [1, 2, 5, 200])
def test_a_chain_is_the_tree_of_its_parents(nodes: int) -> None:
    chain, tree = Tree.chain(nodes), Tree.of((0, *range(nodes - 1)))
    assert chain.is_chain and torch.equal(chain.parent, tree.parent)
    assert torch.equal(chain.ancestors, tree.ancestors) and torch.equal(chain.depth, tree.depth)


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(DrafterError, match="root"):
        Tree.chain(0)


@pytest.mark.parametrize("parents", [(), (1,), (0, 1), (0, 0, 2), (0, -1), (0, 2, 0)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(DrafterError, match="earlier row"):
        Tree.of(parents)


def draft(size: list[int]) -> Draft:
    tokens = torch.arange(10).view(2, 5)
    return Draft(tokens, Tree.of((0, 0, 1, 1, 2)), torch.tensor(size))


def test_rows_that_count() -> None:
    assert draft([2, 5]).counts.tolist() == [[True, True, False, False, False], [True] * 5]


def test_the_head_of_a_draft() -> None:
    head = draft([2, 5]).head(3)
    assert head.tokens.tolist() == [[0, 1, 2], [5, 6, 7]] and head.size.tolist() == [2, 3]
    assert head.tree.parent.tolist() == [[0, 0, 1]] and head.nodes == 3
    whole = draft([2, 5])
    assert whole.head(5) is whole and whole.head(9) is whole


def test_early_states_follow_the_rows_of_a_draft() -> None:
    states, others = torch.randn(2, 2, 5, 3).unbind()
    one, other = (replace(draft([5, 3 + i]), early=Early(2, early)) for i, early in enumerate((states, others)))
    head = one.head(3).early
    assert head and head.layer == 2 and torch.equal(head.states, states[:, :3])
    one.overwrite(other)
    assert torch.equal(states, others) and one.size.tolist() == [5, 4]


def test_nothing_is_the_root_alone() -> None:
    nothing = Draft.nothing(torch.tensor([7, 9]))
    assert nothing.tokens.tolist() == [[7], [9]] and nothing.size.tolist() == [1, 1] and nothing.tree.is_chain


@pytest.mark.parametrize(("nodes", "depth"), [(0, 0), (1, 1), (3, 3), (3, -1)])
def test_shapes_that_cannot_be(nodes: int, depth: int) -> None:
    with pytest.raises(DrafterError, match=f"{nodes} nodes and depth {depth}"):
        Shape(nodes, depth)
