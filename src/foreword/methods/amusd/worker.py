"""A draft model that runs while the target verifies: in a thread, or in a process of its own (`python -m` this module).

In: `Update`s over a channel. Out: `DraftTokens`, and when each pass began and ended. It reads what it has not read, writes
one token after every sequence that may continue, sends it, and receives again, until the channel is closed. Before each pass
it sets how many cached rows are valid, so a rollback costs nothing but reading again. On CUDA passes are replayed graphs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foreword.core.choosing import pick
from foreword.core.sampling_table import SamplingRows, SamplingStages
from foreword.core.state import Batch
from foreword.errors import DrafterError, StorageError
from foreword.files import read_json
from foreword.hub.temporary import TemporaryFolder
from foreword.methods.amusd.channel import Channel, SocketChannel, ThreadChannel
from foreword.methods.amusd.epochs import ALONE, GREEDY, DraftSide, Job, SamplingKey
from foreword.model.linears import rebuild, unpacked
from foreword.model.loading import DTYPES, load_weights, without_progress_bars
from foreword.model.model import Model
from foreword.ops.cuda_graph import RecordedCall, record

CHUNK = 64  # rows of a pass
WIDTHS = (1, ALONE, CHUNK)  # rows of recorded passes: a sequence continues, was rejected, or is read
READY = "ready"


@dataclass(frozen=True)
class WorkerConfig:
    """Where the draft model runs, and for which target."""

    device: str
    slots: int
    context: int
    vocabulary: int  # of the target
    threads: int | None = None  # CPU threads; None: as many as the process has


class PassInputs:
    """The inputs of a pass: for each sequence its slot, how many rows are cached, how many are read, and their tokens. The
    host fills them in and sends them in one copy to a fixed address, where a graph reads them."""

    def __init__(self, sequences: int, rows: int, device: torch.device) -> None:
        self.count, self.rows = sequences, rows
        self.block = torch.zeros(sequences * (3 + rows), dtype=torch.long, device=device)
        self.slots, self.cached, self.read, tokens = self.block.split([sequences, sequences, sequences, sequences * rows])
        self.tokens = tokens.view(sequences, rows)
        self.host = torch.zeros(len(self.block), dtype=torch.long, pin_memory=True) if self.block.is_cuda else self.block
        self.numbers = self.host.numpy()

    def fill(self, job: Job) -> None:
        """Missing sequences repeat the first: they write the same into the same rows. Missing rows repeat the last,
        because no row attends to later ones."""
        missing = self.count - len(job.slots)
        slots, cached = (part + part[:1] * missing for part in (job.slots, job.cached))
        sequences = job.rows + job.rows[:1] * missing
        tokens = [token for text in sequences for token in text + text[-1:] * (self.rows - len(text))]
        self.numbers[:] = [*slots, *cached, *map(len, sequences), *tokens]
        if self.host is not self.block:
            self.block.copy_(self.host, non_blocking=True)


class DraftRunner:
    """The draft model, one pass at a time. On CUDA each pass replays a graph. All sizes are recorded before the first
    sequence arrives, while nothing else runs."""

    def __init__(self, model: Model, config: WorkerConfig) -> None:
        self.model, self.config, self.device = model, config, torch.device(config.device)
        self.cache = model.layer_stack.allocate(config.slots, config.context, CHUNK)
        self.ends = torch.zeros(0, dtype=torch.long, device=self.device)
        temperature = torch.zeros(config.slots, dtype=torch.float32, device=self.device)
        self.columns = {
            "temperature": temperature,
            "key": torch.zeros(config.slots, 2, dtype=torch.long, device=self.device),
        }
        self.sampling_keys = [GREEDY] * config.slots  # what the columns hold
        self.passes: dict[tuple[int, int, bool], tuple[PassInputs, RecordedCall[Tensor]]] = {}
        if self.device.type == "cuda":
            self.capture()

    def __enter__(self) -> DraftRunner:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the graphs here: they and the runner refer to each other, and would wait for the garbage collector."""
        self.passes.clear()

    @torch.inference_mode()
    def step(self, job: Job) -> list[int]:
        """Read the rows of a job. Returns the token after them for each slot, if tokens are written."""
        for slot, cached, sampling_key in zip(job.slots, job.cached, job.sampling_keys, strict=True):
            if not cached:  # the last sequence may have left NaN
                self.cache.wipe(slot)
            if sampling_key != self.sampling_keys[slot]:
                self._set(slot, sampling_key)
        noise, longest = any(sampling_key[0] > 0 for sampling_key in job.sampling_keys), max(map(len, job.rows))
        if self.passes:
            return self._replay(job, longest, noise)
        inputs = PassInputs(len(job.slots), longest, self.device)
        inputs.fill(job)
        batch = Batch(inputs.slots, tuple(job.slots), max(job.cached))
        read_rows = self._read_rows(inputs, batch)
        return self._next_tokens(inputs, read_rows, noise).tolist() if job.writes else []

    def _set(self, slot: int, sampling_key: SamplingKey) -> None:
        self.sampling_keys[slot] = sampling_key
        self.columns["temperature"][slot].fill_(sampling_key[0])
        for key, word in zip(self.columns["key"][slot], sampling_key[1:], strict=True):
            key.fill_(word)

    def _read_rows(self, inputs: PassInputs, batch: Batch) -> Tensor:
        self.cache.rewind(batch, inputs.cached)
        known = inputs.tokens.clamp(max=self.model.vocab_size - 1)  # the target's padding may be longer
        return self.model.layer_stack.read(self.model.embed(known), batch, inputs.read)

    def _next_tokens(self, inputs: PassInputs, read_rows: Tensor, noise: bool) -> Tensor:
        """[b]: the tokens after the last rows that count, sampled as the target samples its own."""
        last = read_rows[torch.arange(inputs.count, device=self.device), inputs.read - 1].unsqueeze(1)
        logits = self.model.draft_head(self.model.norm(last))[..., : self.config.vocabulary]
        sampling = SamplingRows(SamplingStages(noise=noise), self.ends, self.columns, inputs.slots)
        return pick(logits, (inputs.cached + inputs.read).unsqueeze(1), sampling).flatten()

    @torch.inference_mode()
    def capture(self) -> None:
        """Record a graph for every size of a job. A sequence with many rows is read alone."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        pool: Any = None
        for sequences, noise in product(sizes(self.config.slots), (False, True)):
            for rows in WIDTHS if sequences == 1 else WIDTHS[:-1]:
                inputs = PassInputs(sequences, rows, self.device)
                inputs.fill(Job([0], [[0] * rows], [0], [GREEDY], writes=True))
                made = record(partial(self._pass, inputs, noise), pool, stream)
                pool = pool or made.graph.pool()
                self.passes[sequences, rows, noise] = inputs, made

    def _pass(self, inputs: PassInputs, noise: bool) -> Tensor:
        batch = Batch(inputs.slots, tuple(range(inputs.count)), self.config.context, changes=True)
        return self._next_tokens(inputs, self._read_rows(inputs, batch), noise)

    def _replay(self, job: Job, longest: int, noise: bool) -> list[int]:
        """Replay a pass, and wait for the device: the host's inputs are overwritten next time, and passes are timed."""
        sequences = next(size for size in sizes(self.config.slots) if size >= len(job.slots))
        rows = next(width for width in WIDTHS if width >= longest)
        inputs, captured = self.passes[sequences, rows, noise]
        inputs.fill(job)
        captured.replay()
        found: list[int] = captured.answer.tolist()
        return found[: len(job.slots)] if job.writes else []


@cache
def sizes(slots: int) -> tuple[int, ...]:
    """How many sequences a recorded pass may have."""
    return *(1 << power for power in range((slots - 1).bit_length())), slots


def serve(channel: Channel, writer: DraftRunner) -> None:
    """Draft until the channel is closed."""
    draft_side = DraftSide(writer.config.slots, CHUNK)
    channel.send(READY)
    while not channel.closed:
        job = draft_side.job()
        for update in channel.receive(0.0 if job else None):
            answer = draft_side.receive(update)
            if answer is not None:
                channel.send((0.0, 0.0, [answer]))
            job = None
        job = job or draft_side.job()
        if job and not channel.closed:
            began = time.monotonic()
            drafted = draft_side.finished(job, writer.step(job))
            channel.send((began, time.monotonic(), drafted))


# Workers -----------------------------------------------------------------------------------------------------------------


class Worker:
    """A draft worker, seen from the target: a channel, and the reason of its end once that is closed. It ends when nothing
    refers to it any more, or with the process."""

    def __init__(
        self, channel: Channel, exit_reason: Callable[[], str], end: Callable[[], None], pid: int | None = None
    ) -> None:
        self.channel, self.exit_reason, self.pid = channel, exit_reason, pid
        self.close = finalize(self, _end, channel, end)

    def wait(self) -> None:
        """Wait until it is ready."""
        if self.channel.receive(None) != [READY]:
            reason = self.exit_reason()
            self.close()
            raise DrafterError(f"amusd: the draft's worker did not start: {reason}; the other methods need none")


def _end(channel: Channel, end: Callable[[], None]) -> None:
    channel.close()
    end()


def start_thread(model: PreTrainedModel, config: WorkerConfig) -> Worker:
    """Start a thread. On CUDA it has a stream of its own, and its layers are rebuilt for speed, since the model is ours."""
    ours, theirs = ThreadChannel.pair()
    failed: list[str] = []
    if config.device.startswith("cuda"):
        rebuild(model, torch.device(config.device), model.dtype)
        torch.cuda.synchronize(config.device)  # the weights were copied in another stream

    def work() -> None:
        try:
            with _stream(config.device), DraftRunner(Model(model, "draft"), config) as writer:
                serve(theirs, writer)
        except Exception as error:  # whatever it is, the target's side reports it and continues alone
            failed.append(f"{type(error).__name__}: {error}")
        finally:
            theirs.close()

    thread = threading.Thread(target=work, name="foreword-draft", daemon=True)
    thread.start()
    return Worker(ours, lambda: failed[0] if failed else "its thread ended", lambda: _join(thread))


def _join(thread: threading.Thread) -> None:
    """Wait for the thread: freeing its device memory must not happen while someone records a graph."""
    if thread is not threading.current_thread():  # the garbage collector may run in any thread
        thread.join(5)


def _stream(device: str) -> Any:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.startswith("cuda") else nullcontext()


def start_process(model: PreTrainedModel, config: WorkerConfig) -> Worker:
    """Start a process. The model reaches it through a folder, whose weights are deleted as soon as they are read."""
    saved = _saved_model(model, config)
    folder = saved.path
    ours, theirs = socket.socketpair()
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    with theirs, (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "foreword.methods.amusd.worker", str(folder), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the parent; a closed channel ends this one
        )
    return Worker(SocketChannel(ours), lambda: _exit_reason(process, folder), lambda: _reap(process, saved), process.pid)


def _saved_model(model: PreTrainedModel, config: WorkerConfig) -> TemporaryFolder:
    about = {"config": asdict(config), "dtype": str(model.dtype).removeprefix("torch.")}
    saved = None
    try:
        saved = TemporaryFolder("foreword-draft")
        with without_progress_bars():
            model.save_pretrained(saved.path)
        (saved.path / "worker.json").write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:
        if saved is not None:
            saved.delete()
        reason = f"the draft model cannot be handed to its process through {tempfile.gettempdir()} ({error})"
        raise StorageError(f"{reason}; make room there, or set TMPDIR") from error
    return saved


def _exit_reason(process: subprocess.Popen[bytes], folder: Path) -> str:
    lines = (folder / "errors.txt").read_text(encoding="utf-8").strip().splitlines()
    return f"its process ended with status {process.wait()}" + (f" ({lines[-1]})" if lines else "")


def _reap(process: subprocess.Popen[bytes], saved: TemporaryFolder) -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:  # stopped, or busy for too long
        process.kill()
        process.wait()
    saved.delete()


def stock_copy(model: Model) -> PreTrainedModel:
    """A copy of a model with transformers' own layers, to be saved."""
    stock: Any = unpacked(model.hf)
    return stock.requires_grad_(False)


def main(folder: str, descriptor: str) -> None:
    about = read_json(Path(folder) / "worker.json")
    config = WorkerConfig(**about["config"])
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif config.threads is not None:
        torch.set_num_threads(config.threads)
    model = Model(load_weights(Path(folder), device, DTYPES[about["dtype"]]), "draft")
    for file in Path(folder).glob("*.safetensors"):
        file.unlink()
    with _stream(config.device), DraftRunner(model, config) as writer:
        serve(SocketChannel(socket.socket(fileno=int(descriptor))), writer)


if __name__ == "__main__":
    main(*sys.argv[1:])
