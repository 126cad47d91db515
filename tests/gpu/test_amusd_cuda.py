"""amusd with the target on a GPU: the draft on the CPU, in a stream of the same GPU, and on a second one."""

import copy
from typing import Any

import pytest
import torch

from doubles import SAMPLINGS, prompts, taught, tiny, truth
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.model.model import Model

pytestmark = pytest.mark.gpu

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES: list[Any] = [
    pytest.param(dict(draft_device="cpu"), id="draft on the CPU, a process"),
    pytest.param(dict(draft_device="cpu", worker="thread"), id="draft on the CPU, a thread"),
    pytest.param(dict(draft_device="cuda:0", worker="thread"), id="two streams of one GPU"),
    pytest.param(dict(draft_device="cuda:0", worker="process"), id="two processes on one GPU"),
    pytest.param(dict(draft_device="cuda:1"), id="two GPUs, a process", marks=TWO),
    pytest.param(dict(draft_device="cuda:1", worker="thread"), id="two GPUs, a thread", marks=TWO),
]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("options", PLACES)
def test_the_text_is_the_truth(options: dict[str, Any], sampling: Sampling) -> None:
    model = Model(copy.deepcopy(tiny("llama")).to("cuda:0"))
    drafter = taught("amusd", model, least=2, ahead=6, **options)
    asked = [Request(p, sampling.derived(i), max_new_tokens=20) for i, p in enumerate(prompts(6))]
    runs = Engine(model, drafter, slots=3, max_context=200, chunk=7).generate(asked)
    assert [run.tokens for run in runs] == [truth(tiny("llama"), request) for request in asked]
    found = drafter.counters()
    drafter.close()
    assert found["checked"] > 0 and found["passes"] > 0
