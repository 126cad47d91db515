"""A tokenizer for the tiny models: two letters per token."""

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
    pieces = ["<pad>", "<s>", "</s>", *(chr(97 + i % 7) + chr(97 + i // 7) for i in range(VOCABULARY - 3))]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))
