"""gsd: without merging it drafts an ordinary tree; with merging its aliases make longer paths."""

import pytest

from doubles import SAMPLINGS, Recorder, drafts_of, engine, requests, target, truth, with_random_weights
from foreword.core.sampling import Sampling
from foreword.methods import untrained
from foreword.model.cost import CostCurve

every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


@every_sampling
def test_without_merging_it_drafts_what_draft_model_drafts(sampling: Sampling) -> None:
    """The same tree from the same weights, row by row."""
    model, asked, drafts = target(), requests(5, sampling, ignore_eos=True), []
    options = dict(rows=14, depth=3, width=4)
    rule = dict(branch=10, repeat=-1, siblings=0.0, sure=0.0)
    for made in (with_random_weights("draft_model", model, **options), with_random_weights("gsd", model, **options | rule)):
        recorder = Recorder(made)
        engine(recorder, model).generate(asked)
        drafts.append([drafts_of(seen) for seen in recorder.proposed])
    assert drafts[0] == drafts[1] and max(len(tokens) for one in drafts[0] for tokens, _ in one) == 14


@pytest.mark.parametrize("repeat", [-1, 0, 1])
@every_sampling
def test_drafts_of_all_target_layers_are_always_right(sampling: Sampling, repeat: int) -> None:
    """One candidate per node, drafted by the target itself: all of it is accepted, whatever is merged."""
    model, asked = target("qwen3"), requests(6, sampling, max_new_tokens=12, ignore_eos=True)[1:]
    drafter = untrained("gsd", rows=4, layers=4, depth=3, repeat=repeat, siblings=1.0, sure=0.0)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [4, 4, 4] for run in runs)


@pytest.mark.parametrize("siblings", [0.0, 0.3])
@pytest.mark.parametrize("sure", [0.0, 0.2])
@pytest.mark.parametrize("repeat", [-1, 0, 2])
@every_sampling
def test_every_rule_generates_the_truth(sampling: Sampling, repeat: int, sure: float, siblings: float) -> None:
    model, asked = target(), requests(4, sampling, max_new_tokens=8)
    drafter = with_random_weights("gsd", model, rows=20, depth=4, repeat=repeat, sure=sure, siblings=siblings)
    assert [run.tokens for run in engine(drafter, model).generate(asked)] == [truth(model.hf, request) for request in asked]
    assert (drafter.counters()["rows_saved"] > 0) == (repeat == 0) or repeat == 2


def test_a_path_through_an_alias_is_longer_than_the_graph() -> None:
    model = target()
    recorder = Recorder(with_random_weights("gsd", model, rows=60, depth=2, branch=4, repeat=0, siblings=0.0, sure=0.0))
    engine(recorder, model).generate(requests(4, ignore_eos=True))
    assert recorder.shape.depth == 4
    assert {int(seen.draft.tree.depth.max()) for seen in recorder.proposed} > {2, 3}


def test_expensive_levels_are_not_read() -> None:
    """With a free number of rows, on the CPU: free levels are all read, expensive ones not; the output is the truth."""
    model, asked, read = target(), requests(4, max_new_tokens=20, ignore_eos=True), []
    model.curve = CostCurve((1, 64), (1.0, 1.01))
    for level in (0.0, 100.0):
        drafter = with_random_weights("gsd", model, depth=4, siblings=0.0, sure=0.0)
        steps = engine(drafter, model)
        assert drafter.costs.level > 0
        drafter.costs.level = level
        runs = steps.generate(asked)
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
        read.append(drafter.counters()["rows_read"] / sum(len(run.accepted) for run in runs))
    assert read[0] > 10 and read[1] < 1.5, "if levels are expensive, only the root"
