"""Choose the draft vocabulary: the tokens that the target writes often (`drafting/draft_vocabulary.py`).

In: sequences with masks of what the target wrote, and the share of it that the draft vocabulary must cover. Out: a bitmap
over the vocabulary, or None for all of it. A rare token costs as much to draft as any other and is hardly ever right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.core.drafter import Drafter
from foreword.drafters.saved import put_words, restore
from foreword.drafting.draft_vocabulary import packed, unpacked
from foreword.errors import DataError, ForewordWarning
from foreword.model.model import Model
from foreword.train.record import note_words
from foreword.train.schedule import Texts, check_cover
from foreword.train.shards import Shards
from foreword.train.texts import Sequences

FEW = 1024  # tokens: a smaller draft vocabulary than this, and than a quarter of all tokens, is a sign of too little data
TOGETHER = 128  # as many columns or a multiple: what the best of them are looked for by


def counts_of(texts: Texts, vocab_size: int) -> Tensor:
    """[V]: how often the target wrote each token."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for index in range(len(texts.lengths)):
        tokens, written = texts[index]
        counts.index_add_(0, tokens[written].long(), written[written].long())
    return counts


def frequent(counts: Tensor, ends: Tensor, cover: float) -> Tensor | None:
    """The bitmap of the most frequent tokens that cover this share of what was counted, the `ends` [E] among them."""
    check_cover(cover)
    total, vocab_size = int(counts.sum()), len(counts)
    if not total:
        raise DataError("there is no token in these texts that the model wrote; distil more")
    if cover == 1:
        return None
    first = counts.index_fill(0, ends.cpu(), total + 1)
    order = first.argsort(descending=True, stable=True)
    enough = int((counts[order].cumsum(0) < cover * total).sum()) + 1
    wanted = -(-max(enough, len(ends)) // TOGETHER) * TOGETHER
    if wanted >= vocab_size:
        return None
    return packed(torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, order[:wanted], True))


def told_of_words(bits: Tensor | None, counts: Tensor) -> dict[str, Any]:
    """What a record says of them: how many there are, of how many tokens, and which share of the texts they cover."""
    chosen = torch.ones_like(counts, dtype=torch.bool) if bits is None else unpacked(bits, len(counts), "the target")
    covered = int(counts[chosen].sum()) / int(counts.sum())
    return {"count": int(chosen.sum()), "of": len(counts), "covered": round(covered, 5)}


def warn_of_few(told: dict[str, Any], counts: Tensor) -> None:
    """Say so where a draft vocabulary, as `told_of_words` describes it, is so small that it hardly fits other texts."""
    if told["count"] < min(FEW, told["of"] // 4):
        warnings.warn(
            f"the draft vocabulary has {told['count']:,} of {told['of']:,} tokens, chosen from {int(counts.sum()):,} that "
            "the model wrote; other tokens are never drafted. Distil more data, or take all tokens with --cover 1",
            ForewordWarning,
            stacklevel=3,
        )


def among(bits: Tensor | None, make: Callable[..., Drafter]) -> Callable[..., Drafter]:
    """Wrap `make` so that its drafters get this draft vocabulary, if they use the target's head at all."""

    def made(**options: Any) -> Drafter:
        drafter = make(**options)
        if drafter.vocabulary is not None:
            drafter.vocabulary.choose(bits)
        return drafter

    return made


def give_words(folder: str | Path, model: Model, data: Sequence[Shards], cover: float) -> dict[str, Any]:
    """Give a trained drafter the draft vocabulary that is frequent in the data; its weights stay as they are."""
    restore(folder, model)  # refuses what cannot be used, or was trained for another model
    texts = Sequences([(shards, np.arange(len(shards))) for shards in data])
    counts = counts_of(texts, model.vocab_size)
    bits = frequent(counts, model.ends, cover)
    told = told_of_words(bits, counts)
    warn_of_few(told, counts)
    put_words(folder, bits, told["count"])
    note_words(Path(folder), told)
    return told
