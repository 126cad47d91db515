"""Costs of serving, measured on this machine: real rounds of a real engine, at several batch sizes, over real prompts.

In: a loaded model with a method. Out: `MethodCosts`: for each batch size the mean seconds of a round in which all slots are
busy, and how many tokens rounds decide; and the seconds of reading prompts. Every timing is taken several times, and the
fastest counts, since other work can only add time. `known_costs` keeps them as other costs of this machine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, islice
from typing import Any, NamedTuple

from foreword.api import LLM
from foreword.bench.suites import read_suite
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.errors import InputError
from foreword.model.busy import Waits
from foreword.model.cost import CostCurve, facts_of
from foreword.model.fingerprint import Fingerprint
from foreword.model.measured import Facts, recall
from foreword.ops.device import host_computes, synchronize
from foreword.simulate.costs import MethodCosts, RoundCost, Scheduling, ServingCosts

TOKENS = 32  # of each output
REPEATS = 2
FEWEST_PROMPTS = 8  # that the rounds of a batch size are timed over
PROMPT_ROWS = (1, 32, 64, 128, 256, 512, 1024)

Prompts = Sequence[tuple[int, ...]]
Report = Callable[[str, int, int], None]  # what is measured, how much is done, of how much


class Timed(NamedTuple):
    """Rounds in which all sequences took part."""

    seconds: list[float]
    decided: list[int]  # tokens, of every sequence and round
    rows: float  # of a round

    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def batch_sizes(slots: int) -> list[int]:
    """Return the batch sizes that are timed for so many slots: powers of two, and all slots."""
    return sorted({*(1 << power for power in range(slots.bit_length()) if 1 << power <= slots), slots})


def built_in_prompts(llm: LLM) -> Prompts:
    """Return the prompts that come with the package, in an order that mixes their categories."""
    groups = read_suite().groups().values()
    mixed = [prompt for some in zip(*groups, strict=False) for prompt in some]
    return [tuple(llm.tokenizer.encode(prompt.first())) for prompt in mixed]


def measured_costs(llm: LLM, methods: Sequence[str], slots: int, sampling: Sampling, report: Report) -> ServingCosts:
    """Return the costs of some methods with this model, stored or measured now. The LLM is left with the last of them."""
    found = {}
    for done, method in enumerate(methods):
        report(f"measuring rounds of {method}", done, len(methods))
        if llm.method != method:
            llm.use(method)
        found[method] = known_costs(llm, slots, sampling)
    model = llm.model
    facts: dict[str, Any] = dict(facts_of(model))
    dtype = str(model.dtype).removeprefix("torch.")
    notes = [f"{facts['threads']} threads; prompts that come with the package, {TOKENS} tokens each answer"]
    machine = f"{facts['device'][1]}, {facts['device'][2]} cores"
    return ServingCosts(
        model.name, machine, dtype, sampling.temperature, Scheduling.on(model.device, dtype), found, notes=notes
    )


def known_costs(llm: LLM, slots: int, sampling: Sampling) -> MethodCosts:
    """Return the costs of the LLM's method, stored or measured now."""
    facts = facts_of(llm.model) | {"slots": slots, "temperature": sampling.temperature, **_drafting(llm)}

    def measured(_: MethodCosts | None) -> MethodCosts:
        return measure(llm, built_in_prompts(llm), batch_sizes(slots), sampling)

    return recall(f"serving/{llm.method}", facts, measured, MethodCosts.read)


def _drafting(llm: LLM) -> Facts:
    """Return what decides how many tokens are accepted: the weights of the model and of the drafter, and the trees."""
    drafter, digest = llm.engine.drafter, hashlib.sha256()
    module = getattr(drafter, "module", None)  # only drafters with weights have one
    for name, weight in [] if module is None else module.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {float(weight.double().sum())}".encode())
    shape = [drafter.shape.nodes, drafter.shape.depth]
    return {"weights": Fingerprint.of(llm.model).weights, "drafter": digest.hexdigest(), "rows": shape}


def measure(
    llm: LLM, prompts: Prompts, batches: Sequence[int], sampling: Sampling, tokens: int = TOKENS, repeats: int = REPEATS
) -> MethodCosts:
    """Time the rounds of the LLM's method at these batch sizes, and its prompts."""
    engine = llm.engine
    if max(batches) > engine.slots.count:
        raise InputError(f"batches of {max(batches)} need as many slots, and the engine has {engine.slots.count}")
    room = engine.max_context - tokens - 1
    if room < 1:
        raise InputError(f"outputs of {tokens} tokens need a longer context than {engine.max_context}")
    prompts = [prompt[:room] for prompt in prompts]
    with Waits() as waits:
        rounds = [_rounds(engine, prompts, batch, sampling, tokens, repeats) for batch in batches]
        read = _prompts(engine, [token for prompt in prompts for token in prompt], sampling, rounds[0].seconds, repeats)
    suspect = waits.doubt if host_computes(llm.model.device) else ""
    return MethodCosts(llm.method, tuple(rounds), read, "measured on this machine", not suspect, suspect)


def _rounds(engine: Engine, prompts: Prompts, batch: int, sampling: Sampling, tokens: int, repeats: int) -> RoundCost:
    """Time rounds of this batch size, over several groups of prompts if it is small."""
    given = cycle(Request(prompt, sampling, max_new_tokens=tokens, ignore_eos=True) for prompt in prompts)
    groups = [list(islice(given, batch)) for _ in range(max(FEWEST_PROMPTS // batch, 1))]
    found = [min((_timed(engine, group) for _ in range(repeats)), key=Timed.mean) for group in groups]
    seconds = [one for timed in found for one in timed.seconds]
    decided = [count for timed in found for count in timed.decided]
    shares = tuple(decided.count(count) / len(decided) for count in range(1, max(decided) + 1))
    return RoundCost(batch, sum(seconds) / len(seconds), sum(timed.rows for timed in found) / len(found), shares)


def _timed(engine: Engine, requests: Sequence[Request]) -> Timed:
    """Run requests together, and time every round from the one in which all have a token until the first has ended."""
    runs = [engine.checked(request) for request in requests]
    seconds: list[float] = []
    try:
        engine.queue(runs)
        while not all(run.tokens or run.done for run in runs):
            engine.step_for(runs)
        synchronize(engine.target.device)
        while not any(run.done for run in runs):
            started = time.perf_counter()
            engine.step_for(runs)
            seconds.append(time.perf_counter() - started)
    finally:
        engine.abort(*runs)
    if not seconds:
        raise InputError(f"all outputs ended in their first round; the context of {engine.max_context} tokens is too short")
    return Timed(seconds, [count for run in runs for count in run.accepted], _rows(runs))


def _rows(runs: Sequence[Running]) -> float:
    """Return the rows of a round of all sequences, as far as drafts filled them."""
    return sum(1 + sum(run.drafted) / len(run.drafted) for run in runs)


def _prompts(engine: Engine, tokens: Sequence[int], sampling: Sampling, round_s: float, repeats: int) -> CostCurve:
    """Time prompts of several lengths up to their first token, less a round."""
    rows = [count for count in PROMPT_ROWS if count < min(engine.max_context - 1, len(tokens)) and count <= engine.chunk]
    seconds = []
    for count in rows:
        request = Request(tuple(tokens[: count + 1]), sampling, max_new_tokens=1, ignore_eos=True)
        seconds.append(min(_until_first(engine, request) for _ in range(repeats)) - round_s)
    least = [max(one, 1e-6) for one in seconds]
    return CostCurve(tuple(rows), tuple(accumulate(least, max)))


def _until_first(engine: Engine, request: Request) -> float:
    started = time.perf_counter()
    engine.generate([request])
    return time.perf_counter() - started
