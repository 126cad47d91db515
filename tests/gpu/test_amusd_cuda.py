"""amusd with the target on a GPU, and the draft model on the CPU, in a stream of the same GPU, and on a second GPU.

Checks are replayed as graphs, and so are the passes of a draft model on a GPU.
"""

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from doubles import SAMPLINGS, prompts, tiny, truth, with_random_weights
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.graph import GraphedCheck
from foreword.engine.request import Request
from foreword.methods import make
from foreword.methods.amusd.epochs import GREEDY, Job
from foreword.methods.amusd.worker import CHUNK, DraftRunner, WorkerConfig
from foreword.model.linears import fuse
from foreword.model.model import Model
from tiers import slow

pytestmark = pytest.mark.gpu

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES: list[Any] = [
    slow(dict(draft_device="cpu"), id="draft on the CPU, a process"),
    slow(dict(draft_device="cpu", worker="thread"), id="draft on the CPU, a thread"),
    pytest.param(dict(draft_device="cuda:0", worker="thread"), id="two streams of one GPU"),
    slow(dict(draft_device="cuda:0", worker="process"), id="two processes on one GPU"),
    pytest.param(dict(draft_device="cuda:1"), id="two GPUs, a process", marks=[TWO, pytest.mark.slow]),
    pytest.param(dict(draft_device="cuda:1", worker="thread"), id="two GPUs, a thread", marks=[TWO, pytest.mark.slow]),
]
STREAMS = dict(draft_device="cuda:0", worker="thread")


def replays(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Count the replays of each graph from now on."""
    found: dict[int, int] = {}
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        found[id(graph)] = found.get(id(graph), 0) + 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


def checks(steps: Engine) -> list[Any]:
    """Return the graphs of recorded checks."""
    assert isinstance(steps.loop, GraphedCheck)
    return [one.graph.graph for one in steps.loop.buckets.values() if one.graph is not None]


@pytest.mark.parametrize("sampling", [slow(SAMPLINGS["greedy"], id="greedy"), pytest.param(SAMPLINGS["T=0.8"], id="T=0.8")])
@pytest.mark.parametrize("options", PLACES)
def test_the_output_is_the_truth(options: dict[str, Any], sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(copy.deepcopy(tiny("llama")).to("cuda:0"))
    drafter = with_random_weights("amusd", model, least=2, ahead=6, **options)
    asked = [Request(p, sampling.derived(i), max_new_tokens=20) for i, p in enumerate(prompts(6))]
    steps, found = Engine(model, drafter, slots=3, max_context=200, chunk=7), replays(monkeypatch)
    runs = steps.generate(asked)
    assert [run.tokens for run in runs] == [truth(tiny("llama"), request) for request in asked]
    counters = drafter.counters()
    drafter.close()
    assert counters["checked"] > 0 and counters["passes"] > 0
    assert checks(steps) and all(found.get(id(graph), 0) > 0 for graph in checks(steps))
    assert 0 < counters["target_s"] <= 1.01 * counters["wall_s"]


def test_drafts_equal_those_of_eager_rounds() -> None:
    """If the target waits for all draft tokens, each round drafts and accepts as many as without graphs of the target."""
    asked = [Request(p, SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True) for p in prompts(9, longest=180)]
    rounds = []
    for graph in (False, True):
        model = Model(copy.deepcopy(tiny("llama")).to("cuda:0"))
        drafter = with_random_weights("amusd", model, least=3, ahead=3, rows=4, patience=60.0, **STREAMS)
        steps = Engine(model, drafter, slots=2, max_context=256, chunk=128, graph=graph)
        rounds.append([(run.tokens, run.accepted, run.drafted) for run in steps.generate(asked)])
        assert not graph or checks(steps)
        drafter.close()
    assert rounds[0] == rounds[1]


@lru_cache
def half() -> PreTrainedModel:
    """Make a fused model in half precision, so that graphs record our kernels."""
    hf = copy.deepcopy(tiny("qwen3", torch.float32)).to(torch.bfloat16).cuda()
    fuse(hf)
    return hf


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_both_are_recorded_in_half_precision(sampling: Sampling, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin like plain's and may diverge at near-ties. No round and no pass launches its kernels one by one."""
    asked = [Request(p, sampling.derived(i), max_new_tokens=60, ignore_eos=True) for i, p in enumerate(prompts(4)[1:])]
    plain = Engine(Model(half()), make("plain"), slots=slots, max_context=256).generate(asked)
    model = Model(half())
    drafter = with_random_weights("amusd", model, ahead=7, **STREAMS)
    steps = Engine(model, drafter, slots=slots, max_context=256)
    steps.generate(asked)  # the worker starts, checks are recorded
    passes, found = drafter.counters()["passes"], replays(monkeypatch)
    runs = steps.generate(asked)
    ours = sum(found.get(id(graph), 0) for graph in checks(steps))
    passes = drafter.counters()["passes"] - passes
    drafter.close()
    assert all(len(run.tokens) == 60 for run in runs)
    assert sum(run.tokens[0] == other.tokens[0] for run, other in zip(runs, plain, strict=True)) >= len(runs) - 1
    assert ours >= max(len(run.accepted) for run in runs) - 2
    assert sum(found.values()) >= ours + passes - 1 > ours > 0  # one pass may have been running


@torch.inference_mode()
def test_graphs_of_the_draft_model_equal_its_eager_passes() -> None:
    """Jobs of several sizes, with rollbacks in between, in a stream of their own; the other writer runs eagerly."""
    hf = copy.deepcopy(tiny("llama")).to("cuda:0")
    config = WorkerConfig("cuda:0", 3, 200, hf.config.vocab_size)
    with torch.cuda.stream(torch.cuda.Stream()):
        recorded, eager = DraftRunner(Model(hf, "draft"), config), DraftRunner(Model(hf, "draft"), config)
        eager.passes = {}
        sampled = (0.8, 123, 456)
        jobs = [
            Job([0], [[*range(3, 3 + CHUNK)]], [0], [GREEDY], False),
            Job([0], [[5, 6]], [CHUNK], [GREEDY], True),
            Job([1, 2], [[7, 8, 9], [4]], [0, 0], [sampled, sampled], True),
            Job([0, 1, 2], [[9], [3], [11]], [CHUNK + 2, 3, 1], [GREEDY, sampled, sampled], True),
            Job([0, 2], [[12], [13, 14]], [CHUNK - 3, 1], [GREEDY, sampled], True),
        ]
        for job in jobs * 2:
            assert recorded.step(job) == eager.step(job)
