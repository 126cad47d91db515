"""The proposers: each runs one of our drafters, unchanged, on the sequences and rows of a step of vLLM.

In: what vLLM passes to `propose`. Out: draft tokens for each request of the batch, none while a prompt is being read. vLLM
0.32 calls `propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...)` after every step, and
`load_model(target_model)` before the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foreword.core.draft import Draft, Tree
from foreword.core.scores import Accepted, Scores
from foreword.core.state import Batch
from foreword.core.target import Target
from foreword.drafters.saved import read_config, restore_unchecked, trained_for
from foreword.drafters.shipped import shipped
from foreword.errors import DrafterError, InputError
from foreword.methods import make
from foreword.vllm.settings import ProposerSettings, refuse_parallel
from foreword.vllm.steps import UNKNOWN, BatchState, ReadRows, SampledRows, StepRows, Tokens, VllmStep, chains
from foreword.vllm.target import HostTarget, ServedTarget

HEADS = "medusa"
PROMPT_ROWS = 256  # of a prompt, for which logits are computed at a time


class Lookup:
    """`prompt_lookup`: what followed the same tokens earlier in the sequence."""

    def __init__(self, vllm_config: Any) -> None:
        settings = ProposerSettings.of(vllm_config)
        target = HostTarget()
        self.drafter = make("prompt_lookup", settings.rows, **settings.options)
        self.drafter.prepare(cast(Target, target), settings.requests)
        self.sequences = BatchState(settings.requests, target.device)

    def load_model(self, target_model: Any) -> None:
        """It needs nothing of the target."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Tokens, token_ids_cpu: Tokens, **_: Any
    ) -> list[list[int]]:
        step = VllmStep(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        if not step.running:
            return [[] for _ in step.new]
        return chains(self.drafter.propose(self.sequences.of(step, with_tokens=True)), step)


class Recycling:
    """`token_recycling`: the target's own runner-up tokens, in one table for all requests."""

    def __init__(self, vllm_config: Any) -> None:
        refuse_parallel(vllm_config, "Recycling")
        self.config, self.settings = vllm_config, ProposerSettings.of(vllm_config)
        self.drafter = make("token_recycling", self.settings.rows, tree="chain", table="shared", **self.settings.options)

    def load_model(self, target_model: Any) -> None:
        rows, requests = self.settings.rows, self.settings.requests
        self.rows = SampledRows(target_model, rows * requests, keeps_logits=True)
        self.prompts = ReadRows(target_model)
        self.target = ServedTarget(self.config, target_model, self.rows.compute)
        self.drafter.prepare(cast(Target, self.target), requests)
        self.sequences = BatchState(requests, self.target.device)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Tokens,
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        step = VllmStep(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self._learn(self.rows.of(step), self.prompts.of(slot_mappings))
        if not step.running:
            return self.rows.remember(step, [[] for _ in step.new])
        return self.rows.remember(step, chains(self.drafter.propose(self.sequences.of(step)), step))

    def _learn(self, sampled: StepRows | None, read: tuple[Tensor, Tensor] | None) -> None:
        """Show the rows of a step to the drafter as one draft, whatever requests they are of: these share a table. Where a
        prompt was read, show all its rows first."""
        first = self.sequences.state.at(Batch.of([0], 0, self.target.device))
        if read is not None and (sampled is None or len(read[0]) > len(sampled.tokens)):
            for tokens, hidden in zip(*(part.split(PROMPT_ROWS) for part in read), strict=True):
                self.drafter.read(first, self._chain(tokens), Scores(logits=self.target.draft_head(hidden.unsqueeze(0))))
        if sampled is None or sampled.logits is None or not sampled.accepted:
            return
        waste = self.target.vocab_size  # the row of the table that nothing is read from
        tokens = torch.tensor([waste if token == UNKNOWN else token for token in sampled.tokens], device=self.target.device)
        path = torch.tensor([sampled.accepted], device=tokens.device)
        accepted = Accepted(path, torch.tensor([path.shape[1]], device=tokens.device), path[:, -1])
        scores = Scores(logits=sampled.logits[:, :waste].unsqueeze(0))
        self.drafter.observe(first, self._chain(tokens), scores, accepted)

    @staticmethod
    def _chain(tokens: Tensor) -> Draft:
        count = len(tokens)
        return Draft(tokens.unsqueeze(0), Tree.chain(count, tokens.device), torch.tensor([count], device=tokens.device))


class Heads:
    """`medusa`: heads on the target's last state. The option `drafter` names their folder; without it, those that ship."""

    def __init__(self, vllm_config: Any) -> None:
        refuse_parallel(vllm_config, "Heads")
        self.config, self.settings = vllm_config, ProposerSettings.of(vllm_config)
        self.options = {name: value for name, value in self.settings.options.items() if name != "drafter"}
        self.folder = Path(self.settings.options.get("drafter", shipped()[HEADS])).expanduser()
        if (held := read_config(self.folder)["method"]) != HEADS:
            raise InputError(f"{self.folder} holds a drafter of {held}, but Heads runs those of {HEADS} alone")

    def load_model(self, target_model: Any) -> None:
        rows, requests = self.settings.rows, self.settings.requests
        self.rows = SampledRows(target_model, rows * requests, keeps_logits=False)
        target = ServedTarget(self.config, target_model, self.rows.compute)
        made_for = trained_for(self.folder)
        if not made_for.may_be(target.config, target.embedding):
            raise DrafterError(f"{self.folder} was trained for {made_for}, and {target.name} is another model; train one")
        self.drafter = restore_unchecked(self.folder, cast(Any, target), rows, tree="chain", **self.options)
        self.drafter.prepare(cast(Target, target), requests)
        self.sequences = BatchState(requests, target.device)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Tokens, token_ids_cpu: Tokens, **_: Any
    ) -> list[list[int]]:
        step = VllmStep(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        rows = self.rows.of(step)
        if rows is None or not rows.last:
            return self.rows.remember(step, [[] for _ in step.new])
        state = self.sequences.of(step)
        self.drafter.read(state, Draft.nothing(state.root), Scores(hidden=rows.hidden[rows.last].unsqueeze(1)))
        return self.rows.remember(step, chains(self.drafter.propose(state), step))
