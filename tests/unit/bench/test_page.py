"""The page has every chart with figures and none without, is self-contained, and has no scripts."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from foreword.bench import Benchmark, Timing, content, read_results
from foreword.bench.page import html
from foreword.bench.report import Extras
from foreword.bench.roofline import knee
from foreword.bench.svg import bars, horizontal_bars, lines, nice_step, number, short, stacked

RESULTS = Path(__file__).parents[3] / "results"
ABOUT: dict[str, Any] = {
    "command": "foreword bench",
    "commit": "0",
    "date": "-",
    "machine": "<m>",
    "threads": 2,
    "model": "a&b",
}
NAMES = ("plain", "fast", "clover=runs/x/clover")


def benchmark(batch: int) -> Benchmark:
    timings = [
        Timing("q", group, name, 100, 100 // (1 + place), 10.0 / (1 + place), 0.1, 1, batch=batch, block=block, first_s=0.1)
        for block, group in enumerate(("rag", "math_reasoning"))
        for place, name in enumerate(NAMES)
    ]
    timings = [t if t.contender == "plain" else Timing(**{**vars(t), "drafted": 40, "kept": [10, 5, 5]}) for t in timings]
    return Benchmark(NAMES, 128, tuple(timings), batch)


def roofline() -> dict[str, Any]:
    shares = {"bytes": 1, "operations": 1, "bandwidth_share": 0.5, "operations_share": 0.1, "floor_ms": 2.0}
    passes = [{"rows": rows, "ms": 10 + rows, **shares} for rows in (1, 2, 4, 8, 16, 32, 64)]
    one = {"round_ms": 5.0, "round_cost": 1.2, "tokens_per_round": 2.0, "break_even_tokens_per_round": 1.2}
    return {
        "bytes_per_second": 2e10,
        "operations_per_second": 1e11,
        "context": 200,
        "passes": passes,
        "knee": knee(passes),
        "methods": {"plain": one, "fast": {"failed": "no answers"}},
        "split": {"plain": {"draft": 0.0, "verify": 4.0, "accept": 0.5, "host": 0.5}, "fast": {"failed": "no answers"}},
    }


class Checked(HTMLParser):
    """Collect headings; fail on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.heads: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.heads.append(data)


def test_the_whole_page() -> None:
    found = content([benchmark(1), benchmark(4)], ABOUT, extras=Extras(roofline=roofline()))
    text = html(found)
    charts = ["Speed-up", "Tokens per round", "Acceptance by depth", "Speed-up by batch size", "Time of a round"]
    heads = [*charts, "Cost of a pass", "Break-even", "Figures", "Origin"]
    assert Checked(text).heads == heads and text.count("<svg") == 6
    assert "a&amp;b" in text and "&lt;m&gt;" in text and "http" not in text
    assert "fast, rag: 2x" in text and "fast, 2: 0.25" in text and "knee" in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_the_page_says_which_temperature_its_charts_show() -> None:
    sampled = replace(benchmark(1), temperature=0.8)
    assert "The charts show" not in html(content([sampled], ABOUT))
    assert "Greedy and T=0.8" in (text := html(content([benchmark(1), sampled], ABOUT)))
    assert "The charts show greedy outputs." in text


def test_charts_without_figures_are_left_out() -> None:
    plain = Benchmark(("plain",), 128, tuple(t for t in benchmark(1).timings if t.contender == "plain"))
    assert Checked(html(content([plain], ABOUT))).heads == ["Figures", "Origin"]


def test_without_batch_1_the_charts_are_by_batch_size() -> None:
    text = html(content([benchmark(8), benchmark(32)], ABOUT))
    charts = ["Speed-up", "Tokens per round", "Acceptance by depth", "Speed-up by batch size"]
    assert Checked(text).heads == [*charts, "Figures", "Origin"]
    assert text.count(">batch 8<") == text.count(">batch 32<") == 2
    lost = {"tokens": 0, "rounds": 0, "identical": 0, "failed": 1}
    failed = [Timing(**{**vars(t), **(lost if t.contender == "fast" else {})}) for t in benchmark(32).timings]
    text = html(content([benchmark(8), Benchmark(NAMES, 128, tuple(failed), 32)], ABOUT))
    assert "fast, batch 8: 2" in text and "fast, batch 32" not in text and text.count(">–</text>") == 2


def test_another_output_has_a_dash_instead_of_a_bar() -> None:
    timings = [Timing(**{**vars(t), "differing": t.contender == "fast"}) for t in benchmark(1).timings]
    text = html(content([Benchmark(NAMES, 128, tuple(timings))], ABOUT))
    assert "fast, rag: 2x" not in text and ">–</text>" in text and "none: other output" in text


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("bench_*")), ids=lambda folder: folder.name)
def test_results_in_the_repository_can_be_drawn(folder: Path) -> None:
    assert "Figures" in Checked(html(read_results(folder))).heads


@pytest.mark.parametrize(
    "draw",
    [
        lambda: bars(["a", "b"], {"x": [1.0, None], "y": [2.0, 0.5]}, "it", "x", {"x": [(0.5, 1.5), None]}, 1.0),
        lambda: bars(["a"], {"x": [None]}, "it"),
        lambda: horizontal_bars(["a", "b"], {"x": [1.0, None], "y": [2.0, 0.5]}, "it", "x", {"x": [(0.5, 1.5), None]}, 1.0),
        lambda: horizontal_bars(["a"], {"x": [None]}, "it"),
        lambda: lines({"x": [(1, 1.0), (64, 2.0)]}, "it", "across", "up", doubling=True, mark=(8, "here")),
        lambda: lines({"x": [(1, 0.0)]}, "it", "across", "up"),
        lambda: stacked({"x": {"a": 1.0, "b": 0.0}}, "it", " ms"),
        lambda: stacked({"x": {"a": 0.0}}, "it", " ms"),
    ],
)
def test_charts_are_svg_inside_their_frame(draw: Callable[[], str]) -> None:
    root = ElementTree.fromstring(draw())
    wide, high = map(float, root.attrib["viewBox"].split()[2:])
    for shape in root.iter():
        for name, most in (("x", wide), ("cx", wide), ("x1", wide), ("y", high), ("cy", high), ("y2", high)):
            assert 0 <= float(shape.attrib.get(name, 0)) <= most
        assert float(shape.attrib.get("width", 0)) >= 0


def test_numbers_and_names() -> None:
    assert [number(value) for value in (0, 1, 1.5, 2.25, 0.031, 123.4)] == ["0", "1", "1.5", "2.25", "0.031", "123"]
    assert [nice_step(most) for most in (1, 3, 200)] == [0.2, 1, 50]
    assert [short(name) for name in ("plain", "clover=runs/clover", "clover=runs/b/")] == ["plain", "clover", "clover=b"]
    assert len(short("medusa=" + "x" * 60)) == 26
