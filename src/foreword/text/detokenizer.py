"""EMIT: token ids -> text, while the output is still being generated.

One `Detokenizer` serves one request. In: ids, as rounds decide them. Out: text, as soon as no later token can change it. The
invariant: all returned text, in order, equals `tokenizer.decode(all ids)`. Only a short window of ids is decoded again, so
the work is linear in the length of the output.
"""

import re
from collections.abc import Sequence

from foreword.text.tokenizer import Tokenizer

WINDOW = 24
# Decoding that starts anywhere in a text is correct again after four bytes (UTF-8), and a token has at least one byte.
OVERLAP = 8
UNFINISHED = "\ufffd"
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = []  # the last ids; the text before them has been returned
        self._shown = 0  # how many characters of the window's text have been returned
        self._run: list[int] = []  # byte pieces since the window: they decode together, or not at all

    def push(self, ids: Sequence[int]) -> str:
        """Add ids, and return the text that they settle. It may lag behind them by an unfinished character."""
        for token in ids:
            # A token that decodes to nothing must not enter the window: after only such tokens, the next one would decode as
            # the first of the text, without its leading space.
            if self._tokenizer.is_visible(token, self._skip_special):
                self._run.append(token)
                if not BYTE_PIECE.fullmatch(self._tokenizer.pieces[token]):
                    self._window += self._run
                    self._run.clear()
        text = self._decode(self._window)
        settled = _settled(text)
        fresh = text[self._shown : settled]
        self._shown = settled
        if len(self._window) > WINDOW:
            self._window = self._window[-OVERLAP:]
            self._shown = _settled(self._decode(self._window))
        return fresh

    def flush(self) -> str:
        """Return the rest of the text when no more ids will come, broken characters included."""
        text = self._decode(self._window + self._run)
        rest = text[self._shown :]
        self._window, self._run, self._shown = [], [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def _settled(text: str) -> int:
    """Return how many characters are final. An unfinished character decodes to a single U+FFFD at the very end."""
    return len(text) - text.endswith(UNFINISHED)
