"""Needs and grafts are checked when they are declared; scores that were not needed cannot be read."""

import pytest
import torch

from foreword.core.drafter import Drafter
from foreword.core.needs import Graft, Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import Batch


def graft(layer: int, anchors: int = 1, offsets: int | None = None) -> Graft:
    return Graft.of(
        layer, (0,) * anchors, (1,) * (anchors if offsets is None else offsets), lambda real, _: real[:, :anchors]
    )


def test_a_graft_has_one_offset_per_anchor() -> None:
    with pytest.raises(ValueError, match="one offset per anchor, got 3 for 2"):
        graft(0, 2, 3)


def test_grafts_come_in_the_order_of_their_layers() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        Needs(grafts=(graft(2), graft(1)))


def test_grafted_rows_are_counted() -> None:
    assert Needs(grafts=(graft(1, 2), graft(1, 3))).grafted_rows == 5
    assert Needs().grafted_rows == 0


def test_scores_that_were_not_needed_are_missing() -> None:
    with pytest.raises(AssertionError, match="hidden=True"):
        Scores().require_hidden()
    with pytest.raises(AssertionError, match="head"):
        Scores().require_logits()


def test_last_and_kept_of_a_path() -> None:
    accepted = Accepted(torch.tensor([[0, 3, 4], [0, 1, 0], [0, 2, 5]]), torch.tensor([3, 2, 0]), torch.zeros(3))
    assert accepted.last.tolist() == [4, 1, 0]
    assert accepted.kept.tolist() == [[True] * 3, [True, True, False], [False] * 3]


@pytest.mark.parametrize(
    ("ids", "run"), [((0, 1, 2), slice(0, 3)), ((2,), slice(2, 3)), ((0, 2), None), ((1, 0), None), ((3, 4, 6), None)]
)
def test_adjacent_slots_are_a_slice(ids: tuple[int, ...], run: slice | None) -> None:
    batch = Batch.of(ids, 0)
    assert batch.run == run and batch.slots.tolist() == list(ids)


def test_a_drafter_must_propose() -> None:
    class Silent(Drafter):
        pass

    with pytest.raises(TypeError, match="Silent"):
        Silent().propose(None)  # type: ignore[arg-type]
