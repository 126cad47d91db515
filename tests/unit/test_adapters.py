"""Models with peft adapters: weight adapters count as they stand, adapters that add tokens are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import foreword
from doubles import READY
from foreword.errors import ModelUnsupported

pytestmark = pytest.mark.usefixtures("own_home")

ASK = "the words that come before the words"

Maker = Callable[..., PreTrainedModel]
Own = Callable[..., list[int]]

peft = pytest.importorskip("peft")


@pytest.fixture
def lora(talking: Maker) -> Any:
    """Adapters with weights that matter, on attention and on the MLP."""
    torch.manual_seed(1)
    places = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=places, init_lora_weights=False)
    return peft.get_peft_model(talking("llama"), config).eval()


@pytest.mark.parametrize("method", READY)
def test_a_lora_adapter_counts(method: str, lora: Any, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own) -> None:
    adapted = own_text(lora, ASK)
    with lora.disable_adapter():
        bare = own_text(lora, ASK)
    assert adapted != bare
    llm = foreword.wrap(lora, hf_tokenizer, method)
    assert llm.generate(ASK, max_new_tokens=14).tokens == adapted == own_text(lora, ASK)
    with lora.disable_adapter():
        assert llm.generate(ASK, max_new_tokens=14).tokens == bare
    llm.close()
    assert own_text(lora, ASK) == adapted


def test_an_adapter_that_transformers_added_counts(
    talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = talking("llama")
    bare = own_text(hf, ASK)
    hf.add_adapter(peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted = own_text(hf.eval(), ASK)
    assert foreword.wrap(hf, hf_tokenizer, "plain").generate(ASK, max_new_tokens=14).tokens == adapted != bare


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
    ],
)
def test_virtual_tokens_are_refused(config: Any, named: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    model = peft.get_peft_model(talking("llama"), config)
    with pytest.raises(ModelUnsupported, match=f"'default'.*{named}.*virtual tokens.*LoRA"):
        foreword.wrap(model, hf_tokenizer)
