"""On CUDA a drafter's own work is timed captured, as it runs there."""

import copy

import pytest
import torch

from doubles import OPTIONS, family_for, tiny
from foreword.methods import METHODS, untrained
from foreword.model.cost import measure_draft
from foreword.model.model import Model
from tiers import slow

pytestmark = pytest.mark.gpu

QUICK = ("token_recycling", "medusa")


@pytest.mark.parametrize("method", [*QUICK, *(slow(name) for name in METHODS if name not in QUICK)])
def test_every_drafter_can_be_timed_as_a_graph(method: str) -> None:
    model = Model(copy.deepcopy(tiny(family_for(method, "qwen3"))).to(torch.bfloat16).cuda())
    drafter = untrained(method, **OPTIONS[method])
    assert 0 < measure_draft(model, drafter).curve().at(1) < 1
