"""In bfloat16 on CUDA, where passes of different row counts round differently, outputs mostly equal those of `plain`."""

import copy

import pytest
import torch

from doubles import drafter, family_for, prompts, tiny
from foreword import methods
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.model.model import Model
from tiers import slow

pytestmark = pytest.mark.gpu

QUICK = ("token_recycling", "hidden_transfer", "gsd", "speed")


@pytest.mark.parametrize("method", [*QUICK, *(slow(name) for name in methods.METHODS if name not in QUICK)])
def test_most_tokens_are_those_of_plain(method: str) -> None:
    """Outputs may diverge at a near-tie. That most agree at first shows that positions, masks and rows are right."""
    hf = copy.deepcopy(tiny(family_for(method, "qwen3"))).to(torch.bfloat16).cuda()
    asked = [Request(prompt, max_new_tokens=24, ignore_eos=True) for prompt in prompts(8)]
    model = Model(hf)
    plain = [run.tokens for run in Engine(model, methods.make("plain"), slots=3, max_context=200).generate(asked)]
    found = [run.tokens for run in Engine(model, drafter(method, model), slots=3, max_context=200).generate(asked)]
    same = sum(one[:4] == other[:4] for one, other in zip(plain, found, strict=True))
    assert same >= 6
