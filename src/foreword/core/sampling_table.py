"""The sampling options of every slot: columns on the device, and the host's copy of them.

In: the `Sampling` of requests, when they enter. Out: `SamplingRows`, the columns of the sequences in a round, with the
`SamplingStages` that the round needs. Columns never move once they exist: captured rounds read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.core.sampling import LONGEST_BAD_WORD, MOST_BAD_SEQUENCES, OPTIONS, Sampling, mix64
from foreword.ops.noise import WORD
from foreword.ops.sending import sent

COLUMNS = {name: option.column for name, option in OPTIONS.items() if option.column is not None}
ANY_TOKEN = -1  # in a bad word, before its first token: matches every token
NO_TOKEN = -2  # before the first token of a sequence
NO_WORD = -3  # an unused entry for bad words: equals no token


@dataclass(frozen=True)
class SamplingStages:
    """The sampling stages that the requests of a round need. The host knows them, so a round runs no others.

    `top_k`, `logprobs`, `bad_words` and `bad_word_length` bound what any request asks for. They are rounded up to a few
    sizes, since a round is captured for its stages and users may choose any number. Each request is later cut to its own.
    """

    noise: bool = False
    repetition: bool = False  # needs the counts of prompt and output
    floors: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    logprobs: int = -1
    masks: bool = False
    generated: bool = False  # a presence or a frequency penalty, which needs the counts of the output
    bias: bool = False
    bad_words: int = 0  # of two tokens or more; those of one are masks
    bad_word_length: int = 0  # tokens
    grammar: bool = False  # needs the tokens that grammars allow after each row

    @property
    def filters(self) -> bool:
        return bool(self.top_k or self.top_p or self.min_p)

    @property
    def penalties(self) -> bool:
        return self.repetition or self.generated

    @property
    def drops(self) -> bool:
        """Whether some tokens are excluded, whatever their logits are."""
        return self.filters or self.masks or self.grammar or bool(self.bad_words)

    @property
    def is_greedy(self) -> bool:
        """Whether the logits alone decide."""
        processed = self.penalties or self.floors or self.masks or self.bias or self.bad_words or self.grammar
        return not (self.noise or processed)

    @staticmethod
    def of(requests: list[tuple[Sampling, bool]], masks: bool = False, grammar: bool = False) -> SamplingStages:
        """Return the stages of requests, given as (sampling, whether end tokens are held back). `masks`: some requests have
        barred tokens. `grammar`: some have a grammar."""
        samplings = [sampling for sampling, _ in requests]
        sampled = [sampling for sampling in samplings if sampling.temperature > 0]
        long = [_long_words(sampling) for sampling in samplings]
        return SamplingStages(
            noise=bool(sampled),
            repetition=any(sampling.repetition_penalty != 1 for sampling in samplings),
            floors=any(floor for _, floor in requests),
            top_k=_one_of_few_sizes(max((sampling.top_k for sampling in sampled), default=0)),
            top_p=any(sampling.top_p < 1 for sampling in sampled),
            min_p=any(sampling.min_p > 0 for sampling in sampled),
            logprobs=_one_of_few_sizes(max((-1 if s.logprobs is None else s.logprobs for s in samplings), default=-1)),
            masks=masks,
            generated=any(sampling.presence_penalty or sampling.frequency_penalty for sampling in samplings),
            bias=any(sampling.biases for sampling in samplings),
            bad_words=_one_of_few_sizes(max(map(len, long), default=0)),
            bad_word_length=_one_of_few_sizes(max((len(word) for words in long for word in words), default=0), 4),
            grammar=grammar,
        )


def _long_words(sampling: Sampling) -> list[tuple[int, ...]]:
    return [word for word in sampling.bad_word_ids or () if len(word) > 1]


def _one_of_few_sizes(number: int, least: int = 16) -> int:
    """Round a number up to `least` times a power of 4: 16, 64, 256 and so on. 0 and less stay unchanged."""
    size = least
    while size < number:
        size *= 4
    return size if number > 0 else number


@cache
def _one(kind: SamplingStages) -> SamplingStages:
    """Return one object for all equal stages, so that they can be compared by identity."""
    return kind


@dataclass(frozen=True)
class SamplingRows:
    """The columns of the sequences in a round, read from the table when a stage needs them; greedy rounds need none."""

    kind: SamplingStages
    ends: Tensor  # [E]
    table: dict[str, Tensor]
    slots: Tensor

    def column(self, name: str) -> Tensor:
        """Return an option of every sequence: [b, ..]. `barred` [b, V] is 0 for a token that may be sampled, 1 for one that
        may not be sampled below the floor, and 2 for one that may never be sampled."""
        return self.table[name][self.slots]

    @cached_property
    def temperature(self) -> Tensor:
        return self.column("temperature")

    @cached_property
    def floor(self) -> Tensor:
        """[b]: end tokens are held back for positions below it."""
        return self.column("floor")

    @cached_property
    def key(self) -> Tensor:
        """[b, 2]: the seed, mixed."""
        return self.column("key")


NONE_HELD: Mapping[int, tuple[int, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class SamplingTable:
    """The sampling of every slot: columns on the device, and the host's copy, which gives the stages of a round.

    Columns that few requests need are made when the first of them enters: `barred`, `logit_bias`, `generated` [B, V], how
    often each token occurs in the output, and `bad_words` [B, W, L], token sequences aligned to the end of L entries.
    """

    columns: dict[str, Tensor]
    ends: Tensor
    requests: dict[int, tuple[Sampling, bool]]
    own: dict[int, SamplingStages]  # slot -> stages of its request alone; equal ones are one object
    kinds: dict[tuple[int, ...], SamplingStages]  # slots -> stages of a round; cleared when a request enters or leaves
    vocabulary: int  # the number of tokens, the width of masks

    @staticmethod
    def empty(slots: int, ends: Tensor, vocabulary: int = 0) -> SamplingTable:
        dtypes = COLUMNS | {"floor": torch.long}
        columns = {name: torch.zeros(slots, dtype=dtype, device=ends.device) for name, dtype in dtypes.items()}
        columns["key"] = torch.zeros(slots, 2, dtype=torch.long, device=ends.device)
        return SamplingTable(columns, ends, {}, {}, {}, vocabulary)

    def set(self, slot: int, sampling: Sampling, floor: int = 0, held: tuple[int, ...] = (), grammar: bool = False) -> None:
        """Set the sampling of a slot. `floor`: end tokens and the tokens `held` are not sampled before the sequence is that
        long."""
        slots = torch.tensor([slot]).to(self.ends.device)
        self.set_all({slot: (sampling, floor)}, slots, {slot: held}, (slot,) if grammar else ())

    def set_all(
        self,
        given: dict[int, tuple[Sampling, int]],
        slots: Tensor,
        held: Mapping[int, tuple[int, ...]] = NONE_HELD,
        grammars: Collection[int] = (),
    ) -> None:
        """Set the sampling and floor of several slots. `slots` [n]: the same slots in the same order, on the device. `held`:
        the tokens that a slot holds back below its floor, in addition to the end tokens. `grammars`: the slots whose
        requests have a grammar."""
        self.kinds.clear()
        keys, floors = [], []
        for slot, (sampling, floor) in given.items():
            assert sampling.seed is not None, "a request's seed is settled before it enters"
            self.requests[slot] = (sampling, floor > 0)
            masked = self._mask(slot, sampling, held.get(slot, ()) if floor else ())
            self.own[slot] = _one(SamplingStages.of([self.requests[slot]], masked, slot in grammars))
            self._set_rare(slot, sampling)
            mixed = mix64(sampling.seed)
            keys.append((mixed & WORD, mixed >> 32))
            floors.append((floor,))
        samplings = [sampling for sampling, _ in given.values()]
        reals, wholes = ([name for name in COLUMNS if COLUMNS[name] == dtype] for dtype in (torch.float32, torch.long))
        real = sent([tuple(getattr(s, name) for name in reals) for s in samplings], slots.device, torch.float32)
        numbers = [tuple(getattr(s, name) for name in wholes) for s in samplings]
        whole = sent([a + b + c for a, b, c in zip(numbers, floors, keys, strict=True)], slots.device)
        values = dict(zip(reals, real.unbind(1), strict=True))
        values |= dict(zip([*wholes, "floor"], whole[:, :-2].unbind(1), strict=True)) | {"key": whole[:, -2:]}
        for name, value in values.items():
            self.columns[name].index_copy_(0, slots, value)

    def _mask(self, slot: int, sampling: Sampling, held: tuple[int, ...]) -> bool:
        """Write a slot's row of barred tokens. Return whether there are any."""
        allowed = sampling.allowed_token_ids
        never = [word[0] for word in sampling.bad_word_ids or () if len(word) == 1]
        row = self._row("barred", slot, torch.uint8, allowed is not None or bool(held or never))
        if row is None:
            return False
        barred = torch.zeros(self.vocabulary, dtype=torch.uint8)
        if allowed is not None:
            barred.fill_(2)
            barred[list(allowed)] = 0
        barred[list(held)] = barred[list(held)].clamp(min=1)
        barred[never] = 2
        row.copy_(barred)
        return True

    def _set_rare(self, slot: int, sampling: Sampling) -> None:
        """Set the options that few requests have and that are no single number."""
        self._row("generated", slot, torch.int32, self.own[slot].generated)
        biases = sampling.biases
        row = self._row("logit_bias", slot, torch.float32, bool(biases))
        if row is not None:
            dense = torch.zeros(self.vocabulary)
            dense[[token for token, _ in biases]] = torch.tensor([bias for _, bias in biases])
            row.copy_(dense)
        words = _long_words(sampling)
        row = self._row("bad_words", slot, torch.int32, bool(words), (MOST_BAD_SEQUENCES, LONGEST_BAD_WORD), NO_WORD)
        if row is not None:
            ends = [(ANY_TOKEN,) * (LONGEST_BAD_WORD - len(word)) + word for word in words]
            row[: len(words)] = torch.tensor(ends, dtype=torch.int32).to(row.device)

    def _row(
        self, name: str, slot: int, dtype: torch.dtype, needed: bool, shape: tuple[int, ...] = (), empty: int = 0
    ) -> Tensor | None:
        """Return a slot's row of a column, filled with `empty`; None if it is not needed. The column is made when a request
        first needs it, and never moves."""
        if name not in self.columns:
            if not needed:
                return None
            rows = (len(self.columns["key"]), *(shape or (self.vocabulary,)))
            self.columns[name] = torch.full(rows, empty, dtype=dtype, device=self.ends.device)
        row = self.columns[name][slot].fill_(empty)
        return row if needed else None

    def forget(self, slot: int) -> None:
        """Remove a slot from the stages of rounds."""
        self.requests.pop(slot, None)
        self.own.pop(slot, None)
        self.kinds.clear()

    def kind(self, ids: tuple[int, ...]) -> SamplingStages:
        """Return the stages of a round over these slots."""
        if ids not in self.kinds:
            # Requests with equal stages count as one: there are hundreds of requests, and few kinds of stages.
            distinct = {id(self.own[slot]): self.requests[slot] for slot in ids if slot in self.own}
            own = [self.own[slot] for slot in ids if slot in self.own]
            masks, grammar = any(stages.masks for stages in own), any(stages.grammar for stages in own)
            self.kinds[ids] = SamplingStages.of(list(distinct.values()), masks, grammar)
        return self.kinds[ids]

    def at(self, slots: Tensor, ids: tuple[int, ...]) -> SamplingRows:
        return SamplingRows(self.kind(ids), self.ends, self.columns, slots)
