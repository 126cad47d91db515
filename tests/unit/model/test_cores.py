"""Cores that are left to another: threads of ours are fewer for that long, and as many as before afterwards."""

from collections.abc import Iterator

import pytest
import torch

from foreword.model import cores as module
from foreword.model.cores import ReservedCores, cores


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("there", "others", "threads"), [(4, 1, 3), (4, 3, 1), (2, 4, 1), (5, 1, 4), (64, 1, 4), (4, 0, 4)])
def test_threads_are_as_many_as_have_a_core(there: int, others: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: there)
    left = ReservedCores(others)
    for _ in range(2):
        for _ in range(2):  # a second text changes nothing
            left.reserve()
            assert torch.get_num_threads() == threads
        for _ in range(2):
            left.release()
            assert torch.get_num_threads() == 4


def test_there_is_a_core() -> None:
    assert cores() >= 1
