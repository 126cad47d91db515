"""The output items of a response, as they grow: deltas of text and tool calls -> items, and the events that tell of them.

The events of an item come in a fixed order: it is added, its parts grow, they are done, it is done. One item is open at a
time.
"""

from __future__ import annotations

from uuid import uuid4

from foreword.serve.fields import Object


class ItemWriter:
    """Writes the items of one response. `output`: all of them so far."""

    def __init__(self) -> None:
        self.output: list[Object] = []
        self._open: int | None = None  # the place of the item that grows
        self._calls: dict[int, int] = {}  # index of a tool call -> its place
        self._logprobs: list[Object] = []  # of tokens whose text is yet to come

    def add(self, deltas: list[Object], logprobs: list[Object]) -> list[Object]:
        """Add deltas, and return their events. `logprobs`: of the tokens that they come from; the next text takes them
        along."""
        events: list[Object] = []
        self._logprobs += logprobs
        for delta in deltas:
            if delta.get("content"):
                events += self._text(delta["content"])
            for call in delta.get("tool_calls", ()):
                events += self._call(call)
        return events

    def end(self, status: str = "completed") -> list[Object]:
        """Close the item that is open, and return the events."""
        if self._open is None:
            return []
        place, self._open = self._open, None
        item = self.output[place]
        item["status"] = status
        at = {"item_id": item["id"], "output_index": place}
        done = {"type": "response.output_item.done", "output_index": place, "item": item}
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            return [{"type": "response.function_call_arguments.done", **at, **arguments}, done]
        (part,) = item["content"]
        part["logprobs"] += self._logprobs  # of a last token without text
        at["content_index"] = 0
        return [
            {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": part["logprobs"]},
            {"type": "response.content_part.done", **at, "part": part},
            done,
        ]

    def _begin(self, item: Object) -> list[Object]:
        events = self.end()
        self._open = len(self.output)
        self.output.append(item)
        return [*events, {"type": "response.output_item.added", "output_index": self._open, "item": {**item}}]

    def _text(self, text: str) -> list[Object]:
        logprobs, self._logprobs = self._logprobs, []
        events: list[Object] = []
        if self._open is None or self.output[self._open]["type"] != "message":
            message = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
            events += self._begin({**message, "content": []})
            part: Object = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append({"type": "response.content_part.added", **self._at(), "content_index": 0, "part": {**part}})
            self.output[-1]["content"] = [part]
        (part,) = self.output[-1]["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        delta = {"type": "response.output_text.delta", **self._at(), "content_index": 0, "delta": text, "logprobs": logprobs}
        return [*events, delta]

    def _call(self, call: Object) -> list[Object]:
        events: list[Object] = []
        function = call.get("function", {})
        if call["index"] not in self._calls:
            name = {"name": function.get("name", ""), "arguments": ""}
            item = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": call.get("id"), "status": "in_progress"}
            events += self._begin({**item, **name})
            self._calls[call["index"]] = len(self.output) - 1
        text = function.get("arguments") or ""
        self.output[self._calls[call["index"]]]["arguments"] += text
        if text:
            events.append({"type": "response.function_call_arguments.delta", **self._at(), "delta": text})
        return events

    def _at(self) -> Object:
        assert self._open is not None
        return {"item_id": self.output[self._open]["id"], "output_index": self._open}
