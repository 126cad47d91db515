"""FIT, between draft and verify: unused rows are cut off, and sequences that do not speculate get the root alone."""

import torch

from doubles import chain, state_of
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, Needs
from foreword.engine.fit import fit


def draft_of(sizes: list[int]) -> Draft:
    rows = chain([[1, 2, 3, 4, 5, 6]] * len(sizes))
    return Draft(rows.tokens, rows.tree, torch.tensor(sizes))


def test_rows_that_no_sequence_uses_are_cut_off() -> None:
    fitted = fit(draft_of([2, 4, 1]), state_of([[1]] * 3), Needs())
    assert fitted.nodes == 4 and fitted.size.tolist() == [2, 4, 1] and fitted.tree.nodes == 4


def test_sequences_that_do_not_speculate_get_the_root_alone() -> None:
    state = state_of([[1]] * 3)
    state.speculates[1], state.alive_slots[2] = False, False
    fitted = fit(draft_of([3, 6, 6]), state, Needs())
    assert fitted.size.tolist() == [3, 1, 1] and fitted.nodes == 3


def test_nodes_that_carry_grafts_stay() -> None:
    graft = Graft.of(1, (5,), (1,), lambda real, _: real[:, :1])
    fitted = fit(draft_of([1, 2]), state_of([[1]] * 2), Needs(grafts=(graft,)))
    assert fitted.nodes == 6 and fitted.size.tolist() == [1, 2]


def test_a_tree_s_head_is_a_tree() -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    fitted = fit(Draft(tokens, Tree(torch.tensor([[0, 0, 1, 0]])), torch.tensor([3])), state_of([[1]]), Needs())
    assert fitted.tree.parent.tolist() == [[0, 0, 1]] and fitted.tokens.tolist() == [[1, 2, 3]]


def test_the_root_is_the_state_s_and_padding_repeats_it() -> None:
    """The tokens that a drafter leaves after its own size go through the target too, and may be anything."""
    fitted = fit(draft_of([2, 4, 1]), state_of([[7], [8], [9]]), Needs())
    assert fitted.tokens.tolist() == [[7, 2, 7, 7], [8, 2, 3, 4], [9, 9, 9, 9]]
