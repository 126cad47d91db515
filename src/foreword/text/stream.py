"""EMIT: the text of one request: decided tokens -> text that may be shown.

Joins the detokenizer and the stop strings. A round decides several tokens at once. `used` says how many of them plain
decoding would have generated before it stopped. The invariant: text and `used` do not depend on how the tokens are divided
into rounds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from foreword.text.detokenizer import Detokenizer
from foreword.text.stop import StopStrings
from foreword.text.tokenizer import Tokenizer


class Pushed(NamedTuple):
    text: str  # what may be shown now
    used: int  # how many of the ids belong to the output
    stopped: bool  # a stop string is complete: the output ends here


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """`include_stop`: the text includes the stop string or token that ended it. `skip_special`: leave out special
        tokens."""
        self.include_stop = include_stop
        self.token_text = tokenizer.token_text
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._stop = StopStrings(stop, include_stop)

    @property
    def stopped(self) -> bool:
        return self._stop.found

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stop.match

    def push(self, ids: Sequence[int]) -> Pushed:
        """Add the tokens of a round."""
        if not self._stop.strings:
            return Pushed(self._detokenizer.push(ids), len(ids), False)
        text, used = "", 0
        # One by one, to know which token completed the stop string.
        while used < len(ids) and not self.stopped:
            text += self._stop.push(self._detokenizer.push(ids[used : used + 1]))[0]
            used += 1
        return Pushed(text, used, self.stopped)

    def flush(self) -> str:
        """Return the rest of the text, when no more tokens will come. A stop string may end it too: see `stopped`."""
        return self._stop.push(self._detokenizer.flush())[0] + self._stop.flush()
