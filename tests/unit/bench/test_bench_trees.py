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
    more = f"--kinds static,best --levels 1 --max-new-tokens 24 --model {folders['llama']}"
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
        assert one["nodes"] == {"1": 1, "3": 3, "9": 9} and one["by_nodes"] == {}
        assert 1 == one["by_levels"]["1"]["1"] <= one["by_levels"]["1"]["9"] <= 2 and "1 levels" in done.output


def test_nodes_are_told_where_they_carry_rows(folders: dict[str, Path], own_home: Path, tmp_path: Path) -> None:
    """One drafter, two methods: with equally many nodes both draft the same."""
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        saved.save(taught("hidden_transfer", llm.model, steps=2), tmp_path / "one", llm.model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the words that come\nbefore the words\n", encoding="utf-8")
    command = Typer()
    command.command()(trees)
    asked = f"--drafters {tmp_path / 'one'},firp={tmp_path / 'one'} --prompts {prompts} --out {tmp_path / 'found.json'}"
    more = f"--kinds static --rows 9 --nodes 5 --max-new-tokens 24 --model {folders['llama']}"
    done = CliRunner().invoke(command, f"{asked} {more}".split(), catch_exceptions=False)
    carrying, alone = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["trees"]
    assert [one["method"] for one in (carrying, alone)] == ["hidden_transfer", "firp"]
    assert 1 < carrying["nodes"]["9"] < 9 and alone["nodes"]["9"] == 9
    assert f"9 ({carrying['nodes']['9']} nodes): {carrying['tokens_per_round']['9']:.2f}" in done.output
    one, other = carrying["by_nodes"]["5"], alone["by_nodes"]["5"]
    assert (one["rows"], one["nodes"], other["rows"], other["nodes"]) == (15, 5, 5, 5)
    assert one["tokens_per_round"] == other["tokens_per_round"] >= 1


def test_chains_hang_beside_the_tree(folders: dict[str, Path], own_home: Path, tmp_path: Path) -> None:
    """Of as many rows each; one that would be as long as its tree is left out."""
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        saved.save(taught("clover2", llm.model, heads=2), tmp_path / "clover2", llm.model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the words that come\nbefore the words\n", encoding="utf-8")
    command = Typer()
    command.command()(trees)
    asked = f"--drafters echo={tmp_path / 'clover2'} --prompts {prompts} --out {tmp_path / 'found.json'} --rows 2,6"
    more = f"--kinds best --chains 0,3 --max-new-tokens 24 --model {folders['llama']}"
    done = CliRunner().invoke(command, f"{asked} {more}".split(), catch_exceptions=False)
    (found,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["trees"]
    assert list(found["by_chains"]["0"]) == ["2", "6"] and list(found["by_chains"]["3"]) == ["6"]
    assert 1 <= found["by_chains"]["0"]["6"] <= found["by_chains"]["3"]["6"]
    assert f"9: {found['by_chains']['3']['6']:.2f}" in done.output and "and 3 looked up" in done.output
