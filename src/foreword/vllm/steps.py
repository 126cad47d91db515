"""A step of vLLM as our drafters see a round: which sequences there are, and which rows of the target belong to them.

vLLM names no requests here, and moves them from place to place. So a draft is remembered by the sequence that it was for.
The rows of a step are those that vLLM computed logits for: for each request the root and its draft tokens. If their number
is not the expected one, vLLM has cut a draft or added rows, and the rows of that step are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.core.draft import Draft
from foreword.core.state import Batch, State
from foreword.ops.device import is_capturing

Tokens = np.ndarray[Any, np.dtype[np.int32]]
UNKNOWN = -1


@dataclass(frozen=True)
class VllmStep:
    """What vLLM decided in a step. All sequences include the tokens `new`."""

    new: Sequence[Sequence[int]]  # by request; none while its prompt is being read
    counts: Tokens  # [requests or more] tokens of each sequence
    tokens: Tokens  # [requests or more, context]

    @property
    def running(self) -> list[int]:
        """The requests that have all of their prompt read."""
        return [place for place, new in enumerate(self.new) if new]

    def root(self, place: int) -> int:
        """The last token that a request had before this step."""
        return int(self.tokens[place, self.counts[place] - len(self.new[place]) - 1])

    def before(self, place: int) -> bytes:
        """The sequence of a request before this step."""
        return self.tokens[place, : self.counts[place] - len(self.new[place])].tobytes()

    def after(self, place: int) -> bytes:
        return self.tokens[place, : self.counts[place]].tobytes()


class BatchState:
    """vLLM's sequences as a `State`, by their place in its batch."""

    def __init__(self, requests: int, device: torch.device) -> None:
        lengths = torch.zeros(requests, dtype=torch.long, device=device)
        self.state = State.empty(requests, 0, lengths, torch.zeros(0, dtype=torch.long, device=device))

    def of(self, step: VllmStep, with_tokens: bool = False) -> State:
        """Return the state of the running requests. `with_tokens`: the whole sequences too, on the host."""
        places, lengths = step.running, step.counts - 1
        span = int(lengths[places].max(initial=0))
        held = self.state.lengths
        held[: len(lengths)] = torch.from_numpy(lengths).to(held)
        last = step.tokens[places, lengths[places]]
        self.state.roots[places] = torch.from_numpy(last).to(held)
        state = self.state.at(Batch.of(places, span, held.device))
        return replace(state, tokens=torch.from_numpy(step.tokens[:, : span + 1])) if with_tokens else state


def chains(draft: Draft, step: VllmStep) -> list[list[int]]:
    """Return the draft tokens of every request, none for those that do not run."""
    found: list[list[int]] = [[] for _ in step.new]
    for place, tokens, size in zip(step.running, draft.tokens.tolist(), draft.size.tolist(), strict=True):
        found[place] = tokens[1:size]
    return found


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, all requests after each other."""

    hidden: Tensor  # [n, H] after the final norm
    logits: Tensor | None  # [n, V]
    tokens: list[int]  # [n] the token that each row has read; UNKNOWN for requests that do not run
    accepted: list[int]  # rows that the target agrees with, request after request
    last: list[int]  # the last accepted row of every running request


class SampledRows:
    """The rows that vLLM samples from, seen where it computes their logits."""

    def __init__(self, target_model: Any, most: int, keeps_logits: bool) -> None:
        """Wrap `target_model.compute_logits`, which vLLM calls once in every step. most: calls with more rows are others,
        such as those for the log-probabilities of a prompt. keeps_logits: a copy, since vLLM's sampler works in place."""
        self.drafts: dict[bytes, list[int]] = {}
        self._seen: tuple[Tensor, Tensor | None] | None = None
        compute = self.compute = target_model.compute_logits

        def compute_logits(hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
            logits: Tensor = compute(hidden_states, *others, **named)
            if len(hidden_states) <= most:
                self._seen = hidden_states, logits.clone() if keeps_logits else None
            return logits

        target_model.compute_logits = compute_logits

    def of(self, step: VllmStep) -> StepRows | None:
        """Return the rows of a step; None if they are not known."""
        seen, self._seen = self._seen, None
        tokens: list[int] = []
        accepted: list[int] = []
        last: list[int] = []
        for place, new in enumerate(step.new):
            if not new:
                tokens.append(UNKNOWN)
                continue
            read = [step.root(place), *self.drafts.get(step.before(place), ())]
            if len(new) > len(read):
                return None
            accepted += range(len(tokens), len(tokens) + len(new))
            last.append(accepted[-1])
            tokens += read
        return StepRows(*seen, tokens, accepted, last) if seen is not None and len(tokens) == len(seen[0]) else None

    def remember(self, step: VllmStep, drafts: list[list[int]]) -> list[list[int]]:
        """Remember the drafts that the next step verifies, and return them."""
        self.drafts = {step.after(place): drafts[place] for place in step.running}
        return drafts


class ReadRows:
    """All rows of a step, those of prompts included, seen where the target runs. vLLM's buffers still hold them when it asks
    for drafts. A pass that it replays as a CUDA graph runs no Python, so its rows are not known."""

    def __init__(self, target_model: Any) -> None:
        """Wrap `target_model.forward`, which returns the states after the final norm."""
        self._seen: tuple[Any, Any] | None = None
        run = target_model.forward

        @wraps(run)
        def forward(*given: Any, **named: Any) -> Any:
            hidden, tokens = run(*given, **named), named.get("input_ids", given[0] if given else None)
            known = isinstance(tokens, Tensor) and isinstance(
                hidden, Tensor
            )  # not so with images, or states of inner layers
            self._seen = (tokens, hidden) if known and not is_capturing(hidden.device) else None
            return hidden

        target_model.forward = forward

    def of(self, slot_mappings: Any) -> tuple[Tensor, Tensor] | None:
        """Return tokens [n] and states [n, H] of a step; None if they are not known. `slot_mappings`, as vLLM passes them:
        by layer, where the rows lie in the cache [n or more], -1 for padding."""
        seen, self._seen = self._seen, None
        if seen is None or not isinstance(slot_mappings, dict) or not slot_mappings:
            return None
        count = int((next(iter(slot_mappings.values())) >= 0).sum())
        tokens, hidden = seen
        return (tokens[:count].long(), hidden[:count]) if count <= len(tokens) else None
