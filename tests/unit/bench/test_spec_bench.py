"""Our figures in Spec-Bench's terms equal those of its own evaluation, which is reimplemented here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword.bench import Contender
from foreword.bench.run import BlockRun
from foreword.bench.spec_bench import answer_records, spec_bench_figures, write_answers
from foreword.text import Prompt, Tokenizer


@pytest.fixture
def block_runs(
    stub: Callable[..., Contender], measure: Any, questions: list[Prompt], tokenizer: Tokenizer
) -> list[BlockRun]:
    """Three runs with made-up seconds; the baseline has more tokens than its retokenized text."""
    reply = [*tokenizer.hf.encode("hello", add_special_tokens=False), 1]
    contenders = [stub("plain", reply, 6), stub("fast", reply, 2), stub("slow", reply, 3, fails_at=("2",))]
    found = measure(contenders, questions, repeats=3, batches=(1, 2)).block_runs.values()
    rng = np.random.default_rng(0)
    return [
        replace(block_run, seconds={name: float(rng.uniform(1, 9)) for name in block_run.seconds}) for block_run in found
    ]


def evaluate(method: Path, baseline: Path, categories: set[str], tokenizer: Tokenizer) -> dict[str, float]:
    """Apply the published formula: the mean over questions of tokens / seconds, with the baseline's text retokenized."""

    def lines(file: Path) -> dict[str, Any]:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return {row["question_id"]: row["choices"][0] for row in rows if row["category"] in categories}

    own, base = lines(method), lines(baseline)
    both = [name for name in base if name in own]
    speeds = [sum(own[name]["new_tokens"]) / sum(own[name]["wall_time"]) for name in both]
    native = [sum(base[name]["new_tokens"]) / sum(base[name]["wall_time"]) for name in both]
    retokenized = []
    for name in both:
        tokens = 0
        for text in base[name]["turns"]:
            tokens += len(tokenizer.hf(text).input_ids) - 1
        retokenized.append(tokens / sum(base[name]["wall_time"]))
    lengths = [length for name in both for length in own[name]["accept_lengths"]]
    return {
        "speed": np.mean(speeds),
        "speedup": np.mean(speeds) / np.mean(native),
        "speedup_retokenized": np.mean(speeds) / np.mean(retokenized),
        "mean_accepted_tokens": np.mean(lengths),
    }


def test_our_figures_match_the_published_formula(
    block_runs: list[BlockRun], questions: list[Prompt], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    runs = answer_records(block_runs, questions, tokenizer.decode)
    write_answers(runs, tmp_path)
    found = spec_bench_figures(runs, questions, lambda text: len(tokenizer.hf(text)["input_ids"]))
    groups = {"overall": {"rag", "qa", "writing", "math"}, "rag": {"rag"}, "mt_bench": {"writing"}}
    for name in ("plain", "fast", "slow"):
        for group, kinds in groups.items():
            each = [
                evaluate(tmp_path / f"answers/{run}/{name}.jsonl", tmp_path / f"answers/{run}/plain.jsonl", kinds, tokenizer)
                for run in (1, 2, 3)
            ]
            expected = {key: np.mean([one[key] for one in each]) for key in each[0]}
            assert found[name][group] == pytest.approx(expected, rel=1e-9)


def test_the_two_definitions_differ(block_runs: list[BlockRun], questions: list[Prompt], tokenizer: Tokenizer) -> None:
    """The baseline generated six tokens; its text has five, and one is subtracted for a start token that is missing."""
    runs = answer_records(block_runs, questions, tokenizer.decode)
    fast = spec_bench_figures(runs, questions, lambda text: len(tokenizer.hf(text)["input_ids"]))["fast"]["overall"]
    assert fast["speedup_retokenized"] == pytest.approx(fast["speedup"] * 6 / 4)
    assert fast["mean_accepted_tokens"] == 3


def test_answer_files_hold_both_turns_and_no_failed_question(
    block_runs: list[BlockRun], questions: list[Prompt], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    runs = answer_records(block_runs, questions, tokenizer.decode)
    assert [len(runs[0][name]) for name in ("plain", "slow")] == [7, 6]
    (two,) = [record for record in runs[0]["fast"] if record["category"] == "writing"]
    choice = two["choices"][0]
    assert two["question_id"] == "3" and choice["turns"] == ["hello", "hello"]
    assert choice["new_tokens"] == [6, 6] and choice["decoding_steps"] == [2, 2] and choice["accept_lengths"] == [3, 3, 3, 3]
    assert len(choice["wall_time"]) == 2
