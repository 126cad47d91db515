"""Kernels that start while the one before them still runs (programmatic dependent launch, Hopper and later).

A small kernel spends more time on starting, and on its first bytes from memory, than on its work. Launched this way it
starts early, asks for what is old enough, and then waits for its turn. Whoever takes part waits before it reads what the
kernel before wrote, and before it writes anything; then it lets the next one start. So when a kernel starts, all kernels
but the one before it are done, and what they wrote may be read at once. Letting the next start any sooner, before one's
own turn, is a loss: kernels then wait by the dozen, and those that have work find a few multiprocessors free instead of all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ENABLED = True  # the sweep turns it off to see what it brings

SECTOR = tl.constexpr(32)  # bytes that one request brings into the L2 cache


def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device are launched early. Pass it as EARLY, and `early_launch` with it."""
    return ENABLED and device.type == "cuda" and _is_capable(device)


def early_launch(early: bool) -> dict[str, Any]:
    """Only where it is asked for: other devices do not know the option."""
    return {"launch_pdl": True} if early else {}


def launched(device: torch.device, warps: int = 4) -> dict[str, Any]:
    """How a small kernel that takes part is launched: EARLY among the rest."""
    early = overlaps(device)
    return {"EARLY": early, "num_warps": max(1, warps), **early_launch(early)}


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def take_turn(EARLY: tl.constexpr) -> None:
    """From here on all that was launched before is done; and the next kernel may start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch(lines, COUNT: tl.constexpr) -> None:
    """Bring the first COUNT numbers behind each pointer of `lines` [n] into the L2 cache; they may still change."""
    if COUNT > 0:
        per_sector: tl.constexpr = SECTOR * 8 // lines.dtype.element_ty.primitive_bitwidth
        sectors: tl.constexpr = (COUNT + per_sector - 1) // per_sector
        away = tl.minimum(tl.arange(0, triton.next_power_of_2(sectors)), sectors - 1) * per_sector
        address = (lines[:, None] + away[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )
