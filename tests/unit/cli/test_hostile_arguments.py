"""Absurd arguments: every command answers with a line and status 2, never with a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

HUGE = "9" * 20
LONG = "x" * 5000


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"prompt": "hello"}) + "\n")
    return file


def refused(result: Any, message: str) -> None:
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.exception
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--threads", HUGE), "threads is 99999999999999999999"),
        (("--n", HUGE), "ask for a whole number of samples"),
        (("--prompts", LONG), "cannot read the prompt file"),
        (("--trace", LONG), "cannot be written"),
        (("--drafter", LONG), "cannot be read"),
        (("--chat-template", LONG), "cannot read"),
        (("--chat-template-kwargs", "[" * 100_000), "is not JSON"),
        (("--method", "medusa=~nobody-at-all/x"), "is missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_generate(run: Any, tiny_model: str, arguments: tuple[str, str], message: str) -> None:
    prompt = () if "--prompts" in arguments else ("hello",)
    refused(run("generate", *prompt, "--model", tiny_model, "--max-new-tokens", 2, *arguments), message)


@pytest.mark.parametrize("model", [LONG, "~nobody-at-all/x", "/dev/null", "a\0b"], ids=lambda model: repr(model[:20]))
def test_invalid_models(run: Any, model: str) -> None:
    refused(run("generate", "hello", "--model", model, "--method", "plain"), "folder")


def test_a_limit_beyond_all_files(run: Any, tiny_model: str, asked: Path) -> None:
    own = ("--model", tiny_model, "--max-new-tokens", 2, "--method", "plain")
    found = run("generate", "--prompts", asked, "--limit", HUGE, *own)
    assert found.exit_code == 0 and found.exception is None


def test_a_seed_beyond_all_generators(run: Any, tiny_model: str, asked: Path, tmp_path: Path) -> None:
    own = ("--model", tiny_model)
    assert run("distill", *own, "--prompts", asked, "--out", tmp_path / "data", "--max-new-tokens", 4).exit_code == 0
    for seed in (HUGE, f"-{HUGE}"):
        trained = run("train", "medusa", *own, "--data", tmp_path / "data", "--out", tmp_path / "out", "--seed", seed)
        refused(trained, "seed is")


def test_endless_files(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.cli.draw.LONGEST_LINE", 1000)
    monkeypatch.setattr("foreword.text.prompts.LONGEST_LINE", 1000)
    monkeypatch.setattr("foreword.files.LARGEST", 1000)
    refused(run("draw", "/dev/zero"), "/dev/zero is not a trace")
    refused(run("bench", "compare", "/dev/zero", "/dev/zero"), "/dev/zero holds no results")
    refused(run("bench", "table", "--into", "/dev/zero"), "/dev/zero is not a regular file")
    refused(run("generate", "--prompts", "/dev/zero"), "cannot read the prompt file /dev/zero")


def test_a_folder_name_that_is_too_long(run: Any, tiny_model: str) -> None:
    refused(run("export", "--out", LONG, "--model", tiny_model), "name a new or an empty folder")
