"""Requests that no client should send, and what a server may answer to each."""

from __future__ import annotations

from dataclasses import dataclass

from under_load.client import Answer, Vanish, posted

CHAT = "/v1/chat/completions"
CHUNKED = b"POST %b HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
SILENT_S = 1.5
FULL = 429  # of requests that are admitted before their prompt is read
NOTHING = 0  # the connection ends without an answer


@dataclass(frozen=True)
class Rubbish:
    """`statuses`: the answers that are right. `is_silent`: the client sends no more, and leaves after a while."""

    name: str
    request: bytes
    statuses: tuple[int, ...]
    is_silent: bool = False

    @property
    def vanish(self) -> Vanish | None:
        return Vanish(after_s=SILENT_S) if self.is_silent else None

    def difference(self, answer: Answer) -> str | None:
        if answer.status in self.statuses:
            return None
        return f"{self.name}: the answer has status {answer.status}, expected one of {self.statuses}"


def _with_header(size: int) -> bytes:
    return b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\nX-Long: %b\r\n\r\n" % (b"a" * size)


RUBBISH = (
    Rubbish("malformed JSON", posted(CHAT, b'{"messages": [{"role": "user", "content": "a"}'), (400,)),
    Rubbish("bytes that are not UTF-8", posted(CHAT, b'{"messages": "\xff\xfe"}'), (400,)),
    Rubbish("a body that is no object", posted(CHAT, [1, 2]), (400,)),
    Rubbish("deep nesting", posted(CHAT, b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"), (400,)),
    Rubbish("wrong types", posted(CHAT, {"messages": "a", "max_tokens": "many"}), (400,)),
    Rubbish("a wrong role", posted(CHAT, {"messages": [{"role": 7, "content": {}}]}), (400, FULL)),
    Rubbish("a token outside the vocabulary", posted("/v1/completions", {"prompt": [1, 2, 10**9]}), (400, FULL)),
    Rubbish("a prompt that does not fit", posted("/v1/completions", {"prompt": "a" * 5000}), (400, FULL)),
    Rubbish("another model", posted(CHAT, {"model": "another", "messages": []}), (404,)),
    Rubbish("an unknown endpoint", posted("/v1/edits", {"input": "a"}), (404,)),
    Rubbish("another method", b"DELETE %b HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n" % CHAT.encode(), (405,)),
    Rubbish("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", (400, NOTHING)),
    Rubbish("a malformed chunk", CHUNKED + b"5\r\nhello\r\nxyz\r\nworld\r\n", (400, NOTHING)),
    Rubbish("two lengths", b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", (400, NOTHING)),
    Rubbish("a huge header", _with_header(1 << 20), (400, 431, NOTHING)),
    Rubbish("half a head and silence", b"POST %b HTTP/1.1\r\nHost: te" % CHAT.encode(), (408, NOTHING), is_silent=True),
    Rubbish("half a body and silence", posted(CHAT, {"messages": []})[:-5], (408, NOTHING), is_silent=True),
    Rubbish("silence", b"", (408, NOTHING), is_silent=True),
)
