"""The files: results.json holds every number, the pages are made from it alone, and earlier results can still be read."""

import json
import lzma
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from foreword.bench import Benchmark, Timing, content, read_results, tables, write_report
from foreword.bench.markdown import cells, markdown, speedup_cell, stops_paying_sentences, widened_sentences
from foreword.bench.page import html
from foreword.bench.published import published_table
from foreword.bench.report import Extras
from foreword.errors import InputError, StorageError
from foreword.model.cost import CostCurve

RESULTS = Path(__file__).parents[3] / "results"
ABOUT: dict[str, Any] = {
    "command": "foreword bench --prompts 'my questions.jsonl'",
    "commit": "0123abc",
    "date": "2026-01-01",
    "machine": "a machine",
    "threads": 2,
    "model": "tiny",
    "dtype": "float32",
}


def timing(contender: str, group: str, tokens: int, rounds: int, seconds: float, loops: float, **more: Any) -> Timing:
    return Timing(group, group, contender, tokens, rounds, seconds, loops, **({"identical": 1} | more))


TIMINGS = (
    timing("plain", "rag", 100, 100, 10.0, 0.1, block=0, first_s=1.0, first_tokens=1),
    timing("fast", "rag", 100, 25, 4.0, 0.1, block=0, first_s=2.0, first_tokens=4),
    timing("plain", "qa", 20, 20, 2.0, 0.0, block=1, first_s=0.5, first_tokens=1),
    timing("fast", "qa", 20, 20, 2.0, 0.5, block=1, identical=0, ties=1, first_s=0.5, first_tokens=1),
)
BENCHMARK = Benchmark(("plain", "fast"), 128, TIMINGS)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "deep" / "down"
    write_report(content([BENCHMARK], ABOUT, TIMINGS), TIMINGS, folder)
    return folder


def test_results_json_holds_every_number_and_its_origin(report: Path) -> None:
    found = json.loads((report / "results.json").read_text())
    assert tuple(Timing(**one) for one in found["timings"]) == TIMINGS
    assert all("block" in one and "why" not in one for one in found["timings"])
    assert found["tables"] == {name: [asdict(row) for row in table] for name, table in tables(BENCHMARK).items()}
    assert (found["max_new_tokens"], found["base"], found["about"]) == (128, "plain", ABOUT)
    assert read_results(report) == read_results(report / "results.json") == found
    file, packed = report / "results.json", report / "results.json.xz"
    packed.write_bytes(lzma.compress(file.read_bytes()))
    file.unlink()
    assert read_results(report) == read_results(packed) == read_results(file) == found


def test_report_md_has_the_tables(report: Path) -> None:
    text = (report / "report.md").read_text()
    assert f"`{ABOUT['command']}`" in text and "at most 128 new tokens" in text
    heads = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert heads == [f"{name}, batch 1" for name in tables(BENCHMARK)]
    assert "| fast | 20.0 | 2.00x | 1250.0 | 32.9 | 2.67 | 17% | 1 of 2, 1 ties |" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {9}


def test_a_speedup_is_printed_with_its_interval() -> None:
    assert speedup_cell({"speedup": 2.0, "low": 1.25, "high": 2.5}) == "2.00x [1.25, 2.50]"
    assert speedup_cell({"speedup": 1.0, "low": 1.0, "high": 1.0}) == "1.00x"  # the base's own


def test_no_speedup_is_printed_for_another_output(tmp_path: Path) -> None:
    timings = tuple(replace(t, ties=0, differing=1) if t.ties else t for t in TIMINGS)
    extras = Extras(spec_bench={"fast": {"overall": {"speed": 20.0, "speedup": 9.0, "mean_accepted_tokens": 2.0}}})
    found = content([replace(BENCHMARK, timings=timings)], ABOUT, timings, extras)
    write_report(found, timings, tmp_path)
    lines = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| fast ")]
    assert "none: other output" in lines[0] and "1 other" in lines[0] and "x" not in lines[0]
    assert "2.50x" in lines[1]  # the group where the outputs are equal
    assert found["spec_bench"]["fast"]["overall"] == {"speed": 20.0, "mean_accepted_tokens": 2.0}


def test_noise_is_called_noise_in_every_report() -> None:
    """13.18x at 2.00 tokens per round: in the JSON, the Markdown, the page and the tables of other pages."""
    timings = (
        timing("plain", "rag", 100, 100, 10.0, 0.1, block=0),
        timing("clover2", "rag", 100, 50, 10 / 13.18, 0.1, block=0),
        timing("medusa", "rag", 100, 60, 8.0, 0.1, block=0),
    )
    benchmark = Benchmark(("plain", "clover2", "medusa"), 128, timings)
    spec_bench = {name: {"overall": {"speed": 20.0, "speedup": 9.0, "mean_accepted_tokens": 2.0}} for name in ("clover2",)}
    found = json.loads(json.dumps(content([benchmark], ABOUT, timings, Extras(spec_bench=spec_bench))))
    cell, row = "13.18x (noise: no more than 2.00 tokens per round)", found["tables"]["overall"][1]
    assert row["noise"] and speedup_cell(row) == cell and not found["tables"]["overall"][2]["noise"]
    assert cell in markdown(found) and cell in html(found) and cell in published_table(found)
    sentence = "Noise, not a speed-up: clover2 13.18x at 2.00 tokens per round (overall)"
    assert sentence in markdown(found) and sentence in html(found)
    assert "the fastest, medusa, over plain" in html(found), "noise gets no card"
    assert "speedup" not in found["spec_bench"]["clover2"]["overall"]


def test_a_report_says_that_the_machine_was_busy() -> None:
    why = "the machine was busy (a thread waited for a core 31% of the time)"
    for busy in ({"others": 0.05, "waited": 0.31, "told": why}, {"others": 0.05, "waited": 0.01, "told": ""}):
        found = json.loads(json.dumps(content([BENCHMARK], ABOUT, TIMINGS, Extras(busy=busy))))
        sentence = "The machine was busy (a thread waited for a core 31% of the time): speeds and speed-ups may be biased."
        assert found["busy"] == busy and (sentence in markdown(found)) == (sentence in html(found)) == bool(busy["told"])


def test_failed_prompts_are_in_the_report(tmp_path: Path) -> None:
    timings = tuple(replace(t, failed=1, tokens=0, why="Error: no room") if t.ties else t for t in TIMINGS)
    extras = Extras(left_out={4: 2}, warm_up_failed={"fast": "Error: cold"})
    found = content([replace(BENCHMARK, timings=timings)], ABOUT, timings, extras)
    text = markdown(found)
    assert "- failed: fast, batch 1, prompt qa: Error: no room" in text and "1 of 1, 1 failed" in text
    assert "Batch 4: 2 later turns are left out" in text and "fast failed in the warm-up: Error: cold" in text
    assert [one["prompt"] for one in found["failures"]] == ["qa"]


def test_a_report_says_whether_costs_can_be_trusted() -> None:
    sentence = "The machine was busy while the costs of rows were measured"
    for steady in (True, False):
        curve = CostCurve((1, 4), (1.0, 2.0), steady=steady)
        found = json.loads(json.dumps(content([BENCHMARK], ABOUT, TIMINGS, Extras(costs=curve.to_dict()))))
        assert found["costs"]["seconds"] == [1.0, 2.0]
        assert (sentence in markdown(found)) == (sentence in html(found)) == (not steady)
    suspect = replace(curve, suspect="a thread waited").to_dict()
    assert f"{sentence} (a thread waited):" in markdown(content([BENCHMARK], ABOUT, TIMINGS, Extras(costs=suspect)))


@pytest.mark.parametrize(
    ("after", "rows"), [([0.304, 0.415, 0.515], []), ([0.33, 0.46, 0.52], [1, 16]), ([0.3, 0.41, 0.4], [64])]
)
def test_a_report_says_whether_the_clock_drift_check_found_something(after: list[float], rows: list[int]) -> None:
    before, sentence = (
        dict(zip((1, 16, 64), (0.303, 0.41, 0.516), strict=True)),
        "Speed-ups may be biased: the clock drift check",
    )
    extras = Extras(drift_check={"before": before, "after": dict(zip(before, after, strict=True))})
    found = json.loads(json.dumps(content([BENCHMARK], ABOUT, TIMINGS, extras)))
    assert (sentence in markdown(found)) == (sentence in html(found)) == bool(rows)
    assert [some for some in before if f"after it with {some} row" in markdown(found)] == rows
    assert ("with 1 row" in markdown(found)) == (1 in rows) and "1 rows" not in markdown(found)
    assert "0.410 ms before the run and 0.460 after it with 16 rows" in markdown(found) or 16 not in rows


def test_a_drift_check_that_failed_and_one_of_a_resumed_run_say_so() -> None:
    lost = content(
        [BENCHMARK], ABOUT, TIMINGS, Extras(drift_check={"before": {1: 0.3}, "after": {"failed": "Error: no room"}})
    )
    assert "The clock drift check could not run: Error: no room" in markdown(lost)
    resumed = {**ABOUT, "resumed": 3}
    found = content([BENCHMARK], resumed, TIMINGS, Extras(drift_check={"before": {1: 0.3}, "after": {1: 0.4}}))
    assert "0.300 ms before it resumed and 0.400 after it with 1 row." in markdown(found)


def test_a_contender_without_answers_has_no_figures() -> None:
    names = " ".join(f"q-{i}" for i in range(32))
    plain = Timing(names, "mixed", "plain", 320, 320, 1.0, 0.0, 32, texts=32, batch=32)
    failed = replace(plain, contender="fast", tokens=0, rounds=0, identical=0, failed=32, why="no room")
    found = content([Benchmark(("plain", "fast"), 64, (plain, failed), 32)], ABOUT, (plain, failed))
    text = markdown(found)
    assert "| fast | - | none: no answers | - | - | 0 of 0, 32 failed |" in text
    assert "prompt q-0 q-1 q-2 q-3 and 28 more: no room" in text and found["failures"][0]["prompt"] == names
    assert "| `fast` | - | none: no answers | - | 0 of 0, 32 failed |" in published_table(json.loads(json.dumps(found)), 32)


def test_a_report_may_be_written_again(report: Path) -> None:
    write_report(content([BENCHMARK], {**ABOUT, "model": None}), (), report)
    assert json.loads((report / "results.json").read_text())["timings"] == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/out.*name a folder"):
        write_report(content([BENCHMARK], ABOUT), (), tmp_path / "file" / "out")


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("bench_*")), ids=lambda folder: folder.name)
def test_results_in_the_repository_can_be_read(folder: Path) -> None:
    found = read_results(folder)
    assert markdown(found).count("## ") >= 1
    for table in [*found["tables"].values(), *found["batches"].values()]:
        assert all(len(cells(row)) == 7 for row in table)


def test_files_that_are_not_results(tmp_path: Path) -> None:
    for text in ('{"about": {}}', "[" * 100_000, "[]", "5", '{"tables": ' + "9" * 5000 + "}", "\xff"):
        (tmp_path / "results.json").write_text(text, encoding="latin-1")
        for place in (tmp_path, tmp_path / "nothing", "", "a\0b", "x" * 5000):
            with pytest.raises(InputError, match="holds no results of `foreword bench`"):
                read_results(place)


# Batches and temperatures -----------------------------------------------------------------------------------------------


def batch(size: int, temperature: float = 0.0, **seconds: float) -> Benchmark:
    more: dict[str, Any] = {"identical": 2, "texts": 2, "batch": size, "temperature": temperature}
    timings = (timing(name, "mixed", 120, 60, spent, 0.0, **more) for name, spent in seconds.items())
    warm = {"plain": 1.5, "fast": 0.75, "late": 0.75}
    return Benchmark(tuple(seconds), 64, tuple(timings), size, warm, temperature)


BATCHES = [
    batch(1, plain=10.0, fast=5.0, late=8.0),
    batch(4, plain=6.0, fast=4.0, late=6.0),
    batch(8, plain=4.0, fast=5.0, late=3.2),
]


def test_a_resumed_run_says_so() -> None:
    """The warm-up before the interruption is unknown."""
    resumed = content(BATCHES, {**ABOUT, "resumed": 3})
    assert "interrupted after 3 blocks of prompts and resumed" in markdown(resumed)
    assert "not included in the figures above (since the run resumed): batch 1: 3.0 s" in markdown(resumed)
    resumed["warm_up_s"] = {"8": {}}
    assert "Warm-up" not in markdown(resumed) and "interrupted" not in markdown(content(BATCHES, ABOUT))


def test_batches_in_the_files(tmp_path: Path) -> None:
    widened = {"times": 8, "parameters": 7_010_000_000, "prompts": 4, "tokens": 200, "identical": 3, "ties": 1}
    found = content(BATCHES, {**ABOUT, "model": "tiny, grown r=8", "grown": widened})
    write_report(found, (), tmp_path)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert list(kept["batches"]) == ["1", "4", "8"] and kept["stops_paying"] == {"fast": 8, "late": None}
    assert kept["batches"]["4"][1]["speedup"] == 1.5 and kept["warm_up_s"]["8"]["fast"] == 0.75
    text = (tmp_path / "report.md").read_text()
    assert "## overall, batch 8\n\n| contender | tokens/s | over plain | tokens per round |" in text
    assert "| fast | 24.0 | 0.80x |" in text and "| late | 37.5 | 1.25x |" in text
    assert "| contender | batch 1 | batch 4 | batch 8 |" in text and "| fast | 2.00x | 1.50x | 0.80x |" in text
    assert "- stops paying at 8: fast\n- still pays at 8, the largest tried: late\n" in text
    assert "not included in the figures above: batch 1: 3.0 s" in text
    assert "tiny, grown r=8" in text and widened_sentences(widened) in text
    for words in ("grown r=8", "7.01 B", "3 of the answers equal its original's", "1 in all"):
        assert words in widened_sentences(widened)
    assert stops_paying_sentences({"fast": 2, "late": 4, "slow": 2}, [2, 4]) == [
        "pays at no batch tried: fast, slow",
        "stops paying at 4: late",
    ]


def test_batches_alone_have_no_tables_of_groups() -> None:
    text = markdown(content(BATCHES[1:], ABOUT))
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == ["## overall, batch 4", "## overall, batch 8", "## over plain by batch"]


def test_each_temperature_has_its_tables() -> None:
    extras = Extras(spec_bench={"fast": {"overall": {"speed": 20.0, "mean_accepted_tokens": 2.0}}})
    found = content([*BATCHES, batch(1, 0.8, plain=12.0, fast=8.0)], ABOUT, extras=extras)
    assert found["temperature"] == 0 and found["tables"]["overall"][1]["speedup"] == 2.0
    assert found["temperatures"]["0.8"]["tables"]["overall"][1]["speedup"] == 1.5
    text = markdown(found)
    assert "## overall, batch 1, T=0.8" in text and "Greedy and T=0.8, at most" in text
    assert "## As Spec-Bench counts, greedy\n" in text
