"""The command around the benchmark: batches, grown models, trained drafters, and what is refused beforehand."""

import json
from pathlib import Path
from typing import Any

import pytest

import foreword
import foreword.bench.grow as grow_module
from doubles import taught
from foreword.methods import saved

SMALL = ("--threads", 1, "--max-new-tokens", 8, "--device", "cpu")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(f"the words that come before {i}" for i in range(6)))
    return file


@pytest.fixture
def medusa(tiny_model: str, tmp_path: Path) -> Path:
    with foreword.load(tiny_model, "plain", device="cpu", slots=1) as llm:
        saved.save(taught("medusa", llm.model, heads=2), tmp_path / "medusa", llm.model)
    return tmp_path / "medusa"


def test_batches_of_a_grown_model_with_a_trained_drafter(run, tiny_model, questions, medusa, tmp_path):
    out = tmp_path / "out"
    arguments = ("--methods", f"prompt_lookup,medusa={medusa}", "--batch", "1,2", "--grow", 2, "--out", out)
    result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    assert "by batch" in result.stdout and "pay" in result.stdout and "Grown r=2" in result.stdout
    found = json.loads((out / "results.json").read_text())
    assert found["about"]["model"].endswith("grown r=2")
    grown = found["about"]["grown"]
    assert (grown["times"], grown["prompts"], grown["identical"] + (grown["ties"] > 0) >= 4) == (2, 4, True)
    assert list(found["batches"]) == ["1", "2"] and found["tables"]
    for table in found["batches"].values():
        assert [row["contender"] for row in table] == ["plain", "prompt_lookup", f"medusa={medusa}"]
        assert all(row["prompts"] == 6 for row in table)
    assert set(found["stops_paying"]) == {"prompt_lookup", f"medusa={medusa}"}
    text = (out / "report.md").read_text()
    assert "grown r=2" in text and "Grown r=2" in text and "## by batch" in text


def test_one_text_at_a_time_as_json(run, tiny_model, questions):
    result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "plain", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and list(found["batches"]) == ["1"] and "grown" not in found["about"]


def test_a_grown_model_with_another_text_is_not_timed(run, tiny_model, questions, monkeypatch):
    right = grow_module.grow

    def wrong(hf: Any, times: int) -> Any:
        wide = right(hf, times)
        wide.model.norm.weight.data[:8] *= -3
        return wide

    monkeypatch.setattr(grow_module, "grow", wrong)
    grown = ("--methods", "plain", "--grow", 2, "--limit", 1)  # every token of a wrong text goes before the referee
    result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, *grown)
    assert result.exit_code == 2 and "places that are no ties" in result.output and "tokens/s" not in result.output


def test_a_grown_model_is_profiled(run, tiny_model):
    small = ("--threads", 1, "--rows", "1,4", "--contexts", "16", "--context", 24, "--tokens", 16, "--quick")
    result = run("profile", "--model", tiny_model, *small, "--grow", 2, "--json", "--methods", "plain", "--device", "cpu")
    found = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert found["about"]["grown"]["times"] == 2 and found["about"]["model"].endswith("grown r=2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "--batch", "1,x"), "whole numbers"),
        (("bench", "--batch", "0"), "whole numbers"),
        (("bench", "--batch", "2", "--baselines", "hf"), "one text at a time"),
        (("bench", "--batch", "1,16", "--model", "nowhere"), "10 prompts cannot fill a batch of 16"),
        (("bench", "--methods", "medusa=nowhere"), "nowhere is missing"),
        (("bench", "--grow", "1"), "--grow"),
        (("profile", "--grow", "2", "--cold"), "leave out --shapes"),
    ],
)
def test_what_cannot_be_timed_is_refused_first(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.output


def test_what_cannot_grow(run, tiny_model, questions):
    for given, words in ((("--grow", 3), "power of two"), (("--batch", "8"), "cannot fill a batch of 8")):
        result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "plain", *given)
        assert result.exit_code == 2 and words in result.output
