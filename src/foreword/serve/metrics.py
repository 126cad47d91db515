"""Metrics for Prometheus, in a registry of their own. GET /metrics shows them.

The four counters of speculation have vLLM's names and meanings (`vllm:spec_decode_*`), so that its dashboards read them; all
others begin with `foreword:`. A round counts as soon as its client could have seen it. No label holds what a client wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foreword.engine.request import Running
from foreword.errors import NumericsError
from foreword.serve.errors import ClientGone, Refusal
from foreword.serve.flow import News

if TYPE_CHECKING:
    from foreword.serve.async_llm import AsyncLLM

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, *SECONDS[:11])
PER_ROUND = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
ABORTS = ("client", "timeout", "drain", "nan", "error")
MOST_POSITIONS = 32  # a counter each; later positions share the last one


class Metrics:
    """All metrics of one server. The name of its model is a label of every metric."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.registry = CollectorRegistry()
        self._llm, self._model = llm, llm.model
        self._speculation()
        self._requests()
        self._engine()

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._labelled(Counter, name, text, *labels)

    def _labelled(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        made = kind(name, text, ["model_name", *labels], registry=self.registry, **options)
        return made if labels else made.labels(self._model)

    def _speculation(self) -> None:
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds with a draft.")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        by_position = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted a draft token at this position.",
            "position",
        )
        self.by_position = [by_position.labels(self._model, str(position)) for position in range(MOST_POSITIONS)]
        self.rounds = self._counter("foreword:rounds", "Rounds, counted once per output in them.")
        self.rows = self._counter("foreword:rows_checked", "Rows of verify passes: draft tokens and roots.")
        self.per_round = self._labelled(
            Histogram, "foreword:tokens_per_round", "Tokens that a round decided.", buckets=PER_ROUND
        )
        self.nan_rounds = self._counter("foreword:nan_rounds", "Rounds in which the target answered NaN.")

    def _requests(self) -> None:
        self.prompt_tokens = self._counter("foreword:prompt_tokens", "Tokens of prompts.")
        self.reused_tokens = self._counter("foreword:reused_tokens", "Tokens of prompts that were still in the cache.")
        self.generated_tokens = self._counter("foreword:generation_tokens", "Tokens generated.")
        times = {
            "first_token": ("time_to_first_token", "From the request to its first token.", SECONDS),
            "e2e": ("e2e_request_latency", "From the request to its last token.", SECONDS),
            "between_rounds": ("inter_round", "Between two rounds of an output.", SHORT_SECONDS),
            "between_tokens": ("inter_token", "The same, divided by the tokens of the round.", SHORT_SECONDS),
        }
        self.times = {
            key: self._labelled(Histogram, f"foreword:{name}_seconds", text, buckets=buckets)
            for key, (name, text, buckets) in times.items()
        }
        self._outputs = self._counter("foreword:outputs", "Outputs that ended by themselves, by reason.", "reason")
        self._aborts = self._counter("foreword:aborts", "Outputs that were ended before their time, by reason.", "reason")
        for reason in ABORTS:  # so that each is there from the start, at 0
            self._aborts.labels(self._model, reason)
        self._responses = self._counter("foreword:responses", "Answers, by endpoint and status.", "endpoint", "status")
        self.unknown_fields = self._counter("foreword:unknown_fields", "Fields of requests that nobody knows; ignored.")

    def _engine(self) -> None:
        self._running = self._labelled(Gauge, "foreword:requests_running", "Outputs in a slot.")
        self._waiting = self._labelled(Gauge, "foreword:requests_waiting", "Outputs that wait for a slot.")
        self._rows_used = self._labelled(Gauge, "foreword:cache_rows_used", "Cache rows that running outputs use.")
        self._rows_in_all = self._labelled(Gauge, "foreword:cache_rows", "Cache rows of all slots.")
        self._tasks = self._labelled(Gauge, "foreword:tasks", "Tasks of the server's event loop.")
        self._ready = self._labelled(Gauge, "foreword:ready", "1 if the engine serves requests.")

    def aborted(self, reason: str, count: int = 1) -> None:
        self._aborts.labels(self._model, reason).inc(count)

    def answered(self, endpoint: str, status: int) -> None:
        self._responses.labels(self._model, endpoint, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        health = self._llm.health
        self._running.set(health.load.running)
        self._waiting.set(health.load.waiting)
        self._rows_used.set(health.load.cache_rows)
        self._rows_in_all.set(self._llm.cache_rows)
        self._tasks.set(len(asyncio.all_tasks()))
        self._ready.set(health.state == "ready")
        return generate_latest(self.registry)

    def follow(self, runs: Sequence[Running], since: float) -> Counting:
        """Follow the runs of a request that came at `since`, by `perf_counter`."""
        return Counting(self, runs, since)

    def ended(self, reason: str) -> None:
        self._outputs.labels(self._model, reason).inc()


@dataclass
class Seen:
    """How much of a run is counted."""

    run: Running
    rounds: int = 0
    at: float | None = None  # when its last round came
    ended: bool = False


class Counting:
    """Counts what runs do while they run. In a `with` block: what has not ended when an error leaves it was aborted."""

    def __init__(self, metrics: Metrics, runs: Sequence[Running], since: float) -> None:
        self.runs, self._metrics, self._since = runs, metrics, since
        self._seen = [Seen(run) for run in runs]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        left = [one for one in self._seen if not one.ended]
        if error is not None and left:
            self._metrics.aborted(_reason(error), len(left))
        self._metrics.nan_rounds.inc(sum(one.run.draft_was_nan for one in self._seen) + isinstance(error, NumericsError))

    def take(self, news: News) -> None:
        """Count what is new of an output."""
        one = self._seen[news.output.index]
        rounds = self._count_rounds(one)
        if news.events:
            self._time(one, max(rounds, 1), sum(len(event.tokens) for event in news.events))
        if news.ended:
            one.ended = True
            self._metrics.times["e2e"].observe(perf_counter() - self._since)
            self._metrics.ended(one.run.finish_reason or "abort")

    def _time(self, one: Seen, rounds: int, tokens: int) -> None:
        to, now = self._metrics, perf_counter()
        if one.at is None:
            to.prompt_tokens.inc(len(one.run.request.prompt))
            to.reused_tokens.inc(one.run.reused)
            to.times["first_token"].observe(now - self._since)
        else:
            to.times["between_rounds"].observe((now - one.at) / rounds)
            to.times["between_tokens"].observe((now - one.at) / max(tokens, 1))
        one.at = now
        to.generated_tokens.inc(tokens)

    def _count_rounds(self, one: Seen) -> int:
        """Count the rounds since the last call, and return how many there are. The engine may be about to add one, so both
        lists are read once."""
        to, drafted = self._metrics, one.run.drafted[one.rounds :]
        accepted = one.run.accepted[one.rounds : one.rounds + len(drafted)]
        rounds = list(zip(accepted, drafted, strict=False))
        one.rounds += len(rounds)
        to.rounds.inc(len(rounds))
        to.rows.inc(sum(drafted) + len(rounds))
        for kept, _ in rounds:
            to.per_round.observe(kept)
        accepted = [max(kept - 1, 0) for kept, checked in rounds if checked]
        to.drafts.inc(len(accepted))
        to.draft_tokens.inc(sum(drafted))
        to.accepted_tokens.inc(sum(accepted))
        for position in range(max(accepted, default=0)):
            to.by_position[min(position, MOST_POSITIONS - 1)].inc(sum(count > position for count in accepted))
        return len(rounds)


def _reason(error: BaseException) -> str:
    """Return why outputs were aborted, as one of few words."""
    if isinstance(error, ClientGone):
        return "client"
    if isinstance(error, NumericsError):
        return "nan"
    if isinstance(error, Refusal):
        return {503: "drain", 504: "timeout"}.get(error.status, "error")
    return "error"
