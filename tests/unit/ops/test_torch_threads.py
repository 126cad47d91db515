"""A compiled function runs in as many threads as asked for, on torch's own pool, and in one where that pool is unknown."""

from ctypes import addressof, c_int64
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from foreword.ops.layer import torch_threads
from foreword.ops.layer.code_tiles import taken
from foreword.ops.layer.compiled import callback

needs_pool = pytest.mark.skipif(torch_threads._pool() is None, reason="torch has another pool here")


@callback("void(voidptr)")
def count_one(job):
    taken(job, 1)


def calls(threads: int) -> int:
    counter = (c_int64 * 1)(0)
    torch_threads.run(count_one.address, addressof(counter), threads)
    return counter[0]


@needs_pool
def test_every_thread_calls_the_function_once() -> None:
    assert [calls(threads) for threads in (1, 2, 3, 1)] == [1, 2, 3, 1]


@needs_pool
def test_there_are_as_many_threads_as_torch_has() -> None:
    assert torch_threads.thread_count() == torch.get_num_threads()


@pytest.mark.parametrize("maps", ["", "/lib/other.so\n", "0 /gomp-of-nobody.so\n"])
def test_an_unknown_pool_means_one_thread(maps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maps").write_text(maps)
    monkeypatch.setattr(torch_threads, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(torch_threads, "_pool", torch_threads._pool.__wrapped__)
    assert torch_threads.thread_count() == 1 and calls(3) == 1
    monkeypatch.setattr(torch_threads, "MAPS", tmp_path / "none")
    assert torch_threads.thread_count() == 1
