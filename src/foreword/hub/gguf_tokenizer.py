"""Convert the tokenizer inside a GGUF file to `tokenizer.json` and `tokenizer_config.json`; called by `gguf.convert`.

In: the `tokenizer.*` fields. Out: a tokenizer that splits text as the original did. Two kinds exist: byte-level BPE, whose
file only *names* the rule that splits text before merging, and SentencePiece BPE, which has scores in place of merges. A
rule that is not in the table here is refused: a similar one would give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from foreword.errors import ModelCorrupt, ModelUnsupported

CONTROL, USER_DEFINED = 3, 4  # the kinds of token that are matched as a whole
LONGEST_TOKEN = 1024  # characters; every split of a token into two is looked up
SPACE = "\u2581"  # how SentencePiece writes a space

# How byte-level tokenizers split text into words: "{digits}" is how many digits may stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
CUTS: dict[str, list[Any]] = {
    "gpt-2": [GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "llama-bpe": [pre_tokenizers.Split(Regex(WORDS.format(digits="{1,3}")), "isolated"), BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(WORDS.format(digits="")), "isolated"), BYTES],
}


def write_tokenizer(path: Path, fields: Mapping[str, Any], context: int, folder: Path) -> None:
    """Write the tokenizer that the `fields` of the GGUF file `path` describe."""
    prefix = "tokenizer.ggml."
    ours = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    kind, cut = str(ours.get("model")), str(ours.get("pre"))
    if kind not in ("gpt2", "llama"):
        raise ModelUnsupported(f"{path}: the tokenizer is of kind {kind}; gpt2 and llama are supported")
    if kind == "gpt2" and cut not in CUTS:
        raise ModelUnsupported(f"{path}: the tokenizer splits text by the rule {cut}; known rules: {', '.join(CUTS)}")
    try:
        _check(ours, fields.get("tokenizer.chat_template"))
        tokenizer = _byte_level(ours) if kind == "gpt2" else _sentencepiece(ours)
        _add_special(tokenizer, ours)
        config = _config(ours, context, fields.get("tokenizer.chat_template"))
    except Exception as error:  # lists that do not match fail in many ways, and the library has no narrower error
        raise ModelCorrupt(f"{path}: the tokenizer is damaged ({error}); fetch it again") from error
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check(fields: Mapping[str, Any], chat_template: object) -> None:
    """Refuse lists with values of a wrong type, which would be misread below."""
    kinds = {"tokens": str, "merges": str, "token_type": int, "scores": float}
    for name, kind in kinds.items():
        values = fields.get(name, [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ValueError(f"{name} is no list of {kind.__name__}")
    if longest := max((token for token in fields["tokens"] if len(token) > LONGEST_TOKEN), key=len, default=""):
        raise ValueError(f"a token has {len(longest)} characters")
    if not isinstance(chat_template, str | None):
        raise ValueError("the chat template is no text")


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    cut = fields["pre"]
    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    # Llama 3 takes a word that is a token as that token, even where no chain of merges leads to it.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(CUTS[cut])
    tokenizer.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, scores = fields["tokens"], fields["scores"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Any two tokens that make a third may merge, the best score first.
    pairs = [
        (-scores[i], vocabulary[token[:at]], vocabulary[token[at:]], (token[:at], token[at:]))
        for token, i in vocabulary.items()
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    unknown = tokens[fields.get("unknown_token_id", 0)]
    merges = [pair for *_, pair in sorted(pairs)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    as_space = normalizers.Replace(" ", SPACE)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), as_space])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = as_space
        tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _add_special(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Add the tokens that are never split, and the token that begins every text, if the model wants one."""
    kinds = dict(zip(fields["tokens"], fields["token_type"], strict=True))
    special = [AddedToken(token, normalized=False, special=True) for token, kind in kinds.items() if kind == CONTROL]
    whole = [AddedToken(token, normalized=False) for token, kind in kinds.items() if kind == USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)
    if _adds_bos(fields):
        first = fields["bos_token_id"]
        bos = fields["tokens"][first]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, first)]
        )


def _adds_bos(fields: Mapping[str, Any]) -> bool:
    """Return whether a text begins with the bos token. Files that do not say so follow the default of their kind."""
    return fields.get("add_bos_token", fields["model"] == "llama" or fields.get("pre") == "llama-bpe")


def _config(fields: Mapping[str, Any], context: int, chat_template: str | None) -> dict[str, Any]:
    kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {
        f"{ours}_token": fields["tokens"][fields[f"{theirs}_token_id"]]
        for ours, theirs in kinds.items()
        if f"{theirs}_token_id" in fields
    }
    template = {"chat_template": chat_template} if chat_template else {}
    common = {"model_max_length": context, "clean_up_tokenization_spaces": False}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | named | common | template
