"""POST /v1/completions: texts or token ids -> prompts, as they are; rounds -> chunks or texts.

With `echo` an output begins with its prompt, whose log-probabilities come too. Choices are numbered prompt by prompt.
"""

from __future__ import annotations

from foreword.engine.request import Event, Logprob, Running
from foreword.requests import Prompt, listed
from foreword.serve import sse
from foreword.serve.chat import format_settings, predicted_text
from foreword.serve.errors import Refusal
from foreword.serve.exchange import Chunks, by_round, length_limit, tokens_of, traced
from foreword.serve.fields import CompletionFields, Object, settings_of
from foreword.serve.flow import News
from foreword.serve.logprobs import entries_of, of_completion
from foreword.serve.service import Service

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
        if fields.response_format is not None:
            found |= format_settings(fields.response_format)
        return length_limit(found, self._service.llm.limits.context, DEFAULT_TOKENS)

    def begin(self, runs: list[Running]) -> None:
        self._runs = runs
        self._offsets = [0] * len(runs)  # characters of each output so far
        self._echoes = [bool(self._fields.echo)] * len(runs)  # the prompt is still to be written

    def opening(self) -> bytes:
        return b""

    def chunk(self, news: News) -> bytes:
        index = news.output.index
        parts = [self._round(index, events) for events in by_round(news, self._fields)]
        if news.ended:
            run = news.output.run
            parts.append(self._frame(self._choice(index, "", None, run.finish_reason, run.stop_reason)))
        return b"".join(parts)

    def _round(self, index: int, events: list[Event]) -> bytes:
        """Return the event of a round, or nothing if it has nothing to tell."""
        run, begins = self._runs[index], self._echoes[index]
        entries: list[Logprob | None] = [*entries_of(events)]
        tokens, text = tokens_of(events), "".join(event.text for event in events)
        if begins:
            self._echoes[index] = False
            entries, tokens, text = [*self._of_prompt(run), *entries], [*run.request.prompt, *tokens], self._prompt(run) + text
        logprobs = self._logprobs(index, entries, tokens)
        about = traced(events, self._fields)
        ids = {"token_ids": tokens_of(events)} if self._fields.return_token_ids else {}
        if not (text or about or ids or (logprobs and tokens)):
            return b""
        return self._frame(self._choice(index, text, logprobs, None, None) | ids, about)

    def _frame(self, choice: Object, about: Object | None = None) -> bytes:
        return sse.data(self._chunks.one([choice], self._runs, **about or {}))

    def _choice(self, index: int, text: str, logprobs: Object | None, finish: str | None, stop: str | int | None) -> Object:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    def _of_prompt(self, run: Running) -> list[Logprob | None]:
        """Return the log-probabilities of the prompt; none if they were not asked for."""
        return [] if self._fields.logprobs is None else [None, *run.prompt_logprobs]

    def _prompt(self, run: Running) -> str:
        return self._service.llm.tokenizer.decode(run.request.prompt)

    def _logprobs(self, index: int, entries: list[Logprob | None], tokens: list[int]) -> Object | None:
        if self._fields.logprobs is None:
            return None
        texts = [self._service.llm.tokenizer.token_text(token) for token in tokens]
        found = of_completion(entries, texts, self._offsets[index])
        self._offsets[index] += sum(map(len, texts))
        return found

    def closing(self) -> bytes:
        last = self._chunks.last(self._runs)
        return (b"" if last is None else sse.data(last)) + sse.DONE

    def failure(self, refusal: Refusal) -> bytes:
        return sse.data(refusal.content())

    def whole(self) -> Object:
        return self._chunks.whole([self._text(index, run) for index, run in enumerate(self._runs)], self._runs)

    def _text(self, index: int, run: Running) -> Object:
        entries: list[Logprob | None] = [*run.logprobs]
        tokens, text = run.tokens, run.text
        if self._fields.echo:
            entries, tokens, text = [*self._of_prompt(run), *entries], [*run.request.prompt, *tokens], self._prompt(run) + text
        logprobs = self._logprobs(index, entries, tokens)
        choice = self._choice(index, text, logprobs, run.finish_reason, run.stop_reason)
        ids = {"token_ids": run.tokens, "prompt_token_ids": run.request.prompt} if self._fields.return_token_ids else {}
        return choice | ids
