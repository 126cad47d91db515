"""The ranks of a test: this process alone, as one rank that sums."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import pytest
import torch

from foreword.ranks.group import Ranks, free_port, join, launch_variables


@cache
def one_rank(device: str = "cpu") -> Ranks:
    """Become the only rank of a group, which lives as long as this process, and return one whose sums are over itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launch_variables(0, 1, free_port()).items():
            patch.setitem(os.environ, name, value)
        return replace(join(1, torch.device(device)), sums=True)
