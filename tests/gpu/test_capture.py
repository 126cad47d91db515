"""On a CUDA device: captured rounds give what written ones give, and both give the truth."""

import copy

import pytest
import torch

from doubles import FAMILIES, SAMPLINGS, prompts, tiny, truth
from foreword import methods
from foreword.core.draft import Tree
from foreword.core.sampling import Sampling, noise_bits
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.model.model import Model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", methods.METHODS)
def test_captured_rounds_write_the_truth(method: str, family: str, sampling: Sampling) -> None:
    asked = [Request(p, sampling.derived(i), max_new_tokens=40) for i, p in enumerate(prompts(6))]
    expected = [truth(tiny(family), request) for request in asked]
    hf = copy.deepcopy(tiny(family)).cuda()
    for graph in (False, True):
        for slots in (1, 3):
            steps = Engine(Model(hf), methods.make(method), slots=slots, max_context=200, chunk=7, graph=graph)
            assert [run.tokens for run in steps.generate(asked)] == expected


@pytest.mark.parametrize("method", methods.METHODS)
def test_captured_drafts_are_the_written_ones(method: str) -> None:
    """Round by round: as many tokens drafted and kept as without capture, so no state was left at a stale address."""
    hf = copy.deepcopy(tiny("llama")).cuda()
    asked = [Request(p, SAMPLINGS["greedy"], max_new_tokens=60, ignore_eos=True) for p in prompts(4)]
    rounds = []
    for graph in (False, True):
        steps = Engine(Model(hf), methods.make(method), slots=2, max_context=200, graph=graph)
        rounds.append([(run.accepted, run.drafted) for run in steps.generate(asked)])
    assert rounds[0] == rounds[1]


def test_the_noise_is_the_same_on_both_devices() -> None:
    key, position, tokens = torch.tensor([[123456789, 987654321]]), torch.arange(50)[None], torch.arange(5000)
    here = noise_bits(key, position, tokens)
    assert torch.equal(here, noise_bits(key.cuda(), position.cuda(), tokens.cuda()).cpu())


def test_what_a_captured_round_reads_stays_where_it_is() -> None:
    """Prompts of hundreds of lengths come between two replays, and what they leave behind must not be read as a tree."""
    hf = copy.deepcopy(tiny("llama")).cuda()
    (asked,) = [Request(p, SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True) for p in prompts(1)]
    steps = Engine(Model(hf), methods.make("plain"), slots=1, max_context=200)
    (before,) = steps.generate([asked])
    for nodes in range(1, 700):
        Tree.chain(nodes, "cuda")
    junk = [torch.full((64,), 7, device="cuda") for _ in range(2000)]
    (after,) = steps.generate([asked])
    assert after.tokens == before.tokens and len(junk) == 2000
