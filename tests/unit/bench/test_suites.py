"""Prompt sets by file and name, named samples, and the built-in set."""

import json
from collections import Counter
from pathlib import Path

import pytest

from foreword.bench import read_suite, read_suites
from foreword.bench.suites import BUILTIN_FILE, SAMPLES
from foreword.errors import PromptError

KINDS = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
OTHERS = ["translation", "summarization", "qa", "math_reasoning", "rag"]


@pytest.fixture
def spec_bench(tmp_path: Path) -> Path:
    """Write a file with the numbers and categories of the published one."""
    rows = [{"question_id": 81 + i, "category": KINDS[i // 10], "turns": ["one", "two"]} for i in range(80)]
    rows += [{"question_id": 161 + i, "category": OTHERS[i // 80], "turns": ["one"]} for i in range(400)]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_the_built_in_set() -> None:
    found = read_suite()
    kinds = Counter(prompt.category for prompt in found.prompts)
    assert found.name == "builtin" and len(found.prompts) == 60 and set(kinds.values()) == {10} and len(kinds) == 6
    assert len({prompt.id for prompt in found.prompts}) == len({tuple(prompt.turns) for prompt in found.prompts}) == 60
    assert [len(group) for group in found.groups().values()] == [10] * 6
    assert sum(prompt.answers for prompt in found.prompts) == 70  # conversations have two turns
    assert len(BUILTIN_FILE.read_text().encode()) < 30_000


@pytest.mark.parametrize(("name", "each"), [("spec_bench_48", 8), ("spec_bench_240", 40), ("spec_bench_48b", 8)])
def test_samples_of_spec_bench(name: str, each: int, spec_bench: Path) -> None:
    """The same number of each group, and for MT-bench of each category."""
    found = read_suite(f"{name}={spec_bench}")
    sizes = {group: len(of) for group, of in found.groups().items()}
    assert found.name == name and sizes == {"mt_bench": each, **dict.fromkeys(OTHERS, each)}
    kinds = Counter(prompt.category for prompt in found.groups()["mt_bench"])
    assert kinds == dict.fromkeys(KINDS, each // 8)
    assert [int(prompt.id) for prompt in found.prompts] == list(SAMPLES[name])


def test_the_held_out_sample_shares_no_prompt_with_the_others() -> None:
    assert not set(SAMPLES["spec_bench_48b"]) & set(SAMPLES["spec_bench_240"])
    assert set(SAMPLES["spec_bench_48"]) < set(SAMPLES["spec_bench_240"])


def test_a_sample_is_the_same_from_half_of_the_file(spec_bench: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in spec_bench.read_text().splitlines()]
    half = [{**row, "id": f"spec_bench-{row.pop('question_id')}"} for row in rows]
    file = tmp_path / "half.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in half if int(row["id"][11:]) in SAMPLES["spec_bench_48"]))
    assert len(read_suite(f"spec_bench_48={file}").prompts) == 48
    file.write_text("\n".join(json.dumps(row) for row in half[:100]))
    with pytest.raises(PromptError, match="38 of them are not in the file, the first being number 182"):
        read_suite(f"spec_bench_48={file}")
    with pytest.raises(PromptError, match="spec_bench_48=FILE"):
        read_suite("spec_bench_48")


def test_names_and_limits(spec_bench: Path) -> None:
    assert read_suite(str(spec_bench)).name == "question" and read_suite(f"mine={spec_bench}").name == "mine"
    assert [p.id for p in read_suite(str(spec_bench), limit=3).prompts] == ["81", "82", "83"]
    assert len(read_suite(str(spec_bench), per_group=2).prompts) == 12


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"conversations": []}\n')
    assert [prompt.turns for prompt in read_suite(str(file), limit=2).prompts] == [["one"], ["two"]]
    with pytest.raises(PromptError, match="line 3"):
        read_suite(str(file))


def test_prompts_with_the_same_id_become_unique(tmp_path: Path) -> None:
    """Otherwise a report would mistake one for the other and count two samples as one."""
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"id": name, "prompt": "words"}) for name in ("a", "b", "a", "a")))
    assert [prompt.id for prompt in read_suite(str(file)).prompts] == ["a", "b", "a#2", "a#3"]


def test_prompts_of_several_sets_are_named_by_set(spec_bench: Path) -> None:
    found = read_suites([f"a={spec_bench}", f"b={spec_bench}"], limit=1)
    assert [prompt.id for one in found for prompt in one.prompts] == ["a/81", "b/81"]
    assert [one.name for one in read_suites([])] == ["builtin"]
    with pytest.raises(PromptError, match="the same name: question, question"):
        read_suites([str(spec_bench), str(spec_bench)])
