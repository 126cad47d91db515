"""EMIT: a round's tokens -> the host, into each request's output. text/stream.py makes them text and finds stop strings.

Only this file reads the results of rounds from the device. On a GPU, the host reads a round while the next ones run. A
sequence that it then finds finished may have continued in those rounds; that output is dropped. Hundreds of sequences run
at a time. So a request that has only tokens to report costs the host three appends per round, and gets an event only if a
caller asks for one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from foreword.core.scores import Emission
from foreword.engine.grammar import Grammars
from foreword.engine.request import Event, Finish, Logprob, Request, Running
from foreword.engine.round_trace import RoundTrace
from foreword.errors import GrammarError, NumericsError
from foreword.ops.device import mark


class Launched:
    """Launched rounds: the requests they serve, and their emissions, which are on their way to the host."""

    def __init__(self, runs: list[Running]) -> None:
        self.runs = runs
        self.without_draft = [run.draft_was_nan for run in runs]  # launched without a draft, on wiped scratch rows
        self.emissions: list[Emission] = []
        self.arrived: torch.cuda.Event | None = None

    def take(self, emission: Emission) -> None:
        """Add a round."""
        self.emissions.append(emission.fetched())
        self.arrived = mark(emission.count.device)

    def wait(self) -> list[Emission]:
        """Wait until the emissions are on the host, and return them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.emissions


def emit(launched: Launched, ends: set[int], grammars: Grammars) -> dict[Running, Event]:
    """Append the new tokens to every request. Return the events of the requests that end, fail, stream or want logprobs.

    A request is aborted if the target answered NaN to its sequence without a draft, or if its grammar refuses a token.
    """
    rounds = launched.wait()
    if len(rounds) > 1 and all(run.tokens_only for run in launched.runs) and not any(one.broken.any() for one in rounds):
        return _emit_together(launched.runs, rounds, ends)
    events: dict[Running, Event] = {}
    for one in rounds:
        events |= _emit_round(launched, one, ends, grammars)
    return events


def _emit_together(runs: list[Running], rounds: list[Emission], ends: set[int]) -> dict[Running, Event]:
    """Emit several rounds that bring only tokens and ends, visiting each request once."""
    count = np.stack([one.count.numpy() for one in rounds], 1)  # [b, rounds], as the next two
    drafted = np.stack([one.drafted.numpy() for one in rounds], 1)
    ended = np.stack([one.ended.numpy() for one in rounds], 1)
    lasted = np.where(ended.any(1), ended.argmax(1) + 1, len(rounds))
    tokens = np.concatenate([one.tokens.numpy() for one in rounds], 1)
    found = tokens[np.concatenate([_kept(one) for one in rounds], 1)].tolist()
    columns: list[Any] = [column.tolist() for column in (count.sum(1), count, drafted, ended.any(1), lasted)]
    events, stop = {}, 0
    for running, new, accepted, checked, at_end, last in zip(runs, *columns, strict=False):
        start, stop = stop, stop + new
        if running.finish_reason is not None:
            continue
        running.accepted += accepted[:last]
        running.drafted += checked[:last]
        if at_end:
            events[running] = write(running, found[start:stop], True, ends)
            publish(events[running])
        else:
            running.tokens += found[start:stop]
    return events


def _emit_round(launched: Launched, emission: Emission, ends: set[int], grammars: Grammars) -> dict[Running, Event]:
    columns = (column.tolist() for column in (emission.count, emission.drafted, emission.ended, emission.broken))
    tokens, events, stop = _new_tokens(emission), {}, 0
    for index, (running, count, drafted, ended, broken) in enumerate(zip(launched.runs, *columns, strict=False)):
        start, stop = stop, stop + count
        if running.finish_reason is not None:  # found finished after this round was launched
            continue
        if broken:
            events[running] = _fail(running, drafted > 0, launched.without_draft[index])
            continue
        if not grammars.follow(running.slot, tokens[start:stop]):
            events[running] = _refuse(running)
            continue
        running.accepted.append(count)
        running.drafted.append(drafted)
        if not ended and (running.tokens_only or not count):  # a round of a pipeline may decide nothing
            running.tokens += tokens[start:stop]
            continue
        event = events[running] = write(running, tokens[start:stop], ended, ends)
        if running.request.sampling.logprobs is not None:
            event.logprobs = _logprobs(emission, index, event.tokens, running.request)
            running.logprobs += event.logprobs
        if emission.predicted is not None:
            event.predicted = min(int(emission.predicted[index]), len(event.tokens))
            running.predicted += event.predicted
        if running.request.trace_rounds:
            event.draft = _trace(emission, index, running.request)
        publish(event)
    return events


def all_events(launched: Launched, events: dict[Running, Event]) -> list[Event]:
    """Return one event per request that the round served. `events`: those that `emit` returned."""
    served = (running for running in launched.runs if running in events or not running.done)
    return [events.get(running) or _tokens_event(running) for running in served]


def _tokens_event(running: Running) -> Event:
    """Return the event of a request that only got tokens in its last round."""
    return Event(running, running.tokens[len(running.tokens) - running.accepted[-1] :], "")


def _new_tokens(emission: Emission) -> list[int]:
    """Return the new tokens of all batch rows, one batch row after the other."""
    found: list[int] = emission.tokens.numpy()[_kept(emission)].tolist()
    return found


def _kept(emission: Emission) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which tokens are new output: [b, D+1] bool."""
    return np.arange(emission.tokens.shape[1]) < emission.count.numpy()[:, None]


def _fail(running: Running, drafted: bool, without_draft: bool) -> Event:
    """Handle a NaN. A masked row has weight 0, and 0 x NaN is NaN, so a NaN in one draft row spreads to its neighbours. A
    request that had a draft therefore gets another round without one. A request without a draft is aborted."""
    running.accepted.append(0)
    running.drafted.append(0)
    if drafted or (not without_draft and (running.draft_was_nan or any(running.drafted))):
        running.draft_was_nan = True
    else:
        running.error = NumericsError(
            f"the target answered NaN after {len(running.tokens)} new tokens; check the weights, "
            "or load the model in a wider dtype (dtype='float32')"
        )
        running.finish_reason = "abort"
    return Event(running, [], "")


def _refuse(running: Running) -> Event:
    """Abort a request whose grammar does not allow what was chosen: then it left no token to choose."""
    running.accepted.append(0)
    running.drafted.append(0)
    running.error = GrammarError(
        f"after {len(running.tokens)} new tokens no token is left that the grammar allows; change the grammar, or leave out "
        "settings that bar tokens, such as allowed_token_ids or bad_words"
    )
    running.finish_reason = "abort"
    return Event(running, [], "")


def write(running: Running, new: list[int], ended: bool, ends: Collection[int]) -> Event:
    """Append a round's tokens, up to a completed stop string or a stop token. The event is not published yet.

    ended: the round reached an end token or a limit. ends: the end tokens.
    """
    new, final = _cut(running, new, ended, ends)
    finish = None
    if final:
        finish = Finish("stop", None if _is_end(running, new[-1], ends) else new[-1])
    elif ended:
        is_full = len(running.tokens) + len(new) < running.request.max_new_tokens
        finish = Finish("length", "context" if is_full else None)
    return append(running, new, finish)


def append(running: Running, new: list[int], finish: Finish | None) -> Event:
    """Append decided tokens, and their text if the request has a stream. A stop string may end the output before `finish`
    does. If an end token or stop token ends it, that token is the last of `new`. The event is not published yet."""
    stream, text = running.request.stream, ""
    if stream is not None:
        left_out = int(finish is not None and finish.reason == "stop" and not stream.include_stop)
        pushed = stream.push(new[: len(new) - left_out])  # the token that ends the output is not part of its text
        text = pushed.text
        if pushed.stopped:
            new, finish = new[: pushed.used], Finish("stop")
    running.tokens += new
    if finish is not None and stream is not None:
        text += stream.flush()
        if stream.stopped:  # the text that was held back may complete a stop string
            finish = Finish("stop", stream.stop_string)
    running.text += text
    return Event(running, new, text, finish=finish)


def publish(event: Event) -> None:
    """Show a complete event to callers, and then that it ends its output. They may read it in another thread at once."""
    running = event.running
    if running.request.stream is not None:  # else nobody reads events, and those of hundreds of requests burden the GC
        running.events.append(event)
    if event.finish is not None:
        running.stop_reason, running.finish_reason = event.finish.stop_reason, event.finish.reason


def _cut(running: Running, new: list[int], ended: bool, ends: Collection[int]) -> tuple[list[int], bool]:
    """Return a round's tokens up to the one that ends the output, and whether there is such a token."""
    stop = next((index for index, token in enumerate(new) if token in running.stops), None) if running.stops else None
    if stop is not None:
        return new[: stop + 1], True
    return new, ended and bool(new) and _is_end(running, new[-1], ends)


def _is_end(running: Running, token: int, ends: Collection[int]) -> bool:
    return token in ends and not running.request.ignore_eos


def _logprobs(emission: Emission, index: int, tokens: list[int], request: Request) -> list[Logprob]:
    assert emission.logprobs is not None and emission.top_tokens is not None and emission.top_logprobs is not None
    chosen = emission.logprobs[index, : len(tokens)].tolist()
    best = (top[index, : len(tokens), : request.sampling.logprobs] for top in (emission.top_tokens, emission.top_logprobs))
    return logprob_entries(request, tokens, chosen, *(top.tolist() for top in best))


def _trace(emission: Emission, index: int, request: Request) -> RoundTrace:
    assert emission.nodes is not None and emission.chances is not None and emission.path is not None
    size, count = int(emission.drafted[index]) + 1, int(emission.count[index])
    tokens, parents, origins = emission.nodes[index, :size].T.tolist()
    path, chances = emission.path[index, :count].tolist(), emission.chances[index, 1:size].tolist()
    trace = RoundTrace(tokens, parents, origins, [1.0, *chances], path, int(emission.tokens[index, count - 1]))
    return with_texts(trace, request)


def with_texts(trace: RoundTrace, request: Request) -> RoundTrace:
    """Add the texts of tokens to a trace, if the request has a tokenizer."""
    return trace if request.stream is None else trace.spelled(request.stream.token_text)


def logprob_entries(
    request: Request, tokens: list[int], chosen: list[float], ids: list[list[int]], values: list[list[float]]
) -> list[Logprob]:
    """Make one `Logprob` per token: its log-probability, and `ids` and `values` of the likeliest tokens at its position."""
    text = request.stream.token_text if request.stream is not None else lambda token: ""
    rows = zip(tokens, chosen, ids, values, strict=True)
    return [
        Logprob(token, logprob, tuple(zip(top, numbers, strict=True)), text(token), tuple(map(text, top)))
        for token, logprob, top, numbers in rows
    ]
