"""Whole small LLMs to prove: a tiny model of tests/doubles.py, a tokenizer of as many words, and prompts in them."""

from collections.abc import Callable

import pytest
import torch
from doubles import CONTEXT, VOCABULARY, prompts, tiny
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from foreword.api import LLM
from foreword.methods import make
from foreword.model.cost import CostCurve
from foreword.model.model import Model
from foreword.text import Prompt, Tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
FREE_ROWS = CostCurve((1, 64), (1.0, 1.0))  # so that methods draft as much as they can

Loader = Callable[..., LLM]


def words(chat_template: str | None = TEMPLATE) -> Tokenizer:
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w2")
    hf.chat_template = chat_template
    return Tokenizer(hf)


def loaded(
    hf: PreTrainedModel | None = None, kind: type[Model] = Model, slots: int = 3, chat_template: str | None = TEMPLATE
) -> LLM:
    model = kind(hf or tiny("llama", torch.float32), "tiny", FREE_ROWS)
    return LLM(model, words(chat_template), "plain", make("plain"), slots, CONTEXT)


@pytest.fixture
def load() -> Loader:
    """Makes an LLM: the float32 Llama, or around a model of the test's own."""
    return loaded


@pytest.fixture
def questions() -> list[Prompt]:
    """Five prompts for three slots, the first one token long."""
    texts = [" ".join(f"w{token}" for token in tokens) for tokens in prompts(5)]
    return [Prompt(f"question {i}", "test", [text]) for i, text in enumerate(texts)]
