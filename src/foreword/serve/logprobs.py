"""Log-probabilities in OpenAI's two formats: of chats, with the bytes of each token, and of completions, as lists.

They are those of the target itself, before penalties, temperature and filters. A round brings several tokens at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreword.engine.request import Event, Logprob
from foreword.serve.fields import Object
from foreword.text import Tokenizer

LEAST = -9999.0  # JSON has no minus infinity; OpenAI's API gives this, too


def of_chat(tokenizer: Tokenizer, entries: Iterable[Logprob]) -> list[Object]:
    """Return the entries of `logprobs.content`."""

    def one(token: int, text: str, logprob: float) -> Object:
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(tokenizer.token_bytes(token))}

    return [
        {
            **one(entry.token, entry.text, entry.logprob),
            "top_logprobs": [one(token, text, value) for (token, value), text in _top(entry)],
        }
        for entry in entries
    ]


def of_completion(entries: Sequence[Logprob | None], texts: Sequence[str], offset: int) -> Object:
    """Return `logprobs` of a completion. An entry is None at the first token of a prompt, which nothing precedes.

    `texts`: of the tokens. `offset`: the characters before them."""
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in entries],
        "top_logprobs": [entry and _by_text(entry) for entry in entries],
        "text_offset": offsets,
    }


def _by_text(entry: Logprob) -> dict[str, float]:
    """Return the likeliest tokens, and the chosen one, by their text. Of tokens with the same text, the likeliest counts."""
    found = {entry.text: max(entry.logprob, LEAST)}
    for (_, value), text in reversed(_top(entry)):
        found[text] = max(value, LEAST)
    return found


def _top(entry: Logprob) -> list[tuple[tuple[int, float], str]]:
    return list(zip(entry.top, entry.top_texts, strict=True))


def entries_of(events: Iterable[Event]) -> list[Logprob]:
    return [entry for event in events for entry in event.logprobs]
