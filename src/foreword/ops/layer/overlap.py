"""Kernels that start while the previous one still runs (programmatic dependent launch, Hopper and later).

A small kernel spends more time on starting and on its first bytes from memory than on its work. Launched this way it starts
early, loads what is old enough, and then waits for its turn. Every such kernel waits before it reads what the previous
kernel wrote and before it writes anything; then it lets the next one start. So when a kernel starts, all kernels but the
previous one are done, and it may read at once what they wrote. Letting the next kernel start before one's own turn is a
loss: then dozens of kernels wait, and those with work find only a few free multiprocessors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ENABLED = True  # studies/linear_tiles.py turns it off to measure its effect

SECTOR = tl.constexpr(32)  # bytes that one request loads into the L2 cache


def overlaps(device: torch.device) -> bool:
    """Return whether kernels on this device start early. Pass it as EARLY, together with `early_launch`."""
    return ENABLED and device.type == "cuda" and _is_capable(device)


def early_launch(early: bool) -> dict[str, Any]:
    """Return the launch option, only if `early`: other devices do not know it."""
    return {"launch_pdl": True} if early else {}


def launched(device: torch.device, warps: int = 4) -> dict[str, Any]:
    """Return the launch options of a small kernel, EARLY included."""
    early = overlaps(device)
    return {"EARLY": early, "num_warps": max(1, warps), **early_launch(early)}


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def take_turn(EARLY: tl.constexpr) -> None:
    """Wait until all kernels launched before are done, then let the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, COUNT: tl.constexpr) -> None:
    """Load the first COUNT numbers from each of `pointers` [n] into the L2 cache; they may still change."""
    if COUNT > 0:
        per_sector: tl.constexpr = SECTOR * 8 // pointers.dtype.element_ty.primitive_bitwidth
        sectors: tl.constexpr = (COUNT + per_sector - 1) // per_sector
        offset = tl.minimum(tl.arange(0, triton.next_power_of_2(sectors)), sectors - 1) * per_sector
        address = (pointers[:, None] + offset[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )
