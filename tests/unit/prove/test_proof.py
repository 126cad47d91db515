"""The proof finds no bug in lossless methods, every bug in broken ones, and goes on after a difference."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from doubles import fresh, tiny
from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import Batch, State
from foreword.engine import lockstep
from foreword.engine.accept import accept
from foreword.errors import InputError, PromptError, UnknownMethod
from foreword.model.model import Model
from foreword.ops import rounds
from foreword.prove import Report, prove
from foreword.prove.proof import _first_difference
from foreword.text import Prompt

GREEDY, SAMPLED = Sampling(seed=0), Sampling(temperature=0.8, seed=7)
METHODS = ["prompt_lookup", "token_recycling"]


class Shaky(Model):
    """A model whose passes of several rows are off by up to half a point: far more than rounding."""

    def score(self, batch: Batch, draft: Draft, needs: Needs, *rest: object, **options: object) -> Scores:
        scores = super().score(batch, draft, needs, *rest, **options)
        if draft.nodes == 1 or scores.logits is None:
            return scores
        off = torch.rand(self.vocab_size, generator=torch.Generator().manual_seed(0)) - 0.5
        return replace(scores, logits=scores.logits + off)


def worst_first(state: State, draft: Draft, scores: Scores, depth: int) -> tuple[Accepted, Emission]:
    """Accept the least likely token wherever there is a draft."""
    turned = replace(scores, logits=-scores.require_logits()) if draft.nodes > 1 else scores
    return accept(state, draft, turned, depth)


def positions(report: Report, method: str, prompt: str, verdict: str) -> list[int]:
    found = report.methods[method].differences
    return [one.position for one in found if (one.prompt, one.verdict) == (prompt, verdict)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_lossless_methods_have_no_bugs(small: SimpleNamespace, questions: list[Prompt], family: str) -> None:
    llm = small.load(tiny(family, torch.float32))
    report = prove(llm, METHODS, questions, [GREEDY, SAMPLED], max_new_tokens=20)
    assert report.bugs == report.ties == 0
    for proof in report.methods.values():
        assert proof.prompts == proof.identical == 5
        assert proof.drafted > proof.accepted > 0, "a proof without drafts proves nothing"
        assert proof.tokens_per_round == pytest.approx(sum(p.tokens for p in proof.samplings.values()) / proof.rounds)
        assert list(proof.samplings) == ["greedy", "T=0.8 seed=7"]


def test_the_outputs_are_those_of_generate(small: SimpleNamespace, questions: list[Prompt]) -> None:
    llm = small.load()
    report = prove(llm, ["token_recycling"], questions, [SAMPLED], max_new_tokens=24)
    generated = llm.generate([question.turns[0] for question in questions], max_new_tokens=24, temperature=0.8, seed=7)
    assert report.methods["token_recycling"].tokens == sum(len(one.tokens) for one in generated)
    assert any(len(one.tokens) < 24 for one in generated), "no output ends by itself: that would go untested"


def test_a_wrong_acceptance_is_found(
    small: SimpleNamespace, questions: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "accept", worst_first)
    report = prove(small.load(), ["token_recycling"], questions, [GREEDY], max_new_tokens=8)
    proof = report.methods["token_recycling"]
    assert report.bugs == proof.bugs == len(proof.differences) > 0
    assert proof.identical < 5
    first = proof.differences[0]
    assert (first.verdict, first.reason, first.sampling) == ("bug", "gap", "greedy")
    assert first.plain.score > first.method.score + 1
    assert first.gap == first.plain.score - first.method.score
    assert first.plain.text == f"w{first.plain.token}" != first.method.text
    assert max(positions(report, "token_recycling", first.prompt, "bug")) > first.position, "the rest is tested too"


def test_a_wrong_pass_does_not_excuse_itself(small: SimpleNamespace, questions: list[Prompt]) -> None:
    """The run's error is also measured on the broken passes."""
    report = prove(small.load(kind=Shaky), METHODS, questions, [GREEDY, SAMPLED], max_new_tokens=10)
    assert report.bugs > 0 and report.ties == 0
    assert all(one.error < 1e-3 for proof in report.methods.values() for one in proof.differences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("without_onednn")
def test_near_ties_that_flip_are_ties(small: SimpleNamespace, questions: list[Prompt], dtype: torch.dtype) -> None:
    llm = small.load(small.coarse(fresh("llama", dtype)))
    filtered = Sampling(temperature=1.0, top_k=8, top_p=0.8, min_p=0.02, repetition_penalty=1.2, seed=3)
    report = prove(llm, METHODS, questions, [GREEDY, SAMPLED, filtered], max_new_tokens=16)
    assert report.bugs == 0
    for proof in report.methods.values():
        assert proof.ties == len(proof.differences) > 0
        assert all(one.gap <= 2 * one.error for one in proof.differences if one.reason == "gap")
        assert all(proof.samplings[one.sampling].ties > 0 for one in proof.differences)


def test_tokens_after_a_tie_are_tested(
    small: SimpleNamespace, questions: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small.load(small.coarse(fresh("llama", torch.float32)))
    fine = prove(llm, ["token_recycling"], questions, [GREEDY], max_new_tokens=16)
    tie = fine.methods["token_recycling"].differences[0]
    number = next(i for i, question in enumerate(questions) if question.id == tie.prompt)
    reached = len(llm.tokenizer.encode(questions[number].turns[0])) + tie.position + 1

    def worst_after_the_tie(state: State, draft: Draft, scores: Scores, depth: int) -> tuple[Accepted, Emission]:
        return (worst_first if int(state.length.max()) >= reached else accept)(state, draft, scores, depth)

    monkeypatch.setattr(lockstep, "accept", worst_after_the_tie)
    broken = prove(llm, ["token_recycling"], [questions[number]], [GREEDY], max_new_tokens=16)
    assert positions(broken, "token_recycling", tie.prompt, "tie")[0] == tie.position
    assert min(positions(broken, "token_recycling", tie.prompt, "bug")) > tie.position


def test_a_bug_is_found_among_many_ties(
    small: SimpleNamespace, questions: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of one output accepts the worst token; all differences are judged in one batch."""
    llm = small.load(small.coarse(fresh("llama", torch.float32), step=1 / 4))
    spoiled: list[int] = []

    def worst_once(state: State, draft: Draft, scores: Scores, depth: int) -> tuple[Accepted, Emission]:
        late = int(state.length.max()) > 20 and draft.nodes > 1 and not spoiled
        spoiled.extend([1] * late)
        return (worst_first if late else accept)(state, draft, scores, depth)

    monkeypatch.setattr(lockstep, "accept", worst_once)
    report = prove(llm, METHODS, questions, [GREEDY, SAMPLED], max_new_tokens=16)
    assert report.ties > 5 and 0 < report.bugs <= 3, "as many as there are slots"


def test_an_output_stops_where_it_diverges(small: SimpleNamespace, questions: list[Prompt]) -> None:
    """The method continues from plain's sequence at once, so each token is generated about once despite the differences."""
    llm = small.load(small.coarse(fresh("llama", torch.float32), step=1 / 4))
    proof = prove(llm, ["token_recycling"], questions, [GREEDY, SAMPLED], max_new_tokens=24).methods["token_recycling"]
    longest = llm.engine.drafter.shape.depth
    assert len(proof.differences) > 5
    assert proof.rounds * proof.tokens_per_round <= proof.tokens + longest * len(proof.differences)


def test_incomplete_reports_come_before_the_end(small: SimpleNamespace, questions: list[Prompt]) -> None:
    reports: list[Report] = []
    llm = small.load(small.coarse(fresh("llama", torch.float32)))
    report = prove(llm, METHODS, questions, [GREEDY, SAMPLED], 16, on_report=reports.append)
    assert [list(one.methods) for one in reports] == [METHODS[:1], METHODS, METHODS]
    assert report.complete and not any(one.complete for one in reports)
    unjudged = [sum(proof.unjudged for proof in one.methods.values()) for one in [*reports, report]]
    assert unjudged[1] == report.ties > unjudged[0] > 0 == unjudged[2] == unjudged[3]
    assert reports[1].ties == 0 and reports[1].methods[METHODS[0]].identical == report.methods[METHODS[0]].identical


def test_an_output_that_stops_too_early_is_a_bug(
    small: SimpleNamespace, questions: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = rounds.cut

    def hasty(state: State, tokens: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, ended = cut(state, tokens, count)
        return count, ended | (tokens.shape[1] > 1)

    monkeypatch.setattr(rounds, "cut", hasty)
    report = prove(small.load(), ["token_recycling"], questions[:1], [GREEDY], max_new_tokens=8)
    found = report.methods["token_recycling"].differences
    assert found and {(one.verdict, one.reason) for one in found} == {("bug", "length")}
    assert found[0].plain.token is not None and found[0].method.token is None and found[0].gap is None


def test_where_two_outputs_diverge() -> None:
    assert _first_difference([1, 2, 3], [1, 2, 3]) is None
    assert _first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert _first_difference([1, 2, 3], [1, 2]) == 2
    assert _first_difference([1], [1, 2]) == 1


def test_progress_counts_every_output_of_every_method(small: SimpleNamespace, questions: list[Prompt]) -> None:
    """Also if outputs continue after differences."""
    events: list[tuple[str, int, int]] = []
    llm = small.load(small.coarse(fresh("llama", torch.float32)))
    prove(llm, METHODS, questions, [GREEDY, SAMPLED], 12, progress=lambda *event: events.append(event))
    assert events[:30] == [(stage, done, 10) for stage in ("plain", *METHODS) for done in range(1, 11)]
    assert events[30:] == [("judging", 2, 2)]


def test_rows_bound_the_passes(small: SimpleNamespace, questions: list[Prompt]) -> None:
    llm = small.load()
    report = prove(llm, ["token_recycling"], questions, [GREEDY], max_new_tokens=8, rows=3)
    proof = report.methods["token_recycling"]
    assert llm.engine.drafter.shape.nodes == 3
    assert 0 < proof.drafted <= 2 * proof.rounds


def test_without_a_seed_one_is_chosen_and_named(small: SimpleNamespace, questions: list[Prompt]) -> None:
    report = prove(small.load(), ["prompt_lookup"], questions, [Sampling(temperature=1.0)], max_new_tokens=8)
    (name, sampling), *_ = report.samplings.items()
    assert report.bugs == 0
    assert sampling.seed is not None and name == f"T=1 seed={sampling.seed}"


def test_a_conversation_is_asked_as_a_whole(small: SimpleNamespace) -> None:
    chat = [
        {"role": "user", "content": "w3 w4"},
        {"role": "assistant", "content": "w5"},
        {"role": "user", "content": "w6"},
    ]
    talk = Prompt("talk", "test", ["w3 w4", "w6"], chat)
    llm = small.load()
    report = prove(llm, ["prompt_lookup"], [talk], [GREEDY], max_new_tokens=24)
    assert report.methods["prompt_lookup"].tokens == len(llm.generate(chat, max_new_tokens=24).tokens)
    with pytest.raises(PromptError, match="no chat template"):
        prove(small.load(chat_template=None), ["prompt_lookup"], [talk], [GREEDY])


def test_a_model_without_a_chat_template_gets_the_string(small: SimpleNamespace, questions: list[Prompt]) -> None:
    report = prove(small.load(chat_template=None), ["prompt_lookup"], questions, [GREEDY], max_new_tokens=8)
    assert report.methods["prompt_lookup"].identical == 5


@pytest.mark.parametrize("empty", ["methods", "prompts", "samplings"])
def test_nothing_to_prove_is_refused(small: SimpleNamespace, questions: list[Prompt], empty: str) -> None:
    given = {"methods": METHODS, "prompts": questions, "samplings": [GREEDY]} | {empty: []}
    with pytest.raises(InputError, match=f"no {empty}"):
        prove(small.load(), **given)


def test_wrong_arguments_are_refused_before_plain_runs(small: SimpleNamespace, questions: list[Prompt]) -> None:
    events: list[object] = []
    with pytest.raises(UnknownMethod, match="token_recycling"):
        prove(small.load(), ["token_recicling"], questions, [GREEDY], progress=lambda *event: events.append(event))
    with pytest.raises(InputError, match="rows is 0"):
        prove(small.load(), METHODS, questions, [GREEDY], rows=0, progress=lambda *event: events.append(event))
    assert events == []
