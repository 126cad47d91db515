"""Ancestors and depth by climbing, against the reference that squares a matrix, in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from doubles import random_tree
from foreword.core.draft import Tree
from foreword.ops.round.tree import lineage
from foreword.ops.trees import lineage as lineage_of
from rounds import check_next_level, same


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 10**6))
def test_any_tree(nodes: int, batch: int, seed: int) -> None:
    parent = random_tree(batch, nodes, torch.Generator().manual_seed(seed)).parent
    assert all(same(*pair) for pair in zip(lineage(parent), lineage_of(parent), strict=True))


@pytest.mark.parametrize("nodes", [1, 2, 33])
def test_a_chain_is_the_deepest(nodes: int) -> None:
    chain = Tree.chain(nodes)
    assert all(same(*pair) for pair in zip(lineage(chain.parent), chain.lineage, strict=True))


def test_a_view_of_a_longer_tree() -> None:
    parent = random_tree(2, 20, torch.Generator().manual_seed(3)).parent
    assert all(same(*pair) for pair in zip(lineage(parent[:, :9]), lineage_of(parent[:, :9]), strict=True))


@pytest.mark.parametrize("widths", [(1,), (4, 8, 8), (3, 1, 5)])
def test_a_level_follows_the_one_above(widths: tuple[int, ...]) -> None:
    check_next_level(len(widths), "cpu", widths)
