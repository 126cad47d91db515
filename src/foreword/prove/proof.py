"""The proof itself: plain decoding writes every prompt, each method writes them again, and the tokens are compared.

In: a loaded LLM, method names, prompts and samplings. Out: a Report. All prompts of a sampling go to the engine at once,
more than it has slots, so that batching and late admission are proved with the drafts; the seeds are the same for all
methods. Where a method parts from plain, the difference goes to the referee, and the method writes on from plain's text:
so every token of plain's texts is tested, whatever came before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from foreword.api import LLM
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.errors import InputError
from foreword.methods.wanted import Wanted
from foreword.prove.referee import Referee, Ruling
from foreword.prove.report import Choice, Difference, MethodProof, Report, name_of
from foreword.results import Stats
from foreword.text import Prompt

Progress = Callable[[str, int, int], None]


def prove(
    llm: LLM,
    methods: Sequence[str],
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    max_new_tokens: int = 64,
    rows: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Test that each method writes what plain decoding writes. `rows` bounds its passes; None is what pays here.

    A method is a name, or NAME=FOLDER for a trained drafter. `progress` hears what is being run, how many texts of it are
    done, and of how many. The LLM is left with the last method.
    """
    _check(llm, methods, prompts, samplings, rows)
    named = {name_of(sampling): sampling for sampling in [sampling.seeded() for sampling in samplings]}
    asked = {name: _requests(llm, prompts, sampling, max_new_tokens) for name, sampling in named.items()}
    total = len(prompts) * len(named)
    engine, done = llm.use("plain").engine, _counter(progress, "plain", total)
    texts = {name: _write_plain(engine, prompts, requests, done) for name, requests in asked.items()}
    referee, proofs = Referee(llm.model), {}
    for method in dict.fromkeys(methods):
        engine, done = llm.use(method, rows=rows).engine, _counter(progress, method, total)
        trials = [Trial(name, written).run(engine, done) for name, written in texts.items()]
        proofs[method] = _proof(trials, llm, referee)
    return Report.of(llm, named, max_new_tokens, proofs)


def compare(original: LLM, other: LLM, prompts: Sequence[Prompt], max_new_tokens: int = 64) -> MethodProof:
    """Test that another model, of the same function, writes what `original` writes: both plainly and greedily.

    Where they part, the original is asked again in float64, as for a method. Both LLMs are left with plain decoding.
    """
    sampling = Sampling(seed=0)
    requests = _requests(original, prompts, sampling, max_new_tokens)
    texts = _write_plain(original.use("plain").engine, prompts, requests, lambda: None)
    trial = Trial(name_of(sampling), texts).run(other.use("plain").engine, lambda: None)
    return _proof([trial], original, Referee(original.model))


def _check(
    llm: LLM, methods: Sequence[str], prompts: Sequence[Prompt], samplings: Sequence[Sampling], rows: int | None
) -> None:
    """Refuse now what would fail after plain decoding has written everything."""
    for given, name in ((methods, "methods"), (prompts, "prompts"), (samplings, "samplings")):
        if not given:
            raise InputError(f"there are no {name} to prove with; give at least one")
    for method in methods:
        Wanted.of(method, rows=rows).on(llm.model)


def _requests(llm: LLM, prompts: Sequence[Prompt], sampling: Sampling, max_new_tokens: int) -> list[Request]:
    encoded = [llm.tokenizer.encode(one.first()) for one in prompts]
    return [Request(tuple(ids), sampling.derived(i), max_new_tokens) for i, ids in enumerate(encoded)]


def _counter(progress: Progress | None, stage: str, total: int) -> Callable[[], None]:
    done = count(1)
    return (lambda: None) if progress is None else (lambda: progress(stage, next(done), total))


# Writing ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """What plain decoding wrote for one prompt under one sampling."""

    prompt: Prompt
    request: Request
    tokens: list[int]

    def after(self, position: int) -> Request | None:
        """To go on behind a new token of plain's, or None where nothing is left to write.

        The noise depends on the place in the whole text, so the same seed goes on with the same draws.
        """
        given = self.tokens[: position + 1]
        if len(given) == len(self.tokens):
            return None
        left = self.request.max_new_tokens - len(given)
        return replace(self.request, prompt=(*self.request.prompt, *given), max_new_tokens=left)


@dataclass(frozen=True)
class Parting:
    """A place where the method's token is not plain's; None stands for a text that had ended."""

    text: int
    position: int
    plain: int | None
    method: int | None


@dataclass
class Trial:
    """One method against plain's texts under one sampling."""

    sampling: str
    texts: list[Text]
    partings: list[Parting] = field(default_factory=list)
    runs: list[Running] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, engine: Engine, done: Callable[[], None]) -> Trial:
        def ended(index: int, run: Running) -> Request | None:
            further = self._compare(index, run)
            if further is None:
                done()
            return further

        started = time.perf_counter()
        self.runs = _write(engine, [text.request for text in self.texts], ended)
        self.seconds = time.perf_counter() - started
        return self

    def _compare(self, index: int, run: Running) -> Request | None:
        """Note where a run parts from plain's text, and ask for what comes behind."""
        text = self.texts[index]
        given = len(run.request.prompt) - len(text.request.prompt)
        place = _first_difference(text.tokens[given:], run.tokens)
        if place is None:
            return None
        position = given + place
        self.partings.append(Parting(index, position, _at(text.tokens, position), _at(run.tokens, place)))
        return text.after(position)


def _write_plain(engine: Engine, prompts: Sequence[Prompt], requests: list[Request], done: Callable[[], None]) -> list[Text]:
    runs = _write(engine, requests, lambda _, __: done())
    return [Text(prompt, request, run.tokens) for prompt, request, run in zip(prompts, requests, runs, strict=True)]


def _write(engine: Engine, requests: list[Request], ended: Callable[[int, Running], Request | None]) -> list[Running]:
    """Write all requests together. `ended` hears of each, by its index, and may answer with what to write next."""
    runs = [engine.add(request) for request in requests]
    index = {id(run): i for i, run in enumerate(runs)}
    try:
        while engine.busy:
            for run in [event.running for event in engine.step() if event.running.done]:
                further = ended(index[id(run)], run)
                if further is not None:
                    runs.append(engine.add(further))
                    index[id(runs[-1])] = index[id(run)]
    finally:
        for run in runs:
            engine.abort(run)
    return runs


def _first_difference(plain: Sequence[int], method: Sequence[int]) -> int | None:
    """Where two texts part, or the shorter one ends."""
    common = min(len(plain), len(method))
    return next((i for i in range(common) if plain[i] != method[i]), common if len(plain) != len(method) else None)


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


# Judging ----------------------------------------------------------------------------------------------------------------


def _proof(trials: list[Trial], llm: LLM, referee: Referee) -> MethodProof:
    parts = {trial.sampling: _figures([trial], _differences(trial, llm, referee)) for trial in trials}
    differences = [difference for part in parts.values() for difference in part.differences]
    return replace(_figures(trials, differences), samplings=parts)


def _figures(trials: list[Trial], differences: list[Difference]) -> MethodProof:
    stats = Stats.of(run for trial in trials for run in trial.runs)
    parted = {parting.text for trial in trials for parting in trial.partings}
    prompts = len(trials[0].texts)
    return MethodProof(
        prompts=prompts,
        tokens=sum(len(text.tokens) for trial in trials for text in trial.texts),
        identical=prompts - len(parted),
        ties=sum(difference.verdict == "tie" for difference in differences),
        bugs=sum(difference.verdict == "bug" for difference in differences),
        differences=differences,
        tokens_per_round=stats.tokens_per_round,
        rounds=stats.rounds,
        seconds=sum(trial.seconds for trial in trials),
        drafted=stats.spec_decode_num_draft_tokens,
        accepted=stats.spec_decode_num_accepted_tokens,
    )


def _differences(trial: Trial, llm: LLM, referee: Referee) -> list[Difference]:
    """Verdicts on a trial's partings, prompt by prompt."""
    ordered = sorted(trial.partings, key=lambda parting: (parting.text, parting.position))
    return [_difference(trial, parting, llm, referee) for parting in ordered]


def _difference(trial: Trial, parting: Parting, llm: LLM, referee: Referee) -> Difference:
    text = trial.texts[parting.text]
    ruling = _rule(text, parting, referee)
    return Difference(
        prompt=text.prompt.id,
        sampling=trial.sampling,
        position=parting.position,
        plain=_choice(parting.plain, ruling.plain_score, llm),
        method=_choice(parting.method, ruling.method_score, llm),
        gap=ruling.gap,
        error=ruling.error,
        verdict=ruling.verdict,
        reason=ruling.reason,
    )


def _rule(text: Text, parting: Parting, referee: Referee) -> Ruling:
    if parting.plain is None or parting.method is None:
        # The tokens before are the same, so whether the text has ended is no matter of rounding.
        return Ruling(None, None, None, None, "bug", "length")
    prompt, written = text.request.prompt, text.tokens[: parting.position]
    return referee.rule(prompt, written, text.request.sampling, parting.plain, parting.method)


def _choice(token: int | None, score: float | None, llm: LLM) -> Choice:
    return Choice(token, "" if token is None else llm.tokenizer.decode([token], skip_special=False), score)
