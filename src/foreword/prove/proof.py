"""The proof: plain decoding answers every prompt, each method answers them again, and the tokens are compared.

In: a loaded LLM, method names, prompts and samplings. Out: a Report. All prompts of a sampling go to the engine at once,
more than it has slots, so that batching and late admission are tested too; all methods use the same seeds. Where a method
diverges from plain, the difference goes to the referee, and the method continues from plain's sequence. So every token of
plain's outputs is tested, whatever came before it. The differences of all methods are judged together at the end; until then
a report is incomplete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from foreword.api import LLM
from foreword.core.sampling import Sampling
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.errors import InputError
from foreword.prove.referee import Case, Referee, Ruling
from foreword.prove.report import Difference, MethodProof, Report, ScoredToken, name_of
from foreword.results import Stats
from foreword.text import Prompt

Progress = Callable[[str, int, int], None]
Rulings = dict[Case, Ruling]


def prove(
    llm: LLM,
    methods: Sequence[str],
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    max_new_tokens: int = 64,
    rows: int | None = None,
    progress: Progress | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Report:
    """Test that each method generates what plain decoding generates.

    A method is a name, or NAME=FOLDER for a trained drafter. `rows` bounds its passes; None: as many as pay off on this
    machine. `progress` is called with the stage, the number of outputs done, and their total. `on_report` receives the
    incomplete report after each method and while differences are judged. The LLM is left with the last method.
    """
    _check(llm, methods, prompts, samplings, rows)
    named = {name_of(sampling): sampling for sampling in [sampling.seeded() for sampling in samplings]}
    asked = {name: _requests(llm, prompts, sampling, max_new_tokens) for name, sampling in named.items()}
    total = len(prompts) * len(named)
    engine, done = llm.use("plain").engine, _counter(progress, "plain", total)
    outputs = {name: _generate_plain(engine, prompts, requests, done) for name, requests in asked.items()}
    trials: dict[str, list[ProofTrial]] = {}

    def report(rulings: Rulings, complete: bool) -> Report:
        proofs = {method: _proof(tried, llm, rulings) for method, tried in trials.items()}
        return Report.of(llm, named, max_new_tokens, proofs, complete)

    def report_so_far(rulings: Rulings) -> None:
        if on_report is not None:
            on_report(report(rulings, complete=False))

    for method in dict.fromkeys(methods):
        engine, done = llm.use(method, rows=rows).engine, _counter(progress, method, total)
        trials[method] = [ProofTrial(name, plain).run(engine, done) for name, plain in outputs.items()]
        report_so_far({})
    every = [trial for tried in trials.values() for trial in tried]
    return report(_judge(every, llm, progress, report_so_far), complete=True)


def compare(original: LLM, other: LLM, prompts: Sequence[Prompt], max_new_tokens: int = 64) -> MethodProof:
    """Test that another model with the same function generates what `original` generates, both with plain greedy decoding.

    Where they diverge, the original judges in float64, as for a method. Both LLMs are left with plain decoding.
    """
    sampling = Sampling(seed=0)
    requests = _requests(original, prompts, sampling, max_new_tokens)
    outputs = _generate_plain(original.use("plain").engine, prompts, requests, lambda: None)
    trial = ProofTrial(name_of(sampling), outputs).run(other.use("plain").engine, lambda: None)
    return _proof([trial], original, _judge([trial], original))


def _check(
    llm: LLM, methods: Sequence[str], prompts: Sequence[Prompt], samplings: Sequence[Sampling], rows: int | None
) -> None:
    """Refuse arguments now that would fail only after plain decoding has finished."""
    for given, name in ((methods, "methods"), (prompts, "prompts"), (samplings, "samplings")):
        if not given:
            raise InputError(f"there are no {name} to prove with; give at least one")
    for method in methods:
        DrafterRequest.of(method, rows=rows).resolve(llm.model)


def _requests(llm: LLM, prompts: Sequence[Prompt], sampling: Sampling, max_new_tokens: int) -> list[Request]:
    encoded = [llm.tokenizer.encode(one.first()) for one in prompts]
    return [Request(tuple(ids), sampling.derived(i), max_new_tokens) for i, ids in enumerate(encoded)]


def _counter(progress: Progress | None, stage: str, total: int) -> Callable[[], None]:
    done = count(1)
    return (lambda: None) if progress is None else (lambda: progress(stage, next(done), total))


# Generating -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainOutput:
    """What plain decoding generated for one prompt under one sampling."""

    prompt: Prompt
    request: Request
    tokens: list[int]

    def after(self, position: int) -> Request | None:
        """Return the request that continues after plain's new token at `position`, or None if nothing is left.

        The noise depends on the position in the whole sequence, so the same seed continues with the same noise.
        """
        given = self.tokens[: position + 1]
        if len(given) == len(self.tokens):
            return None
        left = self.request.max_new_tokens - len(given)
        return replace(self.request, prompt=(*self.request.prompt, *given), max_new_tokens=left)


@dataclass(frozen=True)
class ProofDivergence:
    """A position where the method's token is not plain's; None stands for a sequence that had ended."""

    output: int  # its index in the trial
    position: int
    plain: int | None
    method: int | None


@dataclass
class ProofTrial:
    """One method against plain's outputs under one sampling."""

    sampling: str
    outputs: list[PlainOutput]
    divergences: list[ProofDivergence] = field(default_factory=list)
    runs: list[Running] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, engine: Engine, done: Callable[[], None]) -> ProofTrial:
        def on_update(index: int, run: Running) -> Request | None:
            output = self.outputs[index]
            divergence = _divergence(index, output, run)
            if divergence is not None:
                self.divergences.append(divergence)
                engine.abort(run)  # its further tokens cannot be compared with anything
            further = None if divergence is None else output.after(divergence.position)
            if run.done and further is None:
                done()
            return further

        started = time.perf_counter()
        self.runs = _generate(engine, [output.request for output in self.outputs], on_update)
        self.seconds = time.perf_counter() - started
        return self

    @property
    def cases(self) -> list[Case]:
        return [
            case
            for divergence in self.divergences
            if (case := _case(self.outputs[divergence.output], divergence)) is not None
        ]


def _divergence(index: int, output: PlainOutput, run: Running) -> ProofDivergence | None:
    """Return where a run, maybe still under way, diverges from plain's output."""
    given = len(run.request.prompt) - len(output.request.prompt)
    expected = output.tokens[given:]
    place = _first_difference(expected if run.done else expected[: len(run.tokens)], run.tokens)
    if place is None:
        return None
    return ProofDivergence(index, given + place, _at(expected, place), _at(run.tokens, place))


def _generate_plain(
    engine: Engine, prompts: Sequence[Prompt], requests: list[Request], done: Callable[[], None]
) -> list[PlainOutput]:
    def on_update(_: int, run: Running) -> None:
        if run.done:
            done()

    runs = _generate(engine, requests, on_update)
    return [PlainOutput(prompt, request, run.tokens) for prompt, request, run in zip(prompts, requests, runs, strict=True)]


def _generate(engine: Engine, requests: list[Request], on_update: Callable[[int, Running], Request | None]) -> list[Running]:
    """Generate all requests together. `on_update` is called with the index and run of each request that got new tokens, and
    may return a request to continue with."""
    try:
        runs = [engine.add(request) for request in requests]
        index = {id(run): i for i, run in enumerate(runs)}
        while engine.busy:
            for run in [event.running for event in engine.step()]:
                if run.error:
                    raise run.error
                further = on_update(index[id(run)], run)
                if further is not None:
                    runs.append(engine.add(further))
                    index[id(runs[-1])] = index[id(run)]
    finally:
        engine.give_up()
    return runs


def _first_difference(plain: Sequence[int], method: Sequence[int]) -> int | None:
    """Return where two sequences diverge, or the shorter one ends; None if they are equal."""
    common = min(len(plain), len(method))
    return next((i for i in range(common) if plain[i] != method[i]), common if len(plain) != len(method) else None)


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


# Judging ----------------------------------------------------------------------------------------------------------------


def _judge(
    trials: list[ProofTrial],
    llm: LLM,
    progress: Progress | None = None,
    report_so_far: Callable[[Rulings], None] = lambda _: None,
) -> Rulings:
    """Judge all divergences of the trials, each sequence once. `report_so_far` receives the rulings after each batch."""
    cases = [case for trial in trials for case in trial.cases]
    sequences = {case.key for case in cases}
    rulings: Rulings = {}
    for found in Referee(llm.model).judge(cases):
        rulings |= found
        report_so_far(rulings)
        if progress is not None:
            progress("judging", len({case.key for case in rulings}), len(sequences))
    return rulings


def _case(output: PlainOutput, divergence: ProofDivergence) -> Case | None:
    """Return the case for the referee. None if one sequence has ended: the tokens before are equal, so rounding cannot
    explain that."""
    if divergence.plain is None or divergence.method is None:
        return None
    prompt = len(output.request.prompt)
    whole = (*output.request.prompt, *output.tokens)
    return Case(whole, prompt, prompt + divergence.position, output.request.sampling, divergence.plain, divergence.method)


def _proof(trials: list[ProofTrial], llm: LLM, rulings: Rulings) -> MethodProof:
    by_sampling = {trial.sampling: _figures([trial], _differences(trial, llm, rulings)) for trial in trials}
    differences = [difference for proof in by_sampling.values() for difference in proof.differences]
    return replace(_figures(trials, differences), samplings=by_sampling)


def _figures(trials: list[ProofTrial], differences: list[Difference]) -> MethodProof:
    stats = Stats.of(run for trial in trials for run in trial.runs)
    diverged = {divergence.output for trial in trials for divergence in trial.divergences}
    prompts = len(trials[0].outputs)
    return MethodProof(
        prompts=prompts,
        tokens=sum(len(output.tokens) for trial in trials for output in trial.outputs),
        identical=prompts - len(diverged),
        ties=sum(difference.verdict == "tie" for difference in differences),
        bugs=sum(difference.verdict == "bug" for difference in differences),
        unjudged=sum(len(trial.divergences) for trial in trials) - len(differences),
        differences=differences,
        tokens_per_round=stats.tokens_per_round,
        rounds=stats.rounds,
        seconds=sum(trial.seconds for trial in trials),
        drafted=stats.spec_decode_num_draft_tokens,
        accepted=stats.spec_decode_num_accepted_tokens,
    )


def _differences(trial: ProofTrial, llm: LLM, rulings: Rulings) -> list[Difference]:
    """Return the judged divergences of a trial, prompt by prompt."""
    found = []
    for divergence in sorted(trial.divergences, key=lambda divergence: (divergence.output, divergence.position)):
        case = _case(trial.outputs[divergence.output], divergence)
        ruling = Ruling(None, None, None, None, "bug", "length") if case is None else rulings.get(case)
        if ruling is not None:
            found.append(_difference(trial, divergence, llm, ruling))
    return found


def _difference(trial: ProofTrial, divergence: ProofDivergence, llm: LLM, ruling: Ruling) -> Difference:
    return Difference(
        prompt=trial.outputs[divergence.output].prompt.id,
        sampling=trial.sampling,
        position=divergence.position,
        plain=_choice(divergence.plain, ruling.plain_score, llm),
        method=_choice(divergence.method, ruling.method_score, llm),
        gap=ruling.gap,
        error=ruling.error,
        verdict=ruling.verdict,
        reason=ruling.reason,
    )


def _choice(token: int | None, score: float | None, llm: LLM) -> ScoredToken:
    return ScoredToken(token, "" if token is None else llm.tokenizer.decode([token], skip_special_tokens=False), score)
