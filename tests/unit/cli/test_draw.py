"""Rounds as pictures: `generate --trace` writes them down, `draw` draws one."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One round of a graph, in which what comes behind b stands behind a too, and one of a tree."""
    pieces = ["r", "a", "<b>", "c"]
    edges = [(0, 1, 0.5, False), (0, 2, 0.25, False), (1, 2, 0.7, True), (2, 3, 0.9, False)]
    graph = {
        "nodes": [{"token": number, "piece": piece} for number, piece in enumerate(pieces)],
        "edges": [dict(zip(("start", "goal", "chance", "alias"), edge, strict=True)) for edge in edges],
    }
    rows = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 3)]
    nodes = [{"token": token, "piece": pieces[token], "parent": parent} for token, parent in rows]
    line = {"text": 0, "round": 0, "nodes": nodes, "accepted": [0, 1, 3, 4], "next": "d"}
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (line | {"graph": graph}, line | {"round": 1})))
    return file


def parts(svg: str, kind: str) -> list[Any]:
    return ElementTree.fromstring(svg).findall(SPACE + kind)


def test_a_graph_is_drawn_with_its_aliases(run: Any, trace: Path, tmp_path: Path) -> None:
    assert run("draw", trace, "--out", tmp_path / "a.svg").exit_code == 0
    svg = (tmp_path / "a.svg").read_text()
    assert [path.get("class") for path in parts(svg, "path")] == ["hit", "", "alias hit", "hit"]
    assert [box.get("class") for box in parts(svg, "rect")] == ["hit"] * 4
    said = [text.text for text in parts(svg, "text")]
    assert said[0] == "text 0, round 0: 5 rows checked, 4 tokens decided"
    assert said[1:] == ["50%", "25%", "90%", "r", "a", "<b>", "c"]


def test_a_tree_is_drawn_row_by_row(run: Any, trace: Path) -> None:
    svg = run("draw", trace, "--round", 1).stdout
    boxes = parts(svg, "rect")
    assert [box.get("class") for box in boxes] == ["hit", "hit", None, "hit", "hit"]
    where = [(int(box.get("x")), int(box.get("y"))) for box in boxes]
    assert len(set(where)) == 5
    columns = sorted({x for x, _ in where})
    assert [columns.index(x) for x, _ in where] == [0, 1, 1, 2, 3]
    assert where[0][1] == where[1][1] == where[3][1] == where[4][1] < where[2][1]


def test_what_generate_traces_can_be_drawn(run: Any, tiny_model: str, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    own = ("--model", tiny_model, "--max-new-tokens", 8, "--ignore-eos", "--rows", 6)
    plain = run("generate", "hello", *own, "--method", "plain")
    shown = run("generate", "hello", *own, "--method", "gsd", "--drafter", tiny_model, "--trace", file)
    assert shown.exit_code == 0 and shown.stdout == plain.stdout
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(len(line["accepted"]) for line in lines) == 8 and all("graph" in line for line in lines)
    for number in range(len(lines)):
        assert parts(run("draw", file, "--round", number).stdout, "rect")


def test_what_cannot_be_drawn(run: Any, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}\n")
    for asked, reason in (
        ((trace, "--round", 7), "has no round 7 of text 0; that text has rounds 0 to 1"),
        ((trace, "--text", 3), "has no round 0 of text 3; it has 1 texts"),
        ((tmp_path / "other",), "other is no trace"),
        ((tmp_path / "none",), "none is no trace"),
        ((trace, "--out", tmp_path / "no" / "a.svg"), "cannot be written"),
    ):
        shown = run("draw", *asked)
        assert shown.exit_code == 2 and reason in shown.stderr.replace("\n", " ")
