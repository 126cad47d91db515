"""The tokenizer read from a GGUF file splits text as the original did."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from foreword.errors import ModelCorrupt
from foreword.hub.gguf import convert
from foreword.hub.gguf_tokenizer import write_tokenizer

TEXTS = [
    "The words that come before",
    "In  1998  it's   12345 and ½ of  7\n\n  8",
    "\n\n\tdef f(x):\n        return x  \n",
    "naïve café, ещё раз, 世界 🌍",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture
def converted(tiny, write_gguf, tmp_path) -> Path:
    convert(write_gguf(tmp_path / "m.gguf", tiny("llama")), tmp_path / "out")
    return tmp_path / "out"


def test_same_tokens_as_the_original(converted, original):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        assert tokenizer(text).input_ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_and_chat_template(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer("<|im_start|><|im_end|>").input_ids == [1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ", "Ġ12345", ",", "Ġ", "Ġx", "Ċ", "Ċ", "y"]),
        ("smollm", ["It", "'s", "ĠĠ", "1", "2", "3", "4", "5", ",", "Ġ", "Ġx", "Ċ", "Ċ", "y"]),
        ("llama-bpe", ["It", "'s", "Ġ", "Ġ", "123", "45", ",", "Ġ", "Ġx", "ĊĊ", "y"]),
        ("qwen2", ["It", "'s", "Ġ", "Ġ", "1", "2", "3", "4", "5", ",", "Ġ", "Ġx", "ĊĊ", "y"]),
    ],
)
def test_each_rule_splits_in_its_own_way(original, tmp_path, rule, words):
    fields = byte_level(original) | {"tokenizer.ggml.pre": rule, "tokenizer.ggml.add_bos_token": False}
    write_tokenizer(Path("m.gguf"), fields, 64, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's  12345,  x\n\ny")] == words


def byte_level(original: Tokenizer) -> dict[str, Any]:
    tokens = sorted(original.get_vocab(), key=original.get_vocab().get)
    kinds = [3 if i < 3 else 1 for i in range(len(tokens))]
    fields = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": [], "bos_token_id": 1}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_llama3_takes_a_whole_word_and_begins_with_bos(original, tmp_path):
    fields = byte_level(original) | {"tokenizer.ggml.pre": "llama-bpe"}
    write_tokenizer(Path("m.gguf"), fields, 64, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("words").input_ids == [1, *(original.token_to_id(letter) for letter in "words")]
    assert tokenizer(" the").input_ids == [1, original.token_to_id("Ġthe")]  # no merges lead there


def test_missing_pieces_are_named(original, tmp_path):
    fields = byte_level(original) | {"tokenizer.ggml.pre": "smollm"}
    del fields["tokenizer.ggml.token_type"]
    with pytest.raises(ModelCorrupt, match="token_type"):
        write_tokenizer(Path("m.gguf"), fields, 64, tmp_path)


PIECES = {"▁": -5.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "bc": -0.5, "abc": -3.0, "▁a": -2.0, "▁ab": -4.0}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [0.0] * 259 + list(PIECES.values())
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds} | ids | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def best_merges(text: str) -> list[str]:
    """SentencePiece's rule in its simplest form: repeatedly join the neighbours that make the best token."""
    parts = list(text)
    while pairs := [(PIECES[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def test_sentencepiece_merges_by_score(tmp_path):
    write_tokenizer(Path("m.gguf"), sentencepiece(), 64, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ["abc", "ab abc", "aabbcc bca", "a  b"]:
        expected = best_merges("▁" + text.replace(" ", "▁"))
        assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == ["<s>", *expected]
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("é").input_ids) == ["<s>", "▁", "<0xC3>", "<0xA9>"]


def test_sentencepiece_without_the_first_space(tmp_path):
    write_tokenizer(Path("m.gguf"), sentencepiece(add_space_prefix=False, add_bos_token=False), 64, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc ab").input_ids) == best_merges("abc▁ab")
    assert tokenizer.decode(tokenizer(" ab").input_ids) == " ab"
