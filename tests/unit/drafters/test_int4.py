"""Weights in four bits: how near they are, how large the file is, what is refused, and drafts after loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from doubles import TRAINED, Recorder, engine, requests, target, truth, with_random_weights, written
from foreword.drafters import saved
from foreword.drafters.checkpoint import read_weights, write_weights
from foreword.drafters.int4 import GROUP, from_int4, int4_codes
from foreword.errors import DrafterError


def unpacked(packed: Tensor, scales: Tensor) -> list[list[float]]:
    """Return the values one by one, as the format is documented."""
    rows = []
    for row, own in zip(packed.tolist(), scales.tolist(), strict=True):
        codes = [half - 8 for byte in row for half in (byte % 16, byte // 16)]
        rows.append([code * own[column // GROUP] for column, code in enumerate(codes)])
    return rows


def plainly_rounded(weight: Tensor) -> Tensor:
    """Return a weight after rounding to -7..7, with the scale that just holds each group."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-12)
    return ((groups / scale).round() * scale).flatten(1)


def test_packed_codes_give_the_documented_values() -> None:
    packed, scales = int4_codes(torch.randn(5, 96, generator=torch.Generator().manual_seed(0)))
    assert (packed.dtype, packed.shape, scales.dtype, scales.shape) == (torch.uint8, (5, 48), torch.bfloat16, (5, 3))
    assert from_int4(packed, scales).tolist() == unpacked(packed, scales)


@pytest.mark.parametrize("magnitude", [1e-6, 0.02, 3e4])
def test_every_group_is_near(magnitude: float) -> None:
    weight = magnitude * torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    packed, scales = int4_codes(weight)
    off = from_int4(packed, scales) - weight
    assert off.norm() < 0.085 * weight.norm() and off.norm() < 0.9 * (plainly_rounded(weight) - weight).norm()
    steps = weight / (scale := scales.float().repeat_interleave(GROUP, 1))
    inside = (steps > -8.5) & (steps < 7.5)
    assert inside.float().mean() > 0.95 and ((off / scale).abs()[inside] <= 0.5001).all(), "the nearest codes"
    assert (from_int4(packed, scales)[~inside] / scale[~inside]).unique().tolist() in ([-8, 7], [7])


def test_values_on_the_grid_and_zeros_come_back_exactly() -> None:
    codes = torch.randint(-8, 8, (6, 64), generator=torch.Generator().manual_seed(2)).float()
    codes[:, ::GROUP] = -8
    signs = torch.tensor([1.0, -1, 1, -1, 1, 0]).unsqueeze(1)
    weight = 0.25 * signs * codes
    assert torch.equal(from_int4(*int4_codes(weight)), weight)


def test_the_size_of_the_file_and_what_stays_int8(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    shapes = {"fits": (256, 512), "odd": (8, 40), "deep": (2, 4, 32), "norm": (32,)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_weights(weights, file, "int4")
    held = load_file(file)
    assert {name: held[name].dtype for name in shapes} == dict(
        fits=torch.uint8, odd=torch.int8, deep=torch.int8, norm=torch.bfloat16
    )
    assert {name: one.shape for name, one in read_weights(file).items()} == shapes
    write_weights({"fits": weights["fits"]}, file, "int4")
    assert 0.5625 <= file.stat().st_size / weights["fits"].numel() < 0.565


def test_a_drafter_loaded_twice_drafts_the_same(tmp_path: Path) -> None:
    model, asked, seen = target(), requests(3, ignore_eos=True), []
    saved.save(with_random_weights("clover2", model, **TRAINED["clover2"]), tmp_path, model, "int4")
    for _ in range(2):
        recorder = Recorder(saved.restore(tmp_path, model))
        assert written(engine(recorder, model), asked) == [truth(model.hf, request) for request in asked]
        seen.append([one.draft.tokens.tolist() for one in recorder.proposed])
    assert seen[0] == seen[1] and len(seen[0]) > 3


def test_codes_and_scales_belong_together(tmp_path: Path) -> None:
    model: Any = target()
    saved.save(with_random_weights("medusa", model), tmp_path, model, "int4")
    file = tmp_path / saved.WEIGHTS
    held = {name: weight.clone() for name, weight in load_file(file).items()}
    matrix = next(name for name, weight in held.items() if weight.dtype == torch.uint8)
    scale, again = f"{matrix}.scale", "copy or train the drafter again"
    for damaged, message in (
        ({scale: held[scale][:3]}, rf"{scale} is bfloat16 \(3, 1\), but must be floats \(32, 1\); {again}"),
        ({scale: held[scale].long()}, f"{scale} is int64"),
        ({scale: torch.zeros_like(held[scale])}, f"{scale} holds 0, but scales must be finite and not 0"),
        ({scale: held[scale] * torch.nan}, f"{scale} holds nan, but scales must be finite"),
        ({matrix: held[matrix][:, 1:]}, rf"{scale} belongs to an int8 or int4 matrix, but .* as uint8 \(32, 15\)"),
        ({matrix: held[matrix][0]}, rf"{scale} belongs to an int8 or int4 matrix, but .* as uint8 \(16,\)"),
    ):
        save_file({name: one.contiguous().clone() for name, one in (held | damaged).items()}, file)
        with pytest.raises(DrafterError, match=message):
            saved.restore(tmp_path, model)
    save_file({name: one for name, one in held.items() if name != scale}, file)
    with pytest.raises(DrafterError, match=f"{matrix} is uint8 .*must be floats, or int8 or int4 with scales"):
        saved.restore(tmp_path, model)
