"""The referee's float64 copy is exact, its passes are the run's own, and its verdicts follow the margins."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from doubles import engine, fresh, hf_logits, requests, target, tiny, truth
from foreword.core.choosing import History, judge, keeps
from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingTable
from foreword.core.scores import Scores
from foreword.core.state import Batch
from foreword.errors import ModelError, ModelNotFound, ModelUnsupported
from foreword.methods import make
from foreword.model.linears import PackedLinear
from foreword.model.loading import load_weights
from foreword.model.model import Model
from foreword.prove import referee
from foreword.prove.referee import (
    Case,
    CaseBatch,
    PassReplay,
    Referee,
    Ruling,
    Scoring,
    batches,
    decide,
    exact_copy,
    replays,
    standing,
)

GREEDY, SAMPLED = Sampling(seed=0), Sampling(temperature=0.8, seed=7)
SEQUENCE = (5, 9, 3, 31, 7, 7, 12, 40, 22, 3, 31, 8, 19, 44, 6, 5, 17, 29, 11, 30)


def case(prompt: int, place: int, sampling: Sampling = GREEDY, plain: int = 4, method: int = 5) -> Case:
    return Case(SEQUENCE, prompt, place, sampling, plain, method)


def ruled(model: Model, *cases: Case) -> list[Ruling]:
    rulings = {case: ruling for found in Referee(model).judge(cases) for case, ruling in found.items()}
    return [rulings[case] for case in cases]


def in_float64(hf: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights in the float64 form of doubles."""
    exact = fresh(hf.config.model_type, torch.float64)
    exact.load_state_dict(hf.state_dict())
    for name, buffer in hf.named_buffers():  # rotary frequencies, which `.to(bfloat16)` also rounds
        exact.get_buffer(name).copy_(buffer)
    return exact


# The float64 copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "count"), [("llama", 9), ("qwen3", 17), ("olmo2", 17), ("gemma2", 17), ("gemma3_text", 25)]
)
def test_the_copy_computes_all_in_float64(family: str, count: int, dtype: torch.dtype) -> None:
    """Except for Gemma 2: its caps need eager attention, where the softmax is in float32."""
    model = Model(fresh(family, dtype))
    copied = exact_copy(model)
    error = (hf_logits(copied, SEQUENCE) - hf_logits(in_float64(model.hf), SEQUENCE)).abs().max()
    assert error < (1e-5 if family == "gemma2" else 1e-12)
    norms = [module for module in copied.modules() if "Norm" in type(module).__name__]
    assert len(norms) == count and {type(norm) for norm in norms} == {referee.ExactNorm}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_copied(family: str) -> None:
    """Transformers' fast ways to compute experts refuse float64; gpt_oss has sinks, which only eager attention has."""
    hf = fresh(family, torch.float32)
    assert hf.config._experts_implementation != "eager"
    assert (hf_logits(exact_copy(Model(hf)), SEQUENCE) - hf_logits(hf, SEQUENCE)).abs().max() < 1e-3


def test_without_the_patch_norms_would_round_to_float32() -> None:
    hf = fresh("llama", torch.float32)
    expected = hf_logits(in_float64(hf), SEQUENCE)
    assert (hf_logits(hf.double(), SEQUENCE) - expected).abs().max() > 1e-9


def test_eager_attention_does_not_round_the_copy() -> None:
    hf = fresh("llama", torch.float32)
    hf.config._attn_implementation = "eager"
    assert (hf_logits(exact_copy(Model(hf)), SEQUENCE) - hf_logits(in_float64(hf), SEQUENCE)).abs().max() < 1e-12


def test_the_original_is_unchanged() -> None:
    hf = fresh("qwen3", torch.float32)
    before = hf_logits(hf, SEQUENCE)
    model = Model(hf)
    exact_copy(model)
    assert model.hf is hf and hf.dtype == torch.float32 and hf.config._attn_implementation == "foreword_sdpa"
    assert not any(isinstance(module, referee.ExactNorm) for module in hf.modules())
    assert hf_logits(hf, SEQUENCE).equal(before)


def test_a_packed_model_is_read_again_from_its_folder(tmp_path: Path) -> None:
    hf = fresh("llama", torch.float32)
    hf.save_pretrained(tmp_path)
    packed = load_weights(tmp_path, torch.device("cpu"), torch.float32)
    assert any(isinstance(module, PackedLinear) for module in packed.modules())
    copied = exact_copy(Model(packed))
    assert (hf_logits(copied, SEQUENCE) - hf_logits(in_float64(hf), SEQUENCE)).abs().max() < 1e-12


def test_weights_are_those_of_the_run_not_of_the_file(tmp_path: Path) -> None:
    wide = fresh("llama", torch.float64)
    with torch.no_grad():
        wide.lm_head.weight += 1e-9
    wide.save_pretrained(tmp_path)
    packed = load_weights(tmp_path, torch.device("cpu"), torch.float32)
    assert exact_copy(Model(packed)).lm_head.weight.equal(wide.lm_head.weight.float().double())


def test_a_packed_model_without_its_folder_is_refused(tmp_path: Path) -> None:
    fresh("llama", torch.float32).save_pretrained(tmp_path / "model")
    packed = load_weights(tmp_path / "model", torch.device("cpu"), torch.float32)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(ModelNotFound, match="not a folder to read them from"):
        exact_copy(Model(packed, "small"))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    hf = fresh("llama", torch.float32)
    hf.model.extra = hf.lm_head.weight * 2  # not a leaf: torch refuses to copy it
    with pytest.raises(ModelError, match="a second time, in float64 on cpu"):
        exact_copy(Model(hf, "small"))


def test_a_norm_of_another_form_is_refused() -> None:
    class OffsetRMSNorm(nn.Module):
        weight, variance_epsilon = torch.zeros(32), 1e-6

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return (1 + self.weight) * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)

    hf = fresh("llama", torch.float32)
    hf.model.norm = OffsetRMSNorm()
    with pytest.raises(ModelUnsupported, match="OffsetRMSNorm"):
        exact_copy(Model(hf))


# The run's own passes


class Watched(Model):
    """Record, for each pass, the number of sequences, the longest cached length, and the rows of the draft."""

    def score(self, batch: Batch, draft: Draft, needs: Needs, *rest: object, **options: object) -> Scores:
        vars(self).setdefault("passes", []).append((len(batch.ids), int(self.cache.length.max()), draft.nodes))
        return super().score(batch, draft, needs, *rest, **options)


@pytest.mark.parametrize("longest", [6, 64])
def test_replays_of_every_shape_answer_the_same(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of different lengths in one batch, prompts of one token and of many, the first new token and the last."""
    monkeypatch.setattr(referee, "prefill_chunk", lambda _: longest)
    model = target("llama")
    by_sequence = [[case(1, 1), case(1, 9), case(1, 3)], [case(8, 8), case(8, 20)], [case(19, 20)]]
    with torch.inference_mode():
        found = [referee.own_logits(model.hf, CaseBatch.of(by_sequence)), *replays(model, CaseBatch.of(by_sequence))]
        whole = hf_logits(model.hf, SEQUENCE)
    expected = torch.stack([whole[one.place - 1] for of_sequence in by_sequence for one in of_sequence])
    assert len(found) == 5
    for answers in found:
        assert (answers - expected).abs().max() < 1e-12


def test_a_replay_has_the_shape_it_is_asked_for() -> None:
    model, batch = Watched(tiny("llama")), CaseBatch.of([[case(10, 12), case(10, 20)], [case(4, 5)]])
    with torch.inference_mode(), model.temporary_cache(2, 20, 64) as cache:
        replay = PassReplay(model, batch, cache)
        replay.prefill(batch.roots)
        replay.generate(4)
        replay.score_single_rows()
    assert model.passes == [(2, 0, 9), (2, 9, 4), (2, 13, 4), (2, 17, 4), (2, 19, 1), (2, 11, 1)]


def test_a_sequence_is_replayed_once_for_all_its_cases() -> None:
    one, many = (Watched(tiny("llama", torch.float32)) for _ in range(2))
    ruled(one, case(10, 20))
    ruled(many, *(case(10, 20, GREEDY, 4, method) for method in range(5, 15)), case(10, 20, SAMPLED))
    assert len(one.passes) == 1 + 11 + 3 + 1 + 1 + 1, "the prompt, chains of 1, 4 and 16, the sequence, its last row"
    assert many.passes == one.passes


def many_cases() -> list[Case]:
    filtered = Sampling(temperature=1.0, top_k=8, top_p=0.8, min_p=0.02, repetition_penalty=1.2, seed=3)
    places = [(prompt, place) for prompt in (1, 5, 19) for place in range(prompt, 21, 4)]
    return [
        case(prompt, place, sampling, place, method)
        for prompt, place in places
        for sampling in (GREEDY, SAMPLED, filtered)
        for method in (place ^ 1, place + 9)
    ]


@pytest.mark.parametrize("bounds", [{}, {"MOST_SEQUENCES": 1}, {"MOST_ANSWERS": 200}])
def test_together_or_one_by_one_the_verdicts_are_the_same(
    small: SimpleNamespace, bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the pairs are twins, which tie without noise, and the head rounds to eighths."""
    model = Model(small.coarse(small.twins(fresh("llama", torch.float32))))
    cases = many_cases()
    alone = [ruled(model, one)[0] for one in cases]
    for name, bound in bounds.items():
        monkeypatch.setattr(referee, name, bound)
    together = ruled(model, *cases)
    assert {one.verdict for one in alone} == {"tie", "bug"}
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.verdict, ours.reason) == (theirs.verdict, theirs.reason)
        assert (ours.gap, ours.error) == pytest.approx((theirs.gap, theirs.error), abs=1e-5)


def test_batches_are_bounded_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cases = target("llama"), many_cases()
    assert len(list(batches([*cases, *cases], model))) == 1
    monkeypatch.setattr(referee, "MOST_SEQUENCES", 2)
    split = list(batches([*cases, *cases], model))
    assert [len(batch.sequences) for batch in split] == [2, 1]
    found = [one for batch in split for one in batch.cases]
    assert len(found) == len(cases) and set(found) == set(cases)
    lengths = [Case(tuple(range(length)), 1, length, SAMPLED, 4, 5) for length in (3000, 2000, 40, 30)]
    assert [[len(sequence) for sequence in batch.sequences] for batch in batches(lengths, model)] == [
        [30, 40],
        [2000],
        [3000],
    ]


@pytest.mark.parametrize("prompt", [1, 3, 20])
def test_sequences_of_any_length_can_be_judged(prompt: int) -> None:
    (ruling,) = ruled(Model(tiny("llama", torch.float32)), case(prompt, min(prompt + 2, 20)))
    assert ruling.error < 1e-4


def test_the_engine_keeps_its_cache() -> None:
    model = Model(tiny("llama", torch.float32))
    writing, asked = engine(make("plain"), model), requests(2)
    running = [writing.add(request) for request in asked]
    writing.step()
    ruled(model, case(8, 20))
    while writing.busy:
        writing.step()
    assert [run.tokens for run in running] == [truth(model.hf, request) for request in asked]


def test_without_a_difference_there_is_no_copy() -> None:
    judging = Referee(Model(tiny("llama", torch.float32)))
    assert list(judging.judge([])) == [] and "exact" not in vars(judging)


# Scores


def test_scores_are_what_pick_compares() -> None:
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.4, seed=3)
    model = target("llama")
    logits = hf_logits(model.hf, SEQUENCE)[-1]
    table = SamplingTable.empty(1, model.ends)
    table.set(0, sampling)
    seen = torch.tensor(SEQUENCE).bincount(minlength=48).view(1, 1, -1)
    judged = judge(logits.view(1, 1, -1), torch.tensor([[len(SEQUENCE)]]), table.at(torch.tensor([0]), (0,)), History(seen))[
        0, 0
    ]
    kept = judged > -torch.inf
    cases = [case(8, 20, Sampling(seed=1)), case(8, 20, sampling)]  # the other case uses other stages
    scores = Scoring.of(cases, model).scores(logits.expand(2, -1))[1]
    assert 1 <= kept.sum() < 6 and scores.isfinite().all()
    assert scores[kept].equal(judged[kept])


def test_the_run_s_error_is_its_rounding(small: SimpleNamespace) -> None:
    (fine,) = ruled(Model(tiny("llama", torch.float32)), case(8, 20))
    (rounded,) = ruled(Model(small.coarse(fresh("llama", torch.float32))), case(8, 20))
    assert 0 < fine.error < 1e-4 < rounded.error <= 1 / 8
    assert fine.gap == pytest.approx(rounded.gap) == abs(fine.plain_score - fine.method_score)


def test_the_likeliest_against_another_is_a_bug() -> None:
    model = Model(tiny("llama", torch.float32))
    best, second = hf_logits(model.hf, SEQUENCE)[-1].topk(2).indices.tolist()
    (ruling,) = ruled(model, case(8, 20, Sampling(seed=0), best, second))
    assert (ruling.verdict, ruling.reason) == ("bug", "gap") and ruling.plain_score > ruling.method_score


# Verdicts


@pytest.mark.parametrize(
    ("gap", "higher", "lower", "expected"),
    [
        (0.1, "kept", "kept", ("tie", "gap")),
        (0.3, "kept", "kept", ("bug", "gap")),
        (0.3, "top-k edge", "kept", ("tie", "top-k edge")),
        (0.3, "top-p edge", "min-p edge", ("tie", "top-p edge")),
        (0.3, "kept", "top-k edge", ("bug", "gap")),  # the higher token wins whether or not the lower is kept
        (0.1, "kept", "top-k edge", ("tie", "gap")),
        (0.1, "dropped", "kept", ("bug", "filter")),
        (0.1, "kept", "dropped", ("bug", "filter")),
        (0.3, "top-k edge", "dropped", ("bug", "filter")),
    ],
)
def test_verdicts(gap: float, higher: str, lower: str, expected: tuple[str, str]) -> None:
    assert decide(gap, 0.2, higher, lower) == expected


def test_equal_scores_are_a_tie_even_without_error() -> None:
    assert decide(0.0, 0.0, "kept", "kept") == ("tie", "gap")


@pytest.mark.parametrize(
    ("filters", "standings"),
    [
        ({"top_k": 2}, ["kept", "top-k edge", "top-k edge", "dropped"]),
        ({"top_k": 3}, ["kept", "kept", "kept", "dropped"]),
        ({"top_p": 0.8}, ["kept", "kept", "kept", "dropped"]),  # 0.525, 0.193, 0.191, 0.091 of the mass
        ({"top_p": 0.7}, ["kept", "top-p edge", "top-p edge", "dropped"]),
        ({"top_p": 0.53}, ["kept", "top-p edge", "top-p edge", "dropped"]),
        ({"top_p": 0.5}, ["kept", "dropped", "dropped", "dropped"]),
        ({"min_p": 0.365}, ["kept", "min-p edge", "min-p edge", "dropped"]),
        ({"min_p": 0.5}, ["kept", "dropped", "dropped", "dropped"]),
        ({"min_p": 0.1}, ["kept", "kept", "kept", "kept"]),
        ({"top_k": 3, "min_p": 0.365}, ["kept", "min-p edge", "min-p edge", "dropped"]),
        ({}, ["kept", "kept", "kept", "kept"]),
    ],
)
def test_filters_have_edges(filters: dict[str, float], standings: list[str]) -> None:
    scaled = torch.tensor([2.0, 1.0, 0.99, 0.25], dtype=torch.float64)
    sampling = Sampling(temperature=0.5, **filters)
    assert [standing(scaled, token, sampling, 0.05) for token in range(4)] == standings


def test_greedy_has_no_filters() -> None:
    assert standing(torch.tensor([2.0, 1.0]), 1, Sampling(top_k=1, top_p=0.1, min_p=0.9), 0.0) == "kept"


@given(
    scores=st.lists(st.integers(-40, 40), min_size=2, max_size=12),
    top_k=st.integers(0, 5),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_without_a_margin_the_filters_agree(scores: list[int], top_k: int, top_p: float, min_p: float) -> None:
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
    scaled = torch.tensor(scores, dtype=torch.float64) / 7
    table = SamplingTable.empty(1, torch.tensor([0]))
    table.set(0, sampling)
    kept = keeps(scaled.view(1, 1, -1), table.at(torch.tensor([0]), (0,)))
    for token in range(len(scores)):
        found = standing(scaled, token, sampling, 1e-9)
        if found in ("kept", "dropped"):
            assert (found == "kept") == (kept is None or bool(kept[0, 0, token]))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.99}], ids=["top-k", "top-p", "min-p"])
def test_twins_on_an_edge_are_a_tie_across_a_wide_gap(
    small: SimpleNamespace, filters: dict[str, float], request: pytest.FixtureRequest
) -> None:
    """Two tokens with the same logit: rounding decides which one a filter keeps, and the noise puts them far apart."""
    model = Model(small.coarse(small.twins(fresh("qwen3", torch.float32))))
    with torch.inference_mode():
        best = int(hf_logits(model.hf, SEQUENCE)[-1].argmax()) // 2 * 2
    edged, free = (Sampling(temperature=1.0, seed=2, **chosen) for chosen in (filters, {}))
    ruling, other = ruled(model, case(8, 20, edged, best, best + 1), case(8, 20, free, best, best + 1))
    assert ruling.gap > 2 * ruling.error
    assert (ruling.verdict, ruling.reason) == ("tie", f"{request.node.callspec.id} edge")
    assert other.verdict == "bug"
