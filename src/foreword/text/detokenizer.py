"""EMIT: token ids -> text, while the text is still being written.

One `Detokenizer` serves one request. Ids come in as rounds decide them; text goes out as soon as no later token can
change it. The invariant: all that was returned, in order, equals `tokenizer.decode(all ids)`. Only a short window of
ids is decoded again, so the work is linear in the text.
"""

import re
from collections.abc import Sequence

from foreword.text.tokenizer import Tokenizer

WINDOW = 24
# Decoding that starts anywhere in a text is right again after four bytes (UTF-8), and a token has at least one.
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
        """The text that these ids settle. It may lag behind them by an unfinished character."""
        for token in ids:
            # A token that decodes to nothing must not enter: a window of those would take the next token for the first
            # of the text, and strip its leading space.
            if self._tokenizer.speaks(token, self._skip_special):
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
        """What is left when no more ids will come, broken characters included."""
        text = self._decode(self._window + self._run)
        rest = text[self._shown :]
        self._window, self._run, self._shown = [], [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def _settled(text: str) -> int:
    """How many characters will stay: an unfinished one shows as a single U+FFFD at the very end."""
    return len(text) - text.endswith(UNFINISHED)
