"""Our figures in Spec-Bench's terms equal what its own evaluation makes of the answer files, written here once more."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword.bench import Contender
from foreword.bench.run import Heat
from foreword.bench.spec_bench import answer_records, published, write_answers
from foreword.text import Prompt, Tokenizer


@pytest.fixture
def heats(stub: Callable[..., Contender], race: Any, questions: list[Prompt], words: Tokenizer) -> list[Heat]:
    """Three runs with made-up seconds; the baseline's tokens are more than its text has when it is tokenized again."""
    said = [*words.hf.encode("hello", add_special_tokens=False), 1]
    contenders = [stub("plain", said, 6), stub("fast", said, 2), stub("slow", said, 3, fails_at=("2",))]
    found = race(contenders, questions, repeats=3, batches=(1, 2)).heats.values()
    rng = np.random.default_rng(0)
    return [replace(heat, seconds={name: float(rng.uniform(1, 9)) for name in heat.seconds}) for heat in found]


def evaluate(method: Path, baseline: Path, wanted: set[str], words: Tokenizer) -> dict[str, float]:
    """By the published formula: a mean over questions of tokens / seconds, the baseline's tokens counted from its text."""

    def lines(file: Path) -> dict[str, Any]:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return {row["question_id"]: row["choices"][0] for row in rows if row["category"] in wanted}

    own, base = lines(method), lines(baseline)
    both = [name for name in base if name in own]
    speeds = [sum(own[name]["new_tokens"]) / sum(own[name]["wall_time"]) for name in both]
    native = [sum(base[name]["new_tokens"]) / sum(base[name]["wall_time"]) for name in both]
    anew = []
    for name in both:
        tokens = 0
        for text in base[name]["turns"]:
            tokens += len(words.hf(text).input_ids) - 1
        anew.append(tokens / sum(base[name]["wall_time"]))
    lengths = [length for name in both for length in own[name]["accept_lengths"]]
    return {
        "speed": np.mean(speeds),
        "speedup": np.mean(speeds) / np.mean(native),
        "speedup_retokenized": np.mean(speeds) / np.mean(anew),
        "mean_accepted_tokens": np.mean(lengths),
    }


def test_our_figures_are_those_of_the_published_formula(
    heats: list[Heat], questions: list[Prompt], words: Tokenizer, tmp_path: Path
) -> None:
    runs = answer_records(heats, questions, words.decode)
    write_answers(runs, tmp_path)
    found = published(runs, questions, lambda text: len(words.hf(text)["input_ids"]))
    groups = {"overall": {"rag", "qa", "writing", "math"}, "rag": {"rag"}, "mt_bench": {"writing"}}
    for name in ("plain", "fast", "slow"):
        for group, kinds in groups.items():
            each = [
                evaluate(tmp_path / f"answers/{run}/{name}.jsonl", tmp_path / f"answers/{run}/plain.jsonl", kinds, words)
                for run in (1, 2, 3)
            ]
            expected = {key: np.mean([one[key] for one in each]) for key in each[0]}
            assert found[name][group] == pytest.approx(expected, rel=1e-9)


def test_the_two_definitions_differ(heats: list[Heat], questions: list[Prompt], words: Tokenizer) -> None:
    """The baseline wrote six tokens; its text has five, and one is taken off for a beginning that is not there."""
    runs = answer_records(heats, questions, words.decode)
    fast = published(runs, questions, lambda text: len(words.hf(text)["input_ids"]))["fast"]["overall"]
    assert fast["speedup_retokenized"] == pytest.approx(fast["speedup"] * 6 / 4)
    assert fast["mean_accepted_tokens"] == 3


def test_answer_files_hold_both_turns_and_no_failed_question(
    heats: list[Heat], questions: list[Prompt], words: Tokenizer, tmp_path: Path
) -> None:
    runs = answer_records(heats, questions, words.decode)
    assert [len(runs[0][name]) for name in ("plain", "slow")] == [7, 6]
    (two,) = [record for record in runs[0]["fast"] if record["category"] == "writing"]
    choice = two["choices"][0]
    assert two["question_id"] == "3" and choice["turns"] == ["hello", "hello"]
    assert choice["new_tokens"] == [6, 6] and choice["decoding_steps"] == [2, 2] and choice["accept_lengths"] == [3, 3, 3, 3]
    assert len(choice["wall_time"]) == 2
