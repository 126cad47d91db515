"""Which tokens the target writes often: the words that a drafter guesses among (`core/vocabulary.py`).

In: texts with the masks that say what the target wrote, and which share of it the words are to cover. Out: a bitmap over the
vocabulary, or None for all of it. Rare tokens cost what all do to guess, and are hardly ever right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.core.drafter import Drafter
from foreword.core.vocabulary import packed, unpacked
from foreword.errors import DataError
from foreword.methods.saved import put_words, restore
from foreword.model.model import Model
from foreword.train.record import note_words
from foreword.train.schedule import Texts, check_cover
from foreword.train.shards import Shards
from foreword.train.texts import Sequences

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


def among(bits: Tensor | None, make: Callable[..., Drafter]) -> Callable[..., Drafter]:
    """`make`, with drafters that guess among these words, where they ask the target's head at all."""

    def made(**options: Any) -> Drafter:
        drafter = make(**options)
        if drafter.words is not None:
            drafter.words.choose(bits)
        return drafter

    return made


def give_words(folder: str | Path, model: Model, data: Sequence[Shards], cover: float) -> dict[str, Any]:
    """The words of a trained drafter are those that the data shows to be frequent; its weights stay as they are."""
    restore(folder, model)  # refuses what cannot be used, or was trained for another model
    texts = Sequences([(shards, np.arange(len(shards))) for shards in data])
    counts = counts_of(texts, model.vocab_size)
    bits = frequent(counts, model.ends, cover)
    told = told_of_words(bits, counts)
    put_words(folder, bits, told["count"])
    note_words(Path(folder), told)
    return told
