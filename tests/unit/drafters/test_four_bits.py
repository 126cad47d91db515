"""Weights in int4: how near they are, how large the file is, what is refused, drafts after loading, and the earlier form."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from doubles import TRAINED, Recorder, engine, requests, target, truth, with_random_weights, written
from foreword.drafters import saved
from foreword.drafters.checkpoint import read_weights, write_weights
from foreword.drafters.deflated import ESCAPE, LARGEST, STEPS, deflated, inflated
from foreword.errors import DrafterError

AGAIN = "copy or train the drafter again"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read_as_documented(stream: Tensor, scale: Tensor, large: Tensor) -> list[float]:
    """Return the values one by one, in the order of the tensor."""
    stored, more = zlib.decompress(stream.numpy().tobytes()), iter(large.tolist())
    codes = [next(more) if byte == ESCAPE else byte - LARGEST for byte in stored]
    columns = len(codes) // scale.numel()
    return [code * scale.flatten()[place // columns].item() for place, code in enumerate(codes)]


@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 7)])
def test_the_parts_give_the_documented_values(shape: tuple[int, ...]) -> None:
    weight = noise(*shape)
    weight.view(-1)[[3, 20, 40]] = torch.tensor([40.0, -300.0, 7.0])
    stream, scale, large = deflated(weight)
    assert (stream.dtype, stream.dim(), scale.dtype, scale.shape) == (torch.uint8, 1, torch.bfloat16, (*shape[:-1], 1))
    assert large.dtype == torch.int16 and large.numel() == 2
    back = inflated(stream, scale, large)
    assert back.shape == shape and back.flatten().tolist() == read_as_documented(stream, scale, large)


@pytest.mark.parametrize("magnitude", [1e-6, 0.02, 3e4])
def test_every_value_is_near_and_outliers_do_not_move_the_others(magnitude: float) -> None:
    weight = magnitude * noise(64, 128, seed=1)
    weight[:, 5] *= 200
    off = (inflated(*deflated(weight)) - weight).abs()
    median = weight.abs().median(-1, keepdim=True).values
    assert (off <= 0.502 * median / STEPS).all(), "the nearest step, of a scale rounded to bfloat16"
    assert off.square().mean().sqrt() < 0.055 * magnitude


def test_zeros_the_identity_and_equal_weights_come_back() -> None:
    for weight in (torch.zeros(3, 8), torch.eye(6, 12), torch.full((2, 40), 0.25), torch.full((4, 1), -1.0)):
        torch.testing.assert_close(inflated(*deflated(weight)), weight, rtol=1e-4, atol=1e-6)


def test_what_is_stored_twice_stays_near(tmp_path: Path) -> None:
    """Codes of codes: a second rounding may move weights by half a step once more, and no further."""
    once = inflated(*deflated(noise(32, 64)))
    twice = inflated(*deflated(once))
    assert (twice - once).norm() < 0.06 * once.norm()


def test_the_size_of_the_file_and_what_stays_a_float(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weights = {"matrix": noise(512, 576), "deep": noise(2, 4, 33), "norm": noise(32)}
    write_weights(weights, file, "int4")
    held = load_file(file)
    assert set(held) == {"matrix", "matrix.scale", "deep", "deep.scale", "norm"} and held["norm"].dtype == torch.bfloat16
    assert {name: one.shape for name, one in read_weights(file).items()} == {
        name: one.shape for name, one in weights.items()
    }
    write_weights({"matrix": weights["matrix"]}, file, "int4")
    assert 4.5 < 8 * file.stat().st_size / weights["matrix"].numel() < 4.85


def test_a_drafter_loaded_twice_drafts_the_same(tmp_path: Path) -> None:
    model, asked, seen = target(), requests(3, ignore_eos=True), []
    saved.save(with_random_weights("clover2", model, **TRAINED["clover2"]), tmp_path, model, "int4")
    for _ in range(2):
        recorder = Recorder(saved.restore(tmp_path, model))
        assert written(engine(recorder, model), asked) == [truth(model.hf, request) for request in asked]
        seen.append([one.draft.tokens.tolist() for one in recorder.proposed])
    assert seen[0] == seen[1] and len(seen[0]) > 3


def stream_of(codes: bytes) -> Tensor:
    return torch.frombuffer(bytearray(zlib.compress(codes)), dtype=torch.uint8)


def test_the_parts_belong_together(tmp_path: Path) -> None:
    model: Any = target()
    drafter: Any = with_random_weights("medusa", model)
    matrix = next(name for name, weight in drafter.module.named_parameters() if weight.dim() == 2)
    drafter.module.get_parameter(matrix).data[4, 5] = 100.0
    saved.save(drafter, tmp_path, model, "int4")
    file = tmp_path / saved.WEIGHTS
    held = {name: weight.clone() for name, weight in load_file(file).items()}
    scale, large, stream = f"{matrix}.scale", f"{matrix}.large", held[matrix]
    assert held[large].numel() == 1
    flipped = stream.clone()
    flipped[len(stream) // 2] ^= 16
    for damaged, message in (
        ({scale: held[scale].squeeze(1)}, rf"{scale} is bfloat16 \(32,\), but must be floats \(32, 1\); {AGAIN}"),
        ({scale: held[scale].long()}, f"{scale} is int64"),
        ({scale: torch.zeros_like(held[scale])}, f"{scale} holds 0, but scales must be above 0 and finite; {AGAIN}"),
        ({scale: held[scale] * torch.nan}, f"{scale} holds nan, but scales must be above 0 and finite"),
        ({scale: held[scale][:31]}, rf"{matrix} cannot be read \(its stream has 1024 codes, which are not 31 rows\)"),
        ({scale: held[scale][:0]}, rf"{scale} is bfloat16 \(0, 1\), but must be floats with a row; {AGAIN}"),
        ({scale: held[scale][:16]}, rf"{matrix} has shape \(16, 64\), but needs \(32, 32\); {AGAIN}"),
        ({matrix: flipped}, rf"{matrix} cannot be read \(its stream is damaged: .*\); {AGAIN}"),
        ({matrix: stream[:-9]}, rf"{matrix} cannot be read \(its stream is cut off"),
        ({matrix: stream[:0]}, rf"{matrix} cannot be read \(its stream is cut off"),
        (
            {matrix: stream_of(bytes(10**7))},
            rf"{matrix} cannot be read \(its stream is cut off, or holds more than a code per",
        ),
        ({large: held[large][:0]}, rf"{matrix} cannot be read \(its stream has 1 large codes, but 0 are stored\); {AGAIN}"),
        ({large: held[large].float()}, f"{large} is float32, but must be int16 in one dimension; {AGAIN}"),
        ({"more.large": held[large]}, f"more.large belongs to a deflated matrix, but more is none; {AGAIN}"),
        ({matrix: held[matrix][None]}, rf"{large} belongs to a deflated matrix, but {matrix} is none; {AGAIN}"),
    ):
        save_file({name: one.contiguous().clone() for name, one in (held | damaged).items()}, file)
        with pytest.raises(DrafterError, match=message):
            saved.restore(tmp_path, model)
    save_file({name: one for name, one in held.items() if name not in (scale, large)}, file)
    with pytest.raises(DrafterError, match=f"{matrix} is uint8 .*must be floats, or int8 or int4 with scales"):
        saved.restore(tmp_path, model)


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales of 32 columns, as this version no longer writes them, and the values that they stand for."""
    groups = weight.unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    codes = (groups / scales.float()).round().clamp(-8, 7)
    bytes_ = (codes + 8).to(torch.uint8).flatten(1)
    return bytes_[:, 0::2] | bytes_[:, 1::2] << 4, scales.squeeze(-1), (codes * scales.float()).flatten(1)


def test_four_bits_in_groups_are_still_read(tmp_path: Path) -> None:
    """Folders of earlier versions: a drafter in int4 with a scale per 32 columns, and with matrices in int8."""
    model: Any = target()
    drafter: Any = with_random_weights("medusa", model)
    saved.save(drafter, tmp_path, model, "int8")
    file = tmp_path / saved.WEIGHTS
    held = load_file(file)
    matrix = next(name for name, weight in held.items() if weight.dtype == torch.int8)
    scale, (packed, scales, values) = f"{matrix}.scale", in_groups(drafter.module.get_parameter(matrix).detach().float())
    save_file(held | {matrix: packed, scale: scales}, file)
    again: Any = saved.restore(tmp_path, model)
    assert torch.equal(again.module.get_parameter(matrix), values.to(again.module.get_parameter(matrix).dtype))
    for damaged, message in (
        ({scale: scales[:3]}, rf"{scale} is bfloat16 \(3, 1\), but must be floats \(32, 1\); {AGAIN}"),
        ({scale: torch.zeros_like(scales)}, f"{scale} holds 0, but scales must be finite and not 0"),
        ({matrix: packed[:, 1:].contiguous()}, rf"{scale} belongs to an int8 or int4 matrix, but .* as uint8 \(32, 15\)"),
    ):
        save_file(held | {matrix: packed, scale: scales} | damaged, file)
        with pytest.raises(DrafterError, match=message):
            saved.restore(tmp_path, model)
