"""Wrapping a transformers model in memory: the model is not changed, and unsupported models are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import foreword
from doubles import FAMILIES, STOCK_ATTENTION, WITHOUT_WEIGHTS
from foreword.api import LLM
from foreword.errors import ForewordWarning, InputError, ModelUnsupported, NumericsError
from foreword.model.draft_linears import int8_codes

pytestmark = pytest.mark.usefixtures("own_home")

ASK = "the words that come before the words"

Maker = Callable[..., PreTrainedModel]
Own = Callable[..., list[int]]


def weights_of(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """The address of every tensor, and a copy of it."""
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("family", "attention"), [*((f, STOCK_ATTENTION[f]) for f in FAMILIES), ("llama", "eager")])
def test_a_wrapped_model_is_still_the_user_s(
    family: str, attention: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = talking(family, attn_implementation=attention)
    before, weights = own_text(hf, ASK), weights_of(hf)
    modules = [(name, type(module)) for name, module in hf.named_modules()]
    llm = foreword.wrap(hf, hf_tokenizer, "prompt_lookup", rows=4)
    assert own_text(hf, ASK) == before
    stream = llm.stream(ASK, max_new_tokens=14)
    first = next(iter(stream)).tokens
    assert own_text(hf, ASK) == before  # in the middle of a stream
    assert first + [token for piece in stream for token in piece.tokens] == before
    llm.close()
    assert own_text(hf, ASK) == before and hf.config._attn_implementation == attention
    assert [(name, type(module)) for name, module in hf.named_modules()] == modules
    for name, (place, copy) in weights_of(hf).items():
        assert place == weights[name][0] and torch.equal(copy, weights[name][1])


@pytest.mark.parametrize("method", WITHOUT_WEIGHTS)
def test_the_output_is_that_of_the_model_s_own_generate(
    method: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = talking("llama")
    out = foreword.wrap(hf, hf_tokenizer, method, slots=1, max_context=128).generate(ASK, max_new_tokens=14)
    assert out.tokens == own_text(hf, ASK)
    assert (out.method, out.model) == (method, "llama")


def test_gradients_still_flow_through_a_wrapped_model(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf = talking("llama")
    llm = foreword.wrap(hf, hf_tokenizer, "plain")
    llm.generate(ASK, max_new_tokens=3)
    ids = torch.tensor([[5, 6, 7, 8]])
    hf(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in hf.parameters())


@pytest.mark.parametrize("closed_first", [0, 1])
def test_two_on_one_model_do_not_disturb_each_other(
    closed_first: int, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = talking("llama")
    whole = own_text(hf, ASK)
    pair = [foreword.wrap(hf, hf_tokenizer, "plain"), foreword.wrap(hf, hf_tokenizer, "prompt_lookup", rows=3)]
    streams = [llm.stream(ASK, max_new_tokens=14) for llm in pair]
    for first, second in zip(*streams, strict=False):
        assert first.tokens and second.tokens
    assert [stream.result.tokens for stream in streams] == [whole, whole]
    pair[closed_first].close()
    assert pair[1 - closed_first].generate(ASK, max_new_tokens=14).tokens == whole
    pair[1 - closed_first].close()
    assert hf.config._attn_implementation == "sdpa"


def test_a_wrapped_model_whose_attention_is_changed(
    talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = talking("llama")
    whole = own_text(hf, ASK)
    llm = foreword.wrap(hf, hf_tokenizer, "plain")
    hf.set_attn_implementation("eager")
    assert llm.generate(ASK, max_new_tokens=14).tokens == whole


def test_a_model_in_training_stays_in_training(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf = talking("llama").train()
    foreword.wrap(hf, hf_tokenizer, "plain").close()
    assert hf.training


# Refusals ----------------------------------------------------------------------------------------------------------------

QUANTISED = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bitsandbytes, as it was first written": {"load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4},
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_models_are_refused(name: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf = talking("llama")
    hf.config.quantization_config = QUANTISED[name]
    with pytest.raises(ModelUnsupported, match=rf"quantised \({name.split(',')[0]}\).*bfloat16"):
        foreword.wrap(hf, hf_tokenizer)
    assert hf.config._attn_implementation == "sdpa"


class EightBits(nn.Linear):
    """int8 weights with a scale per row, as in libraries that quantise weights alone."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        whole, scale = int8_codes(linear.weight.detach())
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight * self.scale)


def in_eight_bit_linears(hf: PreTrainedModel) -> PreTrainedModel:
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, EightBits(child))
    return hf


@pytest.mark.parametrize("method", [*WITHOUT_WEIGHTS, "auto"])
@pytest.mark.parametrize("says_so", [True, False])
def test_a_model_whose_weights_alone_are_quantised_is_served(
    says_so: bool, method: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = in_eight_bit_linears(talking("llama", tie_word_embeddings=False))
    if says_so:
        hf.config.quantization_config = QUANTISED["gptq"]
    assert foreword.wrap(hf, hf_tokenizer, method).generate(ASK, max_new_tokens=14).tokens == own_text(hf, ASK)


def test_a_model_whose_activation_scales_span_a_pass_is_refused(
    talking: Maker, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Its config does not show it, and each method would generate a different output."""
    hf = torch.ao.quantization.quantize_dynamic(talking("llama"), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ModelUnsupported, match=r"q_proj \(torch\.ao\..*Linear\) computes a row differently.*weights alone"):
        foreword.wrap(hf, hf_tokenizer, "plain")
    assert hf.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("config", "served"), [("Int8WeightOnlyConfig", True), ("Int8DynamicActivationInt8WeightConfig", False)]
)
def test_models_that_torchao_quantised(
    config: str, served: bool, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    torchao = pytest.importorskip("torchao.quantization")  # the extra `dev` has it
    hf = talking("llama", tie_word_embeddings=False)
    torchao.quantize_(hf, getattr(torchao, config)())
    if served:
        assert foreword.wrap(hf, hf_tokenizer).generate(ASK, max_new_tokens=14).tokens == own_text(hf, ASK)
    else:
        with pytest.raises(ModelUnsupported, match=r"q_proj \(torchao\..*\) rounds its input rows"):
            foreword.wrap(hf, hf_tokenizer)


@pytest.mark.parametrize("name", ["generation_config", "cuda_graphs", "remeasure"])
def test_a_flag_is_true_or_false(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is 'vllm'; it must be True or False"):
        foreword.wrap(nn.Linear(1, 1), None, "plain", **{name: "vllm"})  # type: ignore[arg-type]


@pytest.mark.parametrize("places", [{"model.embed_tokens": 0, "model.layers": 1}, {"": "disk"}, {"a": "cpu", "b": "disk"}])
def test_a_model_on_several_devices_is_refused(
    places: dict[str, Any], talking: Maker, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    hf = talking("llama")
    hf.hf_device_map = places
    with pytest.raises(ModelUnsupported, match="on one device.*device_map"):
        foreword.wrap(hf, hf_tokenizer)


def test_a_device_map_of_one_device_is_fine(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf = talking("llama")
    hf.hf_device_map = {"": torch.device("cpu")}
    assert foreword.wrap(hf, hf_tokenizer, "plain").generate("hi", max_new_tokens=2).stats.new_tokens == 2


@pytest.mark.parametrize("part", ["model.layers.1", ""])
def test_weights_that_are_not_in_memory_are_refused(
    part: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    hf = talking("llama")
    hf.get_submodule(part).to("meta")
    with pytest.raises(ModelUnsupported, match="meta"):
        foreword.wrap(hf, hf_tokenizer)


MAMBA = {"vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 16, "num_heads": 4, "head_dim": 8, "n_groups": 1}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=32, n_layer=1, hidden_size=16, n_head=2)), "'bloom'"),
        (lambda: Mamba2ForCausalLM(Mamba2Config(**MAMBA)), "'mamba2'"),
    ],
)
def test_other_families_are_refused_with_those_that_are_known(
    make: Callable[[], Any], named: str, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ModelUnsupported, match=f"{named}.*supported: apertus, arcee, .*, llama, minimax_m2, mini"):
        foreword.wrap(make(), hf_tokenizer)


@pytest.mark.parametrize("what", [nn.Linear(2, 2), "a/model/folder", None, PreTrainedModel], ids=str)
def test_what_is_no_transformers_model_is_refused(what: Any, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ModelUnsupported, match="transformers causal language model, got"):
        foreword.wrap(what, hf_tokenizer)


def test_a_model_without_a_head_is_refused(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    bare = LlamaModel(talking("llama").config)
    with pytest.raises(ModelUnsupported, match="LlamaModel has no language-model head.*AutoModelForCausalLM"):
        foreword.wrap(bare, hf_tokenizer)
    assert bare.config._attn_implementation == "sdpa"


def test_attention_that_loses_a_cap_is_refused(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    """Some versions of transformers still run it, without the soft-cap that the weights were trained with."""
    hf = talking("gemma2")
    hf.config._attn_implementation = "sdpa"
    with pytest.raises(ModelUnsupported, match="gemma2.*'sdpa'.*attn_implementation='eager'"):
        foreword.wrap(hf, hf_tokenizer)
    hf.config.attn_logit_softcapping = None
    foreword.wrap(hf, hf_tokenizer).close()


def passes(hf: PreTrainedModel, **options: Any) -> None:
    """Make the second layer pass these options to its attention function, as some families do."""
    hf.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | options), with_kwargs=True
    )


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_an_attention_option_that_is_not_supported_is_refused_by_name(
    method: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    hf = talking("llama").train()
    passes(hf, s_aux=torch.zeros(4))
    with pytest.raises(ModelUnsupported, match="LlamaAttention passes 's_aux' to its attention.*supported: .*softcap"):
        foreword.wrap(hf, hf_tokenizer, method)
    assert hf.config._attn_implementation == "sdpa" and hf.training


def test_an_attention_option_that_is_none_is_accepted(
    talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = talking("llama")
    passes(hf, s_aux=None, sliding_window=None, softcap=None)
    assert foreword.wrap(hf, hf_tokenizer, "plain").generate(ASK, max_new_tokens=14).tokens == own_text(hf, ASK)


@pytest.mark.parametrize("given", [{"sliding_window": 3}, {"softcap": 3.0}], ids=str)
def test_an_attention_option_that_the_config_does_not_say_is_refused(
    given: dict[str, Any], talking: Maker, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    hf = talking("llama")
    passes(hf, **given)
    with pytest.raises(ModelUnsupported, match="passes s.*=3.* to its attention, but its config says None"):
        foreword.wrap(hf, hf_tokenizer)


def test_angles_that_follow_the_length_are_refused(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf = talking("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ModelUnsupported, match="'dynamic'.*supported: default"):
        foreword.wrap(hf, hf_tokenizer)


@pytest.mark.parametrize("what", [None, "a/model/folder", object()], ids=["none", "a name", "something"])
def test_what_is_no_tokenizer_is_refused_at_once(what: Any, talking: Maker) -> None:
    hf = talking("llama")
    with pytest.raises(InputError, match=f"a transformers tokenizer is needed, got {type(what).__name__}; AutoTokenizer"):
        foreword.wrap(hf, what)
    assert hf.config._attn_implementation == "sdpa"


def test_a_model_that_could_not_be_wrapped_is_restored(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf = talking("llama").train()
    with pytest.raises(InputError, match="max_context") as caught:
        foreword.wrap(hf, hf_tokenizer, "plain", max_context=10**9)
    assert hf.config._attn_implementation == "sdpa" and hf.training and caught.tb  # which holds all that was made


# A NaN -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> LLM:
    """A model that answers NaN to prompts with a percent sign."""
    hf = talking("llama")
    with torch.no_grad():
        hf.model.embed_tokens.weight[hf_tokenizer.encode("%")] = torch.nan
    hf.lm_head.weight = nn.Parameter(talking("llama").lm_head.weight.detach())  # the token is only read, never generated
    return foreword.wrap(hf, hf_tokenizer, "plain", slots=2)


def test_only_the_stream_with_nan_fails(poisoned: LLM) -> None:
    alone = poisoned.generate(ASK, max_new_tokens=6).tokens
    sick, healthy = poisoned.stream("100%", max_new_tokens=6), poisoned.stream(ASK, max_new_tokens=6)
    assert [token for piece in healthy for token in piece.tokens] == alone
    with pytest.raises(NumericsError):
        list(sick)


def test_a_failed_request_does_not_affect_the_others_of_its_list(poisoned: LLM) -> None:
    alone = poisoned.generate(ASK, max_new_tokens=6).tokens
    with pytest.warns(ForewordWarning, match="output 1 of 3 failed: the target answered NaN"):
        first, sick, last = poisoned.generate([ASK, "100%", ASK], max_new_tokens=6)
    assert first.tokens == last.tokens == alone and first.error is None and "error" not in first.to_dict()
    assert sick.finish_reason == "abort" and "NaN" in sick.to_dict()["error"]
    with pytest.raises(NumericsError):
        poisoned.generate("100%", max_new_tokens=6)
