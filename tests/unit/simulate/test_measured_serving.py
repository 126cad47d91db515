"""Costs measured on this machine, with a real engine of a tiny model."""

import pytest

import foreword
import foreword.simulate.measure as measure_module
from foreword.core.sampling import Sampling
from foreword.errors import InputError
from foreword.simulate.measure import batch_sizes, measure, measured_costs

PROMPTS = [tuple(range(5 + number, 45 + number)) for number in range(6)]


@pytest.fixture(scope="module")
def tiny_llm(own_home, folders):
    with foreword.load(folders["llama"], "plain", slots=3, device="cpu", isolated=True) as llm:
        yield llm


def test_batch_sizes_end_at_the_slots():
    assert batch_sizes(1) == [1] and batch_sizes(8) == [1, 2, 4, 8] and batch_sizes(6) == [1, 2, 4, 6]


def test_rounds_and_prompts_of_a_real_engine(tiny_llm):
    llm = tiny_llm.use("prompt_lookup")
    found = measure(llm, PROMPTS, [1, 3], Sampling(seed=0), tokens=12, repeats=1)
    assert [one.batch for one in found.rounds] == [1, 3] and found.method == "prompt_lookup"
    assert all(one.seconds > 0 and 1 <= one.tokens <= one.rows / one.batch + 1e-9 for one in found.rounds)
    assert found.prompts.rows[:3] == (1, 32, 64) and list(found.prompts.seconds) == sorted(found.prompts.seconds)
    assert not tiny_llm.engine.busy
    with pytest.raises(InputError, match="batches of 4 need as many slots, and the engine has 3"):
        measure(llm, PROMPTS, [4], Sampling(seed=0))


def test_costs_are_measured_once(tiny_llm, monkeypatch):
    monkeypatch.setattr(measure_module, "FEWEST_PROMPTS", 1)  # for speed
    reports = []
    first = measured_costs(tiny_llm, ["plain"], 2, Sampling(seed=0), lambda *told: reports.append(told))
    assert measured_costs(tiny_llm, ["plain"], 2, Sampling(seed=0), lambda *told: None) == first
    assert reports == [("measuring rounds of plain", 0, 1)] and first.of("plain").rounds[0].tokens == 1
