"""The options of every slot that its rounds depend on: columns on the device, and the host's copy of them.

In: the `SlotOptions` of requests, when they enter. Out: `SamplingRows`, the columns of the sequences in a round, with the
`SamplingStages` that the round needs. Columns never move once they exist: captured rounds read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

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
class SlotOptions:
    """What the rounds of a request depend on."""

    sampling: Sampling
    floor: int = 0
    """End tokens and the tokens `held` are not sampled before the sequence is that long."""

    held: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    """Needed with a prediction, which follows it."""

    prediction: tuple[int, ...] = ()
    traced: bool = False
    constrained: bool = False
    """It has a grammar."""


@dataclass(frozen=True)
class SamplingStages:
    """The stages that the requests of a round need. The host knows them, so a round runs no others.

    `top_k`, `logprobs`, `bad_words`, `bad_word_length` and `predictions` bound what any request asks for. They are rounded
    up to a few sizes, since a round is captured for its stages and users may choose any number. Each request is later cut to
    its own.
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
    predictions: int = 0  # tokens of the longest sequence that a request predicts, prompt included; 0: no request has one
    traces: bool = False
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

    @property
    def origins(self) -> bool:
        """Whether a draft has to say where its rows come from."""
        return self.traces or self.predictions > 0

    @staticmethod
    def of(options: SlotOptions, masks: bool = False) -> SamplingStages:
        """Return the stages of one request. `masks`: it has barred tokens."""
        sampling, words = options.sampling, _long_words(options.sampling)
        sampled = sampling.temperature > 0
        predicted = len(options.prompt) + len(options.prediction) if options.prediction else 0
        return SamplingStages(
            noise=sampled,
            repetition=sampling.repetition_penalty != 1,
            floors=options.floor > 0,
            top_k=_one_of_few_sizes(sampling.top_k if sampled else 0),
            top_p=sampled and sampling.top_p < 1,
            min_p=sampled and sampling.min_p > 0,
            logprobs=_one_of_few_sizes(-1 if sampling.logprobs is None else sampling.logprobs),
            masks=masks,
            generated=bool(sampling.presence_penalty or sampling.frequency_penalty),
            bias=bool(sampling.biases),
            bad_words=_one_of_few_sizes(len(words)),
            bad_word_length=_one_of_few_sizes(max(map(len, words), default=0), 4),
            predictions=_one_of_few_sizes(predicted, 1024),
            traces=options.traced,
            grammar=options.constrained,
        )

    @staticmethod
    def joined(kinds: Iterable[SamplingStages]) -> SamplingStages:
        """Return the stages that several requests need together: the largest value of each."""
        return SamplingStages(*map(max, zip(*(vars(kind).values() for kind in (SamplingStages(), *kinds)), strict=True)))


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


@dataclass(frozen=True)
class SamplingTable:
    """The options of every slot: columns on the device, and the host's copy, which gives the stages of a round.

    Columns that few requests need are made when the first of them enters: `barred`, `logit_bias`, `generated` [B, V], how
    often each token occurs in the output; `bad_words` [B, W, L], token sequences aligned to the end of L entries;
    `predicted` [B, L], the sequence as the request predicts it, and `predicted_span` [B, 2], the positions of the last
    prompt token and of the last token of the prediction.
    """

    columns: dict[str, Tensor]
    ends: Tensor
    own: dict[int, SamplingStages]  # slot -> stages of its request alone; equal ones are one object
    kinds: dict[tuple[int, ...], SamplingStages]  # slots -> stages of a round; cleared when a request enters or leaves
    vocabulary: int  # the number of tokens, the width of masks
    context: int  # the most tokens of a sequence

    @staticmethod
    def empty(slots: int, ends: Tensor, vocabulary: int = 0, context: int = 0) -> SamplingTable:
        dtypes = COLUMNS | {"floor": torch.long}
        columns = {name: torch.zeros(slots, dtype=dtype, device=ends.device) for name, dtype in dtypes.items()}
        columns["key"] = torch.zeros(slots, 2, dtype=torch.long, device=ends.device)
        return SamplingTable(columns, ends, {}, {}, vocabulary, context)

    def set(self, slot: int, sampling: Sampling, floor: int = 0, held: tuple[int, ...] = (), grammar: bool = False) -> None:
        """Set the sampling of a slot: see `SlotOptions`."""
        options = SlotOptions(sampling, floor, held, constrained=grammar)
        self.set_all({slot: options}, torch.tensor([slot]).to(self.ends.device))

    def set_all(self, given: dict[int, SlotOptions], slots: Tensor) -> None:
        """Set the options of several slots. `slots` [n]: the same slots in the same order, on the device."""
        self.kinds.clear()
        keys, floors = [], []
        for slot, options in given.items():
            sampling, floor = options.sampling, options.floor
            assert sampling.seed is not None, "a request's seed is settled before it enters"
            masked = self._mask(slot, sampling, options.held if floor else ())
            self.own[slot] = _one(SamplingStages.of(options, masked))
            self._set_rare(slot, sampling)
            self._set_prediction(slot, options)
            mixed = mix64(sampling.seed)
            keys.append((mixed & WORD, mixed >> 32))
            floors.append((floor,))
        samplings = [options.sampling for options in given.values()]
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

    def _set_prediction(self, slot: int, options: SlotOptions) -> None:
        """Write the sequence as the request predicts it, as far as the context reaches. Both columns are zero without."""
        whole = (options.prompt + options.prediction)[: self.context]
        needed = bool(options.prediction)
        row = self._row("predicted", slot, torch.long, needed, (self.context,))
        span = self._row("predicted_span", slot, torch.long, needed, (2,))
        if row is not None and span is not None:
            row[: len(whole)] = torch.tensor(whole).to(row.device)
            span.copy_(torch.tensor([len(options.prompt) - 1, len(whole) - 1]))

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
        self.own.pop(slot, None)
        self.kinds.clear()

    def kind(self, ids: tuple[int, ...]) -> SamplingStages:
        """Return the stages of a round over these slots."""
        if ids not in self.kinds:
            # Requests with equal stages count as one: there are hundreds of requests, and few kinds of stages.
            distinct = {id(self.own[slot]): self.own[slot] for slot in ids if slot in self.own}
            self.kinds[ids] = SamplingStages.joined(distinct.values())
        return self.kinds[ids]

    def at(self, slots: Tensor, ids: tuple[int, ...]) -> SamplingRows:
        return SamplingRows(self.kind(ids), self.ends, self.columns, slots)
