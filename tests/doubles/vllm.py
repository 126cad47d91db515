"""vLLM as its proposers see it: what its V1 runner calls, with which arrays, in which order, on a tiny model.

The target is real, and so are the drafts. Requests move from place to place, prompts are read in chunks, passes are padded,
and drafts may be cut before they are verified. `studies/in_vllm.py` runs the same proposers in vLLM itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from doubles.models import CONTEXT

PADDING = 2  # rows after those of a pass


def vllm_config(hf: PreTrainedModel, length: int = 3, requests: int = 4, ways: int = 1, **options: Any) -> Any:
    """Return the fields of a VllmConfig that proposers read. `options`: those of the method."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        parallel_config=SimpleNamespace(tensor_parallel_size=ways, pipeline_parallel_size=1),
        model_config=SimpleNamespace(hf_text_config=hf.config, model="tiny", dtype=hf.dtype),
        additional_config={"foreword": options} if options else {},
    )


class VllmModel:
    """A model with the interface of vLLM's: `forward` over all rows of a pass, and `compute_logits` for some of them."""

    def __init__(self, hf: Any) -> None:
        self.hf, self.model, self.lm_head = hf, hf.model, hf.lm_head
        self.scheduled: list[tuple[list[int], int]] = []  # sequences up to the last row of the pass, and rows to run
        self.parameters = hf.parameters

    @torch.no_grad()
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = [self.states(sequence)[-rows:] for sequence, rows in self.scheduled]
        return torch.cat([*hidden, hidden[0].new_full((PADDING, hidden[0].shape[1]), torch.nan)])

    def states(self, sequence: Sequence[int]) -> Tensor:
        """Return the states of a sequence after the final norm: [n, H]."""
        found: Tensor = self.hf.model(torch.tensor([list(sequence)], device=self.hf.device)).last_hidden_state[0]
        return found

    @torch.no_grad()
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits


@dataclass
class VllmRequest:
    sequence: list[int]
    limit: int
    read: int = 0  # rows in the cache
    draft: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # draft tokens of each pass


@dataclass
class RowsOfRequest:
    """What a pass ran for one request."""

    read: list[int]  # the tokens of its rows
    ranked: list[int]  # the token that the target ranks first after each row
    sampled: range  # the rows that vLLM samples from
    decided: list[int]  # none while its prompt is being read


@dataclass
class VllmRunner:
    """Runs requests greedily. After every step, `seen` gets this runner and the drafts. `cut` gets the number of a step and
    a draft, and returns what of it is verified."""

    model: VllmModel
    proposer: Any
    seen: Callable[[VllmRunner, list[list[int]]], None] = lambda runner, drafts: None
    cut: Callable[[int, list[int]], list[int]] = lambda step, draft: draft
    most: int = 3
    chunk: int = 5
    running: list[VllmRequest] = field(default_factory=list)
    rows: list[RowsOfRequest] = field(default_factory=list)  # of the last pass, by place
    steps: int = 0

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int = 14) -> list[VllmRequest]:
        waiting = [VllmRequest(list(prompt), len(prompt) + new_tokens) for prompt in prompts]
        every = list(waiting)
        with torch.inference_mode():
            while waiting or self.running:
                while waiting and len(self.running) < self.most:
                    self.running.append(waiting.pop(0))
                self.step()
                self._leave()
        return every

    def step(self) -> None:
        """One pass, and the drafts for the next."""
        self.steps += 1
        scheduled = [self._scheduled(one) for one in self.running]
        self.model.scheduled = [
            (one.sequence[: one.read] + new, len(new)) for one, new in zip(self.running, scheduled, strict=True)
        ]
        flat = [token for new in scheduled for token in new]
        device = self.model.hf.device
        hidden = self.model.forward(input_ids=torch.tensor(flat + [0] * PADDING, dtype=torch.int32, device=device))
        self.rows = self._decide(scheduled, self.model.lm_head(hidden).argmax(1).tolist())
        starts = np.cumsum([0, *map(len, scheduled)]).tolist()
        places = [start + row for start, rows in zip(starts, self.rows, strict=False) for row in rows.sampled]
        self.model.compute_logits(hidden[places]).fill_(torch.nan)  # vLLM's sampler works in place
        mapping = torch.tensor([*range(len(flat)), *([-1] * PADDING)], device=device)
        decided = [rows.decided for rows in self.rows]
        drafts = self.proposer.propose(decided, *self._arrays(), slot_mappings={"layer": mapping})
        self.seen(self, drafts)
        for one, draft in zip(self.running, drafts, strict=True):
            one.draft = self.cut(self.steps, draft)

    def _scheduled(self, one: VllmRequest) -> list[int]:
        unread = one.sequence[one.read :]
        return unread[: self.chunk] if len(unread) > 1 else [*unread, *one.draft]

    def _decide(self, scheduled: list[list[int]], best: list[int]) -> list[RowsOfRequest]:
        """Accept drafts greedily, and advance the requests."""
        found = []
        for one, read in zip(self.running, scheduled, strict=True):
            ranked, best = best[: len(read)], best[len(read) :]
            drafting = len(one.sequence) - one.read == 1
            kept = 0
            while drafting and kept + 1 < len(read) and read[kept + 1] == ranked[kept]:
                kept += 1
            whole = drafting or one.read + len(read) == len(one.sequence)
            decided = (ranked[: kept + 1] if drafting else ranked[-1:]) if whole else []
            one.read += kept + 1 if drafting else len(read)
            one.sequence += decided
            one.accepted += [kept] if whole else []
            found.append(RowsOfRequest(read, ranked, range(0 if drafting else len(read) - 1, len(read)), decided))
        return found

    def _arrays(self) -> tuple[Any, Any]:
        tokens = np.full((len(self.running) + 1, CONTEXT), 7, dtype=np.int32)  # one place is empty, with what lay there
        counts = np.zeros(len(tokens), dtype=np.int32)
        for place, one in enumerate(self.running):
            counts[place] = len(one.sequence)
            tokens[place, : len(one.sequence)] = one.sequence
        return counts, tokens

    def _leave(self) -> None:
        """The last request takes the place of one that has ended, and two others swap."""
        for place in reversed(range(len(self.running))):
            if len(self.running[place].sequence) >= self.running[place].limit:
                last = self.running.pop()
                if place < len(self.running):
                    self.running[place] = last
        if self.steps % 4 == 3:
            self.running[:2] = reversed(self.running[:2])
