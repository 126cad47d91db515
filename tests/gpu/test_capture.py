"""On a CUDA device: recorded rounds and prompt passes give what eager ones give, and that is the truth."""

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from doubles import FAMILIES, SAMPLINGS, VOCABULARY, drafter, family_for, prompts, tiny, truth
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


RECORDED = [name for name, method in methods.METHODS.items() if method.load().captures == "round"]

# Every method with both samplings, and every family with both. The tests on the CPU cross all of them.
# Two methods are in the quick tier, which with two samplings cover every family once, and one for looped models.
QUICK = ("token_recycling", "medusa", "speed")
CASES = [
    (pytest.param if method in QUICK else slow)(
        method, family_for(method, FAMILIES[(m + 2 * s) % len(FAMILIES)]), sampling, id=f"{method}-{name}"
    )
    for m, method in enumerate(RECORDED)
    for s, (name, sampling) in enumerate(SAMPLINGS.items())
]


@lru_cache
def on_gpu(family: str) -> PreTrainedModel:
    return copy.deepcopy(tiny(family)).cuda()


def recorded_prompts(steps: Engine) -> int:
    """Return how many kinds of prompt passes were recorded."""
    return sum(one.graph is not None for one in steps.loop.chunks.values()) if isinstance(steps.loop, GraphedLoop) else 0


@pytest.mark.parametrize(("method", "family", "sampling"), CASES)
def test_recorded_rounds_generate_the_truth(method: str, family: str, sampling: Sampling) -> None:
    asked = [Request(p, sampling.derived(i), max_new_tokens=20) for i, p in enumerate(prompts(6))]
    model = Model(on_gpu(family))
    steps = Engine(model, drafter(method, model), slots=3, max_context=200, chunk=7)
    assert [run.tokens for run in steps.generate(asked)] == [truth(tiny(family), request) for request in asked]
    assert recorded_prompts(steps)


@pytest.mark.parametrize("method", ["token_recycling", slow("plain")])
def test_recorded_rounds_that_are_read_together(method: str) -> None:
    """Run twice: the second time after all graphs were dropped, in the memory that they had."""
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
    """A graph recorded with one request's mask also serves the next: it reads the mask in place. A third of the requests
    allow few tokens, a third hold back their stop tokens, and a third have no mask."""
    samplings = [
        replace(sampling.derived(i), allowed_token_ids=(2 + i, 9, 17, 30 - i) if i % 3 == 0 else None) for i in range(9)
    ]
    asked = [
        Request(p, one, 20, min_new_tokens=5 * (i % 3 == 1), stop_token_ids=(5, 11 + i), prompt_logprobs=2)
        for i, (p, one) in enumerate(zip(prompts(9), samplings, strict=True))
    ]
    steps = Engine(Model(on_gpu("llama")), methods.make(method), slots=2, max_context=200, chunk=7)
    assert isinstance(steps.loop, GraphedLoop)
    for _ in range(2):
        for run in steps.generate(asked):
            whole = truth(tiny("llama"), run.request)
            stop = next((i + 1 for i, token in enumerate(whole) if token in run.request.stop_token_ids), None)
            assert run.tokens == whole[:stop] and len(run.prompt_logprobs) == len(run.request.prompt) - 1
    assert any(bucket[2].masks and one.graph is not None for bucket, one in steps.loop.buckets.items())


@pytest.mark.parametrize("method", RECORDED)
def test_recorded_drafts_equal_eager_ones(method: str) -> None:
    """Each round drafts and accepts as many tokens as without graphs, so no state is at a stale address, and a drafter that
    reads the prompt has read the same. Prompts are read in passes of 64 and 128 rows, two and one at a time. Greedy and
    sampled requests share a batch, and all of them get the truth."""
    samplings = [*SAMPLINGS.values()]
    asked = [
        Request(p, samplings[i % 2].derived(i), max_new_tokens=20, ignore_eos=True)
        for i, p in enumerate(prompts(9, longest=180))
    ]
    rounds, recorded, family = [], [], family_for(method)
    for graph in (False, True):
        model = Model(on_gpu(family))
        steps = Engine(model, drafter(method, model), slots=2, max_context=256, chunk=128, graph=graph)
        rounds.append([(run.tokens, run.accepted, run.drafted) for run in steps.generate(asked)])
        recorded.append(recorded_prompts(steps))
    assert rounds[0] == rounds[1]
    assert recorded[0] == 0 < recorded[1]
    assert [tokens for tokens, *_ in rounds[1]] == [truth(tiny(family), request, context=256) for request in asked]


@pytest.mark.parametrize("method", ["prompt_lookup", slow("echo")])
def test_recorded_rounds_with_predictions_and_traces(method: str) -> None:
    """Requests with a prediction, with traces, with both and with neither share a batch. Each round drafts and accepts what
    it does without graphs, and its trace is the same up to rounding."""
    outputs = [truth(tiny("llama"), Request(p, SAMPLINGS["greedy"], 20, ignore_eos=True)) for p in prompts(9)]
    asked = [
        Request(
            p,
            SAMPLINGS["greedy"],
            20,
            ignore_eos=True,
            prediction=(*output[:8], 5, *output[9:]) if i % 2 else (),
            trace_rounds=i % 3 == 0,
        )
        for i, (p, output) in enumerate(zip(prompts(9), outputs, strict=True))
    ]
    rounds = []
    for graph in (False, True):
        model = Model(on_gpu("llama"))
        steps = Engine(model, drafter(method, model), slots=2, max_context=200, chunk=7, graph=graph)
        runs, traces = [steps.add(request) for request in asked], []
        while steps.busy:
            traces += [(runs.index(event.running), event.draft) for event in steps.step() if event.draft]
        assert [run.tokens for run in runs] == outputs and any(run.predicted for run in runs)
        shown = [(run, trace.tokens, trace.parents, trace.origins, trace.path, trace.next) for run, trace in traces]
        rounds.append(([(run.accepted, run.drafted, run.predicted) for run in runs], shown))
    assert rounds[0] == rounds[1] and {run for run, *_ in rounds[1][1]} == {0, 3, 6}


def test_rounds_are_recorded_again_after_a_plan_has_changed() -> None:
    """Each round drafts and accepts as many tokens as without graphs, while the layers that drafts run change."""
    asked = [Request(p, SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True) for p in prompts(9)]
    rounds, plans = [], []
    for graph in (False, True):
        made: Any = methods.make("swift", rows=13, ratio=0.5, threshold=0.3, window=6, tries=6)
        steps = Engine(Model(on_gpu("llama")), made, slots=2, max_context=200, chunk=7, graph=graph)
        before = made.search.plan
        rounds.append([(run.tokens, run.accepted, run.drafted) for run in steps.generate(asked)])
        plans.append((before, made.search.plan))
    assert rounds[0] == rounds[1] and plans[0] == plans[1] and plans[0][0] != plans[0][1]
    assert [tokens for tokens, *_ in rounds[1]] == [truth(tiny("llama"), request) for request in asked]


@pytest.mark.parametrize("method", ["medusa", *map(slow, ("chimera", "clover2", "draft_model", "masked", "kangaroo"))])
def test_recorded_drafts_of_a_draft_vocabulary_equal_eager_ones(method: str) -> None:
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


def test_recorded_prompts_in_half_precision() -> None:
    """With the kernels, the cached prompt is the same except for rounding. Later passes read a few tokens after those that
    are kept, and their padding lies beyond the last row of the cache."""
    hf, tokens = copy.deepcopy(tiny("qwen3", torch.float32)).to(torch.bfloat16).cuda(), prompts(2, longest=3)[1] * 200
    fuse(hf)
    held = []
    for graph in (False, True):
        steps = Engine(Model(hf), methods.make("plain"), slots=1, max_context=200, chunk=64, graph=graph)
        for length in (100, 150, 190, 195, 197, 199):
            steps.generate([Request(tokens[:length], max_new_tokens=1, reuse=length > 100)])
        held.append(steps.target.cache.held[:, :, 0, :, :198].double())
        assert bool(recorded_prompts(steps)) == graph
    assert held[1].isfinite().all()
    assert (held[1] - held[0]).norm() < 0.05 * held[0].norm()


def test_the_noise_is_the_same_on_both_devices() -> None:
    key, position, tokens = torch.tensor([[123456789, 987654321]]), torch.arange(50)[None], torch.arange(5000)
    here = noise_bits(key, position, tokens)
    assert torch.equal(here, noise_bits(key.cuda(), position.cuda(), tokens.cuda()).cpu())


def test_inputs_of_a_recorded_round_keep_their_address() -> None:
    """Trees of hundreds of sizes are made between two replays; their memory must not be read as the tree of the round."""
    asked = Request(prompts(2)[1], SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True)
    steps = Engine(Model(on_gpu("llama")), methods.make("plain"), slots=1, max_context=200)
    before, _ = (steps.generate([asked])[0] for _ in range(2))
    assert recorded_prompts(steps) == 1
    for nodes in range(1, 700):
        Tree.chain(nodes, "cuda")
    junk = [torch.full((64,), 7, device="cuda") for _ in range(2000)]
    (after,) = steps.generate([asked])
    assert after.tokens == before.tokens and len(junk) == 2000
