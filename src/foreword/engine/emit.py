"""EMIT: tokens to the host, stop strings, finished sequences. The only file that reads from the device.

On a GPU, rounds are read while the next ones run. A sequence that the host then finds finished may have continued in those;
that output is dropped. Hundreds of sequences run at a time, so a request that has only tokens to report costs the host
three appends per round, and no event is made of it unless somebody asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from foreword.core.scores import Emission
from foreword.engine.request import Event, Logprob, Request, Running
from foreword.errors import NumericsError
from foreword.ops.device import mark


class Launched:
    """Rounds that run, or have run: whom they are for, and what they decided, on its way to the host."""

    def __init__(self, runs: list[Running]) -> None:
        self.runs = runs
        self.alone = [run.spoiled for run in runs]  # launched without guesses, on a scratch that was wiped
        self.emissions: list[Emission] = []
        self.arrived: torch.cuda.Event | None = None

    def take(self, emission: Emission) -> None:
        """One more round."""
        self.emissions.append(emission.fetched())
        self.arrived = mark(emission.count.device)

    def wait(self) -> list[Emission]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.emissions


def emit(launched: Launched, ends: set[int]) -> dict[Running, Event]:
    """Hand every text its tokens. Returns the events of those who end, fail, stream or want logprobs.

    Where the target answered NaN to the text alone, it is given up.
    """
    rounds = launched.wait()
    if len(rounds) > 1 and all(run.quiet for run in launched.runs) and not any(one.broken.any() for one in rounds):
        return _emit_together(launched.runs, rounds, ends)
    told: dict[Running, Event] = {}
    for one in rounds:
        told |= _emit_round(launched, one, ends)
    return told


def _emit_together(runs: list[Running], rounds: list[Emission], ends: set[int]) -> dict[Running, Event]:
    """Several rounds in which there is nothing to tell of but tokens and ends: everybody is visited once."""
    count = np.stack([one.count.numpy() for one in rounds], 1)  # [b, rounds], as the next two
    drafted = np.stack([one.drafted.numpy() for one in rounds], 1)
    ended = np.stack([one.ended.numpy() for one in rounds], 1)
    lasted = np.where(ended.any(1), ended.argmax(1) + 1, len(rounds))
    tokens = np.concatenate([one.tokens.numpy() for one in rounds], 1)
    found = tokens[np.concatenate([_kept(one) for one in rounds], 1)].tolist()
    columns: list[Any] = [column.tolist() for column in (count.sum(1), count, drafted, ended.any(1), lasted)]
    told, stop = {}, 0
    for running, new, accepted, checked, at_end, last in zip(runs, *columns, strict=False):
        start, stop = stop, stop + new
        if running.finish_reason is not None:
            continue
        running.accepted += accepted[:last]
        running.drafted += checked[:last]
        if at_end:
            told[running] = _write(running, found[start:stop], True, ends)
        else:
            running.tokens += found[start:stop]
    return told


def _emit_round(launched: Launched, emission: Emission, ends: set[int]) -> dict[Running, Event]:
    columns = (column.tolist() for column in (emission.count, emission.drafted, emission.ended, emission.broken))
    tokens, told, stop = _in_a_row(emission), {}, 0
    for index, (running, count, drafted, ended, broken) in enumerate(zip(launched.runs, *columns, strict=False)):
        start, stop = stop, stop + count
        if running.finish_reason is not None:  # found finished after this round was launched
            continue
        if broken:
            told[running] = _fail(running, drafted > 0, launched.alone[index])
            continue
        running.accepted.append(count)
        running.drafted.append(drafted)
        if running.quiet and not ended:
            running.tokens += tokens[start:stop]
            continue
        event = told[running] = _write(running, tokens[start:stop], ended, ends)
        if running.request.sampling.logprobs is not None:
            running.logprobs += _logprobs(emission, index, event.tokens, running.request)
    return told


def all_events(launched: Launched, told: dict[Running, Event]) -> list[Event]:
    """What a round brought, for everybody it was read for; `told` is what `emit` had to say of it."""
    served = (running for running in launched.runs if running in told or not running.done)
    return [told.get(running) or _tokens_alone(running) for running in served]


def _tokens_alone(running: Running) -> Event:
    return Event(running, running.tokens[len(running.tokens) - running.accepted[-1] :], "")


def _in_a_row(emission: Emission) -> list[int]:
    """The new tokens of all batch rows, one batch row behind the other."""
    found: list[int] = emission.tokens.numpy()[_kept(emission)].tolist()
    return found


def _kept(emission: Emission) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[b, D+1]: which tokens are new text."""
    return np.arange(emission.tokens.shape[1]) < emission.count.numpy()[:, None]


def _fail(running: Running, drafted: bool, alone: bool) -> Event:
    """NaN, and whose fault it is: a masked row counts 0 times its value, so a NaN in any guess spoils the rows beside it.
    A text with guesses gets another round without them."""
    running.accepted.append(0)
    running.drafted.append(0)
    if drafted or (not alone and (running.spoiled or any(running.drafted))):
        running.spoiled = True
    else:
        running.finish_reason = "abort"
        running.error = NumericsError(
            f"the target answered NaN after {len(running.tokens)} new tokens; check the weights, "
            "or load the model in a wider dtype (dtype='float32')"
        )
    return Event(running, [], "")


def _write(running: Running, new: list[int], ended: bool, ends: set[int]) -> Event:
    """Append a round's tokens, cut where a stop string is complete or a stop token stands."""
    stream, text = running.request.stream, ""
    new, final = _cut(running, new, ended, ends)
    if stream is not None:
        left_out = int(final and not stream.include_stop)  # the token that ends a text is not part of it
        pushed = stream.push(new[: len(new) - left_out])
        text = pushed.text
        if pushed.stopped:
            new, final, running.finish_reason = new[: pushed.used], False, "stop"
    running.tokens += new
    if final:
        running.finish_reason = "stop"
        running.stop_reason = None if _is_end(running, new[-1], ends) else new[-1]
    elif ended and not running.done:
        running.finish_reason = "length"
        running.stop_reason = "context" if len(running.tokens) < running.request.max_new_tokens else None
    if running.done and stream is not None:
        text += stream.flush()
        if stream.stopped:  # the last held-back text may complete a stop string
            running.finish_reason, running.stop_reason = "stop", stream.stop_string
    running.text += text
    event = Event(running, new, text)
    if stream is not None:  # kept for nobody, hundreds of texts side by side would be the garbage collector's work
        running.events.append(event)
    return event


def _cut(running: Running, new: list[int], ended: bool, ends: set[int]) -> tuple[list[int], bool]:
    """A round's tokens up to the one that ends the text, and whether there is such a token."""
    stop = next((place for place, token in enumerate(new) if token in running.stops), None) if running.stops else None
    if stop is not None:
        return new[: stop + 1], True
    return new, ended and bool(new) and _is_end(running, new[-1], ends)


def _is_end(running: Running, token: int, ends: set[int]) -> bool:
    return token in ends and not running.request.ignore_eos


def _logprobs(emission: Emission, index: int, tokens: list[int], request: Request) -> list[Logprob]:
    assert emission.logprobs is not None and emission.top_tokens is not None and emission.top_logprobs is not None
    chosen = emission.logprobs[index, : len(tokens)].tolist()
    best = (part[index, : len(tokens), : request.sampling.logprobs] for part in (emission.top_tokens, emission.top_logprobs))
    return told_logprobs(request, tokens, chosen, *(part.tolist() for part in best))


def told_logprobs(
    request: Request, tokens: list[int], chosen: list[float], ids: list[list[int]], values: list[list[float]]
) -> list[Logprob]:
    """What a caller is told of tokens: their log-probabilities, and `ids` and `values` of the likeliest at each place."""
    text = request.stream.token_text if request.stream is not None else lambda token: ""
    rows = zip(tokens, chosen, ids, values, strict=True)
    return [
        Logprob(token, logprob, tuple(zip(top, numbers, strict=True)), text(token), tuple(map(text, top)))
        for token, logprob, top, numbers in rows
    ]
