"""POST /v1/chat/completions: messages -> the prompt, rounds -> chunks or a message.

Text goes through a parser that finds tool calls in it, if the request has tools. A chunk holds what one or several rounds
decided, so it may have several deltas, which are sent one by one.
"""

from __future__ import annotations

from typing import Any

from foreword.engine.request import Event, Running
from foreword.requests import Prompt
from foreword.serve import sse
from foreword.serve.errors import Refusal
from foreword.serve.exchange import Chunks, by_round, length_limit, tokens_of, traced
from foreword.serve.fields import ChatFields, Object, settings_of
from foreword.serve.flow import News
from foreword.serve.logprobs import entries_of, of_chat
from foreword.serve.service import Service
from foreword.serve.structured import format_settings
from foreword.serve.tool_text import Parser, merged
from foreword.serve.tools import tool_plan

KINDS = ("chatcmpl", "chat.completion.chunk", "chat.completion")


class ChatExchange:
    """One request for a chat completion."""

    def __init__(self, service: Service, fields: ChatFields, session: str | None) -> None:
        if fields.top_logprobs is not None and not fields.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        self._service, self._fields, self._session = service, fields, session
        self.prompts: list[Prompt] = [fields.messages]
        self.samples, self.streams = fields.n or 1, bool(fields.stream)
        self._chunks = Chunks(service, KINDS, fields.stream_options, self.samples)
        self._runs: list[Running] = []

    def settings(self) -> Object:
        fields = self._fields
        found = settings_of(fields, self._session)
        if fields.logprobs:
            found["logprobs"] = fields.top_logprobs or 0
        if fields.reasoning_effort is not None:
            found["chat_template_kwargs"] = {"reasoning_effort": fields.reasoning_effort} | found.get(
                "chat_template_kwargs", {}
            )
        if fields.prediction is not None:
            found["prediction"] = predicted_text(fields.prediction)
        self._plan = tool_plan(
            self._service.llm.tokenizer,
            fields.tools,
            fields.tool_choice,
            fields.parallel_tool_calls,
            format_settings(fields, fields.response_format),
        )
        found = self._plan.settings | found
        context = self._service.llm.limits.context
        return length_limit(found, context, context)

    def begin(self, runs: list[Running]) -> None:
        self._runs = runs
        self._parsers: list[Parser] = [self._plan.parser() for _ in runs]

    def opening(self) -> bytes:
        ids = {"prompt_token_ids": self._runs[0].request.prompt} if self._fields.return_token_ids else {}
        first = [self._choice(index, {"role": "assistant", "content": ""}) for index in range(len(self._runs))]
        return b"".join(sse.data(self._chunks.one([choice], self._runs, **ids)) for choice in first)

    def chunk(self, news: News) -> bytes:
        index = news.output.index
        parts = [part for events in by_round(news, self._fields) for part in self._round(index, events)]
        if news.ended:
            parts += [self._frame(index, delta) for delta in self._parsers[index].finish()]
            choice = self._choice(index, {}, finish_reason=self._reason(index), stop_reason=news.output.run.stop_reason)
            parts.append(sse.data(self._chunks.one([choice], self._runs)))
        return b"".join(parts)

    def _round(self, index: int, events: list[Event]) -> list[bytes]:
        """Return the events of a round. What it tells besides text goes with the first delta, an empty one if need be."""
        deltas = self._parsers[index].push("".join(event.text for event in events))
        entries, about = entries_of(events), traced(events, self._fields)
        ids = {"token_ids": tokens_of(events)} if self._fields.return_token_ids else {}
        if not deltas and (entries or about or ids):
            deltas = [{"content": ""}]
        frames = []
        for delta in deltas:
            logprobs = {"content": of_chat(self._service.llm.tokenizer, entries), "refusal": None} if entries else None
            frames.append(self._frame(index, delta, about, logprobs=logprobs, **ids))
            entries, about, ids = [], {}, {}
        return frames

    def _frame(self, index: int, delta: Object, about: Object | None = None, **more: Any) -> bytes:
        return sse.data(self._chunks.one([self._choice(index, delta, **more)], self._runs, **about or {}))

    def _choice(self, index: int, delta: Object, **more: Any) -> Object:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def _reason(self, index: int) -> str | None:
        reason = self._runs[index].finish_reason
        return "tool_calls" if self._parsers[index].called and reason == "stop" else reason

    def closing(self) -> bytes:
        last = self._chunks.last(self._runs)
        return (b"" if last is None else sse.data(last)) + sse.DONE

    def failure(self, refusal: Refusal) -> bytes:
        return sse.data(refusal.content())

    def whole(self) -> Object:
        choices = [self._message(index, run) for index, run in enumerate(self._runs)]
        ids = {"prompt_token_ids": self._runs[0].request.prompt} if self._fields.return_token_ids else {}
        return self._chunks.whole(choices, self._runs) | ids

    def _message(self, index: int, run: Running) -> Object:
        parser = self._parsers[index]
        message = merged([*parser.push(run.text), *parser.finish()])
        entries = of_chat(self._service.llm.tokenizer, run.logprobs)
        logprobs = {"content": entries, "refusal": None} if self._fields.logprobs else None
        ids = {"token_ids": run.tokens} if self._fields.return_token_ids else {}
        reason = {"finish_reason": self._reason(index), "stop_reason": run.stop_reason}
        return {"index": index, "message": message, "logprobs": logprobs, **reason, **ids}


def predicted_text(prediction: Object) -> str:
    """Return the text of OpenAI's `prediction`: {"type": "content", "content": a text, or text parts}."""
    content = prediction.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if prediction.get("type") != "content" or not all(isinstance(text, str) for text in texts):
        raise Refusal(400, 'prediction must be {"type": "content", "content": a text or text parts}', param="prediction")
    return "".join(text for text in texts if isinstance(text, str))
