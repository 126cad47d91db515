"""The ranks of this process: its number among them, sums of tensors over all of them, and what they agree on.

Every rank runs the same calls in the same order. The results of a sum are the same bits on all of them, so whatever is
computed from them is too. What may differ, a time or what a file held, is `agreed`: the first rank's value counts. A process
without other ranks is ALONE.
"""

from __future__ import annotations

import atexit
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from foreword.errors import InputError
from foreword.ranks.links import Links, linked

SUM_S = 600.0  # how long a rank waits for the others: at the start, and on a CPU in a sum

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that run a model, as one of them sees them."""

    rank: int = 0
    count: int = 1
    links: Links | None = None  # None: there are no others
    sums: bool = False  # layers are divided, and their products summed; a single rank does so only to test and time it

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def summed(self, part: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it."""
        dist.all_reduce(part)
        return part

    def whole(self, part: Tensor | None, like: Tensor) -> Tensor:
        """Return the tensor of which every rank has a part: `part` along the one axis where it is shorter than `like`. If
        it is shorter in none, or missing, the first rank has all of it."""
        if part is None or part.shape == like.shape:
            held = torch.empty_like(like) if part is None else part.detach().clone()
            if self.count > 1:
                dist.broadcast(held, src=0)
            return held
        (axis,) = (place for place, (own, all_) in enumerate(zip(part.shape, like.shape, strict=True)) if own != all_)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.count)]
        dist.all_gather(parts, part.detach().contiguous())
        return torch.cat(parts, axis)


ALONE = Ranks()
_current = ALONE


def current() -> Ranks:
    return _current


def agreed(value: Value) -> Value:
    """Return the first rank's value. All ranks call this at the same place."""
    links = _current.links
    if links is None:
        return value
    if _current.is_first:
        links.send(value)
        return value
    found: Value = links.receive()
    return found


def everywhere(value: bool) -> bool:
    """Return whether this holds on all ranks. All ranks call this at the same place."""
    links = _current.links
    return value if links is None else links.all_of(value)


def fail(error: BaseException) -> None:
    """Tell the other ranks that this one cannot go on. They end, and so does this one, unless it is the first: it is to
    report the error."""
    if _current.links is not None:
        _current.links.fail(f"{type(error).__name__}: {error}")


def launch_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables by which torchrun tells a process which rank it is."""
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    return {name: str(value) for name, value in named.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_launched() -> bool:
    """Return whether torchrun, or a program that does the same, started this process as a rank."""
    return all(name in os.environ for name in launch_variables(0, 1, 0))


def check_launch(count: int) -> None:
    """Refuse a number of ranks that the processes around this one do not have."""
    if type(count) is not int or count < 1:
        raise InputError(f"tp is {count!r}; it must be a whole number, 1 or more: over how many ranks to divide the model")
    if not is_launched():
        if count > 1:
            raise InputError(
                f"tp is {count}, but this process is alone; start one process per rank: "
                f"torchrun --nproc-per-node {count} FILE.py (foreword serve and foreword generate do so by themselves)"
            )
        return
    world, local = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if local != world:
        raise InputError(f"torchrun started {world} processes, {local} of them here; all ranks must run on one machine")
    if world != count:
        raise InputError(
            f"tp is {count}, but torchrun started {world} processes; give --nproc-per-node {count}, or tp={world}"
        )


def device_of_rank(device: torch.device, count: int) -> torch.device:
    """Return this rank's own device: the GPU of its number, or the CPU."""
    if not is_launched():
        return device
    if device.type == "cpu":
        if count > 1 and torch.cuda.is_available():
            raise InputError(f"tp is {count} and device is 'cpu', but there are GPUs; hide them: CUDA_VISIBLE_DEVICES=''")
        return device
    if device.index is not None and count > 1:
        raise InputError(f"tp is {count} and device is {str(device)!r}; each rank has a GPU of its own: give device='cuda'")
    if torch.cuda.device_count() < count:
        raise InputError(f"tp is {count}, but torch sees {torch.cuda.device_count()} GPUs; give at most as many")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def join(count: int, device: torch.device) -> Ranks:
    """Become one of `count` ranks, and return when all are there."""
    global _current
    if _current is not ALONE:
        return _current
    has_gpu = device.type == "cuda"
    if has_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend, own = ("nccl", device) if has_gpu else ("gloo", None)
        dist.init_process_group(backend, timeout=timedelta(seconds=SUM_S), device_id=own)
    rank, links = dist.get_rank(), None
    if count > 1:
        links = linked(rank, count, _from_first)
    _current = Ranks(rank, count, links, sums=count > 1)
    torch.set_num_threads(agreed(torch.get_num_threads()))  # the order of sums depends on it
    atexit.register(leave)
    return _current


def _from_first(value: Any) -> Any:
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def leave() -> None:
    """Tell the other ranks that this one ends in order."""
    if _current.links is not None:
        _current.links.close()
