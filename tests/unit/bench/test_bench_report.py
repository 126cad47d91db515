"""Tables pooled as they say, and files that tell where their numbers come from."""

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import foreword
from foreword.bench import report as report_module
from foreword.bench.report import Row, content, facts, grown_words, rows, stop_words, stops_paying, tables, write_report
from foreword.bench.run import Benchmark, Timing
from foreword.errors import StorageError


def timing(contender: str, group: str, tokens: int, rounds: int, seconds: float, loops: float, same: bool = True) -> Timing:
    return Timing("q", group, contender, tokens, rounds, seconds, None, loops, int(same))


BENCHMARK = Benchmark(
    contenders=("plain", "fast"),
    max_new_tokens=128,
    timings=(
        timing("plain", "rag", 100, 100, 10.0, 0.1),
        timing("fast", "rag", 100, 25, 4.0, 0.1),
        timing("plain", "qa", 20, 20, 2.0, 0.0),
        timing("fast", "qa", 20, 20, 2.0, 0.5, same=False),
        timing("plain", "translation", 60, 60, 3.0, 0.0),
        timing("fast", "translation", 60, 30, 2.0, 0.0),
    ),
)


def test_figures_are_pooled_over_tokens_and_seconds() -> None:
    """Not averaged over prompts: the long answer weighs more."""
    plain, fast = rows(BENCHMARK)
    assert plain == Row("plain", 180, 12.0, 1.0, 1.0, pytest.approx(10 / 180), 3, 3)
    assert fast == Row("fast", 180, 22.5, 22.5 / 12, 180 / 75, pytest.approx(20 / 180), 2, 3)


def test_a_table_of_some_groups() -> None:
    plain, fast = rows(BENCHMARK, ["rag", "qa"])
    assert (plain.tokens_per_second, fast.tokens_per_second) == (10.0, 20.0)
    assert (fast.speedup, fast.tokens_per_round, fast.prompts) == (2.0, 120 / 45, 2)


def test_without_plain_speeds_are_over_the_first() -> None:
    timings = tuple(one for one in BENCHMARK.timings if one.contender == "fast")
    others = tuple(timing("hf", one.group, one.tokens, one.tokens, 2 * one.seconds, 0.0) for one in timings)
    found = rows(Benchmark(("hf", "fast"), 128, others + timings))
    assert [row.speedup for row in found] == [1.0, 2.0]


def test_tables_overall_where_text_is_copied_and_by_group() -> None:
    found = tables([BENCHMARK])
    assert list(found) == ["overall", "rag + translation", "rag", "qa", "translation"]
    assert found["rag + translation"] == rows(BENCHMARK, ["rag", "translation"])
    assert found["qa"] == rows(BENCHMARK, ["qa"])


def test_one_group_of_copied_text_needs_no_sum() -> None:
    some = Benchmark(("plain",), 8, (timing("plain", "rag", 8, 8, 1.0, 0.0), timing("plain", "qa", 8, 8, 1.0, 0.0)))
    assert list(tables([some])) == ["overall", "rag", "qa"]


def test_one_group_is_the_whole() -> None:
    assert list(tables([Benchmark(("plain",), 8, (timing("plain", "rag", 8, 8, 1.0, 0.0),))])) == ["overall"]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.argv", ["/some/where/foreword", "bench", "--prompts", "my questions.jsonl"])
    folder = tmp_path / "deep" / "down"
    write_report([BENCHMARK], folder, dtype="float32", model="tiny")
    return folder


def test_results_json_holds_every_number_and_its_origin(report: Path) -> None:
    found = json.loads((report / "results.json").read_text())
    assert found["timings"] == [asdict(one) for one in BENCHMARK.timings]
    assert found["tables"] == {name: [asdict(row) for row in table] for name, table in tables([BENCHMARK]).items()}
    assert (found["max_new_tokens"], found["base"]) == (128, "plain")
    about = found["about"]
    assert about["command"] == "foreword bench --prompts 'my questions.jsonl'"
    assert (about["dtype"], about["model"], about["threads"]) == ("float32", "tiny", torch.get_num_threads())
    assert about["machine"] and about["commit"] and about["date"]
    assert about["versions"]["foreword"] == foreword.__version__ and about["versions"]["torch"] == torch.__version__


def test_report_md_reads_like_the_tables(report: Path) -> None:
    text = (report / "report.md").read_text()
    assert "`foreword bench --prompts 'my questions.jsonl'`" in text and "at most 128 new tokens" in text
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        f"{name}, one text at a time" for name in tables([BENCHMARK])
    ]
    assert "| fast | 22.5 | 1.88x | 2.40 | 11% | 2 of 3 |" in text and "over plain" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {7}


def test_a_report_may_be_written_again(report: Path) -> None:
    write_report([BENCHMARK], report)
    assert "model" not in json.loads((report / "results.json").read_text())["about"]


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_says_whether_the_source_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "src" / "foreword" / "bench" / "report.py"
    file.parent.mkdir(parents=True)
    file.write_text("as committed")
    monkeypatch.setattr(report_module, "__file__", str(file))

    def git(*words: str) -> str:
        person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *person, *words], capture_output=True, text=True, cwd=tmp_path, check=True
        ).stdout.strip()

    git("init", "--quiet")
    assert facts()["commit"] == "no checkout"  # our file is in the folder of somebody's repository, not in it
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert facts()["commit"] == git("rev-parse", "--short", "HEAD")
    (tmp_path / "notes.md").write_text("not source")
    assert facts()["commit"] == git("rev-parse", "--short", "HEAD")
    (tmp_path / "src" / "other.py").write_text("new")
    assert facts()["commit"] == git("rev-parse", "--short", "HEAD") + "+changes"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/out.*name a folder"):
        write_report([BENCHMARK], tmp_path / "file" / "out")


# Several texts at once ----------------------------------------------------------------------------------------------------


def batch(size: int, **seconds: float) -> Benchmark:
    timings = (Timing("1 2", "mixed", name, 120, 60, spent, None, 0.0, 2, 2, size) for name, spent in seconds.items())
    return Benchmark(tuple(seconds), 64, tuple(timings), size, {"plain": 1.5, "fast": 0.75, "late": 0.75})


BATCHES = [
    batch(1, plain=10.0, fast=5.0, late=8.0),
    batch(4, plain=6.0, fast=4.0, late=6.0),
    batch(8, plain=4.0, fast=5.0, late=3.2),
    batch(16, plain=2.0, fast=2.0, late=1.0),
]


def test_a_method_stops_paying_where_it_is_never_ahead_again() -> None:
    found = content(BATCHES, {})
    assert found["stops_paying"] == {"fast": 8, "late": None}
    assert stops_paying({2: rows(batch(2, plain=1.0, fast=2.0))})["fast"] == 2
    assert stop_words("fast", 2, [2, 4]) == "fast pays at no batch tried"


def test_batches_in_the_files(tmp_path: Path) -> None:
    grown = {"times": 8, "parameters": 7_010_000_000, "prompts": 4, "tokens": 200, "identical": 3, "ties": 1}
    write_report(BATCHES, tmp_path, model="tiny, grown r=8", grown=grown)
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found["batches"]) == ["1", "4", "8", "16"] and len(found["timings"]) == 12
    assert found["batches"]["4"][1]["speedup"] == 1.5 and found["warm_up_s"]["8"]["fast"] == 0.75
    text = (tmp_path / "report.md").read_text()
    assert "| batch | plain, tokens/s | fast, tokens/s | fast, over plain | late, tokens/s | late, over plain |" in text
    assert "| 8 | 30.0 | 24.0 | 0.80x | 37.5 | 1.25x |" in text
    assert "- fast stops paying at batch 8\n- late still pays at batch 16, the largest tried\n" in text
    assert "in no figure above: batch 1: 3.0 s" in text
    assert "tiny, grown r=8" in text and grown_words(grown) in text
    for words in ("Grown r=8", "7.01 B", "3 of them are its original's", "1 in all"):
        assert words in grown_words(grown)


def test_batches_alone_have_no_tables_of_groups(tmp_path: Path) -> None:
    write_report(BATCHES[1:], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## by batch"]
