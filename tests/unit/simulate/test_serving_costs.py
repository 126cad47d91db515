"""Costs of serving: from results of benchmarks, between what was measured, on several GPUs, and as files."""

import json
from pathlib import Path

import pytest

from doubles.serving_costs import ON_GPU
from foreword.errors import InputError
from foreword.simulate.bench_costs import costs_of_results
from foreword.simulate.costs import MethodCosts, RoundCost, ServingCosts
from foreword.simulate.files import read_costs
from foreword.simulate.tensor_parallel import TensorParallel, all_reduce_curve

RESULTS = Path(__file__).parents[3] / "results"
LARGE = [RESULTS / "bench_cuda_7b", RESULTS / "bench_cuda_7b_batches"]


@pytest.fixture(scope="module")
def large() -> ServingCosts:
    return costs_of_results(LARGE)


def test_results_say_what_rounds_cost_and_bring(large):
    """Tokens per second of one request are those that the benchmark has after the first token."""
    found = json.loads(json.dumps(large.to_dict()))
    assert found["machine"] == "NVIDIA H200" and large.scheduling == ON_GPU and 0.7 < (large.reading_share or 0) < 0.9
    for method, speed, tokens in (("plain", 246.3, 1.0), ("echo", 768.5, 4.19)):
        alone = large.of(method).rounds[0]
        assert alone.tokens == pytest.approx(tokens, abs=0.02)
        assert alone.tokens / alone.seconds == pytest.approx(speed, rel=0.03)
    assert [one.batch for one in large.of("echo").rounds] == [1, 8, 32] == [one.batch for one in large.of("plain").rounds]
    assert large.of("echo").rounds[2].tokens == pytest.approx(2.07, abs=0.02)


def test_other_programs_are_no_methods():
    assert "hf" not in costs_of_results([RESULTS / "bench_cpu_48"]).methods


def test_costs_between_measured_batches_lie_on_lines(plain, drafting):
    assert plain.seconds_by_batch(16)[10] == pytest.approx((plain.rounds[1].seconds + plain.rounds[2].seconds) / 2)
    mixed = MethodCosts("m", (RoundCost(1, 1.0, 1, (1.0,)), RoundCost(3, 1.0, 3, (0.0, 1.0))), plain.prompts, "made up")
    assert mixed.chances_by_batch(3)[1:].tolist() == [[1.0, 1.0], [0.5, 1.0], [0.0, 1.0]]


def test_several_gpus_divide_reading_and_add_all_reduces(plain):
    divided = TensorParallel(2, 30, 0.8, all_reduce_curve([(1, 15e-6)])).of(plain)
    assert divided.rounds[0].seconds == pytest.approx(plain.rounds[0].seconds * 0.6 + 60 * 15e-6)
    assert divided.prompts.at(512) == pytest.approx(plain.prompts.at(512) * 0.6 + 60 * 15e-6, rel=1e-3)
    by_rows = TensorParallel(4, 30, 1.0, all_reduce_curve([(1024, 60e-6), (1, 10e-6)]))
    assert by_rows.seconds(0.004, 1) == pytest.approx(0.001 + 60 * 10e-6)
    assert by_rows.seconds(0.004, 1024) == pytest.approx(0.001 + 60 * 60e-6)


def test_costs_survive_a_file(large, tmp_path):
    file = tmp_path / "simulated.json"
    file.write_text(json.dumps({"costs": large.to_dict()}))
    assert read_costs([file]) == large


@pytest.mark.parametrize(
    ("files", "temperature", "said"),
    [
        ([LARGE[1]], 0.0, "has no runs of one request at a time"),
        ([LARGE[0], RESULTS / "bench_cuda_48b"], 0.0, "differ in model"),
        (LARGE, 0.5, "no results of .* are at temperature 0.5"),
        ([RESULTS / "nothing"], 0.0, "holds no results of `foreword bench`"),
        ([RESULTS / "http_cost_cpu.json"], 0.0, "holds no results of `foreword bench`"),
    ],
)
def test_what_results_do_not_have_is_refused(files, temperature, said):
    with pytest.raises(InputError, match=said):
        read_costs(files, temperature).of("plain")


@pytest.mark.parametrize(("changed", "said"), [({"methods": {"echo": {}}}, "holds no costs that can be read"), ({}, "")])
def test_a_damaged_file_is_refused(large, tmp_path, changed, said):
    file = tmp_path / "simulated.json"
    file.write_text(json.dumps({"costs": large.to_dict() | changed}) if changed else "{")
    with pytest.raises(InputError, match=said or "cannot be read"):
        read_costs([file])


def test_costs_of_one_measurement_stand_alone(large, tmp_path):
    file = tmp_path / "simulated.json"
    file.write_text(json.dumps({"costs": large.to_dict()}))
    with pytest.raises(InputError, match="were measured together"):
        read_costs([file, LARGE[0]])
    with pytest.raises(InputError, match="are at temperature 0; give --temperature 0"):
        read_costs([file], 0.8)
