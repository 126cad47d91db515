"""The laws for families that are lines of the table: a slow truth by transformers, one case per family and law.

Every method with every one of them is `pytest tests/lossless/test_every_family.py -m cross`, which takes minutes.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from doubles import (
    BY_LAW,
    DRAFTING,
    SAMPLINGS,
    VOCABULARY,
    Oracle,
    chain,
    drafter,
    engine,
    fresh,
    full_sequence,
    hf_logits,
    prefilled,
    requests,
    target,
    tiny,
    truth,
    written,
)
from foreword.core.needs import Needs, Skip
from foreword.errors import ForewordWarning, ModelCorrupt, ModelUnsupported
from foreword.model import stack
from foreword.model.cost import facts_of
from foreword.model.families import FAMILIES
from foreword.model.fingerprint import Fingerprint
from foreword.model.loading import check_wrapped, load_stock, load_weights
from foreword.model.model import Model

CPU = torch.device("cpu")
each_family = pytest.mark.parametrize("family", BY_LAW)


@each_family
def test_correct_tokens_among_wrong_ones_are_found(family: str) -> None:
    """Trees of three sequences at once, of which two are sampled."""
    model = target(family)
    asked = [*requests(1, max_new_tokens=10), *requests(3, SAMPLINGS["T=0.8"], max_new_tokens=10)[1:]]
    oracle = Oracle([full_sequence(model.hf, request) for request in asked])
    runs = engine(oracle, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(count > oracle.depth for run in runs for count in run.accepted[:-1])


@each_family
def test_logits_of_rows_after_cached_ones(family: str) -> None:
    """A token may hide a wrong factor on logits, which no greedy choice shows."""
    model, text = target(family), [5, 9, 31, 8, 40, 7, 7, 12, 30, 3, 22]
    passes = [
        model.score(prefilled(model, {0: text[:start]}), chain([text[start:stop]]), Needs()).require_logits()[0]
        for start, stop in ((0, 5), (5, 11))
    ]
    torch.testing.assert_close(torch.cat(passes), hf_logits(model.hf, text), atol=1e-5, rtol=0)


@each_family
def test_a_folder_writes_what_transformers_generates(family: str, tmp_path: Path) -> None:
    """Saved by transformers, loaded by us, in float32 and rebuilt for speed; against `generate` of transformers."""
    hf = fresh(family, torch.float32)
    hf.save_pretrained(tmp_path)
    loaded = Model(load_weights(tmp_path, CPU, torch.float32))
    for request in requests(2, max_new_tokens=10, ignore_eos=True):
        own = hf.generate(torch.tensor([request.prompt]), max_new_tokens=10, do_sample=False, eos_token_id=VOCABULARY)
        assert written(engine(drafter("prompt_lookup", loaded), loaded), [request]) == [
            own[0, len(request.prompt) :].tolist()
        ]


@pytest.mark.parametrize("family", [family for family in BY_LAW if FAMILIES[family].has_experts])
def test_experts_of_a_folder_are_read_in_float64(family: str, tmp_path: Path) -> None:
    """That is what a referee needs; transformers' fast ways to compute experts refuse it."""
    hf = fresh(family, torch.float32)
    hf.save_pretrained(tmp_path)
    exact, text = load_stock(tmp_path, CPU, torch.float64), [5, 9, 31, 8]
    torch.testing.assert_close(hf_logits(exact, text), hf_logits(hf, text), atol=1e-3, rtol=0)


def test_the_text_model_of_a_checkpoint_that_reads_images(tmp_path: Path) -> None:
    """It writes what the whole model writes; the vision part is left out."""
    text, vision = tiny("gemma3_text", torch.float32).config.to_dict(), {"num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    whole.save_pretrained(tmp_path)
    with pytest.warns(ForewordWarning, match="also reads images; its text model is loaded, and its vision part is left out"):
        loaded = Model(load_weights(tmp_path, CPU, torch.float32))
    (request,) = requests(2, max_new_tokens=10, ignore_eos=True)[1:]
    own = whole.generate(torch.tensor([request.prompt]), max_new_tokens=10, do_sample=False, eos_token_id=VOCABULARY)
    assert written(engine(drafter("prompt_lookup", loaded), loaded), [request]) == [own[0, len(request.prompt) :].tolist()]


MXFP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite the experts of a folder as MXFP4 blocks of random codes, and return what they stand for."""
    file, generator, meant = folder / "model.safetensors", torch.Generator().manual_seed(0), {}
    weights, values = load_file(file), torch.cat([MXFP4_VALUES, -MXFP4_VALUES])
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
        meant[name] = (pairs * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(2).transpose(1, 2)
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return meant


def test_mxfp4_weights_are_dequantised(tmp_path: Path) -> None:
    """As gpt-oss is published. The model then writes what transformers writes with the same weights."""
    hf = fresh("gpt_oss", torch.bfloat16)
    hf.save_pretrained(tmp_path)
    hf.float().load_state_dict(meant := in_mxfp4(tmp_path), strict=False)
    with pytest.warns(ForewordWarning, match="mxfp4 weights, which are dequantised while they are read: up to 0.0 GiB"):
        loaded = Model(load_weights(tmp_path, CPU, torch.float32))
    state = loaded.hf.state_dict()
    assert meant and all(torch.equal(state[name], tensor) for name, tensor in meant.items())
    (request,) = requests(2, max_new_tokens=10, ignore_eos=True)[1:]
    assert written(engine(drafter("token_recycling", loaded), loaded), [request]) == [truth(hf, request)]


@torch.inference_mode()
def test_sinks_on_the_kernel_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, against the masks of torch: a pass after cached rows, in layers with and without windows."""
    pytest.importorskip("triton")
    hf, found = fresh("gpt_oss", torch.float32), []
    for kernel in (False, True):
        monkeypatch.setattr(stack, "has_kernel", lambda cache, own=kernel: own)
        model = Model(hf)
        batch = prefilled(model, {0: [5, 9, 31, 8, 40, 7, 7]})
        found.append(model.score(batch, chain([[12, 30, 3]]), Needs()).require_logits())
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert not torch.equal(found[1], found[0])


@each_family
def test_what_is_said_of_a_model(family: str) -> None:
    """Costs of halves are shares of the whole. The weights of experts belong to both, and change the fingerprint."""
    model = target(family)
    every = range(model.layers)
    assert 0 < model.skip_cost(Skip.of(mlp=every)) < 1 and 0 < model.skip_cost(Skip.of(attention=every)) < 1
    assert 0 < model.skip_cost(Skip.of(attention=every, mlp=every)) < 0.3  # the head is left
    assert Fingerprint.of(model).matches(Fingerprint.of(model))
    facts = facts_of(model)
    assert ("experts" in facts) == FAMILIES[family].has_experts
    if FAMILIES[family].has_experts:
        assert facts["experts"][:2] == [2, 6]


@pytest.mark.cross
@each_family
@pytest.mark.parametrize("name", DRAFTING)
def test_a_method_writes_the_truth(name: str, family: str) -> None:
    """Greedy and sampled, one sequence at a time and three together."""
    model = target(family)
    for sampling in SAMPLINGS.values():
        asked = requests(4, sampling, max_new_tokens=10)
        for slots in (1, 3):
            found = written(engine(drafter(name, model), model, slots), asked)
            assert found == [truth(model.hf, request) for request in asked]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_weights_that_do_not_fit_the_config_are_refused(family: str, tmp_path: Path) -> None:
    """Before the first round: a missing router, other experts than the weights have, more layers."""
    hf = fresh(family, torch.float32)
    hf.save_pretrained(tmp_path)
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    router = next(name for name in weights if re.search(r"layers\.2\..*(gate|router)\.weight", name))
    save_file({name: tensor for name, tensor in weights.items() if name != router}, tmp_path / "model.safetensors")
    with pytest.raises(ModelCorrupt, match=r"lack 1 tensors, model\.layers\.2\.mlp\.(gate|router)"):
        load_weights(tmp_path, CPU, torch.float32)
    save_file(weights, tmp_path / "model.safetensors")
    for changed, said in (
        ({"num_local_experts": 8}, r"experts\.down_proj has shape 6x.*asks for 8x"),
        ({"num_local_experts": 4}, r"experts\.down_proj has shape 6x.*asks for 4x"),
        ({"num_hidden_layers": 6, "layer_types": None}, r"lack \d+ tensors, model\.layers\.4"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"have a layer 3, and config\.json asks for 3 layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ModelCorrupt, match=said):
            load_weights(tmp_path, CPU, torch.float32)


def test_a_wrapped_mixture_in_float64_is_told_what_to_load() -> None:
    hf = fresh("mixtral", torch.float32).double()
    with pytest.raises(ModelUnsupported, match="mixtral: the model is in float64.*experts_implementation='eager'"):
        check_wrapped(hf)
    hf.config._experts_implementation = "eager"
    assert check_wrapped(hf) is hf
