"""The cost of a pass and the split of a round: checked against hand counts, or for consistency where measured."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foreword
from foreword.api import LLM
from foreword.bench import Benchmark, GenerationSettings, Task, Timing, contender
from foreword.bench.contenders import generate_answers
from foreword.bench.roofline import ROWS, SPLIT_STAGES, Stopwatch, _economy, knee, operations_of_pass, roofline
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.engine import Engine


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], "plain", slots=1, device="cpu", threads=1) as loaded:
        yield loaded


def tasks(llm: LLM) -> list[Task]:
    return [Task(str(i), tuple(llm.tokenizer.encode(f"the words that come before {i}")), i) for i in range(2)]


def timing(contender: str, rounds: int, seconds: float, **more: Any) -> Timing:
    return Timing("0", "qa", contender, 40, rounds, seconds, 0.0, 1, first_s=1.0, first_tokens=1, **more)


def test_operations_are_counted(llm: LLM) -> None:
    """Two layers of hidden 32, MLP 64, 4 heads and 2 key heads of width 8, and a head over the vocabulary."""
    weights = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64) + 32 * llm.model.vocab_size
    attention = 4 * 3 * 4 * 8 * 2 * (100 + 3)
    assert operations_of_pass(llm.model, 3, 100) == 2 * 3 * weights + attention


def test_the_knee_is_where_rows_cost_as_much_as_the_pass() -> None:
    flat = [{"rows": rows, "ms": 10.0 + 0.5 * rows} for rows in ROWS]
    assert knee(flat)["rows"] == pytest.approx(10.5 / 0.5) and not knee(flat)["beyond"]
    level = [{"rows": rows, "ms": 10.0 + 0.01 * rows} for rows in ROWS]
    assert knee(level)["beyond"] and knee([{"rows": rows, "ms": 10.0} for rows in ROWS])["beyond"]


def test_break_even_is_the_cost_of_a_round() -> None:
    """Plain: 39 rounds in 39 s. The method: 19 rounds in 28.5 s, so 1.5 s each; 4 candidates each, 1 accepted."""
    slow = timing("fast", 20, 29.5, drafted=80, kept=[0, 20])
    benchmark = Benchmark(("plain", "fast"), 40, (timing("plain", 40, 40.0), slow))
    found = _economy(benchmark, "fast", {}, [])
    assert found["round_cost"] == found["break_even_tokens_per_round"] == 1.5 and found["round_ms"] == 1500
    assert found["break_even_acceptance"] == 0.5 / 4 and found["acceptance"] == 1 / 4
    assert found["tokens_per_round"] == 39 / 19
    plain = _economy(benchmark, "plain", {}, [])
    assert plain["break_even_tokens_per_round"] == 1.0 and plain["acceptance"] is None


def test_a_round_is_split_into_stages(llm: LLM) -> None:
    method, drafter = DrafterRequest.of("token_recycling", rows=8).resolve(llm.model)
    engine = Engine(llm.model, drafter, 1, 256)
    watch = Stopwatch(engine)
    started = time.perf_counter()
    (answer,) = generate_answers(engine, tasks(llm)[:1], GenerationSettings(24))
    assert 0.5 < sum(watch.spent.values()) / (time.perf_counter() - started) <= 1
    assert answer.tokens == contender(llm, "plain").write(tasks(llm)[:1], GenerationSettings(24))[0].tokens
    assert set(watch.spent) == {*SPLIT_STAGES, "prompt"} and all(seconds > 0 for seconds in watch.spent.values())
    assert not watch.running


def test_the_whole(llm: LLM) -> None:
    names = ["plain", "prompt_lookup"]
    benchmark = Benchmark(tuple(names), 24, tuple(timing(name, 20, 20.0) for name in names))
    found = roofline(llm, names, benchmark, tasks(llm))
    assert found["bytes_per_second"] > 1e6 and found["operations_per_second"] > 1e6
    assert [one["rows"] for one in found["passes"]] == list(ROWS)
    for one in found["passes"]:
        assert one["ms"] >= one["floor_ms"] * 0.2 and one["bandwidth_share"] > 0
    assert set(found["split"]) == set(found["methods"]) == set(names)
    for split in found["split"].values():
        assert set(split) == set(SPLIT_STAGES) and split["verify"] > 0 and all(ms >= 0 for ms in split.values())
    assert found["split"]["plain"]["verify"] > found["split"]["plain"]["draft"]
    assert found["methods"]["plain"]["verify_bandwidth_share"] > 0


def test_a_method_that_cannot_be_measured_is_reported(llm: LLM) -> None:
    found = roofline(llm, ["plain", "medusa=nowhere"], Benchmark(("plain",), 24, (timing("plain", 20, 20.0),)), tasks(llm))
    assert "failed" in found["split"]["medusa=nowhere"] and "failed" in found["methods"]["medusa=nowhere"]
    assert "verify" in found["split"]["plain"]
