"""Rounds as pictures: `generate --trace` records them, `draw` draws one."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from foreword.cli.picture import DARK, LEGEND, LIGHT, Palette

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace with one round of a graph, in which b also follows a, and one round of a tree."""
    pieces = ["r", "a", "<b>", "c"]
    edges = [(0, 1, 0.5, False), (0, 2, 0.25, False), (1, 2, 0.7, True), (2, 3, 0.9, False)]
    graph = {
        "nodes": [{"token": number, "piece": piece} for number, piece in enumerate(pieces)],
        "edges": [dict(zip(("start", "goal", "chance", "alias"), edge, strict=True)) for edge in edges],
    }
    rows = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 3)]
    nodes = [{"token": token, "piece": pieces[token], "parent": parent} for token, parent in rows]
    line = {"text": 0, "round": 0, "nodes": nodes, "accepted": [0, 1, 3, 4], "next": "d", "next_token": 4}
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (line | {"graph": graph}, line | {"round": 1})))
    return file


def elements(svg: str, kind: str) -> list[Any]:
    return ElementTree.fromstring(svg).findall(SPACE + kind)


def boxes_of(svg: str) -> list[tuple[str, str]]:
    """Return token and kind of every node."""
    return [(box[0].text.partition(": ")[0], box.get("class")) for box in elements(svg, "rect")]


def legend_of(svg: str) -> list[str]:
    (legend,) = (group for group in elements(svg, "g") if group.get("class") == "legend")
    return [text.text for text in legend.findall(SPACE + "text")]


def with_changes(file: Path, **changes: Any) -> Path:
    """Rewrite the trace as its tree with changes."""
    line = json.loads(file.read_text().splitlines()[1])
    file.write_text(json.dumps(line | {"round": 0} | changes) + "\n")
    return file


def test_a_graph_is_drawn_with_its_aliases(run: Any, trace: Path, tmp_path: Path) -> None:
    assert run("draw", trace, "--out", tmp_path / "a.svg").exit_code == 0
    svg = (tmp_path / "a.svg").read_text()
    assert [path.get("class") for path in elements(svg, "path")] == ["checked", "hit", "alias hit", "hit", "chosen"]
    assert boxes_of(svg) == [("r", "root"), ("a", "hit"), ("<b>", "hit"), ("c", "hit"), ("d", "chosen")]
    texts = [text.text for text in elements(svg, "text")]
    assert texts[0] == "sequence 0, round 0: 5 rows checked, 4 tokens decided"
    assert texts[1:] == ["r", "a", "<b>", "c", "d", "50%", "25%", "90%"]
    assert "alias: drafted once, shared" in legend_of(svg)


def test_a_tree_is_drawn_row_by_row(run: Any, trace: Path) -> None:
    svg = run("draw", trace, "--round", 1).stdout
    boxes = elements(svg, "rect")
    assert [box.get("class") for box in boxes] == ["root", "hit", "checked", "hit", "hit", "chosen"]
    where = [(int(box.get("x")), int(box.get("y"))) for box in boxes]
    assert len(set(where)) == 6
    columns = sorted({x for x, _ in where})
    assert [columns.index(x) for x, _ in where] == [0, 1, 1, 2, 3, 4]
    assert where[0][1] == where[1][1] == where[3][1] == where[4][1] == where[5][1] < where[2][1]


def test_unchecked_candidates_are_drawn_differently(run: Any, trace: Path) -> None:
    """The model read only the root and `a`; the rest of the graph was not checked."""
    line = json.loads(trace.read_text().splitlines()[0])
    changed = line | {"nodes": line["nodes"][:2], "accepted": [0], "next": "d"}
    trace.write_text(json.dumps(changed) + "\n")
    svg = run("draw", trace).stdout
    assert boxes_of(svg) == [
        ("r", "root"), ("a", "checked"), ("<b>", "unchecked"), ("c", "unchecked"), ("d", "chosen")
    ]  # fmt: skip
    kinds = [path.get("class") for path in elements(svg, "path")]
    assert kinds == ["unchecked", "alias unchecked", "unchecked", "checked", "chosen"]
    assert {"checked, not accepted", "drafted, not checked", "the model's own token"} < set(legend_of(svg))


def test_a_node_is_accepted_if_one_of_its_paths_was(run: Any, trace: Path) -> None:
    """Row 2 is `b` after the root, accepted. Row 3 is the same node after `a`, not accepted."""
    line = json.loads(trace.read_text().splitlines()[0])
    trace.write_text(json.dumps(line | {"nodes": line["nodes"][:4], "accepted": [0, 2]}) + "\n")
    svg = run("draw", trace).stdout
    assert boxes_of(svg) == [("r", "root"), ("a", "checked"), ("<b>", "hit"), ("c", "unchecked"), ("d", "chosen")]
    assert [path.get("class") for path in elements(svg, "path")] == [
        "unchecked",
        "checked",
        "alias checked",
        "hit",
        "chosen",
    ]


def test_the_token_of_the_model_is_shown_if_nothing_was_accepted(run: Any, trace: Path) -> None:
    svg = run("draw", with_changes(trace, accepted=[0], next=" d")).stdout
    assert boxes_of(svg)[-1] == ("␣d", "chosen")
    (root, *_, chosen), (*_, edge) = elements(svg, "rect"), elements(svg, "path")
    assert edge.get("class") == "chosen" and chosen.get("y") == root.get("y")
    assert "accepted" not in legend_of(svg)


def test_a_final_candidate_is_the_token_of_the_model(run: Any, trace: Path) -> None:
    """Row 1 was right and the length limit ended the round there: it is one token, not a wrong candidate and another."""
    svg = run("draw", with_changes(trace, accepted=[0], next="a", next_token=1)).stdout
    assert boxes_of(svg) == [("r", "root"), ("a", "chosen"), ("<b>", "checked"), ("<b>", "checked"), ("c", "checked")]


@pytest.mark.parametrize("text", [0, 10**60])
def test_everything_fits_into_the_picture(run: Any, trace: Path, text: int) -> None:
    """Title, legend and tokens, by the largest width of a monospaced font."""
    rows = [{"token": 0, "piece": "the root of it all", "parent": 0}]
    svg = run("draw", with_changes(trace, text=text, nodes=rows, accepted=[0], next="検証された候補"), "--text", text).stdout
    width = int(ElementTree.fromstring(svg).get("width") or 0)
    texts = [text for text in ElementTree.fromstring(svg).iter(SPACE + "text") if "end" not in text.get("class", "").split()]
    assert len(texts) >= 5
    for shown in texts:
        size = 10 if "small" in shown.get("class", "") else 12
        places = sum(2 if character > "⺀" else 1 for character in shown.text or "")
        assert int(shown.get("x", 0)) + 0.602 * size * places <= width, shown.text
    title = " ".join(shown.text or "" for shown in elements(svg, "text")[:-2])
    assert title.replace(" ", "") == f"sequence{text},round0:1rowchecked,1tokendecided"


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_enough_contrast(palette: Palette) -> None:
    """The bounds of WCAG 2.1: 4.5 for text, 3 for lines."""
    assert contrast(palette.ink, palette.ground) >= 4.5 and contrast(palette.alias, palette.ground) >= 3
    for kind in LEGEND:
        assert contrast(palette.text[kind], palette.fill[kind]) >= 4.5, kind
        assert contrast(palette.stroke[kind], palette.ground) >= 3, kind


def test_a_picture_has_both_palettes(run: Any, trace: Path) -> None:
    (style,) = elements(run("draw", trace).stdout, "style")
    light, dark = style.text.split("@media (prefers-color-scheme:dark)")
    assert LIGHT.fill["chosen"] in light and DARK.fill["chosen"] in dark


def test_traces_of_generate_can_be_drawn(run: Any, tiny_model: str, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    own = ("--model", tiny_model, "--max-new-tokens", 8, "--ignore-eos", "--rows", 6)
    plain = run("generate", "hello", *own, "--method", "plain")
    shown = run("generate", "hello", *own, "--method", "gsd", "--drafter", tiny_model, "--trace", file)
    assert shown.exit_code == 0 and shown.stdout == plain.stdout
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(len(line["accepted"]) for line in lines) == 8 and all("graph" in line for line in lines)
    for number, line in enumerate(lines):
        kinds = [kind for _, kind in boxes_of(run("draw", file, "--round", number).stdout)]
        assert kinds.count("hit") == len(line["accepted"]) - 1 and kinds.count("chosen") == 1


def test_refusals(run: Any, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}\n")
    (tmp_path / "half").write_text('{"text": 0, "round": 0, "nodes": [{}], "accepted": [0]}\n')
    (tmp_path / "nested").write_text("[" * 100_000)
    for asked, reason in (
        ((trace, "--round", 7), "has no round 7 of request 0; that request has rounds 0 to 1"),
        ((trace, "--text", 3), "has no round 0 of request 3; it has 1 requests"),
        ((tmp_path / "other",), "other is not a trace"),
        ((tmp_path / "none",), "none is not a trace"),
        ((tmp_path / "half",), "half is not a trace"),
        ((tmp_path / "nested",), "nested is not a trace"),
        ((trace, "--out", tmp_path / "no" / "a.svg"), "cannot be written"),
    ):
        shown = run("draw", *asked)
        assert shown.exit_code == 2 and reason in shown.stderr.replace("\n", " ")
