"""Full yield: drafts of a drafter that knows the truth are accepted to full depth in every round but the last."""

import pytest

from doubles import (
    DRAFTING,
    FAMILIES,
    SAMPLINGS,
    Liar,
    Oracle,
    Recorder,
    check_yield,
    drafter,
    engine,
    full_sequence,
    requests,
    target,
    truth,
)
from foreword.core.sampling import Sampling


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("as_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("depth", [1, 6])
def test_the_truth_is_accepted_in_full(depth: int, as_chain: bool, sampling: Sampling, family: str) -> None:
    model, asked = target(family), requests(3, sampling, max_new_tokens=20, ignore_eos=True)
    oracle = Oracle([full_sequence(model.hf, request) for request in asked], depth, lies=0, as_chain=as_chain)
    for run in engine(oracle, model, slots=2).generate(asked):
        assert run.tokens == truth(model.hf, run.request)
        full, rest = divmod(20, depth + 1)
        assert run.accepted == [depth + 1] * full + [rest] * (rest > 0)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_wrong_rows_do_not_hide_right_ones(sampling: Sampling) -> None:
    """Wrong rows may make a path longer by chance, never shorter."""
    model, asked = target(), requests(3, sampling, max_new_tokens=20, ignore_eos=True)
    oracle = Oracle([full_sequence(model.hf, request) for request in asked], depth=3, lies=12)
    for run in engine(oracle, model).generate(asked):
        assert all(count >= 4 for count in run.accepted[:-1])
        assert run.drafted == [15] * len(run.drafted)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kind", [*DRAFTING, "liar", "oracle"])
def test_what_is_right_in_a_draft_is_accepted(kind: str, sampling: Sampling) -> None:
    """Every round accepts the deepest proposed row that agrees with the truth, and nothing else."""
    model, asked = target(), requests(5, sampling, max_new_tokens=12)
    doubles = {"liar": Liar(), "oracle": Oracle([full_sequence(model.hf, request) for request in asked], lies=8)}
    recorder = Recorder(doubles.get(kind) or drafter(kind, model))
    engine(recorder, model).generate(asked)
    check_yield(recorder, model.hf, asked)
