"""Choose the draft vocabulary: the tokens that the target generates often (see `drafting/draft_vocabulary.py`).

In: sequences with masks of what the target generated, and the share that the draft vocabulary must cover. Out: a bitmap over
the vocabulary, or None for all tokens. A rare token costs as much to draft as any other and is hardly ever right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.core.drafter import Drafter
from foreword.drafters.saved import restore, write_draft_vocabulary
from foreword.drafting.draft_vocabulary import packed, unpacked
from foreword.errors import DataError, ForewordWarning
from foreword.model.model import Model
from foreword.train.record import record_draft_vocabulary
from foreword.train.schedule import TrainingData, check_cover
from foreword.train.sequences import all_sequences
from foreword.train.shards import Shards

FEW = 1024  # tokens: a draft vocabulary below this and below a quarter of all tokens comes from too little data
MULTIPLE = 128  # the size is rounded up to this: the search for the best tokens takes blocks of columns


def counts_of(data: TrainingData, vocab_size: int) -> Tensor:
    """Count how often the target generated each token: [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for index in range(len(data.lengths)):
        tokens, written = data[index]
        counts.index_add_(0, tokens[written].long(), written[written].long())
    return counts


def frequent(counts: Tensor, ends: Tensor, cover: float) -> Tensor | None:
    """Return a bitmap of the most frequent tokens that cover this share of all counts, including the `ends` [E]."""
    check_cover(cover)
    total, vocab_size = int(counts.sum()), len(counts)
    if not total:
        raise DataError("the data has no token that the model generated; distil more")
    if cover == 1:
        return None
    first = counts.index_fill(0, ends.cpu(), total + 1)
    order = first.argsort(descending=True, stable=True)
    enough = int((counts[order].cumsum(0) < cover * total).sum()) + 1
    size = -(-max(enough, len(ends)) // MULTIPLE) * MULTIPLE
    if size >= vocab_size:
        return None
    return packed(torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, order[:size], True))


def describe_draft_vocabulary(bits: Tensor | None, counts: Tensor) -> dict[str, Any]:
    """Describe it for the record: its size, the size of the vocabulary, and the share of the data that it covers."""
    chosen = torch.ones_like(counts, dtype=torch.bool) if bits is None else unpacked(bits, len(counts), "the target")
    covered = int(counts[chosen].sum()) / int(counts.sum())
    return {"count": int(chosen.sum()), "of": len(counts), "covered": round(covered, 5)}


def warn_of_few(described: dict[str, Any], counts: Tensor) -> None:
    """Warn if a draft vocabulary, as `describe_draft_vocabulary` describes it, is too small for other prompts."""
    if described["count"] < min(FEW, described["of"] // 4):
        warnings.warn(
            f"the draft vocabulary has {described['count']:,} of {described['of']:,} tokens, chosen from the "
            f"{int(counts.sum()):,} that the model generated; other tokens are never drafted. Distil more data, or take all "
            "tokens with --cover 1",
            ForewordWarning,
            stacklevel=3,
        )


def with_draft_vocabulary(bits: Tensor | None, make: Callable[..., Drafter]) -> Callable[..., Drafter]:
    """Wrap `make` so that its drafters get this draft vocabulary, if they use the target's head."""

    def made(**options: Any) -> Drafter:
        drafter = make(**options)
        if drafter.vocabulary is not None:
            drafter.vocabulary.choose(bits)
        return drafter

    return made


def choose_draft_vocabulary(folder: str | Path, model: Model, data: Sequence[Shards], cover: float) -> dict[str, Any]:
    """Give a trained drafter the tokens that are frequent in the data as its draft vocabulary. Its weights do not change."""
    restore(folder, model)  # refuses a folder that cannot be used, or was trained for another model
    counts = counts_of(all_sequences(data), model.vocab_size)
    bits = frequent(counts, model.ends, cover)
    described = describe_draft_vocabulary(bits, counts)
    warn_of_few(described, counts)
    write_draft_vocabulary(folder, bits, described["count"])
    record_draft_vocabulary(Path(folder), described)
    return described
