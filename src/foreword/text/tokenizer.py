"""PROMPT -> token ids, and token ids -> text.

A thin wrapper around a transformers tokenizer. A prompt is a string or chat messages. It goes through the chat template if
there is one, and gets no second beginning-of-text token. An empty or malformed prompt is refused here. Decoding never tidies
spaces, so that the text of a stream is the sum of its pieces.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from foreword.errors import InputError, ModelCorrupt, ModelNotFound, PromptError
from foreword.text.chat_options import ChatOptions
from foreword.text.control_tokens import Marks, control_tokens
from foreword.text.grammar import vocabulary_of
from foreword.text.prompts import Message, check_messages
from foreword.text.template_limits import ValueTooLarge, limited_values
from foreword.text.time_limit import TimeLimitReached, within
from foreword.text.token_bytes import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TransformersTokenizer: TypeAlias = "PreTrainedTokenizerBase"

NO_TOKENS = "the prompt has no tokens in this model's vocabulary; give another prompt"
RENDERING_S = 10.0  # time limit for one prompt; templates take milliseconds
LONGEST_RENDERED = 1 << 26  # characters
NO_CHAT_OPTIONS = ChatOptions()


class RenderedPrompt(NamedTuple):
    """A prompt as the text that the model reads, after the chat template. No token spans two pieces."""

    pieces: tuple[str, ...]
    special: bool  # the tokenizer adds its own special tokens, before the first piece

    def fits(self, tokens: int, longest: int) -> bool:
        """Return whether it could fit into `tokens` tokens of at most `longest` characters. Known before it is encoded."""
        return len(self.pieces) <= tokens and self.characters <= tokens * longest

    @property
    def characters(self) -> int:
        return sum(map(len, self.pieces))

    def last(self, tokens: int, longest: int) -> "RenderedPrompt":
        """Return an end of it that has at least `tokens` tokens, or the whole if it is no longer."""
        if self.fits(tokens, longest):
            return self
        kept, room = [], tokens * longest
        for piece in reversed(self.pieces[-tokens:]):
            kept.append(piece[-room:])
            room -= len(kept[-1])
            if room == 0:
                break
        return RenderedPrompt(tuple(reversed(kept)), special=False)


class Tokenizer:
    """The tokenizer of a model. `hf`: the tokenizer of transformers."""

    def __init__(self, hf_tokenizer: TransformersTokenizer) -> None:
        if not all(callable(getattr(hf_tokenizer, name, None)) for name in ("encode", "decode", "get_vocab")):
            raise InputError(
                f"a transformers tokenizer is needed, got {type(hf_tokenizer).__name__}; "
                "AutoTokenizer.from_pretrained gives the one of a model"
            )
        self.hf: Any = hf_tokenizer
        self._visible: dict[tuple[int, bool], bool] = {}
        self._token_texts: dict[int, str] = {}
        self._grammar_vocabularies: dict[tuple[int, frozenset[int]], str] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Load the tokenizer that lies next to a model's weights."""
        from transformers import AutoTokenizer  # noqa: PLC0415  seconds of start-up for a command that loads no model

        if not Path(folder).is_dir():
            raise ModelNotFound(f"no folder {folder} to load a tokenizer from; give a model's folder")
        try:
            found = cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
            found.decode(found.hf.encode("a"))  # some damage shows only in use
            return found
        except Exception as error:  # anything from OSError to a plain Exception, depending on the damage
            raise ModelCorrupt(f"no usable tokenizer in {folder}: {error}; fetch or save the model again") from error

    def encode(self, prompt: str | list[Message], chat: bool = True) -> list[int]:
        """Return the token ids of a prompt, as `generate` reads it. With `chat`, a string is one user message."""
        return self.ids(self.rendered(prompt, chat))

    def encode_all(self, prompts: Sequence[str | list[Message]]) -> list[list[int] | PromptError]:
        """Encode many prompts at once, which is faster. A prompt that cannot be used has its error in place of token ids."""
        found: list[Any] = [None] * len(prompts)
        texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        for i, prompt in enumerate(prompts):
            try:
                (text,), special = self.rendered(prompt)
                texts[special][i] = _unicode(text)
            except PromptError as error:
                found[i] = error
        for special, some in texts.items():
            many = self.hf(list(some.values()), add_special_tokens=special)["input_ids"] if some else []
            for i, ids in zip(some, many, strict=True):
                found[i] = ids or PromptError(NO_TOKENS)
        return found

    def rendered(
        self, prompt: str | list[Message], chat: bool = True, options: ChatOptions = NO_CHAT_OPTIONS, sanitize: bool = False
    ) -> RenderedPrompt:
        """Return the text that the model reads. With `sanitize`, control tokens in the prompt are ordinary characters."""
        has_template = bool(options.chat_template or getattr(self.hf, "chat_template", None))
        marks = Marks(self.control_tokens) if sanitize else None
        if not isinstance(prompt, str | list):
            raise PromptError(f"a prompt is a string or a list of chat messages, got {type(prompt).__name__}")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise PromptError("the prompt is empty; give it some text")
            if not (chat and has_template):
                return self._without_template(prompt, options, marks)
            prompt = [{"role": "user", "content": prompt}]
        messages = check_messages(prompt)
        if not (chat and has_template):
            lack = "this model has no chat template" if chat else "chat=False leaves out the chat template"
            raise PromptError(f"chat messages were given, but {lack}; give a string instead")
        if options.continue_final_message and messages[-1]["role"] != "assistant":
            raise PromptError(
                f"continue_final_message needs a last message of role assistant, got one of role {messages[-1]['role']!r}"
            )
        # The template writes the special tokens itself, so the tokenizer must not add its own.
        text = self._render(messages, options, marks)
        return RenderedPrompt((text,) if marks is None else marks.cut(text), special=False)

    def _without_template(self, prompt: str, options: ChatOptions, marks: Marks | None) -> RenderedPrompt:
        if options.given:
            raise PromptError(
                f"{options.given[0]} is for a chat template, and this prompt is a string without one; leave it out"
            )
        if marks is not None:
            return RenderedPrompt(marks.cut(marks.around(prompt)), special=True)
        bos = self.hf.bos_token
        return RenderedPrompt((prompt,), special=not (bos and prompt.startswith(bos)))

    def _render(self, messages: list[Message], options: ChatOptions, marks: Marks | None) -> str:
        def render() -> str:
            marked = messages if marks is None else marks.around(messages)
            return self.hf.apply_chat_template(marked, tokenize=False, **options.arguments())

        return self._within_limits(render, options.chat_template is not None)

    def _within_limits(self, render: Callable[[], str], given: bool) -> str:
        """Run a chat template under its limits of time, of memory and of characters. `given`: it is not the model's own."""
        try:
            with limited_values():
                text = within(RENDERING_S, render, _code_of_templates())
        except TimeLimitReached as error:
            reason = f"the chat template takes longer than {RENDERING_S:g} s for these messages"
            raise PromptError(f"{reason}; give fewer of them, or another chat_template") from error
        except ValueTooLarge as error:
            reason = f"the chat template would make {error} of these messages, which is too much"
            raise PromptError(f"{reason}; give fewer of them, or another chat_template") from error
        except Exception as error:  # a template is a program: it may raise anything
            raise PromptError(_refusal(error, given)) from error
        if len(text) > LONGEST_RENDERED:
            reason = f"the chat template makes {len(text)} characters of these messages; at most {LONGEST_RENDERED} are read"
            raise PromptError(f"{reason}; give fewer of them, or another chat_template")
        return text

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool = True, add_generation_prompt: bool = False, **options: Any
    ) -> str | list[int]:
        """Render chat messages as transformers' tokenizers do. Return token ids, or with `tokenize=False` the text.

        `options`: those of the method of the same name in transformers, such as `tools` or `chat_template`.
        """
        if not (options.get("chat_template") or getattr(self.hf, "chat_template", None)):
            raise PromptError("this model has no chat template; give one as chat_template")
        messages = check_messages(conversation)
        options = {**options, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        given = options.get("chat_template") is not None
        text = self._within_limits(lambda: self.hf.apply_chat_template(messages, **options), given)
        return list(self.hf.encode(_unicode(text), add_special_tokens=False)) if tokenize else text

    def ids(self, prompt: RenderedPrompt) -> list[int]:
        """Return the token ids of a rendered prompt."""
        found: list[int] = []
        for i, piece in enumerate(prompt.pieces):
            found += self.hf.encode(_unicode(piece), add_special_tokens=prompt.special and i == 0)
        if not found:
            raise PromptError(NO_TOKENS)
        return found

    def piece_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text inside a sequence: without special tokens around it."""
        return tuple(self.hf.encode(_unicode(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without tidying spaces before punctuation."""
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def is_visible(self, token: int, skip_special: bool = True) -> bool:
        """Return whether `decode` shows the token: its id is in the vocabulary, and it is no special token that is
        skipped."""
        known = self._visible.get((token, skip_special))
        if known is None:
            # A token may decode to nothing alone and still count, such as a first space, which is stripped in both cases.
            in_vocabulary = 0 <= token < len(self.pieces) and bool(self.pieces[token])
            known = in_vocabulary and bool(self.decode([token], skip_special) or not self.decode([token], False))
            self._visible[token, skip_special] = known
        return known

    def token_text(self, token: int) -> str:
        """Return the text of one token inside a text, with the space before it; part of a character is U+FFFD."""
        known = self._token_texts.get(token)
        if known is None:
            before, both = (self.decode([*self._letter, *more], skip_special_tokens=False) for more in ([], [token]))
            alone = both[len(before) :] if both.startswith(before) else self.decode([token], skip_special_tokens=False)
            known = self._token_texts[token] = alone
        return known

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token inside a text; they may be a part of a character."""
        piece = self.pieces[token] if 0 <= token < len(self.pieces) else ""
        return token_bytes(piece, self.token_text(token))

    @cached_property
    def _letter(self) -> list[int]:
        """The ids of some text, so that a token after it is not the first of the text."""
        return list(self.hf.encode("a", add_special_tokens=False))

    def hides(self, text: str) -> bool:
        """Return whether special tokens are a part of this text, which `decode` leaves out."""
        return any(not self.is_visible(token) for token in self.piece_ids(text))

    @property
    def tool_template(self) -> str | None:
        """The chat template of prompts with tools; None if there is no template."""
        return self.hf.get_chat_template(tools=[]) if getattr(self.hf, "chat_template", None) else None

    @property
    def vocab_size(self) -> int:
        """The number of tokens, the added ones included."""
        return len(self.hf)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids of the end token."""
        return () if self.hf.eos_token_id is None else (self.hf.eos_token_id,)

    def grammar_vocabulary(self, size: int, ends: frozenset[int]) -> str:
        """Return the tokens as grammars need them, for logits of `size` tokens and these end tokens. It is a string, so that
        it can be sent to another process."""
        known = self._grammar_vocabularies
        if (size, ends) not in known:
            known[size, ends] = vocabulary_of(self.hf, size, ends)
        return known[size, ends]

    @cached_property
    def control_tokens(self) -> re.Pattern[str]:
        """A pattern for the control tokens."""
        return control_tokens(self.hf)

    @cached_property
    def longest_piece(self) -> int:
        """The most characters of one token."""
        return max(map(len, self.pieces))

    @cached_property
    def pieces(self) -> list[str]:
        """Every token as the vocabulary spells it, by id; an unused id has the empty string."""
        vocabulary = self.hf.get_vocab()
        pieces = [""] * (max(vocabulary.values()) + 1)
        for piece, token in vocabulary.items():
            pieces[token] = piece
        return pieces


@cache
def _code_of_templates() -> tuple[str, ...]:
    """Return the files whose code runs for as long as a chat template wants."""
    import jinja2  # noqa: PLC0415  as above

    packages = [str(Path(str(module.__file__)).parent) for module in (jinja2, json)]
    return ("<template>", *packages)


def _refusal(error: Exception, given: bool) -> str:
    """Return the message for a template that raises. `given`: the caller gave it, so that it is the caller's to correct."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415  as above

    if isinstance(error, TemplateSyntaxError):
        which = "chat_template" if given else "this model's chat template"
        advice = "correct it" if given else "give another as chat_template"
        return f"{which} is no valid Jinja template: {error.message} (line {error.lineno}); {advice}"
    which = "the chat_template that was given" if given else "this model's chat template"
    return f"{which} refuses the messages: {error}; change {'it or them' if given else 'them'}"


def _unicode(text: str) -> str:
    """Refuse a text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode at character {error.start}; clean the text") from error
    return text
