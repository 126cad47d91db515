"""`foreword models` and `foreword pull`: what is listed, and what is refused before anything is fetched."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from foreword.hub.named import NAMED


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.delenv("FOREWORD_MIRROR", raising=False)
    return tmp_path


def test_models_are_listed_with_what_is_on_disk(run: Any, home: Path) -> None:
    (home / "models" / "gemma-3-270m-mirror").mkdir(parents=True)
    shown = run("models")
    assert shown.exit_code == 0 and all(name in shown.stdout for name in NAMED)
    listed = {row["name"]: row for row in json.loads(run("models", "--json").stdout)["models"]}
    assert listed["gemma-3-270m"]["on_disk"] == "copy" and listed["tinyllama-1.1b-chat"]["on_disk"] == ""
    assert listed["qwen2.5-coder-1.5b-instruct"]["hub_id"] == "Qwen/Qwen2.5-Coder-1.5B-Instruct"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("nothing",), "no model is called nothing; `foreword models` lists the names"),
        (("qwen2.5",), "qwen2.5 is the beginning of several names"),
        (("gemma-3", "--parts", "a", "--from", "b"), "--parts writes parts and --from reads them; give one of them"),
        (("gemma-3", "--parts", "a", "--part-size", "48 miles"), "give a number of bytes, or a size such as 48MiB"),
        (("gemma-3", "--from", "nowhere"), "nowhere holds no parts.json"),
    ],
)
def test_invalid_arguments(run: Any, home: Path, asked: Any, reason: str) -> None:
    shown = run("pull", *asked)
    assert shown.exit_code == 2 and reason in shown.stderr and "Traceback" not in shown.stderr
    assert not (home / "models").exists() or not any((home / "models").iterdir())


def test_any_command_may_ask_for_copies(run: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_MIRROR", "0")  # which the command changes, and the test puts back
    shown = run("generate", "the words", "--model", tiny_model, "--mirror", "--method", "plain", "--max-new-tokens", "2")
    assert shown.exit_code == 0 and os.environ["FOREWORD_MIRROR"] == "1"
