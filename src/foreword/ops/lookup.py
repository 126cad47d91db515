"""Prompt lookup, as torch operations: find the longest earlier match of a sequence's end, and continue after it.

In: token sequences by slot, and their lengths. Out: the root with the tokens that followed the match, and how many of them
to draft. Among equally long matches the latest counts. On CUDA, ops/drafting/lookup.py takes the place of `looked_up`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated


@accelerated("drafting.lookup:looked_up")
def looked_up(tokens: Tensor, slots: Tensor, lengths: Tensor, sizes: Tensor, nodes: int, span: int) -> tuple[Tensor, Tensor]:
    """Draft chains for sequences: tokens [b, nodes], the root first, and sizes [b].

    tokens [B, L]: all sequences, by slot. slots [b]: those to draft for. lengths [B]: where their roots stand. sizes
    [longest match + 1]: how many rows to draft, by the number of tokens that match. span: no root stands further on.
    """
    text, end = tokens[slots][:, : span + 1], lengths[slots]  # [b, span + 1], [b]
    matched, place = _longest_match(text, end, sizes.shape[0] - 1)
    ahead = torch.arange(nodes - 1, device=end.device)
    period = (end - place).unsqueeze(1)
    source = place.unsqueeze(1) + 1 + ahead % period
    root = text.gather(1, end.unsqueeze(1))
    return torch.cat([root, text.gather(1, source)], dim=1), sizes[matched]


def _longest_match(text: Tensor, end: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """How many tokens match [b], at most `longest`, and where the match ends [b]: the longest match, and of those the
    latest."""
    columns = torch.arange(text.shape[1], device=text.device)
    run = columns < end.unsqueeze(1)  # a match ends before the root
    matched = torch.zeros_like(text)
    for back in range(longest):
        last = text.gather(1, (end - back).clamp(min=0).unsqueeze(1))
        same = (text == last).roll(back, dims=1) & (columns >= back) & (end >= back).unsqueeze(1)
        run = run & same
        matched += run
    best = (matched * text.shape[1] + columns).argmax(1, keepdim=True)
    length = matched.gather(1, best).squeeze(1)
    # Without a match any place will do, since the draft is the root alone. It must lie before the end, for the period.
    return length, torch.minimum(best.squeeze(1), (end - 1).clamp(min=0)).where(end > 0, -1)
