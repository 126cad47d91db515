"""On a CUDA device: captured rounds and prompt passes give what written ones give, and that is the truth."""

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from doubles import FAMILIES, SAMPLINGS, VOCABULARY, drafter, prompts, tiny, truth
from foreword import methods
from foreword.core.draft import Tree
from foreword.core.sampling import Sampling
from foreword.drafting.draft_vocabulary import packed
from foreword.engine.engine import Engine
from foreword.engine.graph import GraphedLoop
from foreword.engine.request import Request
from foreword.model.linears import fuse
from foreword.model.model import Model
from foreword.ops.noise import noise_bits
from tiers import slow

pytestmark = pytest.mark.gpu


CAPTURABLE = [name for name, method in methods.METHODS.items() if method.load().captures == "round"]

# Every method with both samplings, and every family with both: all of them crossed are for the CPU's laws.
# Two methods are quick, which makes every family once.
QUICK = ("token_recycling", "medusa")
CASES = [
    (pytest.param if method in QUICK else slow)(
        method, FAMILIES[(m + 2 * s) % len(FAMILIES)], sampling, id=f"{method}-{name}"
    )
    for m, method in enumerate(CAPTURABLE)
    for s, (name, sampling) in enumerate(SAMPLINGS.items())
]


@lru_cache
def on_gpu(family: str) -> PreTrainedModel:
    return copy.deepcopy(tiny(family)).cuda()


def captured_prompts(steps: Engine) -> int:
    """Prompt passes that were replayed, by their bucket."""
    return sum(one.graph is not None for one in steps.loop.chunks.values()) if isinstance(steps.loop, GraphedLoop) else 0


@pytest.mark.parametrize(("method", "family", "sampling"), CASES)
def test_captured_rounds_write_the_truth(method: str, family: str, sampling: Sampling) -> None:
    asked = [Request(p, sampling.derived(i), max_new_tokens=20) for i, p in enumerate(prompts(6))]
    model = Model(on_gpu(family))
    steps = Engine(model, drafter(method, model), slots=3, max_context=200, chunk=7)
    assert [run.tokens for run in steps.generate(asked)] == [truth(tiny(family), request) for request in asked]
    assert captured_prompts(steps)


@pytest.mark.parametrize("method", ["token_recycling", slow("plain")])
def test_captured_rounds_that_are_read_together(method: str) -> None:
    """And once more after all that was captured is forgotten, with the memory that it had."""
    asked = [Request(p, SAMPLINGS["T=0.8"].derived(i), max_new_tokens=20) for i, p in enumerate(prompts(6))]
    model = Model(on_gpu("llama"))
    steps = Engine(model, drafter(method, model), slots=3, max_context=200, chunk=7)
    assert isinstance(steps.loop, GraphedLoop)
    for _ in range(2):
        runs = [steps.add(request) for request in asked]
        while steps.busy:
            steps.step_for((), 4)
        assert [run.tokens for run in runs] == [truth(tiny("llama"), request) for request in asked]
        assert any(one.graph is not None for one in steps.loop.buckets.values())
        steps.loop.forget()


@pytest.mark.parametrize("sampling", [slow(SAMPLINGS["greedy"], id="greedy"), pytest.param(SAMPLINGS["T=0.8"], id="T=0.8")])
@pytest.mark.parametrize("method", ["token_recycling", slow("plain")])
def test_masks_of_requests_that_come_and_go(method: str, sampling: Sampling) -> None:
    """A graph that was captured with one request's mask serves the next one's: it reads the rows where they lie. Every third
    request allows few tokens, every third holds its stop tokens back, and every third has no mask."""
    ways = [replace(sampling.derived(i), allowed_token_ids=(2 + i, 9, 17, 30 - i) if i % 3 == 0 else None) for i in range(9)]
    asked = [
        Request(p, way, 20, min_new_tokens=5 * (i % 3 == 1), stop_token_ids=(5, 11 + i), prompt_logprobs=2)
        for i, (p, way) in enumerate(zip(prompts(9), ways, strict=True))
    ]
    steps = Engine(Model(on_gpu("llama")), methods.make(method), slots=2, max_context=200, chunk=7)
    assert isinstance(steps.loop, GraphedLoop)
    for _ in range(2):
        for run in steps.generate(asked):
            whole = truth(tiny("llama"), run.request)
            stop = next((i + 1 for i, token in enumerate(whole) if token in run.request.stop_token_ids), None)
            assert run.tokens == whole[:stop] and len(run.prompt_logprobs) == len(run.request.prompt) - 1
    assert any(bucket[2].masks and one.graph is not None for bucket, one in steps.loop.buckets.items())


@pytest.mark.parametrize("method", CAPTURABLE)
def test_captured_drafts_are_the_written_ones(method: str) -> None:
    """Round by round: as many tokens drafted and kept as without capture, so no state was left at a stale address, and a
    drafter that reads along has read the same. Prompts are read in passes of 64 and 128 rows, two and one at a time. Greedy
    requests and sampled ones share a batch, and all of them get the truth."""
    ways = [*SAMPLINGS.values()]
    asked = [
        Request(p, ways[i % 2].derived(i), max_new_tokens=20, ignore_eos=True) for i, p in enumerate(prompts(9, longest=180))
    ]
    rounds, captured = [], []
    for graph in (False, True):
        model = Model(on_gpu("llama"))
        steps = Engine(model, drafter(method, model), slots=2, max_context=256, chunk=128, graph=graph)
        rounds.append([(run.tokens, run.accepted, run.drafted) for run in steps.generate(asked)])
        captured.append(captured_prompts(steps))
    assert rounds[0] == rounds[1]
    assert captured[0] == 0 < captured[1]
    assert [tokens for tokens, *_ in rounds[1]] == [truth(tiny("llama"), request, context=256) for request in asked]


@pytest.mark.parametrize("method", ["medusa", slow("clover2"), slow("draft_model")])
def test_captured_drafts_among_words_are_the_written_ones(method: str) -> None:
    asked = [Request(p, SAMPLINGS["T=0.8"].derived(i), max_new_tokens=20) for i, p in enumerate(prompts(6))]
    rounds = []
    for graph in (False, True):
        model = Model(on_gpu("llama"))
        one: Any = drafter(method, model)
        one.vocabulary.choose(packed(torch.arange(VOCABULARY) % 3 != 1))
        steps = Engine(model, one, slots=2, max_context=200, chunk=7, graph=graph)
        rounds.append([(run.tokens, run.accepted, run.drafted) for run in steps.generate(asked)])
    assert rounds[0] == rounds[1]
    assert [tokens for tokens, *_ in rounds[0]] == [truth(tiny("llama"), request) for request in asked]


def test_captured_prompts_in_half_precision() -> None:
    """By the kernels: what the cache holds of a prompt is the same but for rounding. Later passes read a few tokens behind
    what is kept, and their padding lies behind the last row of the cache."""
    hf, text = copy.deepcopy(tiny("qwen3", torch.float32)).to(torch.bfloat16).cuda(), prompts(2, longest=3)[1] * 200
    fuse(hf)
    held = []
    for graph in (False, True):
        steps = Engine(Model(hf), methods.make("plain"), slots=1, max_context=200, chunk=64, graph=graph)
        for length in (100, 150, 190, 195, 197, 199):
            steps.generate([Request(text[:length], max_new_tokens=1, reuse=length > 100)])
        held.append(steps.target.cache.held[:, :, 0, :, :198].double())
        assert bool(captured_prompts(steps)) == graph
    assert held[1].isfinite().all()
    assert (held[1] - held[0]).norm() < 0.05 * held[0].norm()


def test_the_noise_is_the_same_on_both_devices() -> None:
    key, position, tokens = torch.tensor([[123456789, 987654321]]), torch.arange(50)[None], torch.arange(5000)
    here = noise_bits(key, position, tokens)
    assert torch.equal(here, noise_bits(key.cuda(), position.cuda(), tokens.cuda()).cpu())


def test_what_a_captured_round_reads_stays_where_it_is() -> None:
    """Prompts of hundreds of lengths come between two replays, and what they leave behind must not be read as a tree."""
    asked = Request(prompts(2)[1], SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True)
    steps = Engine(Model(on_gpu("llama")), methods.make("plain"), slots=1, max_context=200)
    before, _ = (steps.generate([asked])[0] for _ in range(2))
    assert captured_prompts(steps) == 1
    for nodes in range(1, 700):
        Tree.chain(nodes, "cuda")
    junk = [torch.full((64,), 7, device="cuda") for _ in range(2000)]
    (after,) = steps.generate([asked])
    assert after.tokens == before.tokens and len(junk) == 2000
