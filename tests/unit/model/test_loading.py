"""Loading weights from a folder: arguments are checked; damaged, incomplete or unknown models are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from doubles import FAMILIES
from foreword.core.needs import Needs
from foreword.errors import InputError, ModelCorrupt, ModelUnsupported
from foreword.model.linears import FusedPart, PackedLinear
from foreword.model.loading import choose_device, choose_dtype, load_stock, load_weights
from foreword.model.model import Model
from foreword.ops.device import has_packed_linears

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of a model folder, for a test to damage."""
    return Path(shutil.copytree(folders["llama"], tmp_path / "copy"))


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# Choices -----------------------------------------------------------------------------------------------------------------


def test_a_device_is_chosen_or_checked() -> None:
    assert choose_device("cpu") == choose_device(CPU) == CPU
    assert choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("requested", ["gpu", "meta", "mps", ""])
def test_unsupported_devices(requested: str) -> None:
    with pytest.raises(InputError, match=f"device is '{requested}'.*'cpu'"):
        choose_device(requested)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("requested", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_device_that_is_missing(requested: Any) -> None:
    with pytest.raises(InputError, match="no CUDA device here.*device='cpu'"):
        choose_device(requested)


def test_the_default_dtype_depends_on_the_device() -> None:
    assert choose_dtype(None, CPU) == torch.float32
    assert choose_dtype(None, torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("requested", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_by_any_of_its_names(requested: Any) -> None:
    assert choose_dtype(requested, CPU) == torch.bfloat16


@pytest.mark.parametrize("requested", ["fp32", "int8", torch.int64, 32, ""])
def test_unsupported_dtypes(requested: Any) -> None:
    with pytest.raises(InputError, match="dtype is .*choose from float64, float32, bfloat16, float16"):
        choose_dtype(requested, CPU)


# Weights -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_our_layers_compute_what_stock_layers_do(family: str, folders: dict[str, Path], stock: dict[str, Any]) -> None:
    ours = load_weights(folders[family], CPU, torch.float32)
    if has_packed_linears(CPU, torch.float32):
        kinds = {type(module) for module in ours.modules()}
        assert {PackedLinear, FusedPart} <= kinds and torch.nn.Linear not in kinds
    plain = load_stock(folders[family], CPU, torch.float32)
    expected = stock[family](IDS).logits
    assert torch.equal(plain(IDS).logits, expected)
    assert torch.allclose(ours(IDS).logits, expected, atol=1e-4)


def test_other_dtypes_are_not_rebuilt(folders: dict[str, Path]) -> None:
    model = load_weights(folders["llama"], CPU, torch.float64)
    assert model.dtype == torch.float64 and PackedLinear not in {type(module) for module in model.modules()}


def test_a_loaded_model_is_not_for_training(folders: dict[str, Path]) -> None:
    model = load_stock(folders["llama"], CPU, torch.float32)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_bar_setting_is_restored(
    shown: bool, folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    before = logging.is_progress_bar_enabled()
    try:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        load_stock(folders["llama"], CPU, torch.float32)
        assert logging.is_progress_bar_enabled() == shown
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert capfd.readouterr() == ("", "")


def test_weights_in_several_files(folders: dict[str, Path], stock: dict[str, Any], tmp_path: Path) -> None:
    stock["llama"].save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        assert torch.equal(load_stock(tmp_path, CPU, torch.float32)(IDS).logits, stock["llama"](IDS).logits)


NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


@pytest.mark.parametrize("caps", [{name: None} for name in NO_CAPS] + [NO_CAPS], ids=str)
@torch.no_grad()
def test_a_gemma_2_without_caps_is_loaded(caps: dict[str, None], folders: dict[str, Path], tmp_path: Path) -> None:
    """Transformers does not support torch's own attention for Gemma 2, with caps or without."""
    folder = Path(shutil.copytree(folders["gemma2"], tmp_path / "copy"))
    change(folder, **caps)
    expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(IDS).logits
    model = Model(load_weights(folder, CPU, torch.float32))
    assert torch.allclose(model.read(IDS, Needs(logits=True)).logits, expected, atol=1e-4)


# Damaged and unsupported models ------------------------------------------------------------------------------------------


def drop_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def untie_head(folder: Path) -> None:
    """The file has no head, because it was tied to the embedding."""
    change(folder, tie_word_embeddings=False)


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def fill_with_noise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00\xff" * 5000)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_short, fill_with_noise, empty])
def test_damaged_weights(damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelCorrupt, match="cannot be read.*fetch or save the model again"):
        load_stock(folder, CPU, torch.float32)


def test_weights_of_another_shape(folder: Path) -> None:
    change(folder, intermediate_size=80)
    named = r"model\.layers\.0\.mlp\.down_proj\.weight has shape 32x64, and config\.json asks for 32x80"
    with pytest.raises(ModelCorrupt, match=f"{named}.*give the weights their own config"):
        load_stock(folder, CPU, torch.float32)


@pytest.mark.parametrize(
    ("damage", "named"), [(drop_tensor, r"lack 1 tensors, model\.layers\.1\.mlp\.up_proj"), (untie_head, r"lm_head\.weight")]
)
def test_missing_tensors_are_not_filled_with_noise(damage: Callable[[Path], None], named: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelCorrupt, match=f"{named}.*fetch or save the model again"):
        load_stock(folder, CPU, torch.float32)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "bloom"}, "'bloom': .*; supported: apertus, arcee, cohere, "),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3': its attention is latent .*; supported: "),
        ({"model_type": "qwen2_vl"}, "'qwen2_vl': it reads images"),
        ({"model_type": "no_such_type"}, "config.json cannot be used.*no_such_type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_models_that_are_not_supported_are_refused_before_their_weights_are_read(
    fields: dict[str, Any], named: str, folder: Path
) -> None:
    change(folder, **fields)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match=named):
        load_stock(folder, CPU, torch.float32)


@pytest.mark.parametrize("content", ["{", "", "[]", "{}", "[" * 100_000, "9" * 5000], ids=lambda content: content[:5])
def test_a_damaged_config(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelUnsupported, match="config.json cannot be used"):
        load_stock(folder, CPU, torch.float32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_hidden_layers": 9_000}, ModelCorrupt, "config.json asks for more than their .* bytes can hold"),
        ({"hidden_size": 1 << 20}, ModelCorrupt, "config.json asks for more than their .* bytes can hold"),
        ({"intermediate_size": 1 << 40}, ModelCorrupt, "config.json asks for more than their .* bytes can hold"),
        ({"vocab_size": 1 << 40}, ModelCorrupt, "config.json asks for more than their .* bytes can hold"),
        ({"num_hidden_layers": 100_000}, ModelUnsupported, "it asks for 100000 layers"),
        ({"num_hidden_layers": 10**20}, ModelUnsupported, "it asks for 1000"),
    ],
    ids=str,
)
def test_a_config_that_asks_for_more_than_the_weights_hold(
    changed: dict[str, Any], error: type[Exception], message: str, folder: Path
) -> None:
    """Building stops at the number of parameters that the files could fill."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(error, match=message):
        load_stock(folder, CPU, torch.float32)


def test_weights_with_a_wrong_header(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    header = int.from_bytes(whole[:8], "little")
    overlapping = whole[8:].replace(b'"data_offsets":[0,', b'"data_offsets":[8,')
    for length, rest in ((0, whole[8:]), (2**63, whole[8:]), (10**8 - 1, whole[8:]), (header, overlapping), (3, b"[[[")):
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + rest)
        with pytest.raises(ModelCorrupt, match="cannot be read: .*fetch or save the model again"):
            load_stock(folder, CPU, torch.float32)
