"""A small model that writes on while the target checks: in a thread, or in a process of its own (`python -m` this module).

In: `News` of the texts, over a line. Out: `Guesses`, and from when to when each pass ran. It reads what it has not read,
writes one token behind every text that may grow, says so, and listens; it ends when the line is cut. Its cache is told
before each pass how many rows are right, so that rolling back costs nothing but reading anew.
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
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foreword.core.epochs import Follower, Job
from foreword.core.line import Line
from foreword.core.sampling import Kind, SamplingRows, rank
from foreword.core.state import Lanes
from foreword.errors import DrafterError, StorageError
from foreword.model.loading import DTYPES, load_weights, without_bars
from foreword.model.model import Model
from foreword.model.pack import unpacked

CHUNK = 64  # rows of a pass
READY = "ready"


@dataclass(frozen=True)
class Place:
    """Where a draft is written, and for whom."""

    device: str
    slots: int
    context: int
    vocabulary: int  # of the target
    threads: int | None = None  # of the CPU; None: as many as the process has


class Writer:
    """The small model, one pass at a time."""

    def __init__(self, model: Model, place: Place) -> None:
        self.model, self.place, self.device = model, place, torch.device(place.device)
        self.cache = model.layer_stack.allocate(place.slots, place.context, CHUNK)
        self.ends = torch.zeros(0, dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def step(self, job: Job) -> list[int]:
        """Read rows; and the token that comes behind them, if one is written."""
        counts = [len(rows) for rows in job.rows]
        lanes = Lanes.of(job.slots, max(job.cached), self.device)
        self.cache.rewind(lanes, self._sent(job.cached))
        for slot, cached in zip(job.slots, job.cached, strict=True):
            if not cached:  # of the text before, which may have left NaN behind
                self.cache.wipe(slot)
        longest = max(counts)
        tokens = self._sent([rows + rows[-1:] * (longest - len(rows)) for rows in job.rows])
        known = tokens.clamp(max=self.model.vocab_size - 1)  # the target's padding may be longer
        walked = self.model.layer_stack.read(self.model.embed(known), lanes, self._sent(counts))
        return self._written(job, walked, counts) if job.writes else []

    def _written(self, job: Job, walked: Tensor, counts: list[int]) -> list[int]:
        last = walked[torch.arange(len(counts), device=self.device), self._sent(counts) - 1].unsqueeze(1)
        logits = self.model.head(self.model.norm(last))[..., : self.place.vocabulary]
        place = self._sent([cached + count for cached, count in zip(job.cached, counts, strict=True)]).unsqueeze(1)
        return rank(logits, place, self._sampling(job), 1).flatten().tolist()

    def _sampling(self, job: Job) -> SamplingRows:
        heat = torch.tensor([draw[0] for draw in job.draws], dtype=torch.float32, device=self.device)
        columns = {"temperature": heat, "key": self._sent([list(draw[1:]) for draw in job.draws])}
        kind = Kind(noise=any(draw[0] > 0 for draw in job.draws))
        return SamplingRows(kind, self.ends, columns, torch.arange(len(job.draws), device=self.device))

    def _sent(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


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
    """On CUDA in a stream of its own."""
    ours, theirs = Line.pair()
    failed: list[str] = []
    if place.device.startswith("cuda"):
        torch.cuda.synchronize(place.device)  # the weights were copied in another stream

    def work() -> None:
        try:
            with _stream(place.device):
                serve(theirs, Writer(Model(model, "draft"), place))
        except Exception as error:  # whatever it is, the target's side tells it and goes on alone
            failed.append(f"{type(error).__name__}: {error}")
        finally:
            theirs.close()

    threading.Thread(target=work, name="foreword-draft", daemon=True).start()
    return Worker(ours, lambda: failed[0] if failed else "its thread ended", lambda: None)


def _stream(device: str) -> Any:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.startswith("cuda") else nullcontext()


def in_a_process(model: PreTrainedModel, place: Place) -> Worker:
    """The model goes there through a folder, whose weights are gone as soon as they were read."""
    folder = _kept(model, place)
    ours, theirs = socket.socketpair()
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    with theirs, (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "foreword.model.writer", str(folder), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the one who is asked; the line tells this one
        )
    return Worker(Line(ours), lambda: _fate(process, folder), lambda: _reap(process, folder), process.pid)


def _kept(model: PreTrainedModel, place: Place) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="foreword-draft-"))
    about = {"place": asdict(place), "dtype": str(model.dtype).removeprefix("torch.")}
    try:
        with without_bars():
            model.save_pretrained(folder)
        (folder / "place.json").write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:
        _clear(folder)
        told = f"the draft model cannot be handed to its process through {folder.parent} ({error})"
        raise StorageError(f"{told}; make room there, or set TMPDIR") from error
    return folder


def _clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _fate(process: subprocess.Popen[bytes], folder: Path) -> str:
    lines = (folder / "errors.txt").read_text(encoding="utf-8").strip().splitlines()
    return f"its process ended with status {process.wait()}" + (f" ({lines[-1]})" if lines else "")


def _reap(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:  # stopped, or busy for long
        process.kill()
        process.wait()
    _clear(folder)


def alone(model: Model) -> PreTrainedModel:
    """A copy of a model as transformers makes it, to be saved."""
    stock: Any = unpacked(model.hf)
    return stock.requires_grad_(False)


def main(folder: str, descriptor: str) -> None:
    about = json.loads((Path(folder) / "place.json").read_text(encoding="utf-8"))
    place = Place(**about["place"])
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif place.threads is not None:
        torch.set_num_threads(place.threads)
    model = Model(load_weights(Path(folder), device, DTYPES[about["dtype"]]), "draft")
    for file in Path(folder).glob("*.safetensors"):
        file.unlink()
    serve(Line(socket.socket(fileno=int(descriptor))), Writer(model, place))


if __name__ == "__main__":
    main(*sys.argv[1:])
