"""PROMPT: control tokens that users wrote, such as `<|im_end|>`, encoded as the characters they are.

A tokenizer takes them for structure, wherever they stand. Here they are wrapped in marks before the chat template sees them,
so that the template still finds what it looks for; the text that it writes is then cut at the marks, and no token that is
encoded reaches over a cut. What the template itself wrote stays structure.
"""

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from foreword.errors import PromptError

BRACKETS = {("<", ">"), ("[", "]")}


def control_tokens(hf_tokenizer: Any) -> re.Pattern[str]:
    """What a tokenizer takes for structure: its special tokens, and added ones in brackets such as `<tool_call>`."""
    added = getattr(hf_tokenizer, "added_tokens_decoder", {}).values()
    strings = {str(token) for token in added if token.special or (str(token)[:1], str(token)[-1:]) in BRACKETS}
    strings |= set(getattr(hf_tokenizer, "all_special_tokens", ()))
    longest_first = sorted(filter(None, strings), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def _secret() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Marks:
    """For one prompt: they are random, so that what users wrote cannot hold them."""

    tokens: re.Pattern[str]
    opening: str = field(default_factory=_secret)
    closing: str = field(default_factory=_secret)

    def around(self, value: Any) -> Any:
        """The same text, or messages, with every control token in it between marks."""
        if isinstance(value, str):
            return self.tokens.sub(lambda found: f"{self.opening}{found[0]}{self.closing}", value)
        if isinstance(value, dict):
            return {key: self.around(one) for key, one in value.items()}
        return [self.around(one) for one in value] if isinstance(value, list | tuple) else value

    def cut(self, text: str) -> tuple[str, ...]:
        """A text with marks in it, in pieces of which none holds a control token that was marked."""
        parts = re.split(self.opening + self.tokens.pattern + self.closing, text)
        # Of some pairs a template may have kept one mark alone.
        return tuple(filter(None, self._flat([part.replace(self.opening, "").replace(self.closing, "") for part in parts])))

    def _flat(self, parts: list[str]) -> list[str]:
        """Text and control tokens in turns, the tokens broken up."""
        return [piece for i, part in enumerate(parts) for piece in (self._broken(part) if i % 2 else [part])]

    def _broken(self, token: str) -> list[str]:
        if len(token) == 1:
            raise PromptError(f"the prompt holds the control token {token!r}, which cannot be broken up; leave it out")
        return [token[0], *self._flat(self.tokens.split(token[1:]))]
