"""EMIT: stop strings in a stream of text.

One `StopStrings` serves one request. In: pieces of text. Out: the text that may be shown, which never contains a stop
string, nor the beginning of one that may still be completed. The string that is complete first ends the text (the longest,
if several are complete at once), so the result does not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence

from foreword.errors import InputError


class StopStrings:
    def __init__(self, strings: str | Sequence[str], include_stop: bool = False) -> None:
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        for string in self.strings:
            if not isinstance(string, str) or not string:
                raise InputError(f"a stop string must be a string that is not empty, got {string!r}; leave it out")
        self.match: str | None = None  # the string that ended the text
        self._include_stop = include_stop
        self._held = ""

    @property
    def found(self) -> bool:
        return self.match is not None

    def push(self, piece: str) -> tuple[str, bool]:
        """Add text. Return the text that may be shown now, and whether a stop string was found; after that nothing is
        shown."""
        if self.found:
            return "", True
        text = self._held + piece
        matches = [(start + len(string), start, string) for string in self.strings if (start := text.find(string)) >= 0]
        if matches:
            end, start, self.match = min(matches)
            self._held = ""
            return text[: end if self._include_stop else start], True
        shown = len(text) - max((overlap(text, string) for string in self.strings), default=0)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Return the text that was held back, when no more will come."""
        rest, self._held = self._held, ""
        return rest


def overlap(text: str, string: str) -> int:
    """Return how many characters at the end of the text are the beginning of the string, but not all of it."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
