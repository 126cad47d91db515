"""A small model that writes on while the target checks: in a thread, or in a process of its own (`python -m` this module).

In: `News` of the texts, over a line. Out: `Guesses`, and from when to when each pass ran. It reads what it has not read,
writes one token behind every text that may grow, says so, and listens; it ends when the line is cut. Its cache is told
before each pass how many rows are right, so that rolling back costs nothing but reading anew. On CUDA passes are replayed.
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
from foreword.methods.amusd.channel import Line, SocketLine, ThreadLine
from foreword.methods.amusd.epochs import ALONE, GREEDY, Draw, Follower, Job
from foreword.model.linears import rebuild, unpacked
from foreword.model.loading import DTYPES, load_weights, without_progress_bars
from foreword.model.model import Model
from foreword.ops.cuda_graph import RecordedCall, record

CHUNK = 64  # rows of a pass
WIDTHS = (1, ALONE, CHUNK)  # of those that are captured: a text goes on, or was refused, or is read
READY = "ready"


@dataclass(frozen=True)
class Place:
    """Where a draft is written, and for whom."""

    device: str
    slots: int
    context: int
    vocabulary: int  # of the target
    threads: int | None = None  # of the CPU; None: as many as the process has


class Sheet:
    """What a pass is about: of each text its slot, how many of its rows are cached, how many are read, and their tokens. The
    host writes it down and sends it in one copy to where it always lies: a graph looks there."""

    def __init__(self, texts: int, rows: int, device: torch.device) -> None:
        self.count, self.rows = texts, rows
        self.block = torch.zeros(texts * (3 + rows), dtype=torch.long, device=device)
        self.slots, self.cached, self.read, tokens = self.block.split([texts, texts, texts, texts * rows])
        self.tokens = tokens.view(texts, rows)
        self.host = torch.zeros(len(self.block), dtype=torch.long, pin_memory=True) if self.block.is_cuda else self.block
        self.numbers = self.host.numpy()

    def fill(self, job: Job) -> None:
        """Texts that are missing repeat the first: they write the same into the same rows. No row sees those behind it, so
        rows that are missing repeat the last."""
        missing = self.count - len(job.slots)
        slots, cached = (part + part[:1] * missing for part in (job.slots, job.cached))
        texts = job.rows + job.rows[:1] * missing
        tokens = [token for text in texts for token in text + text[-1:] * (self.rows - len(text))]
        self.numbers[:] = [*slots, *cached, *map(len, texts), *tokens]
        if self.host is not self.block:
            self.block.copy_(self.host, non_blocking=True)


class Writer:
    """The small model, one pass at a time. On CUDA each is the replay of a graph: they come in few sizes, all of which are
    captured before the first text comes, while nobody else is at work."""

    def __init__(self, model: Model, place: Place) -> None:
        self.model, self.place, self.device = model, place, torch.device(place.device)
        self.cache = model.layer_stack.allocate(place.slots, place.context, CHUNK)
        self.ends = torch.zeros(0, dtype=torch.long, device=self.device)
        heat = torch.zeros(place.slots, dtype=torch.float32, device=self.device)
        self.columns = {"temperature": heat, "key": torch.zeros(place.slots, 2, dtype=torch.long, device=self.device)}
        self.draws = [GREEDY] * place.slots  # what the columns say
        self.passes: dict[tuple[int, int, bool], tuple[Sheet, RecordedCall[Tensor]]] = {}
        if self.device.type == "cuda":
            self.capture()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        """Its graphs end here: they hold the writer as it holds them, and would wait for the garbage collector."""
        self.passes.clear()

    @torch.inference_mode()
    def step(self, job: Job) -> list[int]:
        """Read rows; and the token that comes behind them, if one is written."""
        for slot, cached, draw in zip(job.slots, job.cached, job.draws, strict=True):
            if not cached:  # of the text before, which may have left NaN behind
                self.cache.wipe(slot)
            if draw != self.draws[slot]:
                self._set(slot, draw)
        noise, longest = any(draw[0] > 0 for draw in job.draws), max(map(len, job.rows))
        if self.passes:
            return self._replayed(job, longest, noise)
        sheet = Sheet(len(job.slots), longest, self.device)
        sheet.fill(job)
        batch = Batch(sheet.slots, tuple(job.slots), max(job.cached))
        walked = self._walked(sheet, batch)
        return self._chosen(sheet, walked, noise).tolist() if job.writes else []

    def _set(self, slot: int, draw: Draw) -> None:
        self.draws[slot] = draw
        self.columns["temperature"][slot].fill_(draw[0])
        for key, word in zip(self.columns["key"][slot], draw[1:], strict=True):
            key.fill_(word)

    def _walked(self, sheet: Sheet, batch: Batch) -> Tensor:
        self.cache.rewind(batch, sheet.cached)
        known = sheet.tokens.clamp(max=self.model.vocab_size - 1)  # the target's padding may be longer
        return self.model.layer_stack.read(self.model.embed(known), batch, sheet.read)

    def _chosen(self, sheet: Sheet, walked: Tensor, noise: bool) -> Tensor:
        """[b]: the tokens behind the last rows that count, drawn as the target draws its own."""
        last = walked[torch.arange(sheet.count, device=self.device), sheet.read - 1].unsqueeze(1)
        logits = self.model.draft_head(self.model.norm(last))[..., : self.place.vocabulary]
        sampling = SamplingRows(SamplingStages(noise=noise), self.ends, self.columns, sheet.slots)
        return pick(logits, (sheet.cached + sheet.read).unsqueeze(1), sampling).flatten()

    @torch.inference_mode()
    def capture(self) -> None:
        """A graph for every size of a job; who has many rows to read is read alone."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        pool: Any = None
        for texts, noise in product(sizes(self.place.slots), (False, True)):
            for rows in WIDTHS if texts == 1 else WIDTHS[:-1]:
                sheet = Sheet(texts, rows, self.device)
                sheet.fill(Job([0], [[0] * rows], [0], [GREEDY], writes=True))
                made = record(partial(self._pass, sheet, noise), pool, stream)
                pool = pool or made.graph.pool()
                self.passes[texts, rows, noise] = sheet, made

    def _pass(self, sheet: Sheet, noise: bool) -> Tensor:
        batch = Batch(sheet.slots, tuple(range(sheet.count)), self.place.context, changes=True)
        return self._chosen(sheet, self._walked(sheet, batch), noise)

    def _replayed(self, job: Job, longest: int, noise: bool) -> list[int]:
        """Waits for the device in any case: the host's sheet is written again next time, and a pass is timed."""
        texts = next(size for size in sizes(self.place.slots) if size >= len(job.slots))
        rows = next(width for width in WIDTHS if width >= longest)
        sheet, captured = self.passes[texts, rows, noise]
        sheet.fill(job)
        captured.replay()
        chosen: list[int] = captured.answer.tolist()
        return chosen[: len(job.slots)] if job.writes else []


@cache
def sizes(slots: int) -> tuple[int, ...]:
    """How many texts a captured pass may have."""
    return *(1 << power for power in range((slots - 1).bit_length())), slots


def serve(line: Line, writer: Writer) -> None:
    """Until the line is cut."""
    follower = Follower(writer.place.slots, CHUNK)
    line.say(READY)
    while not line.cut:
        job = follower.job()
        for news in line.hear(0.0 if job else None):
            said = follower.hear(news)
            if said is not None:
                line.say((0.0, 0.0, [said]))
            job = None
        job = job or follower.job()
        if job and not line.cut:
            began = time.monotonic()
            guesses = follower.did(job, writer.step(job))
            line.say((began, time.monotonic(), guesses))


# Workers -----------------------------------------------------------------------------------------------------------------


class Worker:
    """Who writes the draft, seen from the target: a line, and how to ask what became of it when that is cut. It ends when
    nobody holds it any more, or with the process."""

    def __init__(self, line: Line, fate: Callable[[], str], end: Callable[[], None], pid: int | None = None) -> None:
        self.line, self.fate, self.pid = line, fate, pid
        self.close = finalize(self, _end, line, end)

    def wait(self) -> None:
        """Until it can be told of texts."""
        if self.line.hear(None) != [READY]:
            told = self.fate()
            self.close()
            raise DrafterError(f"amusd: the draft's worker did not start: {told}; the other methods need none")


def _end(line: Line, end: Callable[[], None]) -> None:
    line.close()
    end()


def in_a_thread(model: PreTrainedModel, place: Place) -> Worker:
    """On CUDA in a stream of its own, and with layers that are rebuilt for speed: the model is ours."""
    ours, theirs = ThreadLine.pair()
    failed: list[str] = []
    if place.device.startswith("cuda"):
        rebuild(model, torch.device(place.device), model.dtype)
        torch.cuda.synchronize(place.device)  # the weights were copied in another stream

    def work() -> None:
        try:
            with _stream(place.device), Writer(Model(model, "draft"), place) as writer:
                serve(theirs, writer)
        except Exception as error:  # whatever it is, the target's side tells it and goes on alone
            failed.append(f"{type(error).__name__}: {error}")
        finally:
            theirs.close()

    thread = threading.Thread(target=work, name="foreword-draft", daemon=True)
    thread.start()
    return Worker(ours, lambda: failed[0] if failed else "its thread ended", lambda: _join(thread))


def _join(thread: threading.Thread) -> None:
    """What the thread held on the device is given up when it ends, which must not fall into somebody's capture."""
    if thread is not threading.current_thread():  # the garbage collector works wherever it likes
        thread.join(5)


def _stream(device: str) -> Any:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.startswith("cuda") else nullcontext()


def in_a_process(model: PreTrainedModel, place: Place) -> Worker:
    """The model goes there through a folder, whose weights are gone as soon as they were read."""
    kept = _kept(model, place)
    folder = kept.path
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
            start_new_session=True,  # Ctrl-C is for the one who is asked; the line tells this one
        )
    return Worker(SocketLine(ours), lambda: _fate(process, folder), lambda: _reap(process, kept), process.pid)


def _kept(model: PreTrainedModel, place: Place) -> TemporaryFolder:
    about = {"place": asdict(place), "dtype": str(model.dtype).removeprefix("torch.")}
    kept = None
    try:
        kept = TemporaryFolder("foreword-draft")
        with without_progress_bars():
            model.save_pretrained(kept.path)
        (kept.path / "place.json").write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:
        if kept is not None:
            kept.delete()
        told = f"the draft model cannot be handed to its process through {tempfile.gettempdir()} ({error})"
        raise StorageError(f"{told}; make room there, or set TMPDIR") from error
    return kept


def _fate(process: subprocess.Popen[bytes], folder: Path) -> str:
    lines = (folder / "errors.txt").read_text(encoding="utf-8").strip().splitlines()
    return f"its process ended with status {process.wait()}" + (f" ({lines[-1]})" if lines else "")


def _reap(process: subprocess.Popen[bytes], kept: TemporaryFolder) -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:  # stopped, or busy for long
        process.kill()
        process.wait()
    kept.delete()


def alone(model: Model) -> PreTrainedModel:
    """A copy of a model as transformers makes it, to be saved."""
    stock: Any = unpacked(model.hf)
    return stock.requires_grad_(False)


def main(folder: str, descriptor: str) -> None:
    about = read_json(Path(folder) / "place.json")
    place = Place(**about["place"])
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif place.threads is not None:
        torch.set_num_threads(place.threads)
    model = Model(load_weights(Path(folder), device, DTYPES[about["dtype"]]), "draft")
    for file in Path(folder).glob("*.safetensors"):
        file.unlink()
    with _stream(place.device), Writer(model, place) as writer:
        serve(SocketLine(socket.socket(fileno=int(descriptor))), writer)


if __name__ == "__main__":
    main(*sys.argv[1:])
