"""A converted folder is the same model as the one that the GGUF file was made from, or is refused with a reason."""

import json
import math
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foreword.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, StorageError
from foreword.hub.gguf import convert

gguf = pytest.importorskip("gguf")


def logits(model: PreTrainedModel, stride: int = 1) -> torch.Tensor:
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        return model(tokens, position_ids=stride * torch.arange(32)[None]).logits


def assert_same(converted: Path, source: PreTrainedModel, stride: int = 1) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(converted)
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(logits(loaded, stride), logits(source, stride), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_same_logits(tiny, write_gguf, tmp_path, family, tied):
    model = tiny(family, tie_word_embeddings=tied)
    convert(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    assert_same(tmp_path / "out", model)
    assert AutoConfig.from_pretrained(tmp_path / "out").tie_word_embeddings is tied


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_in_bfloat16(tiny, write_gguf, tmp_path, family):
    """Each is rounded as torch rounds it; the norms of Gemma after 1 is taken off."""
    model = tiny(family)
    convert(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out", "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for (name, one), other in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        exact = (other + 1) - 1 if family == "gemma3" and "norm" in name else other
        assert torch.equal(one, exact.bfloat16()), name


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_same_logits_quantised(tiny, write_gguf, tmp_path, quant):
    model = tiny("llama")
    convert(write_gguf(tmp_path / "m.gguf", model, quant=quant), tmp_path / "out")
    kind = gguf.GGMLQuantizationType[quant]
    before = logits(model)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data = torch.from_numpy(rounded.copy())
    assert not torch.allclose(logits(model), before, rtol=1e-5, atol=1e-5)
    assert_same(tmp_path / "out", model)


def test_linear_rope(tiny, write_gguf, tmp_path):
    model = tiny("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    convert(write_gguf(tmp_path / "m.gguf", model, fields=fields), tmp_path / "out")
    assert_same(tmp_path / "out", model)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0} | LLAMA3


def divisors(model: PreTrainedModel) -> np.ndarray:
    """The table of a Llama 3 file: by how much each frequency of plain rope is divided."""
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    return (plain / model.model.rotary_emb.inv_freq).numpy()


def test_llama3_rope(tiny, write_gguf, tmp_path):
    model = tiny("llama", max_position_embeddings=131072, rope_parameters=LLAMA3_ROPE)
    table = divisors(model)
    assert len(np.unique(table)) > 2  # some frequencies kept, some divided by 32, some between
    convert(write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": table}), tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == LLAMA3_ROPE
    assert_same(tmp_path / "out", model, stride=3000)


def test_config_says_what_was_meant(tiny, write_gguf, tmp_path):
    fields = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    convert(write_gguf(tmp_path / "m.gguf", tiny("qwen3"), fields=fields), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}


def test_unknown_architecture_is_named(tiny, write_gguf, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), architecture="mamba")
    with pytest.raises(ModelUnsupported, match=r"mamba.*llama, qwen2, qwen3, gemma3"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, {}, "yarn"),
        ({"llama.rope.dimension_count": 8}, {}, "part of each head"),
        ({"split.count": 3}, {}, "one of 3 parts"),
        ({}, {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}, "ffn_gate_inp"),
        ({}, {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}, "rope_freqs"),
        ({"tokenizer.ggml.pre": "tekken"}, {}, "tekken"),
        ({"tokenizer.ggml.model": "t5"}, {}, "t5"),
    ],
)
def test_unknown_features_are_refused(tiny, write_gguf, tmp_path, fields, tensors, message):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), fields=fields, tensors=tensors)
    with pytest.raises(ModelUnsupported, match=message):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_truncated_file_is_refused_at_any_length(tiny, write_gguf, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    whole = path.read_bytes()
    for tenth in range(10):
        path.write_bytes(whole[: len(whole) * tenth // 10])
        with pytest.raises(ModelCorrupt, match="fetch it again"):
            convert(path, tmp_path / "out")
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ModelCorrupt, match="not a whole GGUF file"):
        convert(path, tmp_path / "out")
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        convert(tmp_path / "none.gguf", tmp_path / "out")


def test_a_lost_or_damaged_tensor_is_named(tiny, write_gguf, tmp_path):
    lost = write_gguf(tmp_path / "lost.gguf", tiny("llama"), drop=("blk.1.attn_v.weight",))
    with pytest.raises(ModelCorrupt, match=r"blk\.1\.attn_v\.weight"):
        convert(lost, tmp_path / "out")
    harmed = {"output_norm.weight": np.full(64, math.nan, np.float32)}
    with pytest.raises(ModelCorrupt, match=r"output_norm\.weight"):
        convert(write_gguf(tmp_path / "harmed.gguf", tiny("llama"), tensors=harmed), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_full_disk_is_noticed_before_writing(tiny, write_gguf, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(StorageError, match="FOREWORD_HOME"):
        convert(path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_heads_that_do_not_fill_the_projections_are_refused(tiny, write_gguf, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), fields={"llama.attention.head_count_kv": 1})
    with pytest.raises(ModelCorrupt, match="4 and 1 heads of 16"):
        convert(path, tmp_path / "out")
