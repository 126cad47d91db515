"""swift: plans are tried on the output of a request that ends, and a better one serves later requests."""

from typing import Any

import pytest
import torch

from doubles import SAMPLINGS, Recorder, chain, engine, fresh, requests, rerunning, target, truth
from foreword.core.needs import Needs, Skip
from foreword.core.sampling import Sampling
from foreword.core.state import Batch
from foreword.drafting.skipped_target import WindowAgreement
from foreword.engine.lockstep import Lockstep
from foreword.errors import DrafterError, InputError
from foreword.methods import make
from foreword.methods import swift as method
from foreword.methods.swift import PlanSearch
from foreword.model.model import Model

OPTIONS: dict[str, Any] = dict(rows=13, ratio=0.5, window=6, tries=4)


def test_a_plan_starts_with_every_second_inner_layer() -> None:
    search = PlanSearch(30, 0.45, "it")
    assert len(search.plan.halves) == int(2 * 28 * 0.45) == 25
    assert search.plan == Skip.of(tuple(range(1, 27, 2)), tuple(range(1, 25, 2)))
    for _ in range(50):
        search.improve(lambda plan: 0.5 + 0.4 * (7 in plan.attention), 3)
        assert len(search.plan.halves) == 25 and not {0, 29} & (search.plan.attention | search.plan.mlp)
    assert 7 in search.plan.attention


def test_a_search_takes_a_better_plan_and_ends_by_the_papers_rules() -> None:
    """The agreement counts the half-layers of late layers: the search finds only such ones."""
    search = PlanSearch(12, 0.3, "it")
    agreement = lambda plan: sum(layer > 7 for _, layer in plan.halves) / len(plan.halves)  # noqa: E731
    found = [search.improve(agreement, 8) for _ in range(60)]
    assert found == sorted(found) and found[-1] == 1.0 and search.done and search.tries < 400
    stuck = PlanSearch(12, 0.3, "it")
    plan = stuck.plan
    for _ in range(60):
        stuck.improve(lambda _: 0.5, 8)
    assert stuck.done and stuck.tries == method.TRIES_WITHOUT_GAIN and stuck.plan == plan


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_plan_that_loses_nothing_is_found(sampling: Sampling) -> None:
    """Two inner half-layers add nothing, and are not those that are left out first."""
    hf = fresh("llama", num_hidden_layers=5)
    with torch.no_grad():
        hf.model.layers[2].self_attn.o_proj.weight.zero_()
        hf.model.layers[3].mlp.down_proj.weight.zero_()
    drafter: Any = make("swift", rows=5, ratio=0.34, branch=1, threshold=0.0, window=6, tries=30)
    steps = engine(drafter, Model(hf), slots=2)
    assert drafter.search.plan == Skip.of((1,), (1,))
    asked = requests(6, sampling, max_new_tokens=20, ignore_eos=True)
    assert [run.tokens for run in steps.generate(asked)] == [truth(hf, request) for request in asked]
    if not sampling.temperature:
        assert drafter.search.plan == Skip.of((2,), (3,)) and drafter.search.done and drafter.agreement == 1.0
        assert all(run.accepted == [5] * 4 for run in steps.generate(asked))


def test_the_agreement_is_that_of_drafts_after_the_whole_targets_rows() -> None:
    """Of a window of one token it is whether the first draft token is right; and the cache is left as it was."""
    model = target()
    drafter = Recorder(make("self_speculative", 2, attention=(1, 3), mlp=(2,)))
    steps = engine(drafter, model, slots=1)
    run = steps.add(requests(3, max_new_tokens=30, ignore_eos=True)[2])
    right = []
    while not run.done:
        steps.step()
        if not drafter.proposed or run.done:
            continue
        length, held = int(steps.state.lengths[0]), model.cache.held.clone()
        window = steps.state.tokens[:1, length - 1 : length + 1]
        with torch.inference_mode():
            agrees = WindowAgreement(model, Batch.of([0], length), window)(Skip.of((1, 3), (2,)))
        assert torch.equal(model.cache.held, held) and int(model.cache.length[0]) == length
        # The row before the root: its token was drafted in this round if the round accepted nothing.
        if run.accepted[-1] == 1:
            right.append(agrees == 1.0)
    assert len(right) > 5 and not any(right)


@pytest.mark.parametrize("count", [1, 5])
def test_a_window_is_run_like_a_draft(count: int) -> None:
    """The same rows as scratch rows of a sequence that ends before the window."""
    model, skip = target(), Skip.of((1,), (2,))
    tokens = torch.tensor([[5, 9, 11, 30, 7, 21, 8, 17, 40, 6]])
    rows = []
    with torch.inference_mode():
        for committed in (10, 10 - count):
            model.allocate(1, 40, 8)
            batch = Batch.of([0], 0)
            model.score(batch, chain(tokens[:, :committed].tolist()), Needs())
            model.cache.advance(batch, torch.tensor([committed]))
            batch = Batch.of([0], committed)
            if committed == 10:
                rows.append(model.rerun(batch, tokens[:, -count:], skip))
            else:
                scores = model.score(batch, chain(tokens[:, -count:].tolist()), Needs(hidden=True), skip=skip)
                rows.append(scores.require_hidden())
    torch.testing.assert_close(rows[0], rows[1])


def test_recorded_rounds_are_dropped_when_the_plan_changes() -> None:
    """Otherwise they would go on with the plan that was recorded."""
    model = target()
    drafter: Any = make("swift", **OPTIONS)
    steps = engine(drafter, model, slots=1)
    loop = rerunning(Lockstep(model, drafter), drafter)
    steps.loop, changes = loop, []
    for request in requests(5, max_new_tokens=16, ignore_eos=True):
        plan = drafter.search.plan
        assert steps.generate([request])[0].tokens == truth(model.hf, request)
        changes.append(drafter.search.plan != plan)
        assert drafter.small_model.plan.skip == drafter.search.plan
        assert (not loop.buckets) == changes[-1]
    assert set(changes) == {True, False}


def test_short_outputs_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanSearch, "improve", lambda *_: pytest.fail("scored"))
    drafter: Any = make("swift", **OPTIONS)
    engine(drafter, slots=1).generate(requests(3, max_new_tokens=6))


def test_a_search_without_memory_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that ends is not affected."""

    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(PlanSearch, "improve", full)
    model, drafter = target(), make("swift", **OPTIONS)
    asked = requests(3, max_new_tokens=16, ignore_eos=True)
    runs = engine(drafter, model, slots=1).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert drafter.search.done  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 1.0}, "ratio is 1.0"),
        ({"threshold": -0.1}, "threshold is -0.1"),
        ({"depth": 0}, "depth is 0"),
        ({"tries": -1}, "tries -1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make("swift", **options)


def test_a_model_without_inner_layers_is_refused() -> None:
    hf = fresh("llama", num_hidden_layers=2)
    with pytest.raises(DrafterError, match="the 0 half-layers between the first and the last layer of shallow is none"):
        make("swift").prepare(Model(hf, "shallow"), 1)
