"""Quantised weights: codes of 4 or 8 bits, with a scale, and perhaps a minimum, for every group of inputs.

A weight is scale * code + minimum. Groups with a minimum have codes from 0 on, groups without one have signed codes. The
outputs are packed in panels of 16, and four panels group by group, so that a product reads memory from front to back. The
functions here are the reference in torch; `ops/layer/code_products.py` computes the same products from the packed codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PANEL = 16
STEP = 4  # panels that are packed together
PANELS_AT_ONCE = 256  # that are dequantised together: the intermediate results are several times as large


class Layout(NamedTuple):
    """How a block is stored: the codes of one group for 16 outputs, their scales, and their minimums."""

    bits: int  # of a code: 4 or 8
    group: int  # inputs: 16 or 32
    half: bool  # scales and minimums are float16
    minimum: bool  # groups have one

    @property
    def code_bytes(self) -> int:
        return PANEL * self.group * self.bits // 8

    @property
    def block_bytes(self) -> int:
        return self.code_bytes + PANEL * (2 if self.half else 4) * (1 + self.minimum)

    def shape(self, outputs: int, inputs: int) -> tuple[int, int, int, int]:
        """Return the shape of the blocks of a weight [outputs, inputs]."""
        return -(-outputs // (STEP * PANEL)), inputs // self.group, STEP, self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / (PANEL * self.group)

    def __str__(self) -> str:
        return f"q{self.bits}, {self.bits_per_weight:g} bits per weight in groups of {self.group}"


class GroupCodes(NamedTuple):
    """Weights [N, K] as codes, in the order of the weights."""

    bits: int
    codes: Tensor  # [N, K] int8
    scale: Tensor  # [N, K / group] float32 or float16
    minimum: Tensor | None = None  # the same, or None: codes are signed

    def dequantised(self) -> Tensor:
        """Return the weights [N, K] in float32."""
        rows, columns = self.codes.shape
        groups = self.codes.view(rows, self.scale.shape[1], -1).float() * self.scale.float().unsqueeze(-1)
        whole = groups if self.minimum is None else groups + self.minimum.float().unsqueeze(-1)
        return whole.view(rows, columns)


def quantised(weight: Tensor, bits: int, group: int = 32) -> GroupCodes:
    """Round weights [N, K]: four bits between the lowest and the highest of a group, eight bits around zero."""
    groups = weight.float().view(weight.shape[0], -1, group)
    if bits == 8:
        scale = _stored(groups.abs().amax(-1) / 127)
        codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
        return GroupCodes(bits, codes.to(torch.int8).view(weight.shape), scale)
    lowest, highest = groups.aminmax(dim=-1)
    scale = _stored((highest - lowest) / 15)
    minimum = lowest.to(scale.dtype)
    codes = ((groups - minimum.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)).round().clamp(0, 15)
    return GroupCodes(bits, codes.to(torch.int8).view(weight.shape), scale, minimum)


def _stored(scale: Tensor) -> Tensor:
    """Return scales in float16, or in float32 if one of them is too large or too small for that. A group of equal weights
    gets any scale."""
    scale = torch.where(scale > 0, scale, 1.0)
    half = scale.half()
    return half if bool((half.isfinite() & (half >= torch.finfo(torch.float16).smallest_normal)).all()) else scale


@dataclass(frozen=True)
class PackedCodes:
    """Weights [outputs, inputs] as packed blocks [steps, groups, STEP, bytes]. Lanes beyond the last output are 0."""

    layout: Layout
    blocks: Tensor
    outputs: int

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * self.layout.group

    @property
    def is_full(self) -> bool:
        """Whether no lanes lie beyond the last output."""
        return self.outputs % (STEP * PANEL) == 0

    @property
    def bytes(self) -> int:
        return self.blocks.numel()

    @staticmethod
    def of(weight: GroupCodes, half: bool = True) -> PackedCodes:
        """Pack weights. Scales are stored in float16 if `half` and if that keeps them exactly."""
        parts = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
        half = half and all(_fits_half(part) for part in parts)
        group = weight.codes.shape[1] // weight.scale.shape[1]
        layout = Layout(weight.bits, group, half, weight.minimum is not None)
        outputs, inputs = weight.codes.shape
        shape = layout.shape(outputs, inputs)
        blocks, panels, groups = aligned(*shape), shape[0] * STEP, shape[1]
        by_panel = blocks.transpose(1, 2)  # [steps, STEP, groups, bytes]
        codes = _padded(weight.codes, panels).view(panels, PANEL, groups, group)
        by_panel[..., : layout.code_bytes] = _code_bytes(codes, weight.bits).view(*by_panel.shape[:3], -1)
        stored = torch.float16 if half else torch.float32
        for part, first in zip(parts, range(layout.code_bytes, layout.block_bytes, PANEL * stored.itemsize), strict=True):
            lanes = _padded(part.to(stored), panels).view(panels, PANEL, groups).transpose(1, 2).contiguous()
            by_panel[..., first : first + PANEL * stored.itemsize] = lanes.view(torch.uint8).view(*by_panel.shape[:3], -1)
        return PackedCodes(layout, blocks, outputs)

    @staticmethod
    def joined(parts: list[PackedCodes]) -> PackedCodes:
        """Return the outputs of several weights with equal layouts, one after the other, as one."""
        whole = aligned(sum(len(part.blocks) for part in parts), *parts[0].blocks.shape[1:])
        torch.cat([part.blocks for part in parts], out=whole)
        return PackedCodes(parts[0].layout, whole, sum(part.outputs for part in parts))

    def codes(self, index: Tensor) -> GroupCodes:
        """Return the codes of some outputs [n]."""
        return _of_lanes(self.layout, self.blocks[index // (STEP * PANEL), :, index // PANEL % STEP], index % PANEL)

    def rows(self, index: Tensor) -> Tensor:
        """Return the weights of some outputs [n], dequantised: [n, inputs]."""
        return self.codes(index).dequantised()

    def elements(self, index: Tensor) -> Tensor:
        """Return some weights, dequantised, by their places [n] in the flattened weight."""
        output, column = index // self.inputs, index % self.inputs
        blocks = self.blocks[output // (STEP * PANEL), column // self.layout.group, output // PANEL % STEP]
        groups = _of_lanes(self.layout, blocks.unsqueeze(1), output % PANEL).dequantised()
        return groups[torch.arange(len(index)), column % self.layout.group]

    def dequantised(self) -> Tensor:
        """Return all weights [outputs, inputs] in float32."""
        pieces = torch.arange(self.outputs).split(PANELS_AT_ONCE * PANEL)
        return torch.cat([self.rows(piece) for piece in pieces])

    def without_half(self) -> PackedCodes:
        """Return the same weights with scales in float32."""
        return PackedCodes.of(self.codes(torch.arange(self.outputs)), half=False)

    def product(self, rows: Tensor) -> Tensor:
        """Return rows [n, inputs] times the weights: [n, outputs]."""
        return functional.linear(rows, self.dequantised())


def aligned(*shape: int) -> Tensor:
    """Return zeroed bytes that begin where a line of the CPU's cache does."""
    count, line = torch.Size(shape).numel(), 64
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be used for training steps
        raw = torch.zeros(count + line, dtype=torch.uint8)
        first = -raw.data_ptr() % line
        return raw[first : first + count].view(shape)


def _fits_half(part: Tensor) -> bool:
    return part.dtype == torch.float16 or torch.equal(part.half().float(), part.float())


def _padded(rows: Tensor, panels: int) -> Tensor:
    return functional.pad(rows, (0, 0, 0, panels * PANEL - len(rows)))


def _code_bytes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [panels, lanes, groups, group] as bytes [panels, groups, bytes]. Eight bits: a vector of lanes for every
    input. Four bits: a word of eight inputs for every lane."""
    panels, lanes, groups, group = codes.shape
    if bits == 8:
        return codes.permute(0, 2, 3, 1).reshape(panels, groups, -1).view(torch.uint8)
    low, high = (codes.view(torch.uint8) & 15).view(panels, lanes, groups, group // 8, 4, 2).unbind(-1)
    return (low | (high << 4)).permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)


def _of_lanes(layout: Layout, blocks: Tensor, lane: Tensor) -> GroupCodes:
    """Return the codes of one lane [n] of each row of blocks [n, groups, bytes]."""
    count, groups, _ = blocks.shape
    each, stored = torch.arange(count), blocks[:, :, : layout.code_bytes]
    scales = blocks[:, :, layout.code_bytes :].contiguous().view(torch.float16 if layout.half else torch.float32)
    scale, *minimum = (part[each, :, lane] for part in scales.split(PANEL, dim=-1))
    if layout.bits == 8:
        codes = stored.view(torch.int8).reshape(count, groups, layout.group, PANEL)[each, :, :, lane]
    else:
        words = stored.reshape(count, groups, layout.group // 8, PANEL, 4)[each, :, :, lane]
        codes = torch.stack([words & 15, words >> 4], dim=-1).reshape(count, groups, layout.group).view(torch.int8)
        codes = codes if layout.minimum else codes << 4 >> 4  # the sign is the highest of four bits
    return GroupCodes(layout.bits, codes.flatten(1), scale, minimum[0] if minimum else None)
