"""Whole small LLMs to prove: a tiny model of tests/doubles, a tokenizer of as many words, and prompts of them."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from doubles import CONTEXT, VOCABULARY, prompts, tiny
from foreword.api import LLM
from foreword.drafters.resolve import DrafterRequest
from foreword.model.cost import CostCurve
from foreword.model.model import Model
from foreword.text import Prompt, Tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
FREE_ROWS = CostCurve((1, 64), (1.0, 1.0))  # so that methods draft as much as they can


def tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w2")
    hf.chat_template = chat_template
    return Tokenizer(hf)


def load(
    hf: PreTrainedModel | None = None, kind: type[Model] = Model, slots: int = 3, chat_template: str | None = TEMPLATE
) -> LLM:
    """Make an LLM around the float32 Llama, or around a given model."""
    model = kind(hf or tiny("llama", torch.float32), "tiny", FREE_ROWS)
    return LLM.of(model, tokenizer(chat_template), DrafterRequest.of("plain"), slots, CONTEXT)


def coarse(hf: PreTrainedModel, step: float = 1 / 8) -> PreTrainedModel:
    """Round the head's logits to steps: down in passes of one row, to the nearest otherwise. Near-ties then flip with the
    shape of the pass, as in bfloat16, but the same on every machine. float64 is not rounded."""

    def rounded(_: nn.Module, __: object, logits: Tensor) -> Tensor:
        if logits.dtype == torch.float64:
            return logits
        return (logits / step + (0.5 if logits.shape[-2] > 1 else 0.0)).floor() * step

    hf.lm_head.register_forward_hook(rounded)
    return hf


def twins(hf: PreTrainedModel) -> PreTrainedModel:
    """Give tokens 2i and 2i + 1 the same logits."""
    with torch.no_grad():
        hf.lm_head.weight[1::2] = hf.lm_head.weight[::2]
    return hf


@pytest.fixture
def small() -> SimpleNamespace:
    """Return the makers above; a conftest cannot be imported."""
    return SimpleNamespace(load=load, coarse=coarse, twins=twins)


@pytest.fixture
def questions() -> list[Prompt]:
    """Return five prompts for three slots; the first has one token."""
    texts = [" ".join(f"w{token}" for token in tokens) for tokens in prompts(5)]
    return [Prompt(f"question {i}", "test", [text]) for i, text in enumerate(texts)]


@pytest.fixture
def without_onednn() -> Callable[[], None]:
    """For bfloat16: some virtual machines offer oneDNN matrix instructions that they then refuse to run."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield
