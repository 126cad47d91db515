"""Near-ties of routers: which choices of experts rounding may turn, and that turning one explains a difference."""

from types import SimpleNamespace

import pytest
import torch

from doubles import fresh
from foreword.core.sampling import Sampling
from foreword.model.model import Model
from foreword.prove.referee import Case, Referee, Ruling
from foreword.prove.routers import Routers, near_ties

CONFIG = SimpleNamespace(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
SCORES = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)


def test_a_turned_row_takes_the_next_expert() -> None:
    with Routers(CONFIG, frozenset({(1, 0)})) as routers:
        first, second = (torch.topk(SCORES, 2, dim=-1).indices.tolist() for _ in range(2))
        other = SCORES.view(2, 1, 4).topk(2).indices  # no router: it keeps groups apart
    assert first == [[0, 1], [3, 2]] and second == [[0, 2], [3, 2]]
    assert other.flatten(0, 1).tolist() == first and len(routers.scores) == 2
    assert torch.equal(routers.scores[1], SCORES)


def deviating(*errors: float) -> list[torch.Tensor]:
    """Return the scores of one router for equal rows, each with an error at the last expert that it takes."""
    scores = SCORES[:1].repeat(len(errors), 1)
    return [scores, scores - torch.tensor(errors).unsqueeze(1) * torch.tensor([0.0, 1.0, 0.0, 0.0])]


def test_choices_that_rounding_may_turn() -> None:
    """The last expert that a row takes lies 0.1 above the next. Errors far above those of other rows are no rounding."""
    for errors, found in (
        ((0.06, 0.04, 0.02), [(0, 0)]),
        ((0.06, 0.06, 0.08), [(0, 2), (0, 0), (0, 1)]),
        ((0.02, 0.02, 0.5), []),
    ):
        exact, run = deviating(*errors)
        assert near_ties(CONFIG, [exact], [run]) == found
    assert near_ties(SimpleNamespace(num_experts=2, num_experts_per_tok=2), [SCORES], [SCORES]) == []


def ruling(dtype: torch.dtype, method: int) -> Ruling:
    """Judge token 44 of plain decoding against another one, after a sequence in which a router nearly ties in bfloat16."""
    sequence = (39, 37, 20, 47, 7)
    case = Case((*sequence, 44), len(sequence), len(sequence), Sampling(seed=0), plain=44, method=method)
    (found,) = Referee(Model(fresh("olmoe", torch.bfloat16).to(dtype))).judge([case])
    return found[case]


def test_another_choice_of_experts_is_a_tie_of_its_own() -> None:
    """The other choice makes token 15 the likeliest by far, though the scores of both lie far apart."""
    found = ruling(torch.bfloat16, method=15)
    assert (found.verdict, found.reason) == ("tie", "router")
    assert found.gap is not None and found.error is not None and found.gap > 10 * found.error


@pytest.mark.parametrize(("dtype", "method"), [(torch.float32, 15), (torch.bfloat16, 3)])
def test_what_no_choice_explains_stays_a_bug(dtype: torch.dtype, method: int) -> None:
    """In float32 no router nearly ties there; and no choice makes token 3 likely."""
    found = ruling(dtype, method)
    assert (found.verdict, found.reason) == ("bug", "gap")
