"""amusd drafts while the target checks. With processes, threads, delays, stops and deaths, the output is plain's.

The tests for every drafter run amusd with a target that waits for all draft tokens, so that drafts are the same every time.
A worker that is not waited for proposes what it has. Here we test that this is a prefix of the full draft.
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
from foreword.methods.amusd.drafter import Clock, LaunchedRound
from foreword.methods.amusd.epochs import Job
from foreword.methods.amusd.worker import DraftRunner, WorkerConfig, start_process, stock_copy
from foreword.model.model import Model

every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
ALL = dict(least=3, patience=60.0, rows=4, ahead=3)


def not_waiting(model: Model, **options: Any) -> Any:
    return with_random_weights("amusd", model, **{"worker": "thread", "least": 1, "ahead": 4} | options)


@every_sampling
def test_a_target_that_waits_gets_the_drafts_of_draft_model(sampling: Sampling) -> None:
    model, asked, drafts = target(), requests(5, sampling, ignore_eos=True), []
    chain = with_random_weights("draft_model", model, rows=4, depth=3, tree="chain", stop=0.0)
    for made in (chain, with_random_weights("amusd", model, worker="thread", **ALL)):
        recorder = Recorder(made)
        engine(recorder, model).generate(asked)
        found = [pair for seen in recorder.proposed for pair in zip(seen.sequences, drafts_of(seen), strict=True)]
        drafts.append({tuple(tokens): draft for tokens, draft in found if len(tokens) > 1})
    assert drafts[0] == drafts[1] and len(drafts[0]) > 20


@every_sampling
@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma2"])
def test_drafts_of_all_target_layers_are_always_right(family: str, sampling: Sampling) -> None:
    """The draft model is never rolled back: it computes every token once."""
    model, asked = target(family), requests(6, sampling, max_new_tokens=12, ignore_eos=True)[1:]
    drafter: Any = untrained("amusd", layers=4, worker="thread", **ALL)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [4, 4, 4] for run in runs)
    assert drafter.counters()["dropped"] == 0


class Delays:
    """Random pauses on both sides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, longest: float = 0.004) -> None:
        self.random, self.longest, step = random.Random(seed), longest, DraftRunner.step
        monkeypatch.setattr(DraftRunner, "step", lambda writer, job: (self.pause(), step(writer, job), self.pause())[1])

    def pause(self) -> None:
        time.sleep(self.random.choice([0.0, self.random.random() * self.longest]))


@pytest.mark.parametrize("seed", range(6))
def test_no_delay_changes_the_output(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go on three slots; some drafts are always right, and some targets never wait. In half of the cases
    rounds are read late, as on a GPU. A proposal is always a prefix of the full chain."""
    delays, model = Delays(monkeypatch, seed), target()
    asked = requests(8, SAMPLINGS["T=0.8" if seed % 2 else "greedy"], seed=seed)
    make, layers = (with_random_weights, 2) if seed % 3 else (lambda name, model, **options: untrained(name, **options), 4)
    recorders = []
    for options in (dict(least=seed % 3, patience=0.01), dict(least=4, patience=60.0)):
        drafter: Any = make("amusd", model, worker="thread", layers=layers, ahead=4, **options)
        recorders.append(Recorder(drafter))
        steps = engine(recorders[-1], model, late=seed > 2)
        drafter.reads_late = seed > 2
        runs = [steps.add(request) for request in asked]
        while steps.busy:
            steps.step()
            delays.pause()
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
        assert drafter.counters()["checked"] > 0 or options["patience"] < 1  # a target that does not wait may be too early
    known, proposed = (
        {
            tuple(tokens): draft[0]
            for seen in recorder.proposed
            for tokens, draft in zip(seen.sequences, drafts_of(seen), strict=True)
        }
        for recorder in reversed(recorders)
    )
    found = [(draft, known[sequence]) for sequence, draft in proposed.items() if sequence in known]
    assert all(draft == full[: len(draft)] for draft, full in found) and len(found) > 10


@pytest.fixture(scope="module")
def in_process() -> Any:
    """A drafter with a worker in another process, shared by several tests because it takes seconds to start."""
    model = target()
    drafter = with_random_weights("amusd", model, ahead=4)
    yield model, drafter, engine(drafter, model)
    drafter.close()


@every_sampling
def test_two_processes_generate_the_truth(in_process: Any, sampling: Sampling) -> None:
    model, drafter, steps = in_process
    asked = requests(8, sampling, max_new_tokens=20)
    assert written(steps, asked) == [truth(model.hf, request) for request in asked]
    found = drafter.counters()
    assert found["checked"] > 0 and found["tokens"] >= found["rounds"] > 0, "its draft tokens are used"
    assert 0 <= found["both_s"] <= 1.01 * min(found["target_s"], found["draft_s"])  # how much depends on the machine
    assert found["target_s"] + found["waited_s"] <= 1.01 * found["wall_s"] and 0 <= found["overlap"] <= 1


def test_a_stopped_worker_costs_time_but_no_token(in_process: Any) -> None:
    model, drafter, steps = in_process
    written(steps, requests(1, max_new_tokens=2))  # the worker starts with the first request
    drafter.patience = 0.02
    generator, (asked,) = random.Random(0), requests(1, max_new_tokens=60, ignore_eos=True)
    run = steps.add(asked)
    while steps.busy:
        os.kill(drafter.worker.pid, generator.choice([signal.SIGSTOP, signal.SIGCONT]))
        steps.step()
    os.kill(drafter.worker.pid, signal.SIGCONT)
    assert run.tokens == truth(model.hf, asked)


def test_a_killed_worker_gives_a_warning_and_the_output_goes_on(in_process: Any) -> None:
    """This test must be the last that shares the worker."""
    model, drafter, steps = in_process
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
        warnings.simplefilter("error")  # one warning is enough
        assert written(steps, asked) == [truth(model.hf, request) for request in asked]
    assert drafter.worker is None and all(set(run.drafted[-3:]) == {0} for run in runs)


def test_a_worker_that_fails_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = DraftRunner.step, iter(range(99))

    def failing(writer: DraftRunner, job: Job) -> list[int]:
        if next(count) == 9:
            raise MemoryError("no room")
        return step(writer, job)

    monkeypatch.setattr(DraftRunner, "step", failing)
    model, asked = target(), requests(4, max_new_tokens=20)
    with pytest.warns(ForewordWarning, match="worker is gone: MemoryError: no room"):
        assert written(engine(not_waiting(model), model), asked) == [truth(model.hf, request) for request in asked]


def test_each_engine_has_its_own_worker() -> None:
    model, asked, threads = target(), requests(3), set(threading.enumerate())
    drafter = not_waiting(model)
    for slots in (1, 3):
        assert written(engine(drafter, model, slots), asked) == [truth(model.hf, request) for request in asked]
        worker = drafter.worker
    drafter.close()
    assert worker.channel.closed and drafter.worker is None
    assert set(threading.enumerate()) <= threads, "both have ended"


def test_another_model_drafts_in_another_process() -> None:
    """The draft model is the target itself, so its drafts are always right."""
    model, asked = target(), requests(3, max_new_tokens=12, ignore_eos=True)[1:]
    drafter: Any = untrained("amusd", model=Model(tiny("llama"), "the same"), **ALL)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [4, 4, 4] for run in runs)
    drafter.close()


def test_a_worker_that_cannot_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is deleted, and so is one that an earlier worker left when its parent was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "foreword-draft-left"
    left.mkdir()
    (left / LOCK).touch()
    os.utime(left, (1.0, 1.0))
    worker = start_process(stock_copy(target()), WorkerConfig("nowhere", 1, 64, 48))
    assert not left.exists() and [file for file in tmp_path.glob("foreword-draft-*/config.json")]
    with pytest.raises(DrafterError, match="worker did not start: its process ended with status 1 .*nowhere"):
        worker.wait()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(ahead=0), "ahead and draft_threads are at least 1, least at least 0; got 0, 1 and 1"),
        (dict(patience=-1.0), "patience is -1.0; it is a number of seconds"),
        (dict(worker="fork"), "worker is 'fork'; choose from auto, process, thread"),
        (dict(layers=0), "amusd: layers is 0; a model has at least 1"),
    ],
)
def test_invalid_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        untrained("amusd", **options)


def test_a_pass_is_timed_on_the_device() -> None:
    """It does not matter how late the host sees its end. A draft pass alongside it overlaps no longer than that."""
    clock = Clock()
    clock.finish(1.0)
    clock.launch(2.0)
    clock.finish(6.0, device_seconds=2.0)
    clock.drafted(3.0, 5.0)
    assert (clock.wall, clock.target, clock.draft, clock.both) == (5.0, 2.0, 2.0, 1.0)
    clock.launch(7.0)
    clock.finish(8.0, device_seconds=99.0)
    assert (clock.wall, clock.target) == (7.0, 3.0), "it cannot have worked before it started"


def test_a_round_is_waited_for_and_timed_by_its_events() -> None:
    waited: list[str] = []
    started: Any = SimpleNamespace(elapsed_time=lambda back: back.at - 5)
    back: Any = SimpleNamespace(at=7.5, synchronize=lambda: waited.append("back"))
    empty: Any = None
    assert LaunchedRound({}, empty, started, back).wait() == 0.0025 and waited == ["back"]
    assert LaunchedRound({}, empty, None, None).wait() is None


def test_a_sequence_at_its_limit() -> None:
    """There is no room for draft tokens, so the target waits for none."""
    model = target()
    drafter = with_random_weights("amusd", model, worker="thread", **ALL)
    request = Request(tuple(range(3, 43)), SAMPLINGS["greedy"], max_new_tokens=99, ignore_eos=True)
    assert written(engine(drafter, model), [request]) == [truth(model.hf, request)]


@pytest.mark.parametrize(
    ("worker", "speculate", "threads"), [("process", True, 1), ("process", False, 2), ("thread", True, 2)]
)
def test_a_process_on_the_cpu_has_its_own_cores(
    worker: str, speculate: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only while the target checks its draft tokens, even if that raises an error. A thread shares the target's cores."""
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
