"""Cores reserved for another process: torch uses fewer threads until they are released."""

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


@pytest.mark.parametrize(
    ("available", "reserved", "threads"), [(4, 1, 3), (4, 3, 1), (2, 4, 1), (5, 1, 4), (64, 1, 4), (4, 0, 4)]
)
def test_each_thread_has_a_core(available: int, reserved: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: available)
    cores_of_another = ReservedCores(reserved)
    for _ in range(2):
        for _ in range(2):  # a second call changes nothing
            cores_of_another.reserve()
            assert torch.get_num_threads() == threads
        for _ in range(2):
            cores_of_another.release()
            assert torch.get_num_threads() == 4


def test_there_is_a_core() -> None:
    assert cores() >= 1
