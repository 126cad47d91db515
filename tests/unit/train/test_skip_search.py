"""The search for half-layers to leave out: what it measures is what drafts do, and an interrupted search goes on."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import Recorder, SequenceList, drafts_of, engine, requests, target, truth
from foreword.core.needs import Skip
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.request import Request
from foreword.errors import DataError, InputError
from foreword.methods import make
from foreword.model.cost import CostCurve, HalfCosts
from foreword.model.model import Model
from foreword.train import skip_search
from foreword.train.skip_search import MachineCosts, SearchSettings, SkipSearch, agreement_on, windows_of

SETTINGS = SearchSettings(windows=6, length=5, prefix=40, tried=3, patience=2)
COSTS = MachineCosts(HalfCosts(0.05, 0.1), tuple(1 + 0.02 * more for more in range(6)))


@pytest.fixture(scope="module")
def data() -> SequenceList:
    """What the tiny model writes."""
    found = []
    for one in requests(8, max_new_tokens=20, ignore_eos=True):
        tokens = torch.tensor([*one.prompt, *truth(target().hf, one)])
        found.append((tokens, torch.arange(len(tokens)) >= len(one.prompt)))
    return SequenceList(found)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose costs are known."""
    monkeypatch.setattr(skip_search, "half_costs", lambda _: COSTS.halves)
    found = target()
    found.use_costs(CostCurve((1, 6), (1.0, 1.1)))
    return found


def test_windows_lie_in_what_the_model_wrote(data: SequenceList) -> None:
    windows = windows_of(data, SETTINGS)
    assert len(windows) == 6
    for window, (tokens, mask) in zip(windows, data.sequences, strict=False):
        start = len(window.prefix)
        assert torch.equal(torch.cat([window.prefix, window.tokens]), tokens[: start + 5])
        assert mask[start : start + 5].all() and 1 <= start <= 40
    with pytest.raises(DataError, match="no sequence of the data has 50 tokens that the model wrote.*lower --length"):
        windows_of(data, SearchSettings(length=50))


@pytest.mark.parametrize("skip", [Skip.of((1,)), Skip.of((3,), (2,))], ids=str)
def test_the_agreement_is_that_of_drafts(model: Model, data: SequenceList, skip: Skip) -> None:
    """Of the first draft tokens, if windows have one token; and without a plan it is complete."""
    windows = windows_of(data, SearchSettings(windows=8, length=1))
    right = []
    for window in windows:
        recorder = Recorder(make("self_speculative", 2, attention=tuple(skip.attention), mlp=tuple(skip.mlp)))
        sequence = [*window.prefix.tolist(), *window.tokens.tolist()]
        (run,) = engine(recorder, model, slots=1).generate([Request(tuple(sequence), max_new_tokens=1)])
        ((tokens, _),) = drafts_of(recorder.proposed[0])
        right.append(tokens[1] == run.tokens[0])
    with agreement_on(model, windows) as agreement:
        assert agreement(skip) == pytest.approx(sum(right) / 8) and agreement(Skip()) == 1.0
    assert 0 < sum(right) < 8


def expected(model: Model, data: SequenceList, skip: Skip) -> float:
    """The speed-up expected of a plan, by hand."""
    with agreement_on(model, windows_of(data, SETTINGS)) as agreement:
        a, cost = round(agreement(skip), 5), 1 - 0.05 * len(skip.attention) - 0.1 * len(skip.mlp)
    return max(sum(a**i for i in range(n + 1)) / (n * cost + 1 + 0.02 * n) for n in range(1, 6))


def test_each_step_leaves_out_the_half_layer_that_is_best(model: Model, data: SequenceList, tmp_path: Path) -> None:
    record = SkipSearch(model, data, SETTINGS, tmp_path, lambda *_: None).run("these", {"run": "now"})
    steps = [Skip.of(tuple(one["attention"]), tuple(one["mlp"])) for one in record["steps"]]
    assert [len(step.halves) for step in steps] == list(range(1, len(steps) + 1))
    alone = {half: expected(model, data, Skip.of_halves([half])) for half in Skip.of((0, 1, 2, 3), (0, 1, 2, 3)).halves}
    assert steps[0].halves == [max(alone, key=lambda half: alone[half])]
    speeds = [one["expected_speedup"] for one in record["steps"]]
    assert speeds == [pytest.approx(expected(model, data, step), abs=1e-4) for step in steps]
    best = speeds.index(max(speeds))
    assert record["best"]["expected_speedup"] == max(speeds) and len(speeds) == min(best + 1 + SETTINGS.patience, 8)
    assert record["trials"] == 8 + sum(min(3, 8 - step) for step in range(1, len(steps)))
    assert record["run"] == "now" and record["settings"]["rows"] == record["best"]["draft_tokens"] + 1
    _, drafter = DrafterRequest.of(drafter=tmp_path).resolve(model)
    assert drafter.skip_plan.skip == steps[best]  # type: ignore[attr-defined]
    assert drafter.skip_plan.agreement == record["best"]["agreement"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("stop", [1, 9, 13])
def test_an_interrupted_search_goes_on(model: Model, data: SequenceList, tmp_path: Path, stop: int) -> None:
    """It measures no plan twice and ends with the same record. After a step there is a plan to use."""
    whole = SkipSearch(model, data, SETTINGS, tmp_path / "whole", lambda *_: None).run()
    trials = count(1)

    def interrupt(*_: Any) -> None:
        if next(trials) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SkipSearch(model, data, SETTINGS, tmp_path / "cut", interrupt).run()
    assert (tmp_path / "cut" / "config.json").is_file() == (stop > 8)
    held = json.loads((tmp_path / "cut" / "search.json").read_text())["agreements"]
    measured: list[Skip] = []
    score = model.score
    model.score = lambda *given, skip=None, **more: measured.append(skip) or score(*given, skip=skip, **more)  # type: ignore[method-assign]
    assert SkipSearch(model, data, SETTINGS, tmp_path / "cut", lambda *_: None).run() == whole
    assert len(held) == stop and len([skip for skip in measured if skip]) == whole["trials"] - stop
    for name in ("config.json", "record.json", "search.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_another_search_in_the_same_folder_is_refused(model: Model, data: SequenceList, tmp_path: Path) -> None:
    SkipSearch(model, data, SETTINGS, tmp_path, lambda *_: None).run("these")
    with pytest.raises(InputError, match="was started with another data; name another folder"):
        SkipSearch(model, data, SETTINGS, tmp_path, lambda *_: None).run("others")
    with pytest.raises(InputError, match="was started with another settings"):
        SkipSearch(model, data, SearchSettings(windows=4, length=5, prefix=40), tmp_path, lambda *_: None).run("these")
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(DataError, match="search.json cannot be read.*start the search in another folder"):
        SkipSearch(model, data, SETTINGS, tmp_path, lambda *_: None).run("these")


def test_windows_beyond_the_context_are_refused(model: Model, data: SequenceList, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tiny-llama takes 256; lower --length"):
        SkipSearch(model, data, SearchSettings(length=5, prefix=256), tmp_path, lambda *_: None)
    with pytest.raises(InputError, match="length is 0; it must be 1 or more"):
        SearchSettings(length=0)
