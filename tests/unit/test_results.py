"""The figures of results, counted by hand from runs whose rounds are known."""

import json

import pytest

from foreword.core.sampling import Sampling
from foreword.engine.request import Logprob, Request, Running
from foreword.results import Piece, Result, Stats

CONTRACT = {"text", "tokens", "finish_reason", "model", "method", "sampling", "stats"}
STATS = {
    "new_tokens",
    "rounds",
    "tokens_per_round",
    "accepted_per_position",
    "prefill_s",
    "decode_s",
    "tokens_per_second",
}


def run(accepted: list[int], drafted: list[int], prompt: int = 5, **more: object) -> Running:
    """A finished run, with the number of tokens decided and of candidates checked in each round."""
    tokens = list(range(100, 100 + sum(accepted)))
    done = {"tokens": tokens, "text": "abc", "finish_reason": "length", "prefill_s": 0.5, "decode_s": 2.0}
    request = Request(tuple(range(prompt)), Sampling(seed=3))
    return Running(request, accepted=accepted, drafted=drafted, **done | more)  # type: ignore[arg-type]


def test_the_figures_of_a_run() -> None:
    """Five rounds: 3 of 4 kept; nothing drafted; none of 2 kept; 1 of 4 kept; nothing drafted."""
    stats = Stats.of(run([4, 1, 1, 2, 1], [4, 0, 2, 4, 0], reused=3))
    assert stats == Stats(
        new_tokens=9,
        rounds=5,
        tokens_per_round=9 / 5,
        accepted_per_position=[2 / 3, 1 / 3, 1 / 3],
        conditional_per_position=[2 / 3, 1 / 2, 1 / 1],
        prefill_s=0.5,
        decode_s=2.0,
        tokens_per_second=4.5,
        prompt_tokens=5,
        reused_tokens=3,
        spec_decode_num_drafts=3,
        spec_decode_num_draft_tokens=10,
        spec_decode_num_accepted_tokens=4,
        spec_decode_num_accepted_tokens_per_pos=[2, 1, 1],
    )


def test_several_runs_are_pooled_over_their_rounds() -> None:
    """A long run weighs more than a short one: tokens per round is not the mean of 4 and 1."""
    stats = Stats.of([run([4], [3]), run([1, 1, 1], [3, 0, 1], prompt=2)])
    assert (stats.new_tokens, stats.rounds, stats.tokens_per_round) == (7, 4, 7 / 4)
    assert stats.accepted_per_position == [1 / 3, 1 / 3, 1 / 3]
    assert (stats.prefill_s, stats.decode_s, stats.tokens_per_second) == (1.0, 4.0, 7 / 4)
    assert (stats.prompt_tokens, stats.spec_decode_num_drafts, stats.spec_decode_num_draft_tokens) == (7, 3, 7)


def test_without_drafts_there_are_no_rates() -> None:
    stats = Stats.of(run([1, 1], [0, 0]))
    assert stats.tokens_per_round == 1.0 and stats.spec_decode_num_drafts == 0
    assert stats.accepted_per_position == stats.conditional_per_position == []


def test_without_rounds_nothing_is_divided_by_zero() -> None:
    stats = Stats.of(run([], [], decode_s=0.0))
    assert (stats.tokens_per_round, stats.tokens_per_second, stats.rounds) == (0.0, 0.0, 0)


def test_drafts_that_all_fail_have_no_positions() -> None:
    stats = Stats.of(run([1, 1], [4, 4]))
    assert stats.spec_decode_num_drafts == 2 and stats.spec_decode_num_accepted_tokens_per_pos == []


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_result_as_json_has_the_keys_of_the_contract(logprobs: int | None) -> None:
    request = Request((1, 2), Sampling(seed=2**62, logprobs=logprobs))
    known = [Logprob(100, -0.5, ((100, -0.5),), "é", ("é",))]
    running = Running(request, tokens=[100], text="é", finish_reason="stop", logprobs=known, accepted=[1], drafted=[0])
    found = json.loads(json.dumps(Result.of(running, "tiny", "plain").to_dict()))
    assert set(found) == CONTRACT | ({"logprobs"} if logprobs else set())
    assert set(found["stats"]) >= STATS
    assert (found["text"], found["tokens"], found["finish_reason"]) == ("é", [100], "stop")
    assert (found["model"], found["method"], found["sampling"]["seed"]) == ("tiny", "plain", 2**62)
    if logprobs:
        own = {"token": 100, "logprob": -0.5, "top": [[100, -0.5]], "text": "é", "top_texts": ["é"]}
        assert found["logprobs"] == [own]


def test_accepted_and_rejected_tokens_of_predictions() -> None:
    """A prediction that is used twice over rejects no negative number of tokens. Without one, JSON has neither field."""
    asked = [(20, 12), (5, 9), (7, 0), (0, 0)]
    runs = [Running(Request((1,), prediction=(3,) * size), predicted=used, finish_reason="stop") for size, used in asked]
    found = [(one.accepted_prediction_tokens, one.rejected_prediction_tokens) for one in map(Stats.of, runs)]
    assert found == [(12, 8), (9, 0), (0, 7), (None, None)]
    together = Stats.of(runs)
    assert (together.accepted_prediction_tokens, together.rejected_prediction_tokens) == (21, 15)
    shown = [Result.of(run, "tiny", "plain").to_dict()["stats"] for run in (runs[0], runs[3])]
    assert shown[0]["accepted_prediction_tokens"] == 12 and "rejected_prediction_tokens" in shown[0]
    assert shown[1].keys() == shown[0].keys() - {"accepted_prediction_tokens", "rejected_prediction_tokens"}


def test_a_piece_is_a_string_with_tokens() -> None:
    piece = Piece("the ", [7, 8])
    assert piece == "the " and isinstance(piece, str) and piece.tokens == [7, 8] and piece.draft is None
