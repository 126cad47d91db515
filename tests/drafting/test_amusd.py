"""amusd: a draft that is written meanwhile. In processes and threads, with delays, stops and deaths: the text is plain's.

What the laws ask of every drafter they ask of one whose target waits for all guesses: then drafts are the same every time.
A worker that runs free proposes as much as it has; here the law is that this is the beginning of what it would propose.
"""

import os
import random
import signal
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles import SAMPLINGS, Recorder, drafts_of, engine, requests, target, tiny, truth, with_random_weights, written
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.errors import DrafterError, ForewordWarning, InputError
from foreword.hub.temporary import LOCK
from foreword.methods import untrained
from foreword.methods.amusd.drafter import Away, Clock
from foreword.methods.amusd.epochs import Job
from foreword.methods.amusd.worker import Place, Writer, alone, in_a_process
from foreword.model.model import Model

every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
ALL = dict(least=3, patience=60.0, rows=4, ahead=3)


def free(model: Model, **options: Any) -> Any:
    return with_random_weights("amusd", model, **{"worker": "thread", "least": 1, "ahead": 4} | options)


@every_sampling
def test_who_waits_for_all_drafts_what_draft_model_drafts(sampling: Sampling) -> None:
    model, asked, drafts = target(), requests(5, sampling, ignore_eos=True), []
    chain = with_random_weights("draft_model", model, rows=4, depth=3, tree="chain", stop=0.0)
    for made in (chain, with_random_weights("amusd", model, worker="thread", **ALL)):
        recorder = Recorder(made)
        engine(recorder, model).generate(asked)
        found = [pair for seen in recorder.proposed for pair in zip(seen.sequences, drafts_of(seen), strict=True)]
        drafts.append({tuple(text): draft for text, draft in found if len(text) > 1})
    assert drafts[0] == drafts[1] and len(drafts[0]) > 20


@every_sampling
@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma2"])
def test_the_target_s_own_layers_are_always_right(family: str, sampling: Sampling) -> None:
    """And are never disturbed: the draft writes every token once."""
    model, asked = target(family), requests(6, sampling, max_new_tokens=12, ignore_eos=True)[1:]
    drafter: Any = untrained("amusd", layers=4, worker="thread", **ALL)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [4, 4, 4] for run in runs)
    assert drafter.counters()["dropped"] == 0


class Delays:
    """Random pauses, of both sides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, longest: float = 0.004) -> None:
        self.draw, self.longest, step = random.Random(seed), longest, Writer.step
        monkeypatch.setattr(Writer, "step", lambda writer, job: (self.pause(), step(writer, job), self.pause())[1])

    def pause(self) -> None:
        time.sleep(self.draw.choice([0.0, self.draw.random() * self.longest]))


@pytest.mark.parametrize("seed", range(6))
def test_no_delay_changes_the_text(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts come and go on three slots, some with a draft that is always right and a target that never waits; in half of
    them rounds are read late, as on a GPU. What is proposed is always the beginning of what a chain would be."""
    delays, model = Delays(monkeypatch, seed), target()
    asked = requests(8, SAMPLINGS["T=0.8" if seed % 2 else "greedy"], seed=seed)
    make, layers = (with_random_weights, 2) if seed % 3 else (lambda name, model, **options: untrained(name, **options), 4)
    recorders = []
    for options in (dict(least=seed % 3, patience=0.01), dict(least=4, patience=60.0)):
        drafter: Any = make("amusd", model, worker="thread", layers=layers, ahead=4, **options)
        recorders.append(Recorder(drafter))
        steps = engine(recorders[-1], model, late=seed > 2)
        drafter.behind = seed > 2
        runs = [steps.add(request) for request in asked]
        while steps.busy:
            steps.step()
            delays.pause()
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
        assert drafter.counters()["checked"] > 0 or options["patience"] < 1  # who does not wait may come too early
    known, proposed = (
        {
            tuple(text): draft[0]
            for seen in recorder.proposed
            for text, draft in zip(seen.sequences, drafts_of(seen), strict=True)
        }
        for recorder in reversed(recorders)
    )
    found = [(tokens, known[text]) for text, tokens in proposed.items() if text in known]
    assert all(tokens == full[: len(tokens)] for tokens, full in found) and len(found) > 10


@pytest.fixture(scope="module")
def apart() -> Any:
    """One drafter with a worker in another process, for several tests: it takes seconds to start."""
    model = target()
    drafter = with_random_weights("amusd", model, ahead=4)
    yield model, drafter, engine(drafter, model)
    drafter.close()


@every_sampling
def test_two_processes_write_the_truth(apart: Any, sampling: Sampling) -> None:
    model, drafter, steps = apart
    asked = requests(8, sampling, max_new_tokens=20)
    assert written(steps, asked) == [truth(model.hf, request) for request in asked]
    found = drafter.counters()
    assert found["checked"] > 0 and found["tokens"] >= found["rounds"] > 0, "its guesses are used"
    assert 0 <= found["both_s"] <= 1.01 * min(found["target_s"], found["draft_s"])  # how much, the machine decides
    assert found["target_s"] + found["waited_s"] <= 1.01 * found["wall_s"] and 0 <= found["overlap"] <= 1


def test_a_stopped_worker_costs_patience_and_no_token(apart: Any) -> None:
    model, drafter, steps = apart
    written(steps, requests(1, max_new_tokens=2))  # the worker starts with the first text
    drafter.patience = 0.02
    draw, (asked,) = random.Random(0), requests(1, max_new_tokens=60, ignore_eos=True)
    run = steps.add(asked)
    while steps.busy:
        os.kill(drafter.worker.pid, draw.choice([signal.SIGSTOP, signal.SIGCONT]))
        steps.step()
    os.kill(drafter.worker.pid, signal.SIGCONT)
    assert run.tokens == truth(model.hf, asked)


def test_a_killed_worker_is_missed_and_not_needed(apart: Any) -> None:
    """The last of the tests that share it."""
    model, drafter, steps = apart
    drafter.patience = 60.0
    asked = requests(3, SAMPLINGS["T=0.8"], max_new_tokens=30, ignore_eos=True)
    runs = [steps.add(request) for request in asked]
    with pytest.warns(ForewordWarning, match="amusd: the draft's worker is gone: its process ended with status -9"):
        while steps.busy:
            steps.step()
            if sum(len(run.tokens) for run in runs) > 12 and drafter.worker:
                os.kill(drafter.worker.pid, signal.SIGKILL)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once is enough
        assert written(steps, asked) == [truth(model.hf, request) for request in asked]
    assert drafter.worker is None and all(set(run.drafted[-3:]) == {0} for run in runs)


def test_a_worker_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = Writer.step, iter(range(99))

    def failing(writer: Writer, job: Job) -> list[int]:
        if next(count) == 9:
            raise MemoryError("no room")
        return step(writer, job)

    monkeypatch.setattr(Writer, "step", failing)
    model, asked = target(), requests(4, max_new_tokens=20)
    with pytest.warns(ForewordWarning, match="worker is gone: MemoryError: no room"):
        assert written(engine(free(model), model), asked) == [truth(model.hf, request) for request in asked]


def test_another_engine_has_another_worker() -> None:
    model, asked, threads = target(), requests(3), set(threading.enumerate())
    drafter = free(model)
    for slots in (1, 3):
        assert written(engine(drafter, model, slots), asked) == [truth(model.hf, request) for request in asked]
        worker = drafter.worker
    drafter.close()
    assert worker.line.cut and drafter.worker is None
    assert set(threading.enumerate()) <= threads, "both have ended"


def test_another_model_guesses_in_another_process() -> None:
    """The target itself, of a longer vocabulary than is asked for: always right."""
    model, asked = target(), requests(3, max_new_tokens=12, ignore_eos=True)[1:]
    drafter: Any = untrained("amusd", model=Model(tiny("llama"), "the same"), **ALL)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [4, 4, 4] for run in runs)
    drafter.close()


def test_a_worker_that_cannot_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is deleted, and so is what an earlier one left whose parent was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "foreword-draft-left"
    left.mkdir()
    (left / LOCK).touch()
    os.utime(left, (1.0, 1.0))
    worker = in_a_process(alone(target()), Place("nowhere", 1, 64, 48))
    assert not left.exists() and [file for file in tmp_path.glob("foreword-draft-*/config.json")]
    with pytest.raises(DrafterError, match="worker did not start: its process ended with status 1 .*nowhere"):
        worker.wait()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(ahead=0), "ahead and draft_threads are 1 at least, least 0, got 0, 1 and 1"),
        (dict(patience=-1.0), "patience is -1.0; it is a number of seconds"),
        (dict(worker="fork"), "worker is 'fork'; choose from auto, process, thread"),
        (dict(layers=0), "amusd: layers is 0; a model has at least 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        untrained("amusd", **options)


def test_a_pass_counts_as_long_as_the_device_took() -> None:
    """However late the host comes to see that it is over; and a draft's pass beside it no longer than that."""
    clock = Clock()
    clock.meet(1.0)
    clock.part(2.0)
    clock.meet(6.0, worked=2.0)
    clock.drafted(3.0, 5.0)
    assert (clock.wall, clock.target, clock.draft, clock.both) == (5.0, 2.0, 2.0, 1.0)
    clock.part(7.0)
    clock.meet(8.0, worked=99.0)
    assert (clock.wall, clock.target) == (7.0, 3.0), "it cannot have worked before it set out"


def test_a_round_is_waited_for_and_timed_by_its_events() -> None:
    waited: list[str] = []
    set_out: Any = SimpleNamespace(elapsed_time=lambda back: back.at - 5)
    back: Any = SimpleNamespace(at=7.5, synchronize=lambda: waited.append("back"))
    empty: Any = None
    assert Away({}, empty, set_out, back).wait() == 0.0025 and waited == ["back"]
    assert Away({}, empty, None, None).wait() is None


def test_a_text_is_at_its_end() -> None:
    """No room for guesses: nobody waits for any."""
    model = target()
    drafter = with_random_weights("amusd", model, worker="thread", **ALL)
    request = Request(tuple(range(3, 43)), SAMPLINGS["greedy"], max_new_tokens=99, ignore_eos=True)
    assert written(engine(drafter, model), [request]) == [truth(model.hf, request)]


@pytest.mark.parametrize(
    ("worker", "speculate", "threads"), [("process", True, 1), ("process", False, 2), ("thread", True, 2)]
)
def test_a_process_on_the_cpu_has_cores_of_its_own(
    worker: str, speculate: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the target checks its guesses, and no longer; also if that breaks. A thread shares the target's."""
    monkeypatch.setattr("foreword.model.cores.cores", lambda: 2)
    model, (request, *_) = target(), requests(2, ignore_eos=True)[1:]
    score, seen, before = model.score, set(), torch.get_num_threads()

    def watched(*given: Any, **how: Any) -> Any:
        seen.add(("prompt" if how else "round", torch.get_num_threads()))
        return score(*given, **how)

    monkeypatch.setattr(model, "score", watched)
    torch.set_num_threads(2)
    try:
        with_draft = engine(with_random_weights("amusd", model, worker=worker), model)
        run = with_draft.add(replace(request, speculate=speculate))
        while not run.done:
            with_draft.step()
            assert torch.get_num_threads() == 2
        assert seen == {("prompt", 2), ("round", threads)}
        assert run.tokens == truth(model.hf, request)
        monkeypatch.setattr("foreword.engine.lockstep.accept", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            with_draft.generate([request])
        assert torch.get_num_threads() == 2
        with_draft.drafter.close()
    finally:
        torch.set_num_threads(before)
