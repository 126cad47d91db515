"""The command line on the default model: the output, figures and exit codes that a user gets."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import foreword
from foreword.cli.app import app

pytestmark = pytest.mark.model

Run = Callable[..., subprocess.CompletedProcess[str]]
FEW = ("--max-new-tokens", "12", "--threads", "1")


@pytest.fixture
def command(model_home: Path) -> Run:
    """Runs `python -m foreword` in a separate process, with pipes. Nothing keeps the libraries below quiet but the command.
    The model is there: its download would be reported on stderr."""
    environment = os.environ | {"PYTHONPATH": str(Path(foreword.__file__).parents[1]), "FOREWORD_HOME": str(model_home)}

    def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "foreword", *args]
        return subprocess.run(line, input=stdin, capture_output=True, text=True, env=environment, check=False)

    return run


@pytest.fixture
def run(in_model_home: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in this process, and undoes what it sets."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("TRANSFORMERS_VERBOSITY", "error")):
        monkeypatch.setenv(name, value)
    return lambda *args: CliRunner().invoke(app, args)


def test_generate_in_a_pipe_prints_only_the_output(command: Run, run: Callable[..., Result]) -> None:
    plain = run("generate", "What is the capital of France?", "--method", "plain", *FEW)
    fast = command("generate", *FEW, stdin="What is the capital of France?\n")
    assert plain.exit_code == fast.returncode == 0
    assert plain.stdout == fast.stdout and "Paris" in fast.stdout
    assert fast.stderr == ""


def test_chat_reads_only_the_new_turn(command: Run) -> None:
    ran = command("chat", "--json", *FEW, stdin="My name is Ada.\nWhat is my name?\n")
    first, second = map(json.loads, ran.stdout.splitlines())
    assert ran.returncode == 0 and ran.stderr == ""
    assert second["stats"]["reused_tokens"] >= first["stats"]["prompt_tokens"]


def test_the_default_checks_of_doctor(run: Callable[..., Result]) -> None:
    ran = run("doctor", "--json", "--threads", "1")
    found = json.loads(ran.stdout)
    assert ran.exit_code == 0 and found["usable"] and not found["full"]
    tested = [check for check in found["checks"] if check["check"].startswith("self-test")]
    assert len(tested) == 2 and all(check["said"].startswith("same 32 tokens as plain") for check in tested)


def test_prove_finds_no_bug(run: Callable[..., Result]) -> None:
    ran = run("prove", "--json", "--limit", "1", "--methods", "prompt_lookup,clover2", *FEW)
    found = json.loads(ran.stdout)
    assert ran.exit_code == 0 and found["bugs"] == 0
    assert [proof["identical"] for proof in found["methods"].values()] == [1, 1]
