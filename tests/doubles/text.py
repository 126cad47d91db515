"""Tokenizers for the tiny models: one with two letters per token, one with the characters of JSON."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from doubles.models import VOCABULARY
from foreword.text import Tokenizer


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
