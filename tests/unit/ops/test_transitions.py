"""Candidates after live nodes by a kernel, against the torch body in ops/transitions.py, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.ops.transitions import transition_log_probs
from rounds import check_after_live_nodes, check_transitions


@pytest.mark.parametrize(("width", "places", "k"), [(8, 16, 10), (1, 1, 1), (3, 12, 12)])
def test_the_candidates_after_live_nodes(width: int, places: int, k: int) -> None:
    for seed in range(3):
        check_after_live_nodes(seed, "cpu", width, places, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("places", "count", "k"), [(7, 16, 10), (1, 1, 1), (2, 12, 12)])
def test_the_candidates_after_each_candidate(places: int, count: int, k: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        check_transitions(seed, "cpu", places, count, k, dtype)


def test_what_is_no_candidate_keeps_its_share() -> None:
    """A change of 0 changes nothing; otherwise the probabilities of candidates and of the rest still sum to 1."""
    scores, changes = torch.randn(2, 30), torch.randn(2, 3, 5)
    log_probs = scores.log_softmax(-1)[:, :5]
    torch.testing.assert_close(
        transition_log_probs(log_probs, torch.zeros(2, 3, 5)), log_probs.unsqueeze(1).expand(-1, 3, -1)
    )
    changed = torch.cat([scores[:, :5].unsqueeze(1) + changes, scores[:, 5:].unsqueeze(1).expand(-1, 3, -1)], -1)
    torch.testing.assert_close(transition_log_probs(log_probs, changes), changed.log_softmax(-1)[..., :5])
