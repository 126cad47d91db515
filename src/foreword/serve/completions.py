"""POST /v1/completions: texts or token ids -> prompts, as they are; rounds -> chunks or texts.

With `echo` an output begins with its prompt, whose log-probabilities come too. Choices are numbered prompt by prompt.
"""

from __future__ import annotations

from foreword.engine.request import Event, Logprob, Running
from foreword.requests import Prompt, listed
from foreword.serve import sse
from foreword.serve.chat import predicted_text
from foreword.serve.errors import Refusal
from foreword.serve.exchange import Chunks, by_round, length_limit, tokens_of, traced
from foreword.serve.fields import CompletionFields, Object, settings_of
from foreword.serve.flow import News
from foreword.serve.logprobs import entries_of, of_completion
from foreword.serve.service import Service
from foreword.serve.structured import format_settings

KINDS = ("cmpl", "text_completion", "text_completion")
DEFAULT_TOKENS = 16  # OpenAI's


class CompletionExchange:
    """One request for completions."""

    def __init__(self, service: Service, fields: CompletionFields, session: str | None) -> None:
        self._service, self._fields, self._session = service, fields, session
        self.prompts: list[Prompt] = listed(fields.prompt)
        self.samples, self.streams = fields.n or 1, bool(fields.stream)
        self._chunks = Chunks(service, KINDS, fields.stream_options, self.samples)
        self._runs: list[Running] = []

    def settings(self) -> Object:
        fields = self._fields
        found = settings_of(fields, self._session) | {"chat": False}
        if fields.logprobs is not None:
            found["logprobs"] = fields.logprobs
            found |= {"prompt_logprobs": fields.logprobs} if fields.echo else {}
        if fields.prediction is not None:
            found["prediction"] = predicted_text(fields.prediction)
        found |= format_settings(fields, fields.response_format)
        return length_limit(found, self._service.llm.limits.context, DEFAULT_TOKENS)

    def begin(self, runs: list[Running]) -> None:
        self._runs = runs
        self._offsets = [0] * len(runs)  # characters of each output so far
        self._unwritten: dict[int, list[Event]] = {}  # events that wait for the prompt before them
        if self._fields.echo:
            self._unwritten = {index: [] for index in range(len(runs))}

    def opening(self) -> bytes:
        return b""

    def chunk(self, news: News) -> bytes:
        index = news.output.index
        if index in self._unwritten and not self._can_echo(news):
            self._unwritten[index] += news.events
            return b""
        parts = [self._round(index, events) for events in by_round(news, self._fields)]
        if news.ended:
            run = news.output.run
            parts.append(self._frame(self._choice(index, "", None, run.finish_reason, run.stop_reason)))
        return b"".join(parts)

    def _can_echo(self, news: News) -> bool:
        """Return whether the prompt can be written. Its log-probabilities may come as late as the end."""
        run = news.output.run
        return self._fields.logprobs is None or len(run.prompt_logprobs) == len(run.request.prompt) - 1 or news.ended

    def _round(self, index: int, events: list[Event]) -> bytes:
        """Return the event of a round, or nothing if it has nothing to tell."""
        echoes = index in self._unwritten
        events = [*self._unwritten.pop(index, []), *events]
        found = self._text_of(index, "".join(event.text for event in events), tokens_of(events), entries_of(events), echoes)
        about = traced(events, self._fields)
        ids = {"token_ids": tokens_of(events)} if self._fields.return_token_ids else {}
        if not (found["text"] or about or ids or (found["logprobs"] and found["logprobs"]["tokens"])):
            return b""
        return self._frame(self._choice(index, **found) | ids, about)

    def _text_of(self, index: int, text: str, tokens: list[int], entries: list[Logprob], echoes: bool) -> Object:
        """Return a part of an output and its log-probabilities. `echoes`: with the prompt before it."""
        run, tokenizer = self._runs[index], self._service.llm.tokenizer
        whole: list[Logprob | None] = [*entries]
        if echoes:
            text = tokenizer.decode(run.request.prompt) + text
            whole, tokens = [None, *run.prompt_logprobs, *entries], [*run.request.prompt, *tokens]
        if self._fields.logprobs is None:
            return {"text": text, "logprobs": None}
        texts = [tokenizer.token_text(token) for token in tokens]
        found = of_completion(whole, texts, self._offsets[index])
        self._offsets[index] += sum(map(len, texts))
        return {"text": text, "logprobs": found}

    def _frame(self, choice: Object, about: Object | None = None) -> bytes:
        return sse.data(self._chunks.one([choice], self._runs, **about or {}))

    def _choice(
        self, index: int, text: str, logprobs: Object | None, finish: str | None = None, stop: str | int | None = None
    ) -> Object:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    def closing(self) -> bytes:
        last = self._chunks.last(self._runs)
        return (b"" if last is None else sse.data(last)) + sse.DONE

    def failure(self, refusal: Refusal) -> bytes:
        return sse.data(refusal.content())

    def whole(self) -> Object:
        return self._chunks.whole([self._text(index, run) for index, run in enumerate(self._runs)], self._runs)

    def _text(self, index: int, run: Running) -> Object:
        found = self._text_of(index, run.text, run.tokens, run.logprobs, bool(self._fields.echo))
        choice = self._choice(index, **found, finish=run.finish_reason, stop=run.stop_reason)
        ids = {"token_ids": run.tokens, "prompt_token_ids": run.request.prompt} if self._fields.return_token_ids else {}
        return choice | ids
