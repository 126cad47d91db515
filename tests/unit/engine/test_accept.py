"""ACCEPT against slow walks over the tree: the deepest agreeing row, the cut at an end, and the counts for penalties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubles import END, path_to, state_of
from foreword.core.choosing import pick
from foreword.core.draft import Draft, Tree
from foreword.core.sampling import Sampling
from foreword.core.scores import Scores
from foreword.engine.accept import accept, count_seen
from foreword.ops.rounds import cut, longest_path

NODES = 7


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Draft, list[list[int]]]:
    """Trees with tokens from only three ids, so that siblings are often equal, and the target's choice at every row."""
    batch = draw(st.integers(1, 3))
    ids = st.lists(st.integers(0, 2), min_size=NODES, max_size=NODES)
    parents = [[0, *(draw(st.integers(0, i)) for i in range(NODES - 1))] for _ in range(batch)]
    tokens, choice = [[draw(ids) for _ in range(batch)] for _ in range(2)]
    size = [draw(st.integers(1, NODES)) for _ in range(batch)]
    return Draft(torch.tensor(tokens), Tree(torch.tensor(parents)), torch.tensor(size)), choice


def agreeing(draft: Draft, choice: list[list[int]], index: int) -> list[list[int]]:
    """All paths from the root on which every row has the token that was chosen at its parent."""
    parent, tokens = draft.tree.parent[index].tolist(), draft.tokens[index].tolist()
    paths = [path_to(parent, node) for node in range(int(draft.size[index]))]
    return [path for path in paths if all(tokens[row] == choice[index][parent[row]] for row in path[1:])]


@given(rounds())
def test_the_deepest_agreeing_row_wins(example: tuple[Draft, list[list[int]]]) -> None:
    draft, choice = example
    path, count = longest_path(draft, torch.tensor(choice), NODES)
    for index in range(len(choice)):
        found = path[index, : int(count[index])].tolist()
        allowed = agreeing(draft, choice, index)
        assert found in allowed and len(found) == max(map(len, allowed))


def test_padding_is_never_accepted() -> None:
    """The row after `size` has the very token that the target chose."""
    draft = Draft(torch.tensor([[1, 5, 6]]), Tree.chain(3), torch.tensor([2]))
    path, count = longest_path(draft, torch.tensor([[5, 6, 7]]), 3)
    assert count.tolist() == [2] and path[0, :2].tolist() == [0, 1]


@given(st.lists(st.integers(0, 5), min_size=5, max_size=5), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_a_round_is_cut_where_the_text_ends(tokens: list[int], count: int, room: int, heeds: bool) -> None:
    state = state_of([[9, 9, 9]])
    state.limits[0], state.heeds_ends[0] = 3 + room, heeds
    kept, ended = cut(state, torch.tensor([tokens]), torch.tensor([count]))
    expected = tokens[:count][:room]
    by_end = END in expected and heeds
    if by_end:
        expected = expected[: expected.index(END) + 1]
    assert int(kept) == len(expected)
    assert bool(ended) == (by_end or len(expected) == room)


def test_a_frozen_slot_gets_nothing() -> None:
    state = state_of([[9], [9]])
    state.alive_slots[1] = False
    kept, ended = cut(state, torch.tensor([[4, END], [4, END]]), torch.tensor([2, 2]))
    assert kept.tolist() == [2, 0] and ended.tolist() == [True, False]


@given(rounds())
def test_seen_tokens_are_counted_along_the_path(example: tuple[Draft, list[list[int]]]) -> None:
    """Committed tokens, ancestors and the row itself; the root is committed already."""
    draft, choice = example
    sequences = [[4, 5, 4, int(draft.tokens[index, 0])] for index in range(len(choice))]
    state = state_of(sequences)
    counts = torch.stack([torch.tensor(sequence).bincount(minlength=6) for sequence in sequences])
    seen = count_seen(state, draft, counts.to(torch.int32))
    for index, sequence in enumerate(sequences):
        for node in range(NODES):
            path = [int(draft.tokens[index, row]) for row in path_to(draft.tree.parent[index].tolist(), node)[1:]]
            assert seen[index, node].tolist() == torch.tensor(sequence + path).bincount(minlength=6).tolist()


def test_a_round_reports_what_it_decided() -> None:
    """By hand: root 9, its child 4 agrees, the child of that does not; the target's own token comes after it."""
    state = state_of([[3, 9]])
    draft = Draft(torch.tensor([[9, 4, 5, 7]]), Tree.of((0, 0, 1, 0)), torch.tensor([4]))
    logits = torch.full((1, 4, 12), -1.0)
    for row, token in enumerate([4, 8, 6, 3]):
        logits[0, row, token] = 5.0
    accepted, emission = accept(state, draft, Scores(logits), depth=2)
    assert accepted.path[0, :2].tolist() == [0, 1] and accepted.count.tolist() == [2] and accepted.next.tolist() == [8]
    assert emission.tokens[0, :2].tolist() == [4, 8] and emission.count.tolist() == [2]
    assert emission.drafted.tolist() == [3] and not emission.ended and not emission.broken
    assert accepted.path.shape == (1, 3) and emission.logprobs is None


def test_noise_depends_on_the_position_of_each_token() -> None:
    """Rows at one depth with equal logits sample the same token; rows at other depths sample others."""
    state = state_of([[3, 9]], Sampling(temperature=1.0, seed=5))
    draft = Draft(torch.zeros(1, 24, dtype=torch.long), Tree.of((0, *[0] * 3, *range(3, 23))), torch.tensor([24]))
    logits = torch.zeros(1, 24, 40)
    depth = draft.tree.depth
    choice = pick(logits, state.length.unsqueeze(1) + depth + 1, state.sampling)[0].tolist()
    assert choice[1] == choice[2] == choice[3] and len(set(choice)) > 10


@pytest.mark.parametrize(("requested", "returned"), [(0, 0), (2, 16)])
def test_logprobs_only_if_requested(requested: int, returned: int) -> None:
    """A round returns alternatives in a few sizes; `emit` cuts them to what was requested."""
    state = state_of([[3, 9]], Sampling(seed=1, logprobs=requested))
    logits = torch.randn(1, 1, 40)
    _, emission = accept(state, Draft.nothing(torch.tensor([9])), Scores(logits), depth=0)
    assert emission.logprobs is not None and emission.top_tokens is not None
    assert emission.top_tokens.tolist() == logits.topk(returned).indices.tolist()
    assert torch.allclose(emission.logprobs[0, 0], logits[0, 0].log_softmax(-1).max())
