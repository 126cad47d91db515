"""`foreword prove`: its table, JSON, files and exit status."""

import json
import sys
from types import SimpleNamespace

import pytest

from foreword.cli.prove import PROMPTS
from foreword.core.draft import Draft
from foreword.methods import METHODS, Method
from foreword.methods.plain import Plain

QUICK = ("--max-new-tokens", 6, "--limit", 3, "--threads", 1)


def test_table(run, tiny_model):
    shown = run("prove", "--model", tiny_model, *QUICK)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["prompt_lookup"] * 2 + ["token_recycling"] * 2 + ["swift"] * 2
    assert lines[-1].startswith("no bugs")
    assert "\x1b" not in shown.stdout and shown.stderr == ""


def test_json_and_files(run, tiny_model, tmp_path):
    asked = ("--methods", "token_recycling, plain", "--temperature", 0.5, "--seed", 3, "--out", tmp_path / "proof")
    shown = run("prove", "--model", tiny_model, "--json", *asked, *QUICK)
    found = json.loads(shown.stdout)
    assert list(found["methods"]) == ["token_recycling", "plain"]
    assert list(found["samplings"]) == ["greedy", "T=0.5 seed=3"]
    assert found["methods"]["plain"]["prompts"] == 3 and found["bugs"] == 0
    assert json.loads((tmp_path / "proof" / "proof.json").read_text()) == found
    assert (tmp_path / "proof" / "proof.md").exists()


def test_prompts_of_a_file_by_group(run, tiny_model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"question {i}", "category": "ab"[i % 2]} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--prompts", file, "--per-group", 2, "--methods", "plain", "--temperature", 0, "--max-new-tokens", 3)
    found = json.loads(run("prove", "--model", tiny_model, "--json", *asked).stdout)
    assert found["methods"]["plain"]["prompts"] == 4
    assert list(found["samplings"]) == ["greedy"]


class Wrong(Plain):
    """A faulty drafter: it writes to the state, so the target continues from a token that it did not choose."""

    def propose(self, state) -> Draft:
        state.roots[state.slots] = 7
        return super().propose(state)


def test_a_bug_is_status_1_and_named(run, tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "foreword.methods.wrong", SimpleNamespace(Wrong=Wrong))
    monkeypatch.setitem(METHODS, "wrong", Method("wrong:Wrong", "lies", paper="-"))
    shown = run("prove", "--model", tiny_model, "--methods", "wrong", "--temperature", 0, *QUICK)
    assert shown.exit_code == 1
    assert "bug  wrong, prompt 1, greedy, new token" in shown.stdout
    assert shown.stdout.splitlines()[-1].endswith("the output is not that of plain decoding")


def test_an_interrupted_run_leaves_its_results_so_far(run, tiny_model, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foreword.prove.proof._judge", interrupt)
    shown = run("prove", "--model", tiny_model, "--methods", "prompt_lookup", "--out", tmp_path, *QUICK)
    assert shown.exit_code != 0
    left = json.loads((tmp_path / "proof.json").read_text())
    assert left["complete"] is False and left["methods"]["prompt_lookup"]["prompts"] == 3
    assert "Incomplete" in (tmp_path / "proof.md").read_text()


def test_the_built_in_prompts_are_ten_different_ones():
    assert len(set(PROMPTS)) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "token_recycling,medusae"], "no method is called 'medusae'"),
        (["--methods", ""], "no method is called ''"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--rows", "0"], "--rows"),
        (["--per-group", "0"], "--per-group"),
    ],
)
def test_invalid_arguments(run, arguments, message):
    result = run("prove", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_that_cannot_be_created_is_refused_first(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("prove", "--out", tmp_path / "file" / "proof")
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr
