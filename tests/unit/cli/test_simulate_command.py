"""The simulate command: tables and JSON from published results, this machine as a source, and what is refused."""

import json
from pathlib import Path

import pytest

from foreword.simulate import measure

RESULTS = Path(__file__).parents[3] / "results"
LARGE = ("--costs", RESULTS / "bench_cuda_7b", "--costs", RESULTS / "bench_cuda_7b_batches", "--method", "echo")


def test_plain_and_a_method_side_by_side(run, tmp_path):
    out = tmp_path / "new" / "simulated.json"
    result = run("simulate", *LARGE, "--rate", 20, "--slots", 32, "--requests", 200, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].split() == ["plain", "echo"] and "NVIDIA H200" in result.stdout
    found = json.loads(out.read_text())
    plain, echo = found["simulated"]["plain"], found["simulated"]["echo"]
    assert plain["tokens"] == echo["tokens"] == 200 * 128 and echo["request_s"]["p50"] < plain["request_s"]["p50"]
    assert found["about"]["settings"]["rate"] == 20 and str(RESULTS / "bench_cuda_7b") in found["about"]["settings"]["costs"]
    again = run("simulate", "--costs", out, "--method", "echo", "--rate", 20, "--slots", 32, "--requests", 200, "--json")
    assert json.loads(again.stdout)["simulated"] == found["simulated"]


def test_the_fewest_replicas_that_meet_a_goal(run):
    load = ("--rate", 300, "--slots", 32, "--requests", 600, "--replicas", "auto", "--p95-ttft", "200ms", "--json")
    found = json.loads(run("simulate", *LARGE, *load).stdout)["simulated"]
    assert all(one["meets_goal"] and one["first_token_s"]["p95"] <= 0.2 for one in found.values())
    assert 1 < found["echo"]["replicas"] <= found["plain"]["replicas"]


def test_several_gpus_are_called_a_prediction(run):
    parallel = ("--tp", 2, "--layers", 32, "--all-reduce", "1:12us,1024:60us")
    result = run("simulate", *LARGE, "--requests", 50, *parallel)
    assert result.exit_code == 0 and "2 GPUs per replica are a prediction" in result.stdout and "GPUs " in result.stdout


def test_this_machine_is_measured_without_costs(run, tiny_model, monkeypatch):
    monkeypatch.setattr(measure, "built_in_prompts", lambda llm: [(5, 6, 7, 8, 5, 6, 7)])  # for speed: short, and one
    monkeypatch.setattr(measure, "FEWEST_PROMPTS", 1)
    load = ("--slots", 2, "--requests", 20, "--prompt-tokens", 20, "--output-tokens", "5-10", "--json")
    result = run("simulate", "--model", tiny_model, "--method", "prompt_lookup", "--device", "cpu", *load)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["simulated"]) == ["plain", "prompt_lookup"]
    assert found["costs"]["methods"]["plain"]["source"] == "measured on this machine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*LARGE, "--slots", 64), "has rounds of plain up to batch size 32, and --slots is 64"),
        ((*LARGE, "--tp", 2), "--tp 2 needs --layers, --all-reduce: the costs do not say"),
        ((*LARGE, "--routing", "session"), "--routing session needs requests with a session"),
        ((*LARGE, "--prompt-tokens", "many"), "'many' is no distribution of lengths"),
        ((*LARGE, "--trace", "nothing.jsonl"), "the trace nothing.jsonl cannot be read"),
        ((*LARGE, "--replicas", "auto", "--p95-ttft", "1ms", "--requests", 30), "no fleet meets the goal"),
        (LARGE[:4], "auto needs a machine; give --method: plain, prompt_lookup"),
        ((*LARGE[:4], "--method", "swift"), "the costs have no 'swift'"),
    ],
)
def test_what_is_unknown_is_refused_by_name(run, arguments, said):
    result = run("simulate", *arguments)
    assert result.exit_code == 2 and said in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("option", "value"), [("--p95-ttft", "500"), ("--replicas", "0"), ("--replicas", "many"), ("--http-chunk", "-1ms")]
)
def test_options_that_mean_nothing_are_refused(run, option, value):
    result = run("simulate", *LARGE, option, value)
    assert result.exit_code == 2 and option in result.stderr
