"""PROMPT: encode control tokens in a user's text, such as `<|im_end|>`, as ordinary characters.

A tokenizer turns such strings into control tokens, wherever they are. Here they are wrapped in marks before the chat
template sees them, so that the template still finds what it looks for. The rendered text is then cut at the marks, and no
token spans a cut. Control tokens that the template itself writes stay control tokens.
"""

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from foreword.errors import PromptError

BRACKETS = {("<", ">"), ("[", "]")}


def control_tokens(hf_tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern for the control tokens of a tokenizer: special tokens, and added ones in brackets like
    `<tool_call>`."""
    added = getattr(hf_tokenizer, "added_tokens_decoder", {}).values()
    strings = {str(token) for token in added if token.special or (str(token)[:1], str(token)[-1:]) in BRACKETS}
    strings |= set(getattr(hf_tokenizer, "all_special_tokens", ()))
    longest_first = sorted(filter(None, strings), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def _secret() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Marks:
    """The marks of one prompt. They are random, so that a user's text cannot contain them."""

    tokens: re.Pattern[str]
    opening: str = field(default_factory=_secret)
    closing: str = field(default_factory=_secret)

    def around(self, value: Any) -> Any:
        """Return a text, or messages, with every control token between marks."""
        if isinstance(value, str):
            return self.tokens.sub(lambda found: f"{self.opening}{found[0]}{self.closing}", value)
        if isinstance(value, dict):
            return {key: self.around(one) for key, one in value.items()}
        return [self.around(one) for one in value] if isinstance(value, list | tuple) else value

    def cut(self, text: str) -> tuple[str, ...]:
        """Cut a text with marks into pieces, none of which contains a marked control token."""
        parts = re.split(self.opening + self.tokens.pattern + self.closing, text)
        # A template may have dropped one mark of a pair.
        return tuple(filter(None, self._flat([part.replace(self.opening, "").replace(self.closing, "") for part in parts])))

    def _flat(self, parts: list[str]) -> list[str]:
        """Return the pieces of alternating text and control tokens, with the control tokens broken up."""
        return [piece for i, part in enumerate(parts) for piece in (self._broken(part) if i % 2 else [part])]

    def _broken(self, token: str) -> list[str]:
        """Break a control token after its first character; the rest may contain another one."""
        if len(token) == 1:
            raise PromptError(f"the prompt holds the control token {token!r}, which cannot be broken up; leave it out")
        return [token[0], *self._flat(self.tokens.split(token[1:]))]
