"""Tokens a round by tree and rows: more rows bring no fewer, and what is printed is what is written."""

import json
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

import foreword
from doubles import taught
from foreword.bench.trees import trees
from foreword.methods import saved


def test_every_drafter_tree_and_number_of_rows(folders: dict[str, Path], own_home: Path, tmp_path: Path) -> None:
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        saved.save(taught("medusa", llm.model, heads=2), tmp_path / "medusa", llm.model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the words that come\nbefore the words\n", encoding="utf-8")
    command = Typer()
    command.command()(trees)
    asked = f"--drafters {tmp_path / 'medusa'} --prompts {prompts} --out {tmp_path / 'found.json'} --rows 1,3,9"
    more = f"--kinds static,best --max-new-tokens 24 --model {folders['llama']}"
    done = CliRunner().invoke(command, f"{asked} {more}".split(), catch_exceptions=False)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["trees"]
    assert done.exit_code == 0 and [(one["method"], one["tree"]) for one in found] == [
        ("medusa", "static"),
        ("medusa", "best"),
    ]
    for one in found:
        alone, few, many = one["tokens_per_round"].values()
        assert alone == 1 <= few <= many
        assert f"9: {many:.2f}" in done.output
