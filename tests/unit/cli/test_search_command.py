"""`foreword search`: a plan in a folder, which every command takes as a drafter."""

import json
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--windows", 4, "--length", 3, "--patience", 1, "--threads", 1)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


def test_search_and_use(run: Any, tiny_model: str, data: Path, plan: Path) -> None:
    asked = ("search", "self_speculative", "--model", tiny_model, "--data", data, "--out", plan, *QUICK)
    shown = run(*asked)
    assert shown.exit_code == 0 and "halves of 4 layers left out · agreement " in shown.stdout
    record = json.loads((plan / "record.json").read_text())
    assert json.loads(run(*asked, "--json").stdout)["best"] == record["best"]  # nothing is left to measure
    assert record["run"]["command"] and record["data"][0]["sha256"]
    written = ("generate", "hello", "--model", tiny_model, "--max-new-tokens", 12, "--ignore-eos", "--json")
    plain = json.loads(run(*written, "--method", "plain").stdout)
    for option in (("--drafter", plan), ("--method", f"gsd={plan}", "--rows", 8)):
        found = json.loads(run(*written, *option).stdout)
        assert found["tokens"] == plain["tokens"] and found["stats"]["spec_decode_num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("method", "message"),
    [("medusa", "medusa has no plan to search; these have: self_speculative"), ("swft", "did you mean 'swift'")],
)
def test_methods_without_a_plan(run: Any, method: str, message: str, tmp_path: Path) -> None:
    shown = run("search", method, "--data", tmp_path, "--out", tmp_path)
    assert shown.exit_code == 2 and message in shown.stderr
