"""Quantised linears keep the promise of linears: on the fused layers, in joint products, as copies, in costs."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

import foreword
from doubles import EVERY_FAMILY, chain, fresh, hf_logits, prefilled
from foreword.core.needs import Needs
from foreword.errors import ForewordWarning, InputError
from foreword.model import quantised_linears
from foreword.model.cost import facts_of
from foreword.model.fingerprint import Fingerprint
from foreword.model.fused.cpu import CpuLayer
from foreword.model.linears import FusedPart, PackedLinear, join, kinds, read_bytes, rebuild, select_outputs, unpacked
from foreword.model.loading import load_weights
from foreword.model.model import Model
from foreword.model.plain_linears import Buffer
from foreword.model.quantised_linears import QuantizedEmbedding, QuantizedLinear, quantise
from foreword.ops.group_codes import PackedCodes, quantised
from foreword.ops.layer.code_products import FORMS

CPU, F32 = torch.device("cpu"), torch.float32
TOKENS = [5, 9, 31, 8, 40, 7, 7, 12]
FUSED = ("llama", "mistral", "qwen2", "qwen3")


def quantised_pair(family: str = "llama", bits: int = 4, **changes: Any) -> tuple[Any, Any]:
    """Return a quantised model, rebuilt, and the stock model with its dequantised weights."""
    model = fresh(family, F32, **changes).requires_grad_(False)
    quantise(model, bits)
    stock = unpacked(model)
    rebuild(model, CPU, F32)
    return model, stock


def linear(bits: int, outputs: int, inputs: int = 64, bias: bool = False) -> QuantizedLinear:
    codes = PackedCodes.of(quantised(torch.randn(outputs, inputs), bits))
    return QuantizedLinear([codes], torch.randn(outputs) if bias else None)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", EVERY_FAMILY)
@torch.no_grad()
def test_a_quantised_model_computes_what_its_dequantised_weights_do(family: str, bits: int) -> None:
    hf, stock = quantised_pair(family, bits)
    assert not any(type(module) in (nn.Linear, PackedLinear) for module in hf.modules())
    model = Model(hf)
    for rows in (1, 3, 5):
        batch = prefilled(model, {0: TOKENS[:-rows]})
        assert (model.layer_stack.fused is not None) == (family in (*FUSED, "foreword_looped"))
        found = model.score(batch, chain([TOKENS[-rows:]]), Needs()).require_logits()[0]
        torch.testing.assert_close(found.double(), hf_logits(stock, TOKENS)[-rows:], atol=2e-4, rtol=2e-4)
    model.release()


@torch.inference_mode()
def test_the_fused_layers_run_it() -> None:
    hf, _ = quantised_pair("qwen3")
    model = Model(hf)
    model.allocate(1, 64, 8)
    assert {type(layer) for layer in model.layer_stack.fused or ()} == {CpuLayer}
    assert isinstance(hf.model.layers[0].self_attn.q_proj, FusedPart)
    whole = hf.model.layers[0].self_attn.q_proj.fusion.linear
    assert isinstance(whole, QuantizedLinear) and whole.columns_out == 64 + 2 * 32


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_it_writes_into_a_buffer_of_as_many_rows(bias: bool) -> None:
    one = linear(4, 50, bias=bias)
    for rows in (1, 3):
        hidden, out = torch.randn(rows, 64), Buffer.of(rows, 50)
        assert one.into(hidden, out) is out.array and torch.equal(out.tensor, one(hidden))
    padded = torch.randn(40, 64)
    assert torch.equal(torch.from_numpy(one.into(padded, Buffer.of(3, 50))), one(padded))
    dense = one.stock()
    torch.testing.assert_close(one(padded.view(2, 20, 64)), dense(padded.view(2, 20, 64)), atol=1e-4, rtol=1e-4)
    assert torch.equal(one.stock(slice(3, 9)).weight, dense.weight[3:9])


@pytest.mark.parametrize("mixed", ["equal layouts", "other layouts", "a part of a panel"])
@torch.no_grad()
def test_joined_linears_give_their_outputs_in_sequence(mixed: str) -> None:
    bits, sizes = (4, 4 if mixed != "other layouts" else 8), (64, 192 if mixed != "a part of a panel" else 20)
    parts = [linear(*one, bias=True) for one in zip(bits, sizes, strict=True)]
    whole, rows = QuantizedLinear.joined(parts), torch.randn(5, 64)
    assert torch.equal(whole(rows), torch.cat([part(rows) for part in parts], 1))
    assert len(whole.parts) == (1 if mixed != "other layouts" and sizes[1] == 192 else 2)
    assert torch.equal(whole.stock(slice(60, 70)).weight, torch.cat([part.stock().weight for part in parts])[60:70])
    assert whole.bytes == sum(part.bytes for part in parts)


@pytest.mark.parametrize("bits", [4, 8])
def test_selected_outputs_are_a_copy_of_codes(bits: int) -> None:
    whole, columns = linear(bits, 96, bias=True), torch.tensor([3, 4, 40, 95])
    some: Any = select_outputs(whole, columns)
    rows = torch.randn(2, 8, 64)
    assert type(some) is QuantizedLinear and torch.equal(some(rows), whole(rows)[..., columns])


def test_signed_codes_of_four_bits_are_selected_too() -> None:
    codes = quantised(torch.randn(32, 64), 4)
    whole = QuantizedLinear([PackedCodes.of(codes._replace(codes=codes.codes - 8, minimum=None))], None)
    some: Any = select_outputs(whole, torch.tensor([30, 2]))
    rows = torch.randn(3, 64)
    assert torch.equal(some(rows), whole(rows)[:, [30, 2]])


def test_a_tied_head_shares_its_codes_with_the_embedding() -> None:
    hf, stock = quantised_pair("llama")
    embedding = hf.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding) and embedding.codes is hf.lm_head.parts[0]
    tokens = torch.tensor([[1, 5, 5], [47, 0, 2]])
    assert torch.equal(embedding(tokens), stock.get_input_embeddings()(tokens))
    apart, _ = quantised_pair("qwen3")
    assert apart.get_input_embeddings().codes is not apart.lm_head.parts[0]


def test_layers_are_copied_with_weights_that_can_be_trained() -> None:
    hf, _ = quantised_pair("llama")
    model = Model(hf)
    model.allocate(1, 64, 4)
    (layer,) = model.stack(1, init=0).layers
    assert {name for name, _ in layer.named_parameters()} == {
        name for name, _ in fresh("llama", F32).model.layers[0].named_parameters()
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_costs_see_what_is_read(bits: int) -> None:
    hf, stock = quantised_pair("llama", bits, hidden_size=64, vocab_size=64, num_key_value_heads=4)
    model, other = Model(hf), Model(stock)
    layers = sum(one.weight.numel() for name, one in stock.named_modules() if type(one) is nn.Linear and "layers" in name)
    bits_per_weight = 5 if bits == 4 else 8.5
    assert read_bytes(hf) == (layers * bits_per_weight + 64 * 64 * 8.5) / 8
    assert facts_of(model)["linears"] != facts_of(other)["linears"]
    assert len({str(facts_of(Model(quantised_pair("llama", some)[0]))) for some in (4, 8)}) == 2
    assert f"q{bits}, {bits_per_weight:g} bits per weight in groups of 32" in kinds(hf)
    assert model.read_cost(1000) == pytest.approx(4000 / read_bytes(hf))


def test_its_fingerprint_is_that_of_the_dequantised_model() -> None:
    """So a drafter that was trained for the dequantised weights of a file serves the stored ones, and no others do."""
    hf, stock = quantised_pair("llama")
    own, dequantised = Fingerprint.of(Model(hf, "q4")), Fingerprint.of(Model(copy.deepcopy(stock), "float32"))
    assert own.matches(dequantised) and own.weights == dequantised.weights and own.few == dequantised.few
    assert not own.matches(Fingerprint.of(Model(fresh("llama", F32), "before")))
    assert not own.matches(Fingerprint.of(Model(quantised_pair("llama", 8)[0], "q8")))


def test_linears_with_odd_inputs_stay_floats() -> None:
    model = fresh("llama", F32, intermediate_size=80)
    with pytest.warns(ForewordWarning, match=r"4 linears stay in float32, model\.layers\.0\.mlp\.down_proj first"):
        quantise(model, 4)
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    with pytest.raises(InputError, match="multiple of 32"):
        quantise(fresh("llama", F32, hidden_size=24, intermediate_size=40, head_dim=4), 4)


@torch.no_grad()
def test_experts_stay_floats() -> None:
    model = fresh("mixtral", F32)
    with pytest.warns(ForewordWarning, match="experts of a mixture stay in float32"):
        quantise(model, 4)
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantizedLinear)
    tokens = torch.tensor([TOKENS])
    torch.testing.assert_close(model(tokens).logits, unpacked(model)(tokens).logits, atol=2e-4, rtol=2e-4)


def test_layouts_follow_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without an instruction for float16 gets scales in float32, and the same weights."""
    codes = linear(4, 64).parts[0]
    assert codes.layout.half
    products = quantised_linears.cpu_kernels("layer.code_products")
    for form in FORMS:
        monkeypatch.setattr(products, "form_of_this_cpu", lambda form=form: form)
        found = quantised_linears.fitted(codes)
        assert found.layout.half == form.half and torch.equal(found.dequantised(), codes.dequantised())


def test_join_leaves_other_linears_alone() -> None:
    model = fresh("llama", F32)
    quantise(model, 4)
    layer = model.model.layers[1].self_attn
    layer.v_proj = nn.Linear(32, 16)
    join(model)
    assert isinstance(layer.q_proj, QuantizedLinear) and isinstance(model.model.layers[0].self_attn.q_proj, FusedPart)


def test_load_quantises_any_checkpoint(folders: dict[str, Any]) -> None:
    tokens = {}
    for quantization in ("q8", "q4"):
        hf = load_weights(folders["llama"], CPU, F32, quantization=quantization)
        assert not any(type(module) in (nn.Linear, PackedLinear) for module in hf.modules())
        with foreword.load(folders["llama"], "prompt_lookup", device="cpu", quantization=quantization, slots=1) as llm:
            tokens[quantization] = llm.generate("one two one two", max_new_tokens=8).tokens
            assert llm.use("plain").generate("one two one two", max_new_tokens=8).tokens == tokens[quantization]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, r"quantization is 'int3'; choose from stored, q4, q8"),
        ({"quantization": "q4", "dtype": "bfloat16"}, r"runs on a CPU in float32, but the device is cpu and dtype bfloat16"),
        ({"quantization": "stored", "dtype": "float64"}, r"dtype float64; leave quantization out"),
        ({"quantization": "stored"}, r"is a folder; name a GGUF file"),
    ],
)
def test_what_does_not_run_is_refused(options: dict[str, str], message: str, folders: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=message):
        foreword.load(folders["llama"], "plain", device="cpu", **options)


def test_numba_is_needed_and_named(folders: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.model.loading.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs Numba.*foreword\[cpu\]"):
        foreword.load(folders["llama"], "plain", device="cpu", quantization="q4")
