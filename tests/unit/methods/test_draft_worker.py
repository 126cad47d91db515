"""The small model's passes: captured sizes serve every job, and give what passes of the job's own size give.

The graphs themselves need a GPU. Here a replay runs what was captured once more, on the very buffers of the capture.
"""

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles import VOCABULARY, target
from foreword.methods.amusd import worker
from foreword.methods.amusd.epochs import ALONE, GREEDY, Job
from foreword.methods.amusd.worker import CHUNK, WIDTHS, DraftRunner, PassInputs, WorkerConfig, sizes
from foreword.model.model import Model

CONTEXT = 160
DRAWS = [GREEDY, (0.8, 12345, 678910), (1.3, 2**32 - 1, 7)]


class Rerun:
    """In place of a graph."""

    made: list["Rerun"] = []

    def __init__(self, call: Callable[[], torch.Tensor], pool: Any, stream: Any) -> None:
        self.call, self.answer, self.replays, self.pool = call, call(), 0, pool
        self.graph = SimpleNamespace(pool=lambda: "shared")
        Rerun.made.append(self)

    def replay(self) -> None:
        self.answer = self.call()
        self.replays += 1


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "record", Rerun)
    Rerun.made = []


def made(family: str, slots: int, captured: bool) -> DraftRunner:
    one = DraftRunner(Model(target(family).hf, "draft"), WorkerConfig("cpu", slots, CONTEXT, VOCABULARY))
    if captured:
        one.capture()
    return one


class Texts:
    """Random jobs as a follower gives them: texts go on, are rolled back a little, or begin anew."""

    def __init__(self, slots: int, seed: int) -> None:
        self.sampling_key, self.cached = random.Random(seed), [0] * slots
        self.sampling_keys = [GREEDY] * slots

    def job(self) -> Job:
        sampling_key = self.sampling_key
        slots = sorted(sampling_key.sample(range(len(self.cached)), sampling_key.randint(1, len(self.cached))))
        longest, rows = CHUNK if len(slots) == 1 else ALONE, []
        for slot in slots:
            if self.cached[slot] > CONTEXT - CHUNK or sampling_key.random() < 0.1:
                self.cached[slot], self.sampling_keys[slot] = 0, sampling_key.choice(DRAWS)
            self.cached[slot] = max(0, self.cached[slot] - sampling_key.choice([0, 0, 1, 3]))
            count = sampling_key.choice([1, 1, 2, longest]) if self.cached[slot] else longest
            rows.append([sampling_key.randrange(VOCABULARY) for _ in range(count)])
        job = Job(
            slots,
            rows,
            [self.cached[slot] for slot in slots],
            [self.sampling_keys[s] for s in slots],
            sampling_key.random() < 0.8,
        )
        for slot, read in zip(slots, rows, strict=True):
            self.cached[slot] += len(read)
        return job


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize(("family", "slots"), [("llama", 1), ("llama", 5), ("gemma2", 3)])
def test_captured_passes_write_what_written_ones_do(family: str, slots: int) -> None:
    plain, captured, sequences = made(family, slots, False), made(family, slots, True), Texts(slots, seed=slots)
    written = 0
    for _ in range(60):
        job = sequences.job()
        found = captured.step(job)
        assert found == plain.step(job) and len(found) == len(job.slots) * job.writes
        written += len(found)
    assert written > 30 and sum(one.replays for one in Rerun.made) == 60
    assert len({id(one) for one in Rerun.made if one.replays}) >= 4, "several sizes are used"


@pytest.mark.usefixtures("capturing")
def test_sizes_are_few_and_share_their_memory() -> None:
    one = made("llama", 6, True)
    expected = {(sequences, rows, noise) for sequences in (1, 2, 4, 6) for rows in WIDTHS for noise in (False, True)}
    assert set(one.passes) == {size for size in expected if size[:2] == (1, CHUNK) or size[1] < CHUNK}
    assert [each.pool for each in Rerun.made] == [None] + ["shared"] * (len(Rerun.made) - 1)
    assert [sizes(count) for count in (1, 2, 3, 8, 9)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 9)]


@pytest.mark.usefixtures("capturing")
def test_graphs_end_with_the_writer() -> None:
    """And with nobody's help: a collection might come while somebody captures."""
    with made("llama", 1, True) as one:
        graph = weakref.ref(Rerun.made.pop())
        Rerun.made.clear()
        assert graph() is not None
    assert not one.passes and graph() is None


def test_who_is_missing_on_a_sheet_does_what_the_first_does() -> None:
    inputs = PassInputs(3, 4, torch.device("cpu"))
    where = inputs.tokens.data_ptr()
    inputs.fill(Job([5, 2], [[7, 8], [9]], [10, 20], [GREEDY, GREEDY], True))
    assert (
        inputs.slots.tolist() == [5, 2, 5] and inputs.cached.tolist() == [10, 20, 10] and inputs.read.tolist() == [2, 1, 2]
    )
    assert inputs.tokens.tolist() == [[7, 8, 8, 8], [9] * 4, [7, 8, 8, 8]] and inputs.tokens.data_ptr() == where
