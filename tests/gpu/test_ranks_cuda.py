"""On a CUDA device: rounds with sums over ranks (NCCL) are captured, and give what rounds without them give.

There is one rank here, whose sums are its own products. All the rest is as with several.
"""

import copy
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import foreword
from doubles import SAMPLINGS, byte_tokenizer, drafter, one_rank, prompts, tiny, truth
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.methods import METHODS
from foreword.model.fused.cuda import CudaLayer
from foreword.model.linears import fuse
from foreword.model.model import Model
from foreword.model.shapes import random_model
from foreword.model.sharding import take_over
from foreword.ranks.group import free_port, launch_variables
from tiers import slow

pytestmark = pytest.mark.gpu

QUICK = ("plain", "token_recycling", "clover2")


def summing(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model on the GPU whose layers sum over ranks."""
    divided = copy.deepcopy(hf).cuda()
    take_over(divided, one_rank("cuda:0"))
    return divided


@pytest.mark.parametrize("method", [*QUICK, *(slow(one) for one, m in METHODS.items() if not m.looped and one not in QUICK)])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_captured_rounds_with_sums_generate_the_truth(method: str, sampling: Sampling) -> None:
    """In float64 the layers of transformers run."""
    asked = [Request(p, sampling.derived(i), max_new_tokens=20) for i, p in enumerate(prompts(6))]
    model = Model(summing(tiny("qwen3")))
    steps = Engine(model, drafter(method, model), slots=3, max_context=200, chunk=7)
    assert steps.loop.captured or method == "amusd"
    assert [run.tokens for run in steps.generate(asked)] == [truth(tiny("qwen3"), request) for request in asked]


@lru_cache
def large_enough() -> PreTrainedModel:
    return random_model("135m", torch.device("cuda"), torch.bfloat16, rebuild=False)


def runs_of(hf: PreTrainedModel, method: str, graph: bool) -> list[Running]:
    model = Model(hf)
    assert {type(layer) for layer in model.layer_stack.fused or ()} == {CudaLayer}
    generator = torch.Generator().manual_seed(0)
    asked = torch.randint(0, 5000, (4, 65), generator=generator).tolist()
    steps = Engine(model, drafter(method, model), slots=2, max_context=200, graph=graph)
    requests = [Request(tuple(prompt), max_new_tokens=30, ignore_eos=True) for prompt in asked]
    return [*steps.generate(requests[:2]), *steps.generate(requests[2:])]


@pytest.mark.parametrize("method", QUICK)
def test_fused_layers_with_sums_are_captured(method: str) -> None:
    """In bfloat16 our kernels run: captured or not, they give the same bits. Without sums, norms add up in another order, so
    an output may diverge at a near-tie, of random weights even at its first token."""
    divided, whole = summing(large_enough()), copy.deepcopy(large_enough())
    fuse(divided)
    fuse(whole)
    eager, captured, alone = (runs_of(hf, method, graph) for hf, graph in ((divided, False), (divided, True), (whole, True)))
    assert [(run.tokens, run.accepted) for run in captured] == [(run.tokens, run.accepted) for run in eager]
    same = [with_sums.tokens[:2] == without.tokens[:2] for with_sums, without in zip(captured, alone, strict=True)]
    assert sum(same) >= len(same) - 1


def test_a_single_rank_loads_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    one_rank("cuda:0")
    for name, value in launch_variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    settings = {"max_new_tokens": 20, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    found = []
    for tp in (None, 1):
        with foreword.load(tmp_path, "token_recycling", tp=tp, max_context=128) as llm:
            found.append(llm.generate([[5, 6, 7], [8, 9]], **settings))
    assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]
