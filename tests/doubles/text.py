"""Tokenizers for the tiny models: one with two letters per token, one with the characters of JSON, and one with all bytes
and a chat template, for models that are saved as folders; and a chat template with tools."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from doubles.models import VOCABULARY, fresh
from foreword.text import Tokenizer

SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single bytes and five special tokens; `</s>` (1) ends a text."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = CHAT_TEMPLATE
    return hf


def talking_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Make a random float32 model with the vocabulary of `byte_tokenizer`."""
    sizes = {"vocab_size": len(byte_tokenizer()), "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1}
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    return fresh(family, torch.float32, **sizes | shape | changes)


# As Qwen's template writes tools and calls, shortened.
TOOL_TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> For each function
call, return a json object within <tool_call></tool_call>: {"name": <function-name>, "arguments": <args-json-object>}
{%- endif -%}
{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>
{%- endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@lru_cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer. A stop string may begin and end inside a token of two letters."""
    return _tokenizer(*(chr(97 + i % 7) + chr(97 + i // 7) for i in range(VOCABULARY - 3)))


@lru_cache
def json_tokenizer() -> Tokenizer:
    """Return a tokenizer with which the tiny models can write JSON; some tokens hold several parts of it."""
    single = '{}[]",: \n\\-.0123456789abcdefnrtlsu'
    return _tokenizer(*single, '{"', '":', '",', '"}', "true", "null", "ab", "12", ', "')


def json_ids(text: str) -> list[int]:
    """Return the tokens of `json_tokenizer` for a text, the longest first."""
    vocabulary, found = json_tokenizer().hf.get_vocab(), []
    while text:
        piece = max((piece for piece in vocabulary if text.startswith(piece)), key=len)
        found.append(vocabulary[piece])
        text = text[len(piece) :]
    return found


def _tokenizer(*words: str) -> Tokenizer:
    pieces = ["<pad>", "<s>", "</s>", *words]
    assert len(pieces) <= VOCABULARY
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def with_template(hf: PreTrainedTokenizerFast, template: Any = TOOL_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a copy of a tokenizer with another chat template: by default one that shows tools."""
    copy = deepcopy(hf)
    copy.chat_template = template
    return copy
