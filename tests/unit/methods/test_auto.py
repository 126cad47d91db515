"""What `auto` expects: figures and measured costs in, the fastest first out, and the same at every load."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import foreword
from doubles import LEARNERS
from foreword.bench.report import read_results
from foreword.errors import DrafterError
from foreword.methods import METHODS, auto
from foreword.methods.auto import Expected, Yield, expectations, fitting, recorded
from foreword.methods.wanted import Wanted
from foreword.model import cost
from foreword.model.cost import CostCurve, Tries
from foreword.model.model import Model

ROOT = Path(__file__).parents[3]
CHEAP = CostCurve((1, 64), (1.0, 1.0))  # a large GPU: rows are free
DEAR = CostCurve((1, 64), (1.0, 64.0))


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def hf(folders: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(folders["llama"])


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "draft_seconds", lambda model, name, make: 0.0)


def names(found: list[Expected]) -> list[str]:
    return [one.method for one in found]


@pytest.mark.usefixtures("free_drafts")
def test_where_rows_are_free_the_most_tokens_win(
    hf: Any, trained: dict[str, Path], ship: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(trained["clover"])
    monkeypatch.setattr(auto, "YIELDS", {"prompt_lookup": (Yield(16, 1.8, ""),), "token_recycling": (Yield(64, 1.9, ""),)})
    found = expectations(Model(hf, curve=CHEAP))
    assert names(found) == ["clover", "token_recycling", "prompt_lookup", "plain"]
    assert found[0] == Expected("clover", 64, 2.5, 1.0, "record.json") and found[0].speedup == 2.5
    assert names(expectations(Model(hf, curve=DEAR)))[0] == "plain"


@pytest.mark.usefixtures("free_drafts")
def test_a_cpu_takes_the_rows_that_pay_and_no_more_than_allowed(
    hf: Any, trained: dict[str, Path], ship: Callable[[Path], Path]
) -> None:
    ship(trained["clover"])
    steep = Model(hf, curve=CostCurve((1, 8, 64), (1.0, 1.0, 8.0)))
    assert {one.method: one.rows for one in expectations(steep)} == {
        "prompt_lookup": 6,
        "token_recycling": 5,
        "clover": 8,
        "plain": 1,
    }
    assert {one.method: one.rows for one in expectations(Model(hf, curve=CHEAP), rows=4)}["clover"] == 4
    assert names(expectations(Model(hf, curve=CHEAP), rows=1)) == ["plain"]


def test_a_gpu_checks_all_rows_of_a_shape() -> None:
    class Loaded:
        device = torch.device("cuda")

    known = (Yield(3, 1.7, ""), Yield(16, 1.8, ""))
    assert auto._usable(known, None, Loaded) == known[1:]  # type: ignore[arg-type]
    assert auto._usable(known, 8, Loaded) == known[:1]  # type: ignore[arg-type]


def test_the_drafters_own_work_counts(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"prompt_lookup": 0.5, "token_recycling": 4.0}
    monkeypatch.setattr(auto, "draft_seconds", lambda model, name, make: own[name.partition("-")[0]])
    found = {one.method: one for one in expectations(Model(hf, curve=CostCurve((1, 64), (2.0, 2.0))))}
    tokens = auto.YIELDS["prompt_lookup"][-1].tokens
    assert found["prompt_lookup"].round_cost == 1.25 and found["prompt_lookup"].speedup == pytest.approx(tokens / 1.25)
    assert list(found) == ["prompt_lookup", "plain", "token_recycling"]


def test_fewer_rows_bring_fewer_tokens(trained: dict[str, Path]) -> None:
    by_rows = {one.rows: one.tokens for one in recorded(trained["clover"])}
    assert by_rows[64] == 2.5 and by_rows[8] == pytest.approx(1 + 1.5 * 0.5 * (1 + 0.67 * 0.5))
    assert list(by_rows) == sorted(by_rows) and list(by_rows.values()) == sorted(by_rows.values())


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"settings": {"rows": 64}, "best": {}}', '{"best": {"tokens_per_round": 2}}']
)
def test_a_record_that_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(DrafterError, match="does not say how many tokens a round brings"):
        recorded(tmp_path)


def test_only_drafters_of_this_model_fit(
    hf: Any, talking: Any, trained: dict[str, Path], ship: Callable[[Path], Path]
) -> None:
    folder = ship(trained["medusa"])
    assert fitting(Model(hf)) == {"medusa": folder}
    assert fitting(Model(talking("llama", seed=1))) == {}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which drafters were timed, in order; the machine is never busy."""
    timed: list[str] = []
    measure = cost.measure_draft

    def watched(model: Model, drafter: Any) -> Tries:
        timed.append(type(drafter).__name__)
        return measure(model, drafter)

    monkeypatch.setattr(cost, "measure_draft", watched)
    monkeypatch.setattr(Tries, "steady", True)
    yield timed


def test_costs_are_measured_once(
    hf: Any, trained: dict[str, Path], ship: Callable[[Path], Path], counted: list[str]
) -> None:
    for method in LEARNERS:
        ship(trained[method])
    first = expectations(Model(hf))
    assert sorted(counted) == sorted(METHODS[name].load().__name__ for name in [*auto.YIELDS, *LEARNERS])
    assert all(one.round_cost > 1 for one in first if one.method != "plain")
    assert expectations(Model(hf)) == first and len(counted) == len(auto.YIELDS) + len(LEARNERS)


def test_measuring_leaves_an_engine_at_work_alone(folders: dict[str, Path]) -> None:
    with foreword.load(folders["llama"], "token_recycling", rows=4, slots=2) as llm:
        alone = llm.generate("the words", max_new_tokens=12).tokens
        stream = iter(llm.stream("the words", max_new_tokens=12))
        tokens = [token for _ in range(2) for token in next(stream).tokens]
        expectations(llm.model)
        assert tokens + [token for piece in stream for token in piece.tokens] == alone


@pytest.mark.parametrize("fastest", ["plain", "prompt_lookup", "clover"])
def test_auto_takes_the_fastest(
    fastest: str, folders: dict[str, Path], trained: dict[str, Path], ship: Callable[[Path], Path], monkeypatch: Any
) -> None:
    ship(trained["clover"])
    ranked = [Expected(fastest, 4, 9.0, 1.0, ""), auto.PLAIN]
    monkeypatch.setattr("foreword.methods.wanted.expectations", lambda model, rows: ranked)
    with foreword.load(folders["llama"], rows=4) as llm:
        assert llm.method == fastest
        text = llm.generate("the words", max_new_tokens=8)
        assert text.method == fastest and text.tokens == llm.use("plain").generate("the words", max_new_tokens=8).tokens
    assert Wanted.of().method == "auto"


def test_auto_writes_what_plain_writes(folders: dict[str, Path]) -> None:
    """With what this machine really shows."""
    with foreword.load(folders["llama"]) as llm:
        assert llm.method in ("plain", *auto.YIELDS)
        text = llm.generate("the words", max_new_tokens=12)
        assert text.tokens == llm.use("plain").generate("the words", max_new_tokens=12).tokens


def test_the_figures_are_those_of_the_results() -> None:
    for method, known in auto.YIELDS.items():
        for one in known:
            rows = read_results(ROOT / one.source)["tables"]["overall"]
            (found,) = [row["tokens_per_round"] for row in rows if row["contender"] == method]
            assert round(found, 2) == one.tokens, (method, one)
