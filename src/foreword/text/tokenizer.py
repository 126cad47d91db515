"""PROMPT -> token ids, and token ids -> text.

A thin wrapper around a transformers tokenizer that adds what the rest relies on: a prompt is a string or chat messages,
goes through the chat template where there is one, gets no second beginning-of-text token, and is refused here if it is
empty or malformed; decoding never tidies spaces, so that the text of a stream is the sum of its pieces.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from foreword.errors import InputError, ModelCorrupt, ModelNotFound, PromptError
from foreword.text.chat_options import ChatOptions
from foreword.text.control_tokens import Marks, control_tokens
from foreword.text.prompts import Message, check_messages
from foreword.text.time_limit import TimeIsUp, within

NO_TOKENS = "the prompt has no tokens in this model's vocabulary; give another text"
RENDERING_S = 10.0  # for one prompt; templates take milliseconds
LONGEST_RENDERED = 1 << 26  # characters
NOTHING_SAID = ChatOptions()


class Written(NamedTuple):
    """A prompt as the text that the model reads. No token spans two pieces."""

    pieces: tuple[str, ...]
    special: bool  # the tokenizer adds its own special tokens, before the first piece

    def fits(self, tokens: int, longest: int) -> bool:
        """Whether so many tokens could hold it, none of more than `longest` characters: known before it is encoded."""
        return len(self.pieces) <= tokens and self.characters <= tokens * longest

    @property
    def characters(self) -> int:
        return sum(map(len, self.pieces))

    def last(self, tokens: int, longest: int) -> "Written":
        """An end of it that has so many tokens at least; the whole where it is no longer."""
        if self.fits(tokens, longest):
            return self
        kept, room = [], tokens * longest
        for piece in reversed(self.pieces[-tokens:]):
            kept.append(piece[-room:])
            room -= len(kept[-1])
            if room == 0:
                break
        return Written(tuple(reversed(kept)), special=False)


class Tokenizer:
    def __init__(self, hf_tokenizer: Any) -> None:
        if not all(callable(getattr(hf_tokenizer, name, None)) for name in ("encode", "decode", "get_vocab")):
            raise InputError(
                f"a transformers tokenizer is needed, got {type(hf_tokenizer).__name__}; "
                "AutoTokenizer.from_pretrained gives the one of a model"
            )
        self.hf = hf_tokenizer
        self._speaks: dict[tuple[int, bool], bool] = {}
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer that lies beside a model's weights."""
        from transformers import AutoTokenizer  # noqa: PLC0415  seconds of start-up for a command that loads no model

        if not Path(folder).is_dir():
            raise ModelNotFound(f"no folder {folder} to load a tokenizer from; give a model's folder")
        try:
            found = cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
            found.decode(found.hf.encode("a"))  # some of what a damaged file says shows only in use
            return found
        except Exception as error:  # anything from OSError to a plain Exception, by which file is damaged and how
            raise ModelCorrupt(f"no usable tokenizer in {folder}: {error}; fetch or save the model again") from error

    def encode(self, prompt: str | list[Message], chat: bool = True) -> list[int]:
        """Token ids of a prompt, ready to be continued. With `chat`, a string is one user message."""
        return self.ids(self.written(prompt, chat))

    def encode_all(self, prompts: Sequence[str | list[Message]]) -> list[list[int] | PromptError]:
        """The same for many at once, which is quicker; where a prompt cannot be used, the reason stands in its place."""
        found: list[Any] = [None] * len(prompts)
        texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        for i, prompt in enumerate(prompts):
            try:
                (text,), special = self.written(prompt)
                texts[special][i] = _unicode(text)
            except PromptError as error:
                found[i] = error
        for special, some in texts.items():
            many = self.hf(list(some.values()), add_special_tokens=special)["input_ids"] if some else []
            for i, ids in zip(some, many, strict=True):
                found[i] = ids or PromptError(NO_TOKENS)
        return found

    def written(
        self, prompt: str | list[Message], chat: bool = True, options: ChatOptions = NOTHING_SAID, sanitize: bool = False
    ) -> Written:
        """The text that the model reads. With `sanitize`, control tokens in the prompt are plain characters."""
        has_template = bool(options.chat_template or getattr(self.hf, "chat_template", None))
        marks = Marks(self.control_tokens) if sanitize else None
        if not isinstance(prompt, str | list):
            raise PromptError(f"a prompt is a string or a list of chat messages, got {type(prompt).__name__}")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise PromptError("the prompt is empty; give it some text")
            if not (chat and has_template):
                return self._as_it_is(prompt, options, marks)
            prompt = [{"role": "user", "content": prompt}]
        messages = check_messages(prompt)
        if not (chat and has_template):
            lack = "this model has no chat template" if chat else "chat=False leaves out the chat template"
            raise PromptError(f"chat messages were given, but {lack}; give a string instead")
        if options.continue_final_message and messages[-1]["role"] != "assistant":
            raise PromptError(
                f"continue_final_message needs a last message of the assistant's, got one of role {messages[-1]['role']!r}"
            )
        # The template writes the special tokens itself: the tokenizer must not add its own before them.
        text = self._render(messages, options, marks)
        return Written((text,) if marks is None else marks.cut(text), special=False)

    def _as_it_is(self, prompt: str, options: ChatOptions, marks: Marks | None) -> Written:
        if options.given:
            raise PromptError(
                f"{options.given[0]} is for a chat template, and this prompt is a text without one; leave it out"
            )
        if marks is not None:
            return Written(marks.cut(marks.around(prompt)), special=True)
        bos = self.hf.bos_token
        return Written((prompt,), special=not (bos and prompt.startswith(bos)))

    def _render(self, messages: list[Message], options: ChatOptions, marks: Marks | None) -> str:
        def render() -> str:
            marked = messages if marks is None else marks.around(messages)
            return self.hf.apply_chat_template(marked, tokenize=False, **options.arguments())

        return self._within_limits(render)

    def _within_limits(self, render: Callable[[], str]) -> str:
        """Run a chat template under its limits of time and of characters."""
        try:
            text = within(RENDERING_S, render)
        except TimeIsUp as error:
            told = f"the chat template takes longer than {RENDERING_S:g} s for these messages"
            raise PromptError(f"{told}; give fewer of them, or another chat_template") from error
        except Exception as error:  # a template is a program: it may raise anything
            raise PromptError(f"this model's chat template refuses the messages: {error}; change them") from error
        if len(text) > LONGEST_RENDERED:
            told = f"the chat template makes {len(text)} characters of these messages; {LONGEST_RENDERED} are read at most"
            raise PromptError(f"{told}; give fewer of them, or another chat_template")
        return text

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool = True, add_generation_prompt: bool = False, **options: Any
    ) -> str | list[int]:
        """Render chat messages as transformers' tokenizers do: token ids, or with `tokenize=False` the text.

        `options`: what the method of the same name in transformers takes, such as `tools` or `chat_template`.
        """
        if not (options.get("chat_template") or getattr(self.hf, "chat_template", None)):
            raise PromptError("this model has no chat template; give one as chat_template")
        messages = check_messages(conversation)
        options = {**options, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        text = self._within_limits(lambda: self.hf.apply_chat_template(messages, **options))
        return list(self.hf.encode(_unicode(text), add_special_tokens=False)) if tokenize else text

    def ids(self, written: Written) -> list[int]:
        """Token ids of what the model reads."""
        found: list[int] = []
        for i, piece in enumerate(written.pieces):
            found += self.hf.encode(_unicode(piece), add_special_tokens=written.special and i == 0)
        if not found:
            raise PromptError(NO_TOKENS)
        return found

    def piece_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece of text inside a sequence: no special tokens around it."""
        return tuple(self.hf.encode(_unicode(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids as they are: no tidying of spaces before punctuation."""
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def speaks(self, token: int, skip_special: bool = True) -> bool:
        """Whether `decode` lets the token through: not an id beyond the vocabulary, nor a special one that is skipped."""
        known = self._speaks.get((token, skip_special))
        if known is None:
            # A token may be silent alone and yet count, such as a first space that is stripped: it is so either way.
            in_vocabulary = 0 <= token < len(self.pieces) and bool(self.pieces[token])
            known = in_vocabulary and bool(self.decode([token], skip_special) or not self.decode([token], False))
            self._speaks[token, skip_special] = known
        return known

    def token_text(self, token: int) -> str:
        """The text of one token as it stands in a text, its space before it included; part of a character is U+FFFD."""
        known = self._token_texts.get(token)
        if known is None:
            before, both = (self.decode([*self._letter, *more], skip_special_tokens=False) for more in ([], [token]))
            alone = both[len(before) :] if both.startswith(before) else self.decode([token], skip_special_tokens=False)
            known = self._token_texts[token] = alone
        return known

    @cached_property
    def _letter(self) -> list[int]:
        """Some text, so that what comes after it is not the first of a text."""
        return list(self.hf.encode("a", add_special_tokens=False))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, the added ones included."""
        return len(self.hf)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return () if self.hf.eos_token_id is None else (self.hf.eos_token_id,)

    @cached_property
    def control_tokens(self) -> re.Pattern[str]:
        """What is structure where it stands in a text."""
        return control_tokens(self.hf)

    @cached_property
    def longest_piece(self) -> int:
        """Characters that one token stands for at most."""
        return max(map(len, self.pieces))

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
