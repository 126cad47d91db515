"""How a token is sampled, against a slow reference that sorts: penalties, / T, top-k, top-p, min-p, argmax plus noise."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.choosing import History, candidates, judge, keeps, pick, rank
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import NO_TOKEN, SamplingRows, SamplingStages, SamplingTable, SlotOptions
from foreword.errors import InputError
from foreword.ops.noise import gumbel
from foreword.ops.top import top

ENDS = torch.tensor([1, 4])


def rows_of(*samplings: Sampling, floors: tuple[int, ...] = ()) -> SamplingRows:
    table = SamplingTable.empty(len(samplings), ENDS)
    for slot, sampling in enumerate(samplings):
        table.set(slot, sampling.seeded(), floors[slot] if floors else 0)
    ids = tuple(range(len(samplings)))
    return table.at(torch.tensor(ids), ids)


def logits_of(batch: int, rows: int, vocabulary: int = 12, seed: int = 0) -> Tensor:
    return 2 * torch.randn(batch, rows, vocabulary, generator=torch.Generator().manual_seed(seed)).double()


# Validation


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 1e-39, 1e300, math.inf, math.nan, "1", True)),
        *(("top_k", value) for value in (-1, 2.0, 2**70, True)),
        *(("top_p", value) for value in (0, 1.01, -1, math.nan)),
        *(("min_p", value) for value in (-0.1, 1, math.nan)),
        *(("repetition_penalty", value) for value in (0, -1, 1e-39, 1e300, math.inf)),
        *(("seed", value) for value in (1.5, "x", True)),
        *(("logprobs", value) for value in (-1, 101, 2.0, True)),
        *(("allowed_token_ids", value) for value in ((), 5, "ab")),
        *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, math.nan, "1", True)),
        *(("logit_bias", value) for value in (5, "ab", [3], [(1, 2, 3)])),
        *(("bad_words", value) for value in ((), 5, "ab")),
        *(("bad_word_ids", value) for value in ((), 5, "ab")),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name) as caught:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def test_edges_are_allowed() -> None:
    Sampling(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=0.1, seed=-5, logprobs=0)
    Sampling(top_p=1e-6, min_p=0.999, logprobs=100, seed=2**70)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 is 101"),
        ({"logit_bias": {5: math.nan}}, "logit_bias of token 5 is nan"),
        ({"logit_bias": {"x": 1}}, "a key of logit_bias is 'x'"),
        ({"logit_bias": {-1: 1}}, "a key of logit_bias is -1"),
        ({"logit_bias": {True: 1}}, "a key of logit_bias is True"),
        ({"logit_bias": dict.fromkeys(range(4097), 1)}, "at most 4096"),
        ({"bad_words": ["a", " "]}, "an entry of bad_words is ' '"),
        ({"bad_words": ["a", 3]}, "an entry of bad_words is 3"),
        ({"bad_words": ["a"] * 1025}, "1 to 1024"),
        ({"bad_word_ids": [[]]}, "an entry of bad_word_ids"),
        ({"bad_word_ids": [[1, -1]]}, "an entry of bad_word_ids is -1"),
        ({"bad_word_ids": [[1] * 65]}, "1 to 64 token ids"),
    ],
)
def test_a_wrong_part_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Sampling(**options)


def test_options_in_any_form_are_kept_in_one() -> None:
    sampling = Sampling(logit_bias={"7": 1, 3: -2.5}, bad_words=["a"], bad_word_ids=[[4, 5], (4, 5)])  # type: ignore
    assert sampling.biases == ((3, -2.5), (7, 1.0)) and sampling.bad_word_ids == ((4, 5),)
    assert replace(sampling, seed=3).biases == sampling.biases and hash(sampling) == hash(replace(sampling))
    assert Sampling(logit_bias={}) == Sampling()


# Filters


def slow_keeps(scores: list[float], sampling: Sampling) -> list[bool]:
    """One row, by sorting; equal scores are kept or dropped together."""
    kept = set(scores)
    best_first = sorted(scores, reverse=True)
    if sampling.top_k:
        kept &= {score for score in scores if score >= best_first[min(sampling.top_k, len(scores)) - 1]}
    if sampling.top_p < 1:
        total = sum(math.exp(score) for score in scores if score in kept)
        nucleus, mass = set(), 0.0
        for score in sorted(kept, reverse=True):
            if mass >= sampling.top_p:
                break
            nucleus.add(score)
            mass += scores.count(score) * math.exp(score) / total
        kept &= nucleus
    if sampling.min_p:
        kept &= {score for score in scores if math.exp(score - best_first[0]) >= sampling.min_p}
    return [score in kept for score in scores]


# Multiples of 1/4 make ties; the odd thresholds keep clear of the edges that float32 cannot tell apart.
SCORES = st.lists(st.integers(-12, 12).map(lambda x: x / 4), min_size=6, max_size=6)
FILTERS = st.builds(
    Sampling,
    temperature=st.just(1.0),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([1.0, 0.9137, 0.5171, 0.1313, 0.0173]),
    min_p=st.sampled_from([0.0, 0.0513, 0.3137, 0.9173]),
    seed=st.integers(0, 99),
)


@given(st.lists(st.tuples(SCORES, FILTERS), min_size=1, max_size=4))
def test_filters_keep_what_the_slow_search_keeps(batch: list[tuple[list[float], Sampling]]) -> None:
    """Every row with its own filters; ties are kept or dropped together."""
    scores = torch.tensor([row for row, _ in batch]).double().unsqueeze(1)
    kept = keeps(scores, rows_of(*(sampling for _, sampling in batch)))
    expected = [slow_keeps(row, sampling) for row, sampling in batch]
    assert (kept.squeeze(1).tolist() if kept is not None else [[True] * 6] * len(batch)) == expected


def test_equal_logits_stay_together() -> None:
    scores = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.6)):
        assert keeps(scores, rows_of(sampling)).tolist() == [[[True, True, True, True, False]]]  # type: ignore[union-attr]


def test_the_edge_of_the_nucleus_is_exact() -> None:
    """64 tokens whose probabilities differ by a few float32 steps: those above the 32nd sum to less than a half."""
    chances = (1 + torch.arange(64).double() * 2**-18) / 64
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    kept = keeps(chances.log()[order].view(1, 1, 64), rows_of(Sampling(1.0, top_p=0.5)))
    assert kept is not None and torch.equal(kept[0, 0], order >= 32)


def test_the_best_token_always_stays() -> None:
    scores = logits_of(3, 4)
    kept = keeps(scores, rows_of(*(Sampling(1.0, top_k=1, top_p=1e-6, min_p=0.99) for _ in range(3))))
    assert kept is not None and kept.sum().item() == 12
    assert torch.equal(kept.to(torch.int8).argmax(-1), scores.argmax(-1))


def test_without_filters_there_is_no_mask() -> None:
    assert keeps(logits_of(1, 1), rows_of(Sampling(1.0))) is None


def test_filters_come_in_their_order() -> None:
    """top-p counts the mass that top-k left: 0.4 and 0.3 of (0.4, 0.3, 0.2, 0.1) are 1.0 after top-k 2."""
    scores = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]).log()
    both = keeps(scores, rows_of(Sampling(1.0, top_k=2, top_p=0.56)))
    assert both is not None and both.tolist() == [[[True, False, False, False]]]
    alone = keeps(scores, rows_of(Sampling(1.0, top_p=0.56)))
    assert alone is not None and alone.tolist() == [[[True, True, False, False]]]


def test_filters_are_after_the_temperature() -> None:
    scores = torch.tensor([[[math.log(0.5), math.log(0.3), math.log(0.2)]]])
    cold, hot = (judge(scores, torch.tensor([[9]]), rows_of(Sampling(t, min_p=0.5, seed=1))) for t in (0.5, 2.0))
    assert (cold > -math.inf).tolist() == [[[True, False, False]]]
    assert (hot > -math.inf).tolist() == [[[True, True, True]]]


# Penalties and floors


def test_a_penalty_makes_seen_tokens_less_likely() -> None:
    logits = torch.tensor([[[2.0, -2.0, 2.0, -2.0]], [[2.0, -2.0, 2.0, -2.0]]])
    seen = torch.tensor([[[3, 1, 0, 0]], [[3, 1, 0, 0]]])
    scores = judge(logits, torch.tensor([[5], [5]]), rows_of(Sampling(repetition_penalty=2.0), Sampling()), History(seen))
    assert scores.tolist() == [[[1.0, -4.0, 2.0, -2.0]], [[2.0, -2.0, 2.0, -2.0]]]


def test_the_penalty_comes_before_the_temperature() -> None:
    sampling = rows_of(Sampling(temperature=0.5, repetition_penalty=2.0, seed=3))
    logits, seen, place = torch.tensor([[[3.0, -3.0]]]), torch.tensor([[[1, 1]]]), torch.tensor([[4]])
    without = judge(logits, place, sampling, History(seen)) - gumbel(sampling.key, place, torch.arange(2))
    assert without.view(-1).tolist() == pytest.approx([3.0, -12.0], abs=1e-5)


def test_end_tokens_are_held_back_below_the_floor() -> None:
    """Row by row: positions 6 and 7 are below the first request's floor of 8, and 8 is not; the second has no floor."""
    logits, position = torch.zeros(2, 3, 6), torch.tensor([[6, 7, 8], [6, 7, 8]])
    scores = judge(logits, position, rows_of(Sampling(), Sampling(), floors=(8, 0)))
    held = (scores == -math.inf).tolist()
    closed = [False, True, False, False, True, False]
    assert held == [[closed, closed, [False] * 6], [[False] * 6] * 3]


@pytest.mark.parametrize("wrong", [-1, 2.0, True, "a", None])
def test_only_token_ids_can_be_allowed(wrong: object) -> None:
    with pytest.raises(InputError, match=f"allowed_token_ids is {wrong!r}; it must be a token id"):
        Sampling(allowed_token_ids=(3, wrong))  # type: ignore[arg-type]
    assert Sampling(allowed_token_ids=[3, 4]).allowed_token_ids == (3, 4)  # type: ignore[arg-type]


def test_masks_bar_tokens_always_or_below_the_floor() -> None:
    """One request allows two tokens and holds one of them back, one holds a token back, one does neither."""
    table = SamplingTable.empty(3, ENDS, 6)
    table.set(0, Sampling(seed=1, allowed_token_ids=(2, 3)), 8, held=(3,))
    table.set(1, Sampling(seed=1), 8, held=(0,))
    table.set(2, Sampling(seed=1), 0, held=(0,))
    scores = judge(torch.zeros(3, 2, 6), torch.tensor([[7, 8]] * 3), table.at(torch.arange(3), (0, 1, 2)))
    open_to = [[[token for token in range(6) if row[token] == 0] for row in index] for index in scores.tolist()]
    assert open_to == [[[2], [2, 3]], [[2, 3, 5], [0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]] * 2]


def test_the_stages_of_a_round_include_masks() -> None:
    table = SamplingTable.empty(3, ENDS, 12)
    table.set(0, Sampling(seed=1))
    table.set(1, Sampling(seed=1, allowed_token_ids=(3,)))
    table.set(2, Sampling(seed=1), held=(3,))
    assert [table.kind((slot,)) for slot in range(3)] == [SamplingStages(), SamplingStages(masks=True), SamplingStages()]
    assert table.kind((0, 1)) == SamplingStages(masks=True) and not SamplingStages(masks=True).is_greedy
    table.set(1, Sampling(seed=1))
    assert table.kind((0, 1)) == SamplingStages() and not table.columns["barred"].any()


def test_bias_and_output_penalties_by_hand() -> None:
    """Each row with its own penalties; the counts of the prompt do not matter."""
    rows = table_rows(
        Sampling(seed=1, frequency_penalty=0.5, presence_penalty=1.0),
        Sampling(seed=1, logit_bias={0: -100, 3: 2.5}),
        Sampling(seed=1),
    )
    counts = torch.tensor([[[3, 1, 0, 0]]]).expand(3, 1, 4)
    logits = torch.tensor([[[2.0, -2.0, 1.0, 0.0]]]).expand(3, 1, 4)
    scores = judge(logits, torch.full((3, 1), 5), rows, History(counts + 7, counts))
    assert scores.view(3, 4).tolist() == [[-0.5, -3.5, 1.0, 0.0], [-98.0, -2.0, 1.0, 2.5], [2.0, -2.0, 1.0, 0.0]]


def test_bad_words_bar_their_last_token_after_the_others() -> None:
    """Words of one, two, three and five tokens; two words end alike, and one of them is not completed."""
    words = ((1,), (2, 3), (0, 2, 3), (2, 2, 2, 2, 0))
    rows = table_rows(Sampling(seed=1, bad_word_ids=words), Sampling(seed=1))
    last = torch.tensor([[NO_TOKEN] * 14 + [2], [NO_TOKEN] * 13 + [0, 2], [*[NO_TOKEN] * 11, 2, 2, 2, 2], [0] * 15])
    assert rows.kind.bad_word_length == 16
    scores = judge(torch.zeros(2, 4, 4), torch.full((2, 4), 5), rows, History(last=last.expand(2, -1, -1)))
    barred = [[[token for token in range(4) if row[token] < 0] for row in index] for index in scores.tolist()]
    assert barred == [[[1, 3], [1, 3], [0, 1, 3], [1]], [[], [], [], []]]


def table_rows(*samplings: Sampling) -> SamplingRows:
    """Columns for a vocabulary of four tokens."""
    table, ids = SamplingTable.empty(len(samplings), torch.tensor([3]), 4), tuple(range(len(samplings)))
    for slot, sampling in enumerate(samplings):
        table.set(slot, sampling)
    return table.at(torch.tensor(ids), ids)


# Choosing


def slow_pick(logits: list[float], position: int, sampling: Sampling) -> int:
    """The best of the tokens that the filters keep, plus noise; T = 0 is the argmax alone."""
    if sampling.temperature == 0:
        return max(range(len(logits)), key=lambda token: logits[token])
    scores = [logit / sampling.temperature for logit in logits]
    key = rows_of(sampling).key
    noise = gumbel(key, torch.tensor([[position]]), torch.arange(len(logits)))[0, 0].tolist()
    kept = [token for token, keep in enumerate(slow_keeps(scores, sampling)) if keep]
    return max(kept, key=lambda token: scores[token] + noise[token])


def test_every_row_picks_for_itself() -> None:
    samplings = [
        Sampling(0.0, seed=1),
        Sampling(0.5, seed=2),
        Sampling(1.0, top_k=3, seed=3),
        Sampling(2.0, top_p=0.713, seed=4),
        Sampling(1.5, min_p=0.113, seed=5),
        Sampling(0.0, top_k=1, top_p=0.1, seed=6),
    ]
    logits = logits_of(6, 20)
    position = torch.arange(20).expand(6, -1) + torch.tensor([[0], [3], [9], [100], [7], [2]])
    chosen = pick(logits, position, rows_of(*samplings))
    for index, sampling in enumerate(samplings):
        for row in range(20):
            expected = slow_pick(logits[index, row].tolist(), int(position[index, row]), sampling)
            assert int(chosen[index, row]) == expected


LARGE = 600  # more tokens than a pick on the CPU looks at first

WIDE_FILTERS = [
    {},
    *({"top_k": k} for k in (1, 5, 255, 256, 257, 300, 2000)),
    *({"top_p": p} for p in (0.05, 0.5, 0.9, 0.99)),
    *({"min_p": p} for p in (0.001, 0.1, 0.9)),
    *({"top_k": k, "top_p": p} for k in (40, 256, 300, 500) for p in (0.3, 0.9)),
    {"top_k": 300, "min_p": 0.3},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 400, "top_p": 0.7, "min_p": 0.02},
]


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize("options", WIDE_FILTERS, ids=str)
def test_a_pick_is_the_best_of_the_whole_vocabulary(options: dict[str, float], spread: float) -> None:
    """However few tokens it looks at first: the winner is the best score of `judge`, which looks at all."""
    logits = spread * torch.randn(1, 80, LARGE, generator=torch.Generator().manual_seed(5)).double()
    position, sampling = torch.arange(80).view(1, -1), rows_of(Sampling(1.0, seed=3, **options))  # type: ignore[arg-type]
    assert torch.equal(pick(logits, position, sampling), judge(logits, position, sampling).argmax(-1))


def test_filters_of_a_large_vocabulary_equal_the_slow_search() -> None:
    logits = torch.randn(1, 1, LARGE, generator=torch.Generator().manual_seed(5)).double()
    for options in WIDE_FILTERS[1:]:
        sampling = Sampling(1.0, seed=3, **options)  # type: ignore[arg-type]
        kept = keeps(logits, rows_of(sampling))
        assert kept is not None
        assert kept[0].tolist() == [slow_keeps(row.tolist(), sampling) for row in logits[0]]


def test_a_pick_depends_neither_on_the_batch_nor_on_the_row() -> None:
    logits, sampling = logits_of(1, 1), Sampling(1.0, top_p=0.9, seed=4)
    alone = pick(logits, torch.tensor([[7]]), rows_of(sampling))
    others = torch.cat([logits_of(2, 3, seed=1), logits.expand(1, 3, -1)])
    position = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 7, 7]])
    together = pick(others, position, rows_of(Sampling(0.3, seed=1), Sampling(repetition_penalty=1.0), sampling))
    assert together[2].tolist() == alone[0].tolist() * 3


def stages(*requests: SlotOptions) -> SamplingStages:
    return SamplingStages.joined(map(SamplingStages.of, requests))


def test_the_stages_of_a_round_are_those_of_its_requests() -> None:
    greedy = Sampling(top_k=5, top_p=0.5, min_p=0.5)
    assert stages(SlotOptions(greedy)) == stages() == SamplingStages()
    mixed = (
        SlotOptions(greedy, floor=3),
        SlotOptions(Sampling(1.0, top_k=7, logprobs=2)),
        SlotOptions(Sampling(repetition_penalty=2.0)),
    )
    assert stages(*mixed) == SamplingStages(noise=True, repetition=True, floors=True, top_k=16, logprobs=16)
    filters = SlotOptions(Sampling(1.0, top_p=0.5)), SlotOptions(Sampling(1.0, min_p=0.5))
    assert stages(*filters) == SamplingStages(noise=True, top_p=True, min_p=True)
    others = SlotOptions(greedy, prompt=(1, 2), prediction=(3,)), SlotOptions(greedy, traced=True)
    assert stages(*others) == SamplingStages(predictions=1024, traces=True) and not stages(*others).filters
    assert [stages(one).origins for one in (*others, *mixed)] == [True, True, False, False, False]


def test_numbers_that_users_choose_come_in_few_sizes() -> None:
    """A round is captured for its stages: other stages for every number would need a graph for every number."""
    assert {stages(SlotOptions(Sampling(1.0, top_k=k))).top_k for k in range(1, 300)} == {16, 64, 256, 1024}
    assert {stages(SlotOptions(Sampling(logprobs=n))).logprobs for n in range(1, 101)} == {16, 64, 256}
    assert [stages(SlotOptions(Sampling(logprobs=n))).logprobs for n in (None, 0)] == [-1, 0], "neither needs a sort"
    assert all(stages(SlotOptions(Sampling(1.0, top_k=k))).top_k >= k for k in (1, 16, 17, 5000, 2**31 - 1))
    whole = [SlotOptions(Sampling(), prompt=(1,), prediction=(2,) * n) for n in (1, 1023, 1024, 4095)]
    assert [stages(one).predictions for one in whole] == [1024, 1024, 4096, 4096]


@pytest.mark.parametrize("k", [1, 3, 15, 16, 17, 64, 100])
def test_the_size_that_a_number_is_rounded_to_changes_no_pick(k: int) -> None:
    """Every row is cut to its own number, whatever the other requests ask for."""
    logits, position, sampling = logits_of(3, 4, 300, seed=k), torch.arange(12).view(3, 4), Sampling(1.3, top_k=k, seed=k)
    rows = rows_of(sampling, sampling, sampling)
    exact = pick(logits, position, replace(rows, kind=replace(rows.kind, top_k=k)))
    assert torch.equal(pick(logits, position, rows), exact)
    assert torch.equal(pick(logits, position, replace(rows, kind=replace(rows.kind, top_k=4096))), exact)
    scores = judge(logits, position, rows)
    assert (scores > -math.inf).sum(-1).tolist() == [[k] * 4] * 3


def test_the_stages_of_a_round_follow_requests_that_enter_and_leave() -> None:
    table, slots = SamplingTable.empty(3, ENDS), (0, 1, 2)
    table.set(0, Sampling(seed=1))
    table.set(1, Sampling(seed=2))
    assert table.kind(slots) == table.kind((0,)) == SamplingStages()
    table.set(2, Sampling(1.0, top_k=5, seed=3))
    assert table.kind(slots) == SamplingStages(noise=True, top_k=16) and table.kind((0, 1)) == SamplingStages()
    table.set(1, Sampling(1.0, top_k=50, seed=2), floor=4)
    assert table.kind(slots) == SamplingStages(noise=True, top_k=64, floors=True)
    table.forget(1)
    assert table.kind(slots) == SamplingStages(noise=True, top_k=16)
    table.forget(2)
    assert table.kind(slots) == SamplingStages()


# Ranking


def test_rank_begins_with_what_the_target_would_pick() -> None:
    """A drafter that knows the target's logits predicts its sample at any temperature, because they share the noise."""
    logits, position = logits_of(3, 50), torch.arange(50).expand(3, -1)
    sampling = rows_of(Sampling(0.0, seed=1), Sampling(0.7, seed=2), Sampling(1.5, seed=3))
    ranked = rank(logits, position, sampling, 3)
    assert torch.equal(ranked[..., 0], pick(logits, position, sampling))
    assert not torch.equal(ranked[2, :, 0], logits[2].argmax(-1))


def test_rank_is_best_first_under_the_noise() -> None:
    logits, position, sampling = logits_of(1, 5), torch.arange(5).view(1, -1), rows_of(Sampling(0.9, seed=2))
    scores = judge(logits, position, sampling)
    assert torch.equal(rank(logits, position, sampling, 4), scores.topk(4).indices)


def test_rank_over_given_candidates_sees_the_same_noise() -> None:
    """Indices into the candidates, in the order that they have among all tokens."""
    logits, position, sampling = logits_of(2, 5), torch.arange(10).view(2, 5), rows_of(Sampling(0.9), Sampling(0.0))
    tokens = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i))[:4] for i in range(10)])
    tokens = tokens.view(2, 5, 4)
    order = rank(logits.gather(2, tokens), position, sampling, 4, tokens)
    scores = judge(logits, position, sampling).gather(2, tokens)
    assert torch.equal(scores.gather(2, order), scores.sort(dim=-1, descending=True).values)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_candidate_has_the_probability_of_the_scores_it_is_ranked_by(temperature: float) -> None:
    """Those are the logits without noise, and otherwise the scores that the target will sample by."""
    logits, position = logits_of(2, 3), torch.tensor([[4, 5, 6], [1, 2, 3]])
    sampling = rows_of(Sampling(temperature=temperature, seed=3), Sampling(seed=4))
    tokens, chances = candidates(logits, position, sampling, 5)
    assert torch.equal(tokens, rank(logits, position, sampling, 5))
    scores = judge(logits, position, sampling)
    torch.testing.assert_close(chances, scores.log_softmax(-1).gather(2, tokens))
    assert (chances.diff(dim=-1) <= 0).all()


def test_without_noise_rank_is_the_order_of_the_logits() -> None:
    logits = logits_of(1, 5)
    assert torch.equal(rank(logits, torch.zeros(1, 5), rows_of(Sampling()), 4), logits.topk(4).indices)


def test_candidates_under_shared_noise_match_more_often() -> None:
    """A drafter with similar logits: under the noise it predicts the sample far more often than by argmax."""
    target, noise = logits_of(1, 2000), logits_of(1, 2000, seed=1)
    drafter, position = target + 0.25 * noise, torch.arange(2000).view(1, -1)
    sampling = rows_of(Sampling(1.0, seed=8))
    sampled = pick(target, position, sampling)
    coupled = (rank(drafter, position, sampling, 1)[..., 0] == sampled).double().mean()
    by_argmax = (drafter.argmax(-1) == sampled).double().mean()
    assert coupled > by_argmax + 0.1


# Seeds


def test_seeds_are_settled_once() -> None:
    seeded = Sampling().seeded()
    assert seeded.seed is not None and seeded.seeded() is seeded
    assert Sampling(seed=5).seeded() == Sampling(seed=5)
    assert Sampling().seeded().seed != Sampling().seeded().seed


def test_derived_seeds() -> None:
    sampling = Sampling(0.7, top_k=3, seed=5)
    assert sampling.derived(0) is sampling
    assert replace(sampling.derived(3), seed=5) == sampling
    assert [sampling.derived(i).seed for i in range(1, 3)] == [sampling.derived(i).seed for i in range(1, 3)]
    assert all(0 <= (sampling.derived(i).seed or 0) < 2**63 for i in range(50))


@pytest.mark.parametrize("size", [48, 4096, 5000, 49152])
@pytest.mark.parametrize("k", [1, 8])
def test_the_best_are_those_of_a_sort(size: int, k: int) -> None:
    scores = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size))
    scores[0, 0] = torch.arange(size) / size  # all in the last block
    scores[0, 1, 7] = math.inf
    scores[1, 2, 5:] = -math.inf
    found = top(scores, k)
    assert found.shape == (2, 3, k)
    expected = scores.sort(dim=-1, descending=True).values[..., :k]
    assert torch.equal(scores.gather(-1, found), expected)
    assert all(len(set(row)) == k for row in found.flatten(0, 1).tolist())


@pytest.mark.parametrize("size", [48, 4096, 5000])
def test_of_equal_scores_the_first_wins(size: int) -> None:
    sampling = rows_of(Sampling(seed=0))
    logits = torch.randint(0, 4, (1, 20, size), generator=torch.Generator().manual_seed(0)).float()
    logits[0, 3, size // 2] = math.nan
    found = pick(logits, torch.zeros(1, 20, dtype=torch.long), sampling)
    assert torch.equal(found, torch.from_numpy(logits.numpy().argmax(-1)))
