"""PROMPT -> token ids, and token ids -> text.

A thin wrapper around a transformers tokenizer that adds what the rest relies on: a prompt is a string or chat messages,
goes through the chat template where there is one, gets no second beginning-of-text token, and is refused here if it is
empty or malformed; decoding never tidies spaces, so that the text of a stream is the sum of its pieces.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from foreword.errors import InputError, ModelCorrupt, ModelNotFound, PromptError
from foreword.text.prompts import Message, check_messages

NO_TOKENS = "the prompt has no tokens in this model's vocabulary; give another text"


class Tokenizer:
    def __init__(self, hf_tokenizer: Any) -> None:
        if not all(callable(getattr(hf_tokenizer, name, None)) for name in ("encode", "decode", "get_vocab")):
            raise InputError(
                f"a transformers tokenizer is needed, got {type(hf_tokenizer).__name__}; "
                "AutoTokenizer.from_pretrained gives the one of a model"
            )
        self.hf = hf_tokenizer
        self._speaks: dict[int, bool] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer that lies beside a model's weights."""
        from transformers import AutoTokenizer  # noqa: PLC0415  seconds of start-up for a command that loads no model

        if not Path(folder).is_dir():
            raise ModelNotFound(f"no folder {folder} to load a tokenizer from; give a model's folder")
        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
        except Exception as error:  # anything from OSError to a plain Exception, by which file is damaged and how
            raise ModelCorrupt(f"no usable tokenizer in {folder}: {error}; fetch or save the model again") from error

    def encode(self, prompt: str | list[Message], chat: bool = True) -> list[int]:
        """Token ids of a prompt, ready to be continued. With `chat`, a string is one user message."""
        return self._ids(*self._written(prompt, chat))

    def encode_all(self, prompts: Sequence[str | list[Message]]) -> list[list[int] | PromptError]:
        """The same for many at once, which is quicker; where a prompt cannot be used, the reason stands in its place."""
        found: list[Any] = [None] * len(prompts)
        texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        for i, prompt in enumerate(prompts):
            try:
                text, special = self._written(prompt, chat=True)
                texts[special][i] = _unicode(text)
            except PromptError as error:
                found[i] = error
        for special, some in texts.items():
            many = self.hf(list(some.values()), add_special_tokens=special)["input_ids"] if some else []
            for i, ids in zip(some, many, strict=True):
                found[i] = ids or PromptError(NO_TOKENS)
        return found

    def _written(self, prompt: str | list[Message], chat: bool) -> tuple[str, bool]:
        """The text that the model reads, and whether the tokenizer has to add its special tokens."""
        has_template = bool(getattr(self.hf, "chat_template", None))
        if not isinstance(prompt, str | list):
            raise PromptError(f"a prompt is a string or a list of chat messages, got {type(prompt).__name__}")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise PromptError("the prompt is empty; give it some text")
            if not (chat and has_template):
                bos = self.hf.bos_token
                return prompt, not (bos and prompt.startswith(bos))
            prompt = [{"role": "user", "content": prompt}]
        messages = check_messages(prompt)
        if not (chat and has_template):
            lack = "this model has no chat template" if chat else "chat=False leaves out the chat template"
            raise PromptError(f"chat messages were given, but {lack}; give a string instead")
        # The template writes the special tokens itself: the tokenizer must not add its own before them.
        return self._render(messages), False

    def _render(self, messages: list[Message]) -> str:
        try:
            return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise PromptError(f"this model's chat template refuses the messages: {error}; change them") from error

    def _ids(self, text: str, special: bool) -> list[int]:
        ids = self.hf.encode(_unicode(text), add_special_tokens=special)
        if not ids:
            raise PromptError(NO_TOKENS)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of the ids as they are: no tidying of spaces before punctuation."""
        return self.hf.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def speaks(self, token: int) -> bool:
        """Whether `decode` lets the token through: not a special one, and not an id beyond the vocabulary."""
        known = self._speaks.get(token)
        if known is None:
            # A token may be silent alone and yet count, such as a first space that is stripped: it is so either way.
            in_vocabulary = 0 <= token < len(self.pieces) and bool(self.pieces[token])
            known = in_vocabulary and bool(self.decode([token]) or not self.decode([token], skip_special=False))
            self._speaks[token] = known
        return known

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, the added ones included."""
        return len(self.hf)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return () if self.hf.eos_token_id is None else (self.hf.eos_token_id,)

    @cached_property
    def pieces(self) -> list[str]:
        """Every token as the vocabulary spells it, by id; an id that is not in use is the empty string."""
        vocabulary = self.hf.get_vocab()
        pieces = [""] * (max(vocabulary.values()) + 1)
        for piece, token in vocabulary.items():
            pieces[token] = piece
        return pieces


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode at character {error.start}; clean the text") from error
    return text
