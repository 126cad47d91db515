"""The one place where a token is chosen: bias, penalties, masks; division by the temperature T; top-k, top-p, min-p; noise.

The noise is Gumbel, a pure function of (request seed, position of the token, token id). So the choice does not depend on the
drafter, the batch or when the request came: speculative output equals plain output, token for token, at any temperature.
T = 0 drops noise and filters. Filters keep or drop equal logits together, so that no sort order matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.core.sampling_table import ANY_TOKEN, SamplingRows
from foreword.ops.bitmasks import drop_barred
from foreword.ops.filters import Filters, lowest, survivors
from foreword.ops.noise import Noise, all_tokens, column, divided, under
from foreword.ops.top import at_least_float32, first_largest, race, sampled, top, top_with_chances


@dataclass(frozen=True)
class History:
    """The tokens before the one that each row decides, as far as the stages of the round need them."""

    seen: Tensor | None = None  # [b, N, V]: how often each token occurs in prompt and output
    generated: Tensor | None = None  # [b, N, V]: how often it occurs in the output alone
    last: Tensor | None = None  # [b, N, L - 1]: the last tokens, for bad words of up to L tokens
    allowed: Tensor | None = None  # [b, N, W]: the tokens that a grammar allows after them, as bits

    def at(self, rows: Tensor) -> History:
        """Return that of some rows [b, n]."""

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.gather(1, rows.unsqueeze(-1).expand(-1, -1, values.shape[-1]))

        return History(part(self.seen), part(self.generated), part(self.last), part(self.allowed))


NO_HISTORY = History()


def pick(logits: Tensor, position: Tensor, sampling: SamplingRows, history: History = NO_HISTORY) -> Tensor:
    """Pick the target's own token at every row: [b, N, V] -> [b, N].

    `position` [b, N]: the position of the picked token; greedy rounds do not use it.
    """
    if sampling.kind.is_greedy:
        return first_largest(logits)
    scores = _processed(logits, position, sampling, history)
    if not sampling.kind.noise:
        return first_largest(at_least_float32(scores))
    return sampled(scores, _noise(scores, position, sampling), _filters(sampling))


def judge(logits: Tensor, position: Tensor, sampling: SamplingRows, history: History = NO_HISTORY) -> Tensor:
    """Return the score of every token; the largest wins: processed logits, plus noise if there is a temperature."""
    scores = at_least_float32(_processed(logits, position, sampling, history))
    if not sampling.kind.noise:
        return scores
    scores, filters = divided(scores, sampling.temperature), _filters(sampling)
    floor = None if filters is None else lowest(scores, filters, scores.logsumexp(-1, keepdim=True))
    return race(scores, all_tokens(scores), _noise(scores, position, sampling), floor)


def rank(logits: Tensor, position: Tensor | None, sampling: SamplingRows, k: int, tokens: Tensor | None = None) -> Tensor:
    """Return a drafter's k best candidates, best first, under the noise that the target will sample with: [b, N, V] -> [b,
    N, k].

    With `tokens` [b, N, C], `logits` are those of the given candidates alone, and the result is indices into them.
    Sharing the noise couples the candidate to the sample, so a good candidate stays good at any temperature. `position` may
    be None without noise.
    """
    if not sampling.kind.noise:
        return top(logits, k)
    assert position is not None
    return top(under(logits, _noise(logits, position, sampling), tokens), k)


def candidates(
    logits: Tensor, position: Tensor | None, sampling: SamplingRows, k: int, vocabulary: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k best candidates as `rank` orders them, and the log-probability of each: [b, N, V] -> both [b, N, k].

    `position` [b, N or 1]: may be None without noise. `vocabulary` [V]: the draft vocabulary, in rising order, if the
    columns are those tokens only. The candidates are then its token ids, and the noise is that of those ids.

    A probability is the softmax of the scores that the candidates are ranked by. Shared noise already shows which of the
    likely tokens will win, so probabilities under it are sharper than those of the logits.
    """
    if not sampling.kind.noise:
        return likeliest(logits, k, vocabulary)
    assert position is not None
    return top_with_chances(logits, k, _noise(logits, position, sampling), vocabulary)


def likeliest(scores: Tensor, k: int, vocabulary: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the k largest scores along the last axis, largest first: their indices, or with a draft `vocabulary` [V] the
    tokens at those indices, and the log of their softmax. Both are [.., k]."""
    return top_with_chances(scores, k, None, vocabulary)


def log_chances(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the model's own log-probability of tokens [b, n] by their rows of logits [b, n, V]: [b, n]; and the `most`
    likeliest tokens and their log-probabilities, both [b, n, most]."""
    rows = at_least_float32(logits).log_softmax(-1)
    likely = rows.topk(min(most, rows.shape[-1]), dim=-1)
    return rows.gather(2, tokens.unsqueeze(-1)).squeeze(-1), likely.indices, likely.values


def chances_after(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return the model's own probability of tokens [b, n], each after one of the rows [b, n] of logits [b, N, V]: [b, n]."""
    log_probs = at_least_float32(logits).log_softmax(-1)
    return log_probs.flatten(1).gather(1, rows * logits.shape[-1] + tokens).exp()


def keeps(scores: Tensor, sampling: SamplingRows) -> Tensor | None:
    """Return which tokens survive top-k, top-p and min-p, in that order; None if no filter is on. `scores` are divided by
    the temperature already."""
    filters = _filters(sampling)
    return None if filters is None else survivors(scores, filters)


def _noise(scores: Tensor, position: Tensor, sampling: SamplingRows) -> Noise:
    return Noise(sampling.key, position.expand(scores.shape[:-1]), sampling.temperature)


def _filters(sampling: SamplingRows) -> Filters | None:
    kind = sampling.kind
    if not kind.filters:
        return None
    return Filters(
        top_k=sampling.column("top_k") if kind.top_k else None,
        largest_k=kind.top_k,
        top_p=sampling.column("top_p") if kind.top_p else None,
        min_p=sampling.column("min_p") if kind.min_p else None,
    )


# Before the temperature ------------------------------------------------------------------------------------------------


def _processed(logits: Tensor, position: Tensor, sampling: SamplingRows, history: History) -> Tensor:
    """Apply bias, penalties, held-back end tokens, masks, bad words and grammars to logits, as far as the round has any."""
    kind, scores = sampling.kind, logits
    if kind.bias:
        scores = at_least_float32(scores)
        scores = scores + sampling.column("logit_bias").unsqueeze(1).to(scores.dtype)
    if kind.penalties:
        scores = _penalise(at_least_float32(scores), sampling, history)
    if kind.floors:
        scores = _hold_back_ends(at_least_float32(scores), position, sampling)
    if kind.masks:
        early = (position < sampling.floor.unsqueeze(1)).unsqueeze(-1)  # [b, N, 1]
        scores = scores.masked_fill(sampling.column("barred").unsqueeze(1) + early.to(torch.uint8) >= 2, -math.inf)
    if kind.bad_words:
        scores = _bar_bad_words(scores, sampling, history)
    if kind.grammar:
        assert history.allowed is not None, "a grammar needs the tokens that it allows after each row"
        scores = drop_barred(scores, history.allowed)
    return scores


def _penalise(scores: Tensor, sampling: SamplingRows, history: History) -> Tensor:
    """Apply the penalties. The repetition penalty counts prompt and output, the others the output alone, as in vLLM."""
    if sampling.kind.repetition:
        seen = history.seen
        assert seen is not None, "a repetition penalty needs the counts of the sequence"
        penalty = column(sampling.column("repetition_penalty"), scores)
        scores = torch.where(seen > 0, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if sampling.kind.generated:
        counts = history.generated
        assert counts is not None, "presence and frequency penalties need the counts of the output"
        scores = scores - column(sampling.column("frequency_penalty"), scores) * counts
        scores = scores - column(sampling.column("presence_penalty"), scores) * (counts > 0)
    return scores


def _hold_back_ends(scores: Tensor, position: Tensor, sampling: SamplingRows) -> Tensor:
    early = (position < sampling.floor.unsqueeze(1)).unsqueeze(-1)  # [b, N, 1]
    held = torch.where(early, -math.inf, scores[..., sampling.ends])
    return scores.index_copy(-1, sampling.ends, held)


def _bar_bad_words(scores: Tensor, sampling: SamplingRows, history: History) -> Tensor:
    """Bar the last token of every bad word whose other tokens come right before the token that a row decides."""
    last, kind = history.last, sampling.kind
    assert last is not None, "bad words need the last tokens of the sequence"
    words = sampling.table["bad_words"][:, : kind.bad_words, -kind.bad_word_length :][sampling.slots].unsqueeze(1)
    *before, final = words.unbind(-1)  # each [b, 1, W]
    hits = final >= 0
    for token, there in zip(before, last.unbind(-1), strict=True):
        hits = hits & ((token == there.unsqueeze(-1)) | (token == ANY_TOKEN))  # [b, N, W]
    hits = hits.expand(*scores.shape[:2], -1)
    # Two words may end in the same token. So count: a word that is not completed must not undo the other.
    counts = torch.zeros(scores.shape, dtype=torch.int32, device=scores.device)
    counts.scatter_add_(2, final.clamp(min=0).long().expand_as(hits), hits.to(torch.int32))
    return scores.masked_fill(counts > 0, -math.inf)
