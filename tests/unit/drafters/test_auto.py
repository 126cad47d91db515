"""What `auto` expects: tokens per round and measured costs in, the fastest method first, and the same choice at every
load."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import foreword
from doubles import TRAINABLE
from foreword.bench.report import read_results
from foreword.drafters import auto
from foreword.drafters.auto import Expected, TokensPerRound, choose, expectations, recorded_tokens, shipped_for
from foreword.drafters.resolve import DrafterRequest
from foreword.errors import DrafterError
from foreword.methods import METHODS
from foreword.model import cost
from foreword.model import linears as pack
from foreword.model.cost import CostCurve, PassTimings
from foreword.model.model import Model

ROOT = Path(__file__).parents[3]
CHEAP = CostCurve((1, 64), (1.0, 1.0))  # a large GPU: rows are free
EXPENSIVE = CostCurve((1, 64), (1.0, 64.0))


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def hf(folders: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(folders["llama"])


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "draft_cost", lambda model, name, make: CostCurve((1,), (1e-300,)))


def names(found: list[Expected]) -> list[str]:
    return [one.method for one in found]


@pytest.mark.usefixtures("free_drafts")
def test_if_rows_cost_nothing_the_most_tokens_win(
    hf: Any, trained: dict[str, Path], ship: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(trained["clover"])
    figures = {"prompt_lookup": (TokensPerRound(16, 1.8, ""),), "token_recycling": (TokensPerRound(64, 1.9, ""),)}
    monkeypatch.setattr(auto, "TOKENS_PER_ROUND", figures)
    found = expectations(Model(hf, curve=CHEAP))
    assert names(found) == ["clover", "token_recycling", "prompt_lookup", "plain"]
    assert found[0] == Expected("clover", 64, 2.5, 1.0, "record.json") and found[0].speedup == 2.5
    assert names(expectations(Model(hf, curve=EXPENSIVE)))[0] == "plain"


@pytest.mark.usefixtures("free_drafts")
def test_a_cpu_checks_the_rows_that_pay_off_and_no_more_than_allowed(
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

    known = (TokensPerRound(3, 1.7, ""), TokensPerRound(16, 1.8, ""))
    assert auto._usable(known, None, Loaded) == known[1:]  # type: ignore[arg-type]
    assert auto._usable(known, 8, Loaded) == known[:1]  # type: ignore[arg-type]


def test_the_drafters_own_work_counts(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"prompt_lookup": 0.5, "token_recycling": 4.0}
    monkeypatch.setattr(auto, "draft_cost", lambda model, name, make: CostCurve((1,), (own[name.partition("-")[0]],)))
    found = {one.method: one for one in expectations(Model(hf, curve=CostCurve((1, 64), (2.0, 2.0))))}
    tokens = auto.TOKENS_PER_ROUND["prompt_lookup"][-1].tokens
    assert found["prompt_lookup"].round_cost == 1.25 and found["prompt_lookup"].speedup == pytest.approx(tokens / 1.25)
    assert list(found) == ["prompt_lookup", "plain", "token_recycling"]


def test_fewer_rows_decide_fewer_tokens(trained: dict[str, Path]) -> None:
    by_rows = {one.rows: one.tokens for one in recorded_tokens(trained["clover"])}
    assert by_rows[64] == 2.5 and by_rows[8] == pytest.approx(1 + 1.5 * 0.5 * (1 + 0.67 * 0.5))
    assert list(by_rows) == sorted(by_rows) and list(by_rows.values()) == sorted(by_rows.values())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"settings": {"rows": 64}, "best": {}}',
        '{"best": {"tokens_per_round": 2}}',
        '{"settings": {"rows": 1}, "best": {"tokens_per_round": 2}}',
        '{"settings": {"rows": 64}, "best": {"tokens_per_round": "inf"}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_a_record_that_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(DrafterError, match="does not say how many tokens a round decides"):
        recorded_tokens(tmp_path)


def test_only_drafters_of_this_model_are_found(
    hf: Any, talking: Any, trained: dict[str, Path], ship: Callable[[Path], Path]
) -> None:
    folder = ship(trained["medusa"])
    assert shipped_for(Model(hf)) == {"medusa": folder}
    assert shipped_for(Model(talking("llama", seed=1))) == {}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which drafters were timed, in order; the machine is never busy."""
    timed: list[str] = []
    measure = cost.measure_draft

    def watched(model: Model, drafter: Any) -> PassTimings:
        timed.append(type(drafter).__name__)
        return measure(model, drafter)

    monkeypatch.setattr(cost, "measure_draft", watched)
    monkeypatch.setattr(PassTimings, "steady", True)
    yield timed


def test_costs_are_measured_once(
    hf: Any, trained: dict[str, Path], ship: Callable[[Path], Path], counted: list[str]
) -> None:
    for method in TRAINABLE:
        ship(trained[method])
    first = expectations(Model(hf))
    assert sorted(counted) == sorted(METHODS[name].load().__name__ for name in [*auto.TOKENS_PER_ROUND, *TRAINABLE])
    assert all(one.round_cost > 1 for one in first if one.method != "plain")
    assert expectations(Model(hf)) == first and len(counted) == len(auto.TOKENS_PER_ROUND) + len(TRAINABLE)


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
    monkeypatch.setattr("foreword.drafters.resolve.expectations", lambda model, rows: ranked)
    with foreword.load(folders["llama"], rows=4) as llm:
        assert llm.method == fastest
        text = llm.generate("the words", max_new_tokens=8)
        assert text.method == fastest and text.tokens == llm.use("plain").generate("the words", max_new_tokens=8).tokens
    assert DrafterRequest.of().method == "auto"


def test_auto_generates_what_plain_generates(folders: dict[str, Path]) -> None:
    """With the real costs of this machine."""
    with foreword.load(folders["llama"]) as llm:
        assert llm.method in ("plain", *auto.TOKENS_PER_ROUND)
        text = llm.generate("the words", max_new_tokens=12)
        assert text.tokens == llm.use("plain").generate("the words", max_new_tokens=12).tokens


# The same at every load ----------------------------------------------------------------------------------------------------


def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every measurement differ from the last, also the one that picks the faster linear."""
    coming = itertools.cycle([1.02, 1.4, 1.02, 3.0, 1.1])

    def measure(model: Model) -> PassTimings:
        more = next(coming)
        return PassTimings((1, 4, 64), [[0.001] * 3, [0.001 * more] * 3, [0.003 * more] * 3])

    def measure_draft(model: Model, drafter: Any) -> PassTimings:
        return PassTimings((1,), [[0.0002 * next(coming)] * 3])

    monkeypatch.setattr(cost, "measure", measure)
    monkeypatch.setattr(cost, "measure_draft", measure_draft)
    monkeypatch.setattr(cost, "read_speed", lambda device: 1.0)
    monkeypatch.setattr(pack, "_measure_max_stock_rows", lambda: int(next(coming) * 10) % 4)
    monkeypatch.setattr(pack.Waits, "doubt", "")


def as_a_new_process() -> None:
    pack.max_stock_rows.cache_clear()


def test_four_loads_choose_the_same(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    noisy(monkeypatch)
    chosen = []
    for _ in range(4):
        as_a_new_process()
        with foreword.load(folders["llama"]) as llm:
            assert llm.model.curve is not None
            chosen.append((llm.method, llm.model.curve.seconds, llm.model.hf.lm_head.stock_rows))
    assert len(set(chosen)) == 1


def test_a_load_may_measure_anew(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    noisy(monkeypatch)
    curves, linears = [], []
    for remeasure in (False, True, False):
        as_a_new_process()
        with foreword.load(folders["llama"], remeasure=remeasure) as llm:
            assert llm.model.curve is not None
            curves.append(llm.model.curve.seconds)
            linears.append(llm.model.hf.lm_head.stock_rows)
    assert curves[0] != curves[1] == curves[2] and linears[0] != linears[1] == linears[2]


def test_a_wrapped_model_may_be_measured_anew(hf: Any, hf_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy(monkeypatch)
    curves = []
    for remeasure in (False, False, True):
        with foreword.wrap(hf, hf_tokenizer, remeasure=remeasure) as llm:
            assert llm.model.curve is not None
            curves.append(llm.model.curve.seconds)
    assert curves[0] == curves[1] != curves[2]


def expected(speedups: dict[str, float], steady: bool = True) -> list[Expected]:
    found = [Expected(name, 4, speedup, 1.0, "", steady) for name, speedup in speedups.items()]
    return sorted(found, key=lambda one: -one.speedup)


QUIET, BUSY = True, False


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ([({"clover": 1.50, "echo": 1.49}, QUIET), ({"clover": 1.49, "echo": 1.50}, QUIET)], ["clover", "clover"]),
        ([({"clover": 1.50, "echo": 1.49}, QUIET), ({"clover": 1.40, "echo": 1.50}, QUIET)], ["clover", "echo"]),
        ([({"clover": 1.50, "echo": 1.49}, QUIET), ({"clover": 0.40, "echo": 1.50}, BUSY)], ["clover", "clover"]),
        ([({"clover": 1.50, "echo": 0.49}, BUSY), ({"clover": 1.40, "echo": 1.50}, QUIET)], ["clover", "echo"]),
        ([({"clover": 1.50, "echo": 0.49}, BUSY), ({"clover": 1.48, "echo": 1.50}, QUIET)], ["clover", "clover"]),
        ([({"clover": 1.50, "echo": 0.49}, BUSY), ({"clover": 1.10, "echo": 1.50}, BUSY)], ["clover", "echo"]),
        (
            [
                ({"clover": 1.5, "echo": 1.4}, BUSY),
                ({"clover": 1.5, "echo": 1.55}, QUIET),
                ({"clover": 0.5, "echo": 1.5}, BUSY),
            ],
            ["clover", "clover", "clover"],
        ),
    ],
)
def test_a_choice_is_kept_while_it_is_about_as_fast(hf: Any, measured: Any, chosen: list[str]) -> None:
    model = Model(hf)
    assert [choose(model, expected(*one)).method for one in measured] == chosen


def test_a_choice_is_kept_for_its_candidates_and_rows(hf: Any) -> None:
    model = Model(hf)
    assert choose(model, expected({"clover": 1.5, "plain": 1.0})).method == "clover"
    assert choose(model, expected({"prompt_lookup": 1.5, "plain": 1.0})).method == "prompt_lookup"
    assert choose(model, expected({"clover": 1.48, "plain": 1.5}), rows=4).method == "plain"
    assert choose(model, expected({"clover": 1.48, "plain": 1.5})).method == "clover"


@pytest.mark.filterwarnings("ignore:costs are measured by every process")
def test_a_choice_that_cannot_be_written_is_remembered(hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "file" / "home"))
    model = Model(hf, curve=CHEAP)
    assert choose(model, expected({"clover": 1.5, "plain": 1.49})).method == "clover"
    assert choose(model, expected({"clover": 1.49, "plain": 1.5})).method == "clover"


def test_a_choice_that_cannot_be_read_is_made_again(hf: Any, tmp_path: Path) -> None:
    model, both = Model(hf), expected({"clover": 1.5, "plain": 1.49})
    choose(model, both)
    (file,) = (tmp_path / "home" / "choices").glob("*.json")
    for text in ("{", "[]", '{"method": "clover"}'):
        file.write_text(text)
        assert choose(model, expected({"clover": 1.49, "plain": 1.5})).method == "plain"


# Figures -------------------------------------------------------------------------------------------------------------------


def test_the_records_that_ship_have_the_figures_of_the_results() -> None:
    for method in ("medusa", "clover", "clover2", "draft_model", "hidden_transfer"):
        folder = auto.shipped()[method]
        by_rows = {one.rows: one.tokens for one in recorded_tokens(folder)}
        for one in json.loads((folder / "record.json").read_text())["benchmark"]:
            rows, tokens = measured_in(ROOT / one["source"], method, one["rows"])
            assert (one["rows"], one["tokens_per_round"]) == (rows, round(tokens, 3)), (method, one)
            assert by_rows[rows] == pytest.approx(tokens, abs=0.01), (method, one)


def measured_in(source: Path, method: str, rows: int) -> tuple[int, float]:
    """Rows of a pass and tokens per round, from a benchmark or from a study of trees."""
    if source.is_dir():
        (row,) = [row for row in read_results(source)["tables"]["overall"] if row["contender"] == method]
        return round(row["draft_tokens_per_round"] + 1), row["tokens_per_round"]
    trees = json.loads(source.read_text())["trees"]
    (tree,) = [one for one in trees if (one["method"], one["tree"]) == (method, "static")]
    return rows, tree["tokens_per_round"][str(rows)]


def test_no_more_is_expected_of_clover2_than_was_measured() -> None:
    """For all its trees: those with few rows on a CPU, and those from before it had a draft vocabulary."""
    by_rows = {one.rows: one.tokens for one in recorded_tokens(auto.shipped()["clover2"])}
    files = ("trees_cuda/clover.json", "trees_cpu/rows_few.json", "trees_cpu/rows_clover2.json")
    trees = [json.loads((ROOT / "results" / file).read_text())["trees"] for file in files]
    found = [
        one["tokens_per_round"] for some in trees for one in some if (one["method"], one["tree"]) == ("clover2", "best")
    ]
    known = {int(rows): tokens for one in found for rows, tokens in one.items() if int(rows) in by_rows}
    assert {2, 4, 8, 16, 64} <= set(known)
    for rows, tokens in known.items():
        assert tokens * 0.95 < by_rows[rows] < tokens * 1.01, rows


def test_the_figures_are_those_of_the_results() -> None:
    for method, known in auto.TOKENS_PER_ROUND.items():
        for one in known:
            rows = read_results(ROOT / one.source)["tables"]["overall"]
            (found,) = [row["tokens_per_round"] for row in rows if row["contender"] == method]
            assert round(found, 2) == one.tokens, (method, one)
