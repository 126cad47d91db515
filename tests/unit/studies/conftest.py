"""Run a study on a drafter of the tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

import foreword
from doubles import with_random_weights
from foreword.drafters import saved


@pytest.fixture
def study(folders: dict[str, Path], own_home: Path, tmp_path: Path) -> Callable[..., tuple[Result, Any]]:
    """Return a runner: study(tree_shapes, "medusa", "--drafters {drafter} --rows 3", heads=2) runs the command with a
    drafter of the tiny model on two prompts, and returns its output and the JSON it wrote."""

    def run_study(command: Callable[..., None], method: str, options: str, **trained: Any) -> tuple[Result, Any]:
        drafter, prompts, out = tmp_path / method, tmp_path / "prompts.txt", tmp_path / "found.json"
        with foreword.load(folders["llama"], "plain", slots=1) as llm:
            saved.save(with_random_weights(method, llm.model, **trained), drafter, llm.model)
        prompts.write_text("the words that come\nbefore the words\n", encoding="utf-8")
        own = Typer()
        own.command()(command)
        given = f"{options.format(drafter=drafter)} --prompts {prompts} --out {out} --model {folders['llama']}"
        done = CliRunner().invoke(own, given.split(), catch_exceptions=False)
        return done, json.loads(out.read_text(encoding="utf-8"))

    return run_study
