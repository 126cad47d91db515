"""Tokens per round by tree and rows: they do not fall with more rows, and the printed figures are those in the file."""

from collections.abc import Callable
from typing import Any

from typer.testing import Result

from tree_shapes import tree_shapes

Study = Callable[..., tuple[Result, Any]]


def test_every_drafter_tree_and_number_of_rows(study: Study) -> None:
    options = "--drafters {drafter} --rows 1,3,9 --kinds static,best --levels 1 --max-new-tokens 24"
    done, written = study(tree_shapes, "medusa", options, heads=2)
    found = written["trees"]
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


def test_nodes_are_printed_if_they_carry_pseudo_rows(study: Study) -> None:
    """One drafter, two methods: with the same number of nodes both draft the same."""
    options = "--drafters {drafter},firp={drafter} --kinds static --rows 9 --nodes 5 --max-new-tokens 24"
    done, written = study(tree_shapes, "hidden_transfer", options, steps=2)
    carrying, alone = written["trees"]
    assert [one["method"] for one in (carrying, alone)] == ["hidden_transfer", "firp"]
    assert 1 < carrying["nodes"]["9"] < 9 and alone["nodes"]["9"] == 9
    assert f"9 ({carrying['nodes']['9']} nodes): {carrying['tokens_per_round']['9']:.2f}" in done.output
    one, other = carrying["by_nodes"]["5"], alone["by_nodes"]["5"]
    assert (one["rows"], one["nodes"], other["rows"], other["nodes"]) == (15, 5, 5, 5)
    assert one["tokens_per_round"] == other["tokens_per_round"] >= 1


def test_chains_next_to_the_tree(study: Study) -> None:
    """Trees have the given rows; a chain as long as its tree is left out."""
    options = "--drafters echo={drafter} --rows 2,6 --kinds best --chains 0,3 --max-new-tokens 24"
    done, written = study(tree_shapes, "clover2", options, heads=2)
    (found,) = written["trees"]
    assert list(found["by_chains"]["0"]) == ["2", "6"] and list(found["by_chains"]["3"]) == ["6"]
    assert 1 <= found["by_chains"]["0"]["6"] <= found["by_chains"]["3"]["6"]
    assert f"9: {found['by_chains']['3']['6']:.2f}" in done.output and "and 3 looked up" in done.output
