"""Copy: a prompt that begins like another slot's sequence starts from a copy of its rows, and the output is the same. The
other sequence may run, end, be aborted or be NaN meanwhile."""

from dataclasses import replace
from random import Random

import pytest

from doubles import (
    POISON,
    SAMPLINGS,
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    poisoned_model,
    rerunning,
    run_to_end,
    target,
    target_for,
    truth,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.errors import NumericsError
from foreword.methods import METHODS, make
from foreword.model.model import Model

PROMPT = (7, 30, 12, 5, 41, 9, 30, 12, 8, 22, 17, 30, 12, 5, 6)
KINDS = [*METHODS, "liar", "oracle"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def drafter_of(kind: str, model: Model, asked: list[Request]) -> Drafter:
    if kind == "oracle":
        return Oracle([full_sequence(model.hf, request) for request in asked])
    return Liar() if kind == "liar" else drafter(kind, model)


def steps_of(kind: str, asked: list[Request], slots: int, late: bool = False) -> tuple[Model, Engine]:
    model = target_for(kind)
    return model, engine(drafter_of(kind, model, asked), model, slots, late=late)


def samples(count: int, sampling: Sampling, **options: object) -> list[Request]:
    """Return requests for several outputs of one prompt."""
    asked = Request(PROMPT, sampling, max_new_tokens=9, reuse=True)
    return [replace(asked, sampling=sampling.derived(i), **options) for i in range(count)]  # type: ignore[arg-type]


def check(model: Model, runs: list[Running]) -> None:
    assert [run.tokens for run in runs] == [truth(model.hf, run.request) for run in runs]


@pytest.mark.parametrize(("n", "slots", "sampling"), [(1, 2, "T=0.8"), (3, 1, "greedy"), (8, 4, "T=0.8")])
@every_kind
def test_samples_of_a_prompt_read_it_once(kind: str, n: int, slots: int, sampling: str) -> None:
    asked = samples(n, SAMPLINGS[sampling])
    model, steps = steps_of(kind, asked, slots)
    runs = steps.generate(asked)
    check(model, runs)
    always_read = steps.drafter.needs.prompt != "none"  # the row before the root
    rows = len(PROMPT) - 1 - always_read
    if slots == 1:  # a slot that a sequence has left
        rows = min(rows, len(PROMPT) - steps.drafter.needs.follower)
    assert [run.reused for run in runs] == [0] + [rows] * (n - 1)


@every_kind
def test_a_prompt_starts_from_what_runs(kind: str) -> None:
    """The second shares half of the first one's prompt, the third its prompt and a part of its output."""
    first = Request(PROMPT, SAMPLINGS["T=0.8"], max_new_tokens=25, ignore_eos=True)
    output = tuple(truth(target_for(kind).hf, first))
    half, whole = (*PROMPT[:8], 3, 4, 5), (*PROMPT, *output[:4], 3, 4)
    others = [Request(prompt, Sampling(0.8, seed=3), max_new_tokens=8, reuse=True) for prompt in (half, whole)]
    model, steps = steps_of(kind, [first, *others], slots=3, late=bool(KINDS.index(kind) % 2))
    source = steps.add(first)
    while len(source.tokens) < 12:
        steps.step()
    runs = [steps.add(request) for request in others]
    run_to_end(steps)
    check(model, [source, *runs])
    paired = steps.drafter.needs.follower
    assert [run.reused for run in runs] == [8 - paired, len(PROMPT) + 4 - paired]
    assert len({source.slot, *(run.slot for run in runs)}) == 3


@pytest.mark.parametrize("steps_before", [1, 4])
@every_kind
def test_the_source_may_be_aborted(kind: str, steps_before: int) -> None:
    """While the others wait for it, and after they copied its rows."""
    asked = samples(4, SAMPLINGS["T=0.8"])
    model, steps = steps_of(kind, asked, slots=3)
    gone, *others = [steps.add(request) for request in asked]
    for _ in range(steps_before):
        steps.step()
    steps.abort(gone)
    run_to_end(steps)
    check(model, others)


@pytest.mark.parametrize("early", [0, 1, 2, None], ids=["at once", "after a step", "after two steps", "not aborted"])
@pytest.mark.parametrize("late", [False, True])
def test_nan_in_the_source_does_not_reach_a_copy(late: bool, early: int | None) -> None:
    """Rows before the token with NaN are in its pass: in attention a masked row has weight 0, and 0 x NaN is NaN."""
    hf = poisoned_model()
    shared = (3, 9, 4, 11, 5, 8)
    sick = Request((*shared, POISON, *range(10, 22)), Sampling(seed=1), 9, reuse=True)
    healthy = [Request((*shared, 6, token), Sampling(seed=1), 9, reuse=True) for token in range(10, 13)]
    steps = engine(make("plain"), Model(hf), slots=3, late=late)
    bad, *good = [steps.add(request) for request in (sick, *healthy)]
    for _ in range(early or 0):
        steps.step()
    if early is not None:
        steps.abort(bad)
    run_to_end(steps)
    assert bad.finish_reason == "abort" and (early is not None or isinstance(bad.error, NumericsError))
    assert [run.tokens for run in good] == [truth(hf, request) for request in healthy]
    assert good[0].reused <= len(shared) and good[-1].reused == len(shared) + 1


def test_other_salts_share_nothing_and_do_not_wait() -> None:
    """The source runs, ends, and has left its slot."""
    model, asked = target(), samples(6, SAMPLINGS["T=0.8"])
    asked = [replace(request, cache_salt=f"user {i}", session="one") for i, request in enumerate(asked)]
    steps = engine(Liar(), model, slots=4)
    runs = [steps.add(request) for request in asked]
    steps.step()
    assert len(steps.slots.running) == 4
    run_to_end(steps)
    check(model, runs)
    assert [run.reused for run in runs] == [0] * 6


def test_without_reuse_nothing_is_copied_and_nobody_waits() -> None:
    model, asked = target(), samples(3, SAMPLINGS["greedy"], reuse=False)
    steps = engine(Liar(), model, slots=3)
    runs = [steps.add(request) for request in asked]
    steps.step()
    assert len(steps.slots.running) == 3
    run_to_end(steps)
    check(model, runs)
    assert [run.reused for run in runs] == [0] * 3


def test_a_drafter_that_does_not_copy_reads_prompts_itself() -> None:
    """It takes a free slot in place, and never waits."""
    model, asked = target(), samples(3, SAMPLINGS["greedy"])
    own = Liar()
    own.copies = False  # type: ignore[misc]
    steps = engine(own, model, slots=3)
    runs = [steps.add(request) for request in asked]
    steps.step()
    assert len(steps.slots.running) == 3
    run_to_end(steps)
    (again,) = steps.generate(asked[:1])
    check(model, [*runs, again])
    assert [run.reused for run in runs] == [0] * 3 and again.reused == len(PROMPT) - 1


def test_a_request_that_waits_holds_up_no_other() -> None:
    """A request with another prompt passes it, and takes a slot that it does not need yet."""
    model = target()
    first, second = samples(2, SAMPLINGS["greedy"])
    other = Request((9, 9, 4), SAMPLINGS["greedy"], max_new_tokens=9, reuse=True)
    steps = engine(Liar(), model, slots=3)
    runs = [steps.add(request) for request in (first, second, other)]
    steps.step()
    assert [run.slot >= 0 for run in runs] == [True, False, True]
    run_to_end(steps)
    check(model, runs)


def test_but_it_keeps_its_turn() -> None:
    """There is one free slot next to the source: the request that waits for it gets it, and none behind."""
    model = target()
    first, second = samples(2, SAMPLINGS["greedy"])
    others = [Request((9, 9, token), SAMPLINGS["greedy"], max_new_tokens=9) for token in (4, 5)]
    steps = engine(Liar(), model, slots=2)
    runs = [steps.add(request) for request in (first, second, *others)]
    while runs[1].slot < 0:
        steps.step()
        assert all(run.slot < 0 for run in runs[2:])
    run_to_end(steps)
    check(model, runs)


def test_a_session_finds_its_tokens_again() -> None:
    """Three conversations take turns, with requests without a session in between. There are slots for all of them."""
    model, steps = target(), engine(Liar(), target(), slots=5)
    held = {name: (token, 30, 12, 5) for token, name in enumerate("abc", start=3)}
    for turn in range(3):
        noise = [Request((20 + turn, token, 8, 9), Sampling(seed=token), 4, reuse=True) for token in (5, 6)]
        check(model, steps.generate(noise))
        for name, sequence in held.items():
            asked = Request((*sequence, 9, 4), Sampling(seed=1), 5, ignore_eos=True, reuse=True, session=name)
            (run,) = steps.generate([asked])
            check(model, [run])
            assert run.reused == (len(sequence) - 1 if turn else 0)
            held[name] = run.sequence


def random_requests(random: Random, count: int) -> list[Request]:
    """Return requests whose prompts share beginnings, under a few sessions and salts."""
    stems = [tuple(random.randrange(3, 47) for _ in range(random.randint(3, 20))) for _ in range(3)]
    found: list[Request] = []
    while len(found) < count:
        stem = random.choice([*stems, *(request.prompt for request in found)])
        tail = tuple(random.randrange(3, 47) for _ in range(random.randint(1, 6)))
        prompt = (stem[: random.randint(1, len(stem))] + tail)[:30]
        asked = Request(
            prompt,
            Sampling(random.choice([0.0, 0.8]), seed=random.randrange(99)),
            random.randint(1, 9),
            reuse=random.random() < 0.9,
            session=random.choice(["", "", "a", "b"]),
            cache_salt=random.choice(["", "", "", "x"]),
        )
        found += [replace(asked, sampling=asked.sampling.derived(i)) for i in range(random.choice([1, 1, 3]))]
    return found


@every_kind
def test_random_company(kind: str) -> None:
    """Requests come and are aborted at random steps, in few or many slots, in captured rounds for every other kind."""
    random, captured = Random(kind), bool(KINDS.index(kind) % 2)
    reused = 0
    for slots in (random.choice([1, 2]), 4):
        asked = random_requests(random, 6)
        model, steps = steps_of(kind, asked, slots, late=random.random() < 0.5)
        if captured and steps.drafter.captures != "nothing":
            steps.loop, steps.slots.pads = rerunning(steps.loop, steps.drafter), True  # type: ignore[arg-type]
        runs = come_and_go(steps, asked, random)
        for run in runs:
            true = truth(model.hf, run.request)
            assert run.tokens == (true[: len(run.tokens)] if run.finish_reason == "abort" else true)
            reused += run.reused
        assert not steps.slots.running and len(steps.slots.free) == slots
        assert set(steps.slots.sessions) <= set(steps.slots.free)
    assert reused > 0


def come_and_go(steps: Engine, asked: list[Request], random: Random) -> list[Running]:
    coming, runs = list(asked), []
    while coming or steps.busy:
        while coming and random.random() < 0.6:
            runs.append(steps.add(coming.pop(0)))
        if runs and random.random() < 0.1:
            steps.abort(random.choice(runs))
        steps.step()
    return runs
