"""The profile command: its tables, its file, and what it refuses."""

import json
from typing import Any

import pytest

from foreword.bench import profile as profile_module
from foreword.model.shapes import SHAPES

SMALL = ("--threads", 1, "--rows", "1,4", "--contexts", "16", "--context", 24, "--tokens", 16, "--quick")


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "CPU_BUFFER", 8 * 10**6)


def test_tables_and_a_file(run, tiny_model, tmp_path):
    out = tmp_path / "deep" / "profile.json"
    result = run("profile", "--model", tiny_model, *SMALL, "--cold", "--out", out)
    assert result.exit_code == 0, result.output
    for fragment in ("peak bandwidth", "over one row", "tokens per round", "where a pass goes, 64 row(s)", "first token"):
        assert fragment in result.stdout
    content = json.loads(out.read_text())
    assert list(content["sections"]) == ["machine", "passes", "rounds", "parts", "cold start"]
    assert content["about"]["settings"]["rows"] == [1, 4] and content["about"]["model"] == tiny_model
    assert {"command", "commit", "machine", "versions"} <= set(content["about"])
    cold = content["sections"]["cold start"]
    steps = sum(cold[f"{step}_s"] for step in ("python", "imports", "load", "first_token"))
    assert cold["total_s"] == pytest.approx(steps) and 0 < cold["load_s"] < cold["total_s"]


def test_json_of_batch_2_and_one_method(run, tiny_model):
    result = run("profile", "--model", tiny_model, *SMALL, "--json", "--batch", 2, "--methods", "prompt_lookup")
    (found,) = json.loads(result.stdout)["sections"]["rounds"]
    assert (found["method"], found["texts"]) == ("prompt_lookup", 2)


def test_random_weights_need_no_model(run, monkeypatch):
    sizes: dict[str, Any] = {"hidden_size": 36, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64}
    monkeypatch.setitem(SHAPES, "135m", SHAPES["135m"] | sizes)
    result = run("profile", "--shapes", "135m", *SMALL, "--json", "--methods", "plain")
    content = json.loads(result.stdout)
    assert result.exit_code == 0 and content["about"]["model"] == "random weights of 135m shapes"


def test_a_section_that_fails_is_reported_and_the_others_are_kept(run, tiny_model, monkeypatch, tmp_path):
    def broken(self: Any) -> None:
        raise RuntimeError("the clock stopped")

    monkeypatch.setattr(profile_module.Profile, "rounds", broken)
    monkeypatch.setattr(profile_module, "break_down_pass", lambda *_: 1 / 0)
    out = tmp_path / "profile.json"
    result = run("profile", "--model", tiny_model, *SMALL, "--out", out)
    assert result.exit_code == 1
    assert "rounds: failed: RuntimeError: the clock stopped" in result.stdout
    assert "failed: ZeroDivisionError" in result.stdout and "over one row" in result.stdout
    content = json.loads(out.read_text())["sections"]
    assert content["rounds"] == {"failed": "RuntimeError: the clock stopped"} and content["passes"][0]["ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "1,x"), "whole numbers"),
        (("--contexts", "0"), "whole numbers"),
        (("--methods", "no_such"), "no method is called"),
        (("--shapes", "70b"), "70b"),
        (("--shapes", "135m", "--model", "some"), "leave out --model"),
    ],
)
def test_invalid_arguments_are_refused_first(run, arguments, message):
    result = run("profile", *arguments)
    assert result.exit_code == 2 and message in result.output


def test_a_file_that_cannot_be_written(run, tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("profile", "--model", tiny_model, *SMALL, "--out", tmp_path / "file" / "profile.json")
    assert result.exit_code == 2 and "cannot be written" in result.output
