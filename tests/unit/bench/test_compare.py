"""Two results compared, and pages whose tables come from results."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.bench import Benchmark, Timing, content, read_results, write_report
from foreword.bench.compare import changes, pooled, settings_that_differ
from foreword.bench.published import MARK, published_table, refresh_tables

ROOT = Path(__file__).parents[3]
ABOUT: dict[str, Any] = {"command": "foreword bench", "commit": "0", "date": "-", "machine": "m", "threads": 2}


def results(folder: Path, speed: float, spread: float = 0.0, prompts: int = 12, **about: Any) -> dict[str, Any]:
    """Write results: the first twelve prompts are quick; of three repeats, one is slow and the median counts."""
    timings = [
        Timing(str(q), "rag" if q % 2 else "qa", name, 100, 50, seconds, 0.0, 1, repeat=repeat, block=q)
        for q in range(prompts)
        for name, factor in (("plain", 1.0), ("fast", speed * (1 + spread * (-1) ** (q // 2))))
        for repeat, seconds in enumerate([(10.0 if q < 12 else 40.0) / factor] * 2 + [99.0])
    ]
    middle = tuple(t for t in timings if t.repeat == 0)
    write_report(content([Benchmark(("plain", "fast"), 128, middle)], {**ABOUT, **about}), timings, folder)
    return read_results(folder)


def test_runs_in_turns_are_pooled(tmp_path: Path) -> None:
    """A slow run in the middle does not count: of each prompt the median over all turns does."""
    quick = [results(tmp_path / f"quick{turn}", 2.0) for turn in range(4)]
    slow = results(tmp_path / "slow", 0.5)
    both = pooled([*quick[:2], slow, *quick[2:]])
    assert both["repeats"] == 5 * quick[0]["repeats"]
    found = {one.contender: one for one in changes(quick[0], both) if one.table == "overall"}
    assert found["fast"].ratio == pytest.approx(1.0) and found["fast"].other_lengths == 0


def test_a_change_below_a_bound(tmp_path: Path) -> None:
    before, after = results(tmp_path / "a", 2.0), results(tmp_path / "b", 1.9)
    fast = next(one for one in changes(before, after) if (one.table, one.contender) == ("overall", "fast"))
    assert fast.is_below(0.98) and not fast.is_below(0.9)
    few = results(tmp_path / "c", 1.0, prompts=2)
    assert not any(one.is_below(0.98) for one in changes(results(tmp_path / "d", 2.0, prompts=2), few)), "too few to tell"


def test_what_became_faster(tmp_path: Path) -> None:
    before, after = results(tmp_path / "a", 2.0), results(tmp_path / "b", 2.5, commit="1")
    found = {(one.table, one.contender): one for one in changes(before, after)}
    assert set(found) == {(table, name) for table in ("overall", "rag", "qa") for name in ("plain", "fast")}
    fast = found["overall", "fast"]
    assert (fast.before, fast.after) == (20.0, 25.0) and fast.ratio == pytest.approx(1.25)
    assert fast.verdict == "faster" and fast.low == pytest.approx(1.25) and fast.speedup == (2.0, 2.5)
    assert found["rag", "plain"].verdict == "no significant change"
    back = {(one.table, one.contender): one for one in changes(after, before)}
    assert back["overall", "fast"].verdict == "slower" and settings_that_differ(before, after) == {"commit": ("0", "1")}


def test_noise_is_not_a_change(tmp_path: Path) -> None:
    before, after = results(tmp_path / "a", 2.0), results(tmp_path / "b", 2.5)
    for row in after["tables"]["overall"]:
        row["noise"] = "noise: no more than 2.00 tokens per round" if row["contender"] == "fast" else ""
    verdicts = {(one.table, one.contender): one.verdict for one in changes(before, after)}
    assert verdicts["overall", "fast"] == "noise" and verdicts["rag", "fast"] == "faster"


def test_speeds_are_over_the_prompts_that_both_have(tmp_path: Path) -> None:
    """The other prompts are slow and would change the speed."""
    before, after = results(tmp_path / "a", 2.0), results(tmp_path / "b", 2.0, prompts=24, prompts_sha256="1")
    for fast in (one for one in changes(before, after) if one.contender == "fast"):
        assert (fast.before, fast.after, fast.low) == (20.0, 20.0, pytest.approx(1.0))
    assert not settings_that_differ(before, after)  # the earlier result does not identify its prompts
    other = {**before, "about": {**ABOUT, "prompts_sha256": "2"}, "temperature": 0.8}
    assert set(settings_that_differ(other, after)) == {"prompts_sha256", "temperature"}


def test_tables_of_several_sets_are_distinguished(tmp_path: Path) -> None:
    """Both sets have a group of the same name; only one of them became faster."""

    def two_sets(folder: Path, seconds: float) -> dict[str, Any]:
        timings = [
            Timing(f"{suite}/{q}", "qa", "plain", 100, 50, spent, 0.0, 1, suite=suite, block=place * 8 + q)
            for place, (suite, spent) in enumerate((("a", seconds), ("b", 10.0)))
            for q in range(8)
        ]
        write_report(content([Benchmark(("plain",), 128, tuple(timings))], ABOUT), timings, folder)
        return read_results(folder)

    found = changes(two_sets(tmp_path / "old", 10.0), two_sets(tmp_path / "new", 5.0))
    verdicts = {one.table: one.verdict for one in found}
    assert verdicts["a"] == verdicts["a: qa"] == "faster"
    assert verdicts["b"] == verdicts["b: qa"] == "no significant change"


def test_a_change_within_the_interval_is_not_significant(tmp_path: Path) -> None:
    found = changes(results(tmp_path / "a", 2.0), results(tmp_path / "b", 2.1, spread=0.4))
    fast = next(one for one in found if one.contender == "fast")
    assert fast.low is not None and fast.high is not None and fast.low < 1 < fast.high
    assert fast.verdict == "no significant change"


@pytest.mark.parametrize("name", ["bench_cpu", "bench_cpu_all"])
def test_results_of_earlier_versions_are_compared_too(name: str) -> None:
    old = read_results(ROOT / "results" / name)
    found = {(one.table, one.contender): one for one in changes(old, old)}
    assert found["overall", "plain"].ratio == 1 and found["overall", "plain"].low == pytest.approx(1)
    assert found["translation + summarization + rag", "token_recycling"].low == pytest.approx(1)


def test_the_command(run_foreword: Any, tmp_path: Path) -> None:
    results(tmp_path / "a", 2.0), results(tmp_path / "b", 2.5, machine="another")
    shown = run_foreword("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert shown.exit_code == 0 and "machine differs: m against another" in shown.stdout and "faster" in shown.stdout
    compared = json.loads(run_foreword("bench", "compare", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert {one["verdict"] for one in compared["changes"]} == {"faster", "no significant change"}
    assert run_foreword("bench", "compare", tmp_path / "a", tmp_path / "nothing").exit_code == 2


# Pages --------------------------------------------------------------------------------------------------------------------


def test_the_table_of_a_page(tmp_path: Path, run_foreword: Any) -> None:
    results(tmp_path / "results", 2.0)
    page = tmp_path / "README.md"
    page.write_text("Before.\n\n<!-- foreword bench table results -->\n\n| old |\n|---|\n| x |\n\nAfter.\n")
    assert run_foreword("bench", "table", "--into", page).exit_code == 0
    table = published_table(read_results(tmp_path / "results"))
    assert page.read_text() == f"Before.\n\n<!-- foreword bench table results -->\n\n{table}\nAfter.\n"
    assert "| `fast` | 20.0 | 2.00x | 2.00 | 12 of 12 |\n" in table
    assert run_foreword("bench", "table", tmp_path / "results").stdout == table
    assert run_foreword("bench", "table").exit_code == 2
    page.write_text("<!-- foreword bench table results -->\n| old |\n| the last line, without an end |")
    assert refresh_tables(page.read_text(), tmp_path) == f"<!-- foreword bench table results -->\n\n{table}\n"


def test_tables_of_batches_and_of_sampled_outputs(tmp_path: Path, run_foreword: Any) -> None:
    """The error for a missing table names the option to run with."""
    timings = {
        temperature: [Timing("0 1", "mixed", "plain", 100, 50, 1.0 + temperature, 0.0, 2, texts=2, batch=2)]
        for temperature in (0.0, 1.0)
    }
    found = [Benchmark(("plain",), 128, tuple(some), 2, temperature=temperature) for temperature, some in timings.items()]
    write_report(content(found, ABOUT), timings[0.0] + timings[1.0], tmp_path / "results")
    page = "<!-- foreword bench table results --batch 2 --temperature 1 -->\n"
    assert "| `plain` | 100.0 |" in run_foreword("bench", "table", tmp_path / "results", "--batch", 2).stdout
    assert refresh_tables(page, tmp_path).startswith(page + "\n| |") and "| `plain` | 50.0 |" in refresh_tables(
        page, tmp_path
    )
    for option, asked in {"--batch": (), "--temperature": ("--batch", 2, "--temperature", 0.5)}.items():
        refused = run_foreword("bench", "table", tmp_path / "results", *asked)
        assert refused.exit_code == 2 and f"in {option}" in refused.output


@pytest.mark.parametrize("page", [ROOT / "docs" / "results.md"], ids=lambda page: page.name)
def test_pages_agree_with_their_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(MARK.findall(text)) == sum(line.startswith("<!-- foreword bench table") for line in text.splitlines()) > 0
    assert refresh_tables(text, page.parent) == text


def test_a_row_is_what_results_hold() -> None:
    found = read_results(ROOT / "results" / "bench_cpu_48")
    (row,) = [row for row in found["tables"]["overall"] if row["contender"] == "prompt_lookup"]
    speed = f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]"
    line = f"| `prompt_lookup` | {row['tokens_per_second']:.1f} | {speed} |"
    assert line in published_table(found) and line in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
