"""The one place where a token is chosen: penalties, then / T, then top-k, top-p, min-p, then argmax plus noise.

The noise is Gumbel, a pure function of (request seed, position of the token, token id). So the draw does not know who
drafted, who shares the batch or when the request came: speculative text equals plain text, token for token, at any
temperature. T = 0 drops noise and filters. Filters keep or drop equal logits together, so that no sort order matters.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from foreword.core.sending import sent
from foreword.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens. `seed` None draws one; `logprobs` n reports the n likeliest at each place."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # Scores are float32: what divides them must not take them to infinity, nor to nothing.
        heat = self.temperature
        _require(_finite(heat) and (heat == 0 or 1e-6 <= heat <= 1e6), "temperature", heat, "0, or from 1e-6 to 1e6")
        _require(_whole(self.top_k) and 0 <= self.top_k < 2**31, "top_k", self.top_k, "a whole number, 0 (off) or more")
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _require(_finite(self.min_p) and 0 <= self.min_p < 1, "min_p", self.min_p, "from 0 (off) to below 1")
        penalty = self.repetition_penalty
        _require(_finite(penalty) and 1e-6 <= penalty <= 1e6, "repetition_penalty", penalty, "from 1e-6 to 1e6; 1 is off")
        _require(self.seed is None or _whole(self.seed), "seed", self.seed, "a whole number, or None to draw one")
        wanted = self.logprobs
        _require(
            wanted is None or (_whole(wanted) and 0 <= wanted <= 100),
            "logprobs",
            wanted,
            "None (off) or the number of likeliest tokens to report, 0 to 100",
        )

    def seeded(self) -> Sampling:
        """The same with its seed settled, so that a result can name the seed that made it."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def derived(self, index: int) -> Sampling:
        """For the index-th request of a list under one seed."""
        assert self.seed is not None
        return self if index == 0 else replace(self, seed=_mix64(_mix64(self.seed) + index) >> 1)


def _require(holds: bool, name: str, given: object, needed: str) -> None:
    if not holds:
        raise InputError(f"{name} is {given!r}; it must be {needed}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Kind:
    """Which stages any request of a round needs; known to the host, so that a round runs no other."""

    noise: bool = False
    penalties: bool = False
    floors: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    logprobs: int = -1

    @property
    def filters(self) -> bool:
        return bool(self.top_k or self.top_p or self.min_p)

    @property
    def is_greedy(self) -> bool:
        """Nothing has a say but the logits."""
        return not (self.noise or self.penalties or self.floors)

    @staticmethod
    def of(requests: list[tuple[Sampling, bool]]) -> Kind:
        """Of (sampling, whether end tokens are held back) pairs."""
        drawn = [sampling for sampling, _ in requests if sampling.temperature > 0]
        return Kind(
            noise=bool(drawn),
            penalties=any(sampling.repetition_penalty != 1 for sampling, _ in requests),
            floors=any(floor for _, floor in requests),
            top_k=max((sampling.top_k for sampling in drawn), default=0),
            top_p=any(sampling.top_p < 1 for sampling in drawn),
            min_p=any(sampling.min_p > 0 for sampling in drawn),
            logprobs=max((-1 if s.logprobs is None else s.logprobs for s, _ in requests), default=-1),
        )


@cache
def _one(kind: Kind) -> Kind:
    """The same object for all that are equal, so that they are told apart at a glance."""
    return kind


@dataclass(frozen=True)
class SamplingRows:
    """The columns of the sequences in a round, each [b], taken from the table when a stage asks: greedy rounds ask none."""

    kind: Kind
    ends: Tensor  # [E]
    table: dict[str, Tensor]
    slots: Tensor

    @cached_property
    def temperature(self) -> Tensor:
        return self.table["temperature"][self.slots]

    @cached_property
    def top_k(self) -> Tensor:
        return self.table["top_k"][self.slots]

    @cached_property
    def top_p(self) -> Tensor:
        return self.table["top_p"][self.slots]

    @cached_property
    def min_p(self) -> Tensor:
        return self.table["min_p"][self.slots]

    @cached_property
    def penalty(self) -> Tensor:
        return self.table["penalty"][self.slots]

    @cached_property
    def key(self) -> Tensor:
        """[b, 2]: the seed, mixed."""
        return self.table["key"][self.slots]

    @cached_property
    def floor(self) -> Tensor:
        """End tokens are held back for positions below it."""
        return self.table["floor"][self.slots]


@dataclass(frozen=True)
class SamplingTable:
    """Sampling of every slot: columns on the device, and the host's copy that tells the kind of a round."""

    columns: dict[str, Tensor]
    ends: Tensor
    requests: dict[int, tuple[Sampling, bool]]
    own: dict[int, Kind]  # of each request alone; equal ones are one object
    kinds: dict[tuple[int, ...], Kind]  # of rounds over these slots, until somebody enters or leaves

    @staticmethod
    def empty(slots: int, ends: Tensor) -> SamplingTable:
        real, whole = torch.float32, torch.long
        dtypes = {"temperature": real, "top_k": whole, "top_p": real, "min_p": real, "penalty": real, "floor": whole}
        columns = {name: torch.zeros(slots, dtype=dtype, device=ends.device) for name, dtype in dtypes.items()}
        columns["key"] = torch.zeros(slots, 2, dtype=whole, device=ends.device)
        return SamplingTable(columns, ends, {}, {}, {})

    def set(self, slot: int, sampling: Sampling, floor: int = 0) -> None:
        """`floor`: end tokens are held back until the text is that long."""
        self.set_all({slot: (sampling, floor)}, torch.tensor([slot]).to(self.ends.device))

    def set_all(self, given: dict[int, tuple[Sampling, int]], slots: Tensor) -> None:
        """Sampling and floor of several slots, which `slots` [n] names in the same order on the device."""
        reals, wholes = [], []
        self.kinds.clear()
        for slot, (sampling, floor) in given.items():
            assert sampling.seed is not None, "a request's seed is settled before it enters"
            self.requests[slot] = (sampling, floor > 0)
            self.own[slot] = _one(Kind.of([self.requests[slot]]))
            mixed = _mix64(sampling.seed)
            reals.append((sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty))
            wholes.append((sampling.top_k, floor, mixed & _WORD, mixed >> 32))
        real, whole = sent(reals, slots.device, torch.float32), sent(wholes, slots.device)
        values = dict(zip(("temperature", "top_p", "min_p", "penalty"), real.unbind(1), strict=True))
        values |= {"top_k": whole[:, 0], "floor": whole[:, 1], "key": whole[:, 2:]}
        for name, value in values.items():
            self.columns[name].index_copy_(0, slots, value)

    def forget(self, slot: int) -> None:
        """Who sat there, or was about to, has no say in the kind of a round any more."""
        self.requests.pop(slot, None)
        self.own.pop(slot, None)
        self.kinds.clear()

    def kind(self, ids: tuple[int, ...]) -> Kind:
        if ids not in self.kinds:
            # Requests of one kind count as one: there are hundreds of requests, and few kinds.
            unlike = {id(self.own[slot]): self.requests[slot] for slot in ids if slot in self.own}
            self.kinds[ids] = Kind.of(list(unlike.values()))
        return self.kinds[ids]

    def at(self, slots: Tensor, ids: tuple[int, ...]) -> SamplingRows:
        return SamplingRows(self.kind(ids), self.ends, self.columns, slots)


def pick(logits: Tensor, position: Tensor, sampling: SamplingRows, seen: Tensor | None = None) -> Tensor:
    """The target's own token at every row: [b, N, V] -> [b, N].

    `position` [b, N] is where the chosen token will stand; greedy rounds do not look at it. `seen` [b, N, V] counts the
    tokens of the text before it and is needed when a penalty is on.
    """
    if sampling.kind.is_greedy:
        return _first_largest(logits)
    if sampling.kind.noise and _has_kernel(logits, 1):
        return _pick_by_kernel(logits, position, sampling, seen)
    scores = _process(logits, position, sampling, seen)
    if scores.device.type == "cpu" and sampling.kind.filters:
        return _pick_among_best(scores, position, sampling)
    return _first_largest(_race(scores, _all_tokens(scores), position, sampling))


def judge(logits: Tensor, position: Tensor, sampling: SamplingRows, seen: Tensor | None = None) -> Tensor:
    """The score by which a token wins, for every token: processed logits, plus noise where there is a temperature."""
    scores = _process(logits, position, sampling, seen)
    return _race(scores, _all_tokens(scores), position, sampling)


def rank(logits: Tensor, position: Tensor, sampling: SamplingRows, k: int, tokens: Tensor | None = None) -> Tensor:
    """A drafter's k best guesses, best first, under the noise that the target will draw with: [b, N, V] -> [b, N, k].

    With `tokens` [b, N, C], `logits` are those of the given candidates alone, and the answer is indices into them.
    Sharing the noise couples the guess to the draw, so a good guess stays good at any temperature.
    """
    return best(_under_noise(logits, position, sampling, tokens), k)


def guesses(
    logits: Tensor, position: Tensor | None, sampling: SamplingRows, k: int, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k best guesses as `rank` has them, and the log-chance of each: [b, N, V] -> twice [b, N, k].

    `position` [b, N or 1] may be left out where there is no noise. With `words` [V] the columns are those tokens, in rising
    order: they are what is answered, and what the noise knows.

    A chance is the softmax of what the guesses are ranked by. Where noise is shared, it already tells which of the likely
    tokens will win, so chances under it are sharper than those of the logits.
    """
    if not sampling.kind.noise:
        return likeliest(logits, k, words)
    assert position is not None
    if _has_kernel(logits, k):
        return _guesses_by_kernel(logits, position, sampling, k, words)
    return likeliest(_under_noise(widened(logits), position, sampling, words), k, words)


def _guesses_by_kernel(
    logits: Tensor, position: Tensor, sampling: SamplingRows, k: int, words: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`guesses` by a kernel that makes the noise where it needs it, equal to the tensors' up to rounding."""
    from foreword.kernels.top import Noise, top_with_chances  # noqa: PLC0415  Triton is there only where CUDA is

    noise = Noise(sampling.key, position.expand(logits.shape[:-1]), sampling.temperature)
    return top_with_chances(logits, k, noise, words)


def _pick_by_kernel(logits: Tensor, position: Tensor, sampling: SamplingRows, seen: Tensor | None) -> Tensor:
    """The same pick, by that kernel, which divides by T as well. Every round with noise in it goes this way: a text that
    has no filter is drawn by the same bits whether or not its company has one. No filter drops what is largest, so none
    changes a row at T = 0."""
    from foreword.kernels.top import Noise, top  # noqa: PLC0415  Triton is there only where CUDA is

    scores = _penalise(logits, position, sampling, seen)
    if sampling.kind.filters:
        kept = _survivors(_divide_by_temperature(scores, sampling), sampling)
        scores = scores.masked_fill(~kept, -math.inf)
    return top(scores, 1, Noise(sampling.key, position.expand(logits.shape[:-1]), sampling.temperature)).squeeze(-1)


def _under_noise(logits: Tensor, position: Tensor, sampling: SamplingRows, tokens: Tensor | None = None) -> Tensor:
    if not sampling.kind.noise:
        return logits
    tokens = _all_tokens(logits) if tokens is None else tokens
    temperature = _column(sampling.temperature, logits)
    scaled = logits / torch.where(temperature > 0, temperature, 1)
    return (scaled + gumbel(sampling.key, position, tokens)).where(temperature > 0, scaled)


_BLOCK = 128
_MOST = 16  # best ones that a kernel looks for


def likeliest(scores: Tensor, k: int, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest along the last axis, largest first, by their places or the `words` [V] that stand there, and the log of
    their softmax: twice [.., k]."""
    if _has_kernel(scores, k):
        from foreword.kernels.top import top_with_chances  # noqa: PLC0415  Triton is there only where CUDA is

        return top_with_chances(scores, k, words=words)
    places, scores = best(scores, k), widened(scores)
    chances = scores.gather(-1, places) - scores.logsumexp(-1, keepdim=True)
    return places if words is None else words[places], chances


def widened(logits: Tensor) -> Tensor:
    """In float32 at least, which half precision fits into exactly: for all that is more than a comparison."""
    return logits if logits.dtype.itemsize >= 4 else logits.float()


def best(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last axis, largest first.

    A vocabulary is long and k is short: what is among the k largest lies in one of the k blocks with the largest maxima,
    so one sweep finds those, and the rest is done on a few hundred numbers.
    """
    if _has_kernel(scores, k):
        from foreword.kernels.top import top  # noqa: PLC0415  Triton is there only where CUDA is

        return top(scores, k)
    size = scores.shape[-1]
    if size % _BLOCK or size < 4 * k * _BLOCK:
        return scores.topk(k, dim=-1).indices
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    chosen = blocks.amax(-1).topk(k, dim=-1).indices
    few = blocks.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, _BLOCK)).flatten(-2)
    places = few.topk(k, dim=-1).indices
    return chosen.gather(-1, places // _BLOCK) * _BLOCK + places % _BLOCK


def _first_largest(scores: Tensor) -> Tensor:
    """argmax, of equal ones the first. On a CPU that of torch is slow, and a maximum is quick: so by blocks."""
    if _has_kernel(scores, 1):
        return best(scores, 1).squeeze(-1)
    if scores.device.type != "cpu" or scores.shape[-1] % _BLOCK:
        return scores.argmax(-1)
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    place = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, _BLOCK)).squeeze(-2).argmax(-1)
    return block.squeeze(-1) * _BLOCK + place


def _has_kernel(scores: Tensor, k: int) -> bool:
    return scores.is_cuda and scores.dtype != torch.float64 and k <= _MOST


def keeps(scores: Tensor, sampling: SamplingRows) -> Tensor | None:
    """Which tokens survive top-k, top-p and min-p, in that order; None where no filter is on. `scores` are after / T."""
    return _survivors(scores, sampling) if sampling.kind.filters else None


def _survivors(scores: Tensor, sampling: SamplingRows) -> Tensor:
    return scores >= _floor(scores, sampling, scores.logsumexp(-1, keepdim=True))


def _process(logits: Tensor, position: Tensor, sampling: SamplingRows, seen: Tensor | None) -> Tensor:
    """Logits after penalties, held-back end tokens, and / T."""
    return _divide_by_temperature(_penalise(logits, position, sampling, seen), sampling)


def _penalise(logits: Tensor, position: Tensor, sampling: SamplingRows, seen: Tensor | None) -> Tensor:
    """Logits after penalties and held-back end tokens; as they are where there is neither."""
    kind, scores = sampling.kind, logits
    if kind.penalties:
        assert seen is not None, "a repetition penalty needs the counts of the text"
        scores = widened(scores)
        penalty = _column(sampling.penalty, scores)
        scores = torch.where(seen > 0, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if kind.floors:
        scores = _hold_back_ends(widened(scores), position, sampling)
    return scores


def _divide_by_temperature(scores: Tensor, sampling: SamplingRows) -> Tensor:
    scores = widened(scores)
    if not sampling.kind.noise:
        return scores
    temperature = _column(sampling.temperature, scores)
    return scores / torch.where(temperature > 0, temperature, 1)


def _race(scores: Tensor, tokens: Tensor, position: Tensor, sampling: SamplingRows, floor: Tensor | None = None) -> Tensor:
    """Filters and noise for the tokens whose processed scores are given; rows at T = 0 have neither."""
    if not sampling.kind.noise:
        return scores
    drawn = _column(sampling.temperature, scores) > 0
    kept = keeps(scores, sampling) if floor is None else scores >= floor
    filtered = scores if kept is None else scores.masked_fill(~kept & drawn, -math.inf)
    return torch.where(drawn, filtered + gumbel(sampling.key, position, tokens), filtered)


# A nucleus rarely has more tokens than this.
_BEST = 256


def _pick_among_best(scores: Tensor, position: Tensor, sampling: SamplingRows) -> Tensor:
    """The same pick, for the CPU, where filters and noise over a whole vocabulary cost more than a small model's pass.

    If not even the last of the best scores survives the filters, no other token does, and the race is among the best. Each
    row answers that for itself, so its token does not depend on its company.
    """
    top = scores.topk(min(max(_BEST, sampling.kind.top_k + 1), scores.shape[-1]), dim=-1)
    floor = _floor(top.values, sampling, scores.logsumexp(-1, keepdim=True))
    winner = _race(top.values, top.indices, position, sampling, floor).argmax(-1, keepdim=True)
    drawn = (sampling.temperature > 0).unsqueeze(1)
    choice = torch.where(drawn, top.indices.gather(-1, winner).squeeze(-1), scores.argmax(-1))
    sure = (floor > top.values[..., -1:]).squeeze(-1) | ~drawn
    if bool(sure.all()):
        return choice
    return torch.where(sure, choice, _race(scores, _all_tokens(scores), position, sampling).argmax(-1))


def _floor(scores: Tensor, sampling: SamplingRows, log_mass: Tensor) -> Tensor:
    """The lowest score that survives: [b, N, 1]. `scores` may be the best few of a row, `log_mass` is that of all."""
    kind = sampling.kind
    floor = torch.full_like(scores[..., :1], -math.inf)
    if kind.top_k:
        floor = _top_k_floor(scores, sampling.top_k, kind.top_k)
        survivors = scores.masked_fill(scores < floor, -math.inf)
        log_mass = torch.where(floor > -math.inf, survivors.logsumexp(-1, keepdim=True), log_mass)
    if kind.top_p:
        probability = torch.where(scores < floor, 0, (scores - log_mass).exp()).to(torch.float32)
        floor = torch.maximum(floor, _top_p_floor(scores, probability, sampling.top_p))
    if kind.min_p:
        floor = torch.maximum(floor, scores.amax(-1, keepdim=True) + _column(sampling.min_p, scores).log())
    return floor


def _top_k_floor(scores: Tensor, k: Tensor, largest: int) -> Tensor:
    """The k-th best score of each row; minus infinity where top-k is off."""
    largest = min(largest, scores.shape[-1])
    top = scores.topk(largest, dim=-1).values
    place = (k - 1).clamp(0, largest - 1).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return top.gather(-1, place).masked_fill((k <= 0).view(-1, 1, 1), -math.inf)


def _top_p_floor(scores: Tensor, probability: Tensor, top_p: Tensor) -> Tensor:
    """The score of the least likely token inside the nucleus: a token is in while those above it hold less than top_p.

    Positive floats order like their bit patterns, so halving the range of patterns finds the exact edge in 31 sums: no
    sort, the same work for every input, and a fixed shape.
    """
    wanted = _column(top_p, probability)
    low = torch.zeros_like(probability[..., :1], dtype=torch.int32)  # mass(>= low) reaches wanted, or all there is
    high = probability.amax(-1, keepdim=True).view(torch.int32) + 1  # mass(>= high) does not
    for _ in range(31):
        middle = low + (high - low) // 2
        edge = middle.view(torch.float32)
        enough = torch.where(probability >= edge, probability, 0).sum(-1, keepdim=True) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    inside = (probability >= low.view(torch.float32)) & (probability > 0)
    lowest = torch.where(inside, scores, math.inf).amin(-1, keepdim=True)
    return lowest.masked_fill(wanted >= 1, -math.inf)


def _hold_back_ends(scores: Tensor, position: Tensor, sampling: SamplingRows) -> Tensor:
    early = (position < sampling.floor.unsqueeze(1)).unsqueeze(-1)  # [b, N, 1]
    held = torch.where(early, -math.inf, scores[..., sampling.ends])
    return scores.index_copy(-1, sampling.ends, held)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, 1, 1).to(like.dtype)


def _all_tokens(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device)


# The noise -------------------------------------------------------------------------------------------------------------

_WORD = 0xFFFFFFFF
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd multipliers that spread bits well


def gumbel(key: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise [b, N, V] for request keys [b, 2], positions [b, N] and token ids ([V] or [b, N, V])."""
    bits = noise_bits(key, position, tokens)
    # Small uniforms make large noise, and floats are finest near 0: that is where the winners are decided.
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def noise_bits(key: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """31 random bits for each (key, position, token), as int32: the same on every device."""
    first, second = _row_keys(key, position)
    bits = tokens.to(torch.int32) * _signed(_GOLDEN) ^ first.unsqueeze(-1)
    bits ^= _shifted(bits, 16)
    bits *= _signed(_FIRST)
    bits += second.unsqueeze(-1)
    bits ^= _shifted(bits, 13)
    bits *= _signed(_SECOND)
    bits ^= _shifted(bits, 16)
    return _shifted(bits, 1)


def _row_keys(key: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words per row from the request's key and the position, in int64 so that nothing overflows."""
    place = position & _WORD
    first = _mix32(key[:, :1] ^ _mix32(place * 0x6C62272E & _WORD))
    second = _mix32(key[:, 1:] + first & _WORD)
    return _wrapped(first), _wrapped(second)


def _mix32(word: Tensor) -> Tensor:
    for shift, multiplier in ((16, 0x45D9F3B), (16, 0x45D9F3B)):
        word = (word ^ (word >> shift)) * multiplier & _WORD
    return word ^ (word >> 16)


def _mix64(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = ((word ^ (word >> shift)) * multiplier) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical right shift; torch's own keeps the sign."""
    return (bits >> by) & (_WORD >> by)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _wrapped(word: Tensor) -> Tensor:
    return (word - ((word >> 31) << 32)).to(torch.int32)
