"""Quantised tensors of GGUF files become codes without a loss, in folders that load without dequantising them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import foreword
from foreword.errors import InputError, ModelCorrupt, ModelUnsupported
from foreword.hub.gguf import convert
from foreword.hub.gguf_codes import FORMS, codes_of
from foreword.hub.stored import is_stored
from foreword.model.linears import kinds, unpacked
from foreword.model.loading import load_stock, load_weights
from foreword.model.quantised_linears import QuantizedEmbedding, QuantizedLinear
from foreword.ops.group_codes import PackedCodes

pytest.importorskip("numba")
gguf = pytest.importorskip("gguf")
CPU, F32 = torch.device("cpu"), torch.float32
TOKENS = torch.tensor([[5, 9, 31, 8, 40, 7, 7, 12]])


def random_blocks(kind: str, rows: int, inputs: int) -> np.ndarray:
    """Return random bytes as blocks of a kind, without those whose scales are not finite."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (rows * inputs // block, size), dtype=np.uint8)
    while (bad := [codes_of(one[None], kind) is None for one in blocks]) and any(bad):
        blocks[bad] = generator.integers(0, 256, (sum(bad), size), dtype=np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMS)
def test_codes_have_exactly_the_values_of_the_file(kind: str) -> None:
    data = random_blocks(kind, 20, 512)
    codes = codes_of(data, kind)
    assert codes is not None
    exact = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(codes.dequantised().numpy().view(np.int32), exact.view(np.int32)), "every bit"
    packed = PackedCodes.of(codes, FORMS[kind].layout.half)
    assert packed.layout == FORMS[kind].layout and torch.equal(packed.dequantised(), codes.dequantised())


def test_the_page_lists_every_kind_with_its_size() -> None:
    page = (Path(__file__).parents[3] / "docs" / "quantised.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| Q", "| q"))]
    said = {kind: float(bits) for kinds, _, bits in rows for kind in kinds.split(", ")}
    assert said == {kind: form.layout.bits_per_weight for kind, form in FORMS.items()}


@pytest.mark.parametrize("kind", FORMS)
def test_scales_that_are_not_numbers_are_found(kind: str) -> None:
    data = np.full((2, FORMS[kind].block_bytes), 0xFF, np.uint8)  # float16 NaN, wherever it is
    assert codes_of(data, kind) is None


@pytest.fixture(params=["llama", "llama tied", "qwen2", "qwen3", "gemma3"])
def stored(request, tiny, write_gguf, tmp_path) -> tuple[Path, Path]:
    """The folders of one file: dequantised, and with its codes."""
    family, *tied = request.param.split()
    model = tiny(family, tie_word_embeddings=bool(tied) or family == "gemma3")
    path = write_gguf(tmp_path / "m.gguf", model, quant="Q4_1")
    convert(path, tmp_path / "float32")
    convert(path, tmp_path / "stored", "stored")
    return tmp_path / "float32", tmp_path / "stored"


def test_a_folder_of_codes_computes_what_the_dequantised_one_does(stored: tuple[Path, Path]) -> None:
    floats, codes = stored
    assert is_stored(codes) and not is_stored(floats)
    assert (codes / "model.safetensors").stat().st_size < (floats / "model.safetensors").stat().st_size / 4
    exact = load_stock(floats, CPU, F32)
    for rebuild in (False, True):
        model = load_weights(codes, CPU, F32, rebuild, "stored")
        assert not any(type(module) is torch.nn.Linear for module in model.modules()), "nothing was dequantised"
        torch.testing.assert_close(model(TOKENS).logits, exact(TOKENS).logits, rtol=1e-4, atol=1e-4)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    if model.config.tie_word_embeddings:
        assert embedding.codes is model.lm_head.parts[0], "head and embedding share their codes"


def test_dequantised_it_is_the_same_model_bit_for_bit(stored: tuple[Path, Path]) -> None:
    """Without `quantization`, and for the referee, which computes in float64."""
    floats, codes = stored
    exact, found = load_stock(floats, CPU, F32).state_dict(), load_stock(codes, CPU, F32).state_dict()
    assert found.keys() == exact.keys() and all(torch.equal(found[name], exact[name]) for name in exact)
    again = unpacked(load_weights(codes, CPU, F32, True, "stored"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, exact[name]), name
    assert load_stock(codes, CPU, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_other_kinds_of_files(kind: str, tiny, write_gguf, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), quant=kind)
    convert(path, tmp_path / "float32")
    convert(path, tmp_path / "stored", "stored")
    exact, model = load_stock(tmp_path / "float32", CPU, F32), load_weights(tmp_path / "stored", CPU, F32, True, "stored")
    torch.testing.assert_close(model(TOKENS).logits, exact(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert str(FORMS[kind].layout) in kinds(model)


def test_a_file_without_codes_is_refused(tiny, write_gguf, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), quant="F16")
    with pytest.raises(ModelUnsupported, match=r"stored as F16.*Q4_1.*q4 or q8"):
        convert(path, tmp_path / "stored", "stored")


def test_weights_of_another_kind_run_dequantised_and_that_is_said(tiny, write_gguf, tmp_path: Path, capsys) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), quant="Q4_1", floats=("blk.0.attn_v.weight",))
    convert(path, tmp_path / "stored", "stored")
    assert "m.gguf: 1 weights are stored as F32 and run dequantised" in capsys.readouterr().err
    convert(path, tmp_path / "float32")
    exact, found = load_stock(tmp_path / "float32", CPU, F32), load_weights(tmp_path / "stored", CPU, F32, True, "stored")
    torch.testing.assert_close(found(TOKENS).logits, exact(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_damaged_codes_are_refused_as_damaged_floats_are(tiny, write_gguf, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), quant="Q4_1")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(one for one in reader.tensors if one.name == "blk.1.ffn_down.weight")
    tensor.data.reshape(-1)[:2] = 0xFF  # the scale of the first block
    reader.data.flush()
    for form in ("float32", "stored"):
        with pytest.raises(ModelCorrupt, match=r"blk\.1\.ffn_down\.weight holds values that are not numbers"):
            convert(path, tmp_path / form, form)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held, about: held.pop("model.norm.weight"), r"lack 1 tensors, model\.norm\.weight"),
        (lambda held, about: held.pop("model.layers.0.mlp.up_proj.weight"), r"lack 1 tensors, .*up_proj"),
        (lambda held, about: held.update(other=torch.ones(2)), "a tensor other, which the model does not have"),
        (lambda held, about: about.update({"lm_head.weight": "4 32 1 1 999"}), "does not fit its layout"),
        (lambda held, about: about.update({"lm_head.weight": "5 32 1 1 340"}), "unknown layout"),
        (lambda held, about: about.update({"lm_head.weight": "four"}), "does not fit its layout"),
        (lambda held, about: about.pop("lm_head.weight"), r"lm_head\.weight has shape"),
    ],
)
def test_a_folder_that_does_not_fit_together_is_refused(change, message: str, tiny, write_gguf, tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "m.gguf", tiny("llama"), quant="Q4_1"), tmp_path / "stored", "stored")
    file = tmp_path / "stored" / "model.safetensors"
    held = {name: tensor.clone() for name, tensor in load_file(file).items()}
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    change(held, about)
    save_file(held, file, about)
    with pytest.raises(ModelCorrupt, match=message):
        load_weights(tmp_path / "stored", CPU, F32, True, "stored")


def test_a_config_that_asks_for_far_more_is_refused_at_once(tiny, write_gguf, tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "m.gguf", tiny("llama"), quant="Q4_1"), tmp_path / "stored", "stored")
    config = json.loads((tmp_path / "stored" / "config.json").read_text())
    (tmp_path / "stored" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9999}))
    with pytest.raises(ModelCorrupt, match=r"asks for more than their \d+ bytes can hold; delete the folder"):
        load_weights(tmp_path / "stored", CPU, F32, True, "stored")


def test_load_converts_a_file_once_for_each_form(tiny, write_gguf, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), quant="Q4_1")
    answers = []
    for quantization in ("stored", None, "stored"):
        with foreword.load(path, "plain", slots=1, device="cpu", quantization=quantization) as llm:
            answers.append(llm.generate([5, 9, 31], max_new_tokens=8).tokens)
            quantised = any(isinstance(module, QuantizedLinear) for module in llm.model.hf.modules())
            assert quantised == (quantization == "stored")
    assert answers[0] == answers[1] == answers[2]
    assert capsys.readouterr().err.count("converting") == 2
    folders = sorted(folder.name for folder in (tmp_path / "home" / "gguf").iterdir())
    assert len(folders) == 2 and folders[1] == f"{folders[0]}-stored"
    config = json.loads((tmp_path / "home" / "gguf" / folders[1] / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "foreword"}
    with foreword.load(tmp_path / "home" / "gguf" / folders[1], "plain", device="cpu", quantization="stored") as llm:
        assert llm.generate([5, 9, 31], max_new_tokens=8).tokens == answers[0]
    with pytest.raises(InputError, match=r"stored.*is a folder; name a GGUF file.*'q4' or 'q8'"):
        foreword.load(tmp_path / "home" / "gguf" / folders[0], "plain", device="cpu", quantization="stored")
