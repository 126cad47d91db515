"""Products of float32 rows with quantised weights on a CPU, compiled for what this CPU can do.

In: rows [n, K] and `PackedCodes`. Out: [n, N]. The function is that of the dequantised weights; only the order of its sums
is another one. Each row is computed in the same order in every pass, alone or among others, with one thread or several. So
within a form of the loops, a row's result always has the same bits. The machine code is compiled once for each layout.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from numba import carray, float32, njit
from numba.core.registry import cpu_target
from torch import Tensor

from foreword.ops.group_codes import PANEL, STEP, Layout, PackedCodes
from foreword.ops.layer.code_tiles import SOURCE, integer_at, pointer_at, taken, tile
from foreword.ops.layer.compiled import callback
from foreword.ops.layer.torch_threads import run, thread_count

ROWS_AT_ONCE = 64  # rows of a prompt that are multiplied by all weights before the next ones
WORK_PER_THREAD = 1 << 18  # multiplications for which it pays to wake another thread
SHARES = 8  # pieces of work of each thread: a thread that other programs hold up takes fewer of them


class Form(NamedTuple):
    """How the loops are compiled."""

    name: str
    needs: frozenset[str]  # features of the CPU
    lanes: int  # outputs in a vector
    table: bool  # codes of four bits are looked up in a register
    fused: bool  # multiply and add are one instruction
    half: bool  # scales of float16 are converted by an instruction
    vectors: tuple[int, int, int, int]  # of a tile of 8, 4, 2 and 1 rows, as many as registers hold; 0: no such tile


FORMS = (
    Form("avx512", frozenset({"avx512f", "fma", "f16c"}), 16, table=True, fused=True, half=True, vectors=(2, 4, 4, 4)),
    Form("avx2", frozenset({"avx2", "fma", "f16c"}), 8, table=False, fused=True, half=True, vectors=(0, 2, 4, 4)),
    Form("portable", frozenset(), 4, table=False, fused=False, half=False, vectors=(0, 0, 4, 4)),
)


@cache
def form_of_this_cpu() -> Form:
    """Return the fastest form that runs here."""
    *_, features = cpu_target.target_context.codegen().magic_tuple()
    held = {one[1:] for one in features.split(",") if one.startswith("+")}
    return next(form for form in FORMS if form.needs <= held)


class ProductJob(NamedTuple):
    """What a compiled function reads: a counter of the panels that threads have taken, sizes, and addresses."""

    taken: int
    piece: int  # panels that a thread takes at a time
    panels: int
    rows: int  # how many
    groups: int
    outputs: int
    weight_at: int
    rows_at: int
    row_bytes: int
    sums_at: int
    out_at: int
    out_bytes: int  # of a row


# Places in a job, as constants of the compiled code.
_, PIECE, PANELS, ROWS, GROUPS, OUTPUTS, WEIGHT_AT, ROWS_AT, ROW_BYTES, SUMS_AT, OUT_AT, OUT_BYTES = range(12)


def product(rows: Tensor, weight: PackedCodes, out: Tensor, threads: int | None = None, form: Form | None = None) -> None:
    """Write rows [n, K] times the weights to `out` [n, N], whose rows may be part of longer ones. By default it uses as many
    threads as torch does, if there is work for them, and the fastest form."""
    (count, inputs), (steps, groups, *_) = rows.shape, weight.blocks.shape
    form = form or form_of_this_cpu()
    assert rows.is_contiguous() and out.stride(1) == 1 and rows.dtype == out.dtype == torch.float32
    assert inputs == weight.inputs and out.shape == (count, weight.outputs)
    assert form.half or not weight.layout.half, f"{form.name} needs scales in float32"
    work = count * inputs * weight.outputs // WORK_PER_THREAD
    threads = max(1, min(thread_count() if threads is None else threads, work))
    piece = max(1, steps // (threads * SHARES)) * STEP
    sums = torch.empty(count, groups) if weight.layout.minimum else rows
    sizes = steps * STEP, count, groups, weight.outputs
    places = weight.blocks.data_ptr(), rows.data_ptr(), 4 * inputs, sums.data_ptr(), out.data_ptr(), 4 * out.stride(0)
    job = ProductJob(0, piece, *sizes, *places)
    held = (ctypes.c_int64 * len(job))(*job)
    of_sums, of_panels = _compiled(weight.layout, form)
    if of_sums is not None:
        run(of_sums, ctypes.addressof(held), 1)
    run(of_panels, ctypes.addressof(held), threads)


@cache
def _compiled(layout: Layout, form: Form) -> tuple[int | None, int]:
    """Return the addresses of the functions that sum groups of the rows, if there are minimums, and that multiply."""
    multiply = _panels(*map(int, layout), form.lanes, int(form.table), int(form.fused), *form.vectors)
    return _sums(layout.group).address if layout.minimum else None, multiply.address


@cache
def _sums(group: int) -> Any:
    """Compile the sums of the rows over each group of inputs."""

    @callback("void(voidptr)")
    def sums(job):
        rows = carray(pointer_at(job, ROWS_AT), (integer_at(job, ROWS), integer_at(job, GROUPS), group // 8, 8))
        out = carray(pointer_at(job, SUMS_AT), rows.shape[:2])
        for row in range(rows.shape[0]):
            for index in range(rows.shape[1]):
                total = float32(0)
                for lane in range(8):
                    part = float32(0)
                    for some in range(group // 8):
                        part += rows[row, index, some, lane]
                    total += part
                out[row, index] = total

    return sums


@cache
def _panels(
    bits: int, group: int, half: int, minimum: int, lanes: int, table: int, fused: int,
    of_eight: int, of_four: int, of_two: int, of_one: int,
) -> Any:  # fmt: skip
    """Compile the product for a layout and a form. The integers become constants of the code."""
    source, block_bytes = SOURCE, (PANEL * group * bits // 8) + PANEL * (2 if half else 4) * (1 + minimum)

    @callback("void(voidptr)")
    def multiply(job):
        panels, piece, count = integer_at(job, PANELS), integer_at(job, PIECE), integer_at(job, ROWS)
        while True:
            first = taken(job, piece)
            if first >= panels:
                break
            for start in range(0, count, ROWS_AT_ONCE):
                for panel in range(first, min(first + piece, panels), STEP):
                    row, stop = start, min(start + ROWS_AT_ONCE, count)
                    while row < stop:
                        places = _places(job, panel, row, block_bytes)
                        if of_eight and stop - row >= 8:
                            tile(source, bits, group, half, minimum, lanes, table, fused, 8, of_eight, places)
                            row += 8
                        elif of_four and stop - row >= 4:
                            tile(source, bits, group, half, minimum, lanes, table, fused, 4, of_four, places)
                            row += 4
                        elif stop - row >= 2:
                            tile(source, bits, group, half, minimum, lanes, table, fused, 2, of_two, places)
                            row += 2
                        else:
                            tile(source, bits, group, half, minimum, lanes, table, fused, 1, of_one, places)
                            row += 1

    return multiply


@njit
def _places(job, panel, row, block_bytes):
    """Return the addresses and sizes of a tile, in the order in which it takes them."""
    groups, row_bytes, out_bytes = integer_at(job, GROUPS), integer_at(job, ROW_BYTES), integer_at(job, OUT_BYTES)
    return (
        integer_at(job, WEIGHT_AT) + panel * groups * block_bytes,
        integer_at(job, ROWS_AT) + row * row_bytes,
        row_bytes,
        integer_at(job, SUMS_AT) + row * groups * 4,
        groups * 4,
        integer_at(job, OUT_AT) + row * out_bytes + panel * PANEL * 4,
        out_bytes,
        groups,
        integer_at(job, OUTPUTS) - panel * PANEL,
    )
