"""Prompt lookup, as torch operations: find the longest earlier match of a sequence's end, and continue after it.

In: token sequences by slot, and their lengths. Out: the root with the tokens that followed the match, and how many of them
to draft. Among equally long matches the latest counts. `looked_up_in_both` also looks in the predictions of requests. On
CUDA, ops/drafting/lookup.py takes the place of both functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated


class Predictions(NamedTuple):
    """Sequences as their requests predict them, by slot."""

    tokens: Tensor  # [B, W] the prompt, then the prediction, each token at the position where it is expected
    span: Tensor  # [B, 2] positions of the last prompt token, and of the last token of the prediction; equal: there is none
    sizes: Tensor  # [longest match + 1] how many rows to draft, by the number of tokens that match
    width: int  # no prediction reaches further


@accelerated("drafting.lookup:looked_up")
def looked_up(tokens: Tensor, slots: Tensor, lengths: Tensor, sizes: Tensor, nodes: int, span: int) -> tuple[Tensor, Tensor]:
    """Draft chains for sequences: tokens [b, nodes], the root first, and sizes [b].

    tokens [B, L]: all sequences, by slot. slots [b]: those to draft for. lengths [B]: where their roots stand. sizes
    [longest match + 1]: how many rows to draft, by the number of tokens that match. span: no root stands further on.
    """
    text, end = tokens[slots][:, : span + 1], lengths[slots]  # [b, span + 1], [b]
    matched, place = _longest_match(text, end, sizes.shape[0] - 1)
    root = text.gather(1, end.unsqueeze(1))
    return torch.cat([root, _repeated(text, end, place, nodes - 1)], dim=1), sizes[matched]


@accelerated("drafting.lookup:looked_up_in_both")
def looked_up_in_both(
    tokens: Tensor, slots: Tensor, lengths: Tensor, sizes: Tensor, nodes: int, span: int, predictions: Predictions
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft chains like `looked_up`, from the sequence or from its prediction, whichever matches longer: tokens [b, nodes],
    sizes [b], and whether a chain is from the prediction [b] bool. If both match equally, the prediction is taken.

    A prediction is not repeated as a loop: a chain ends with it. Of its equally long matches the one counts that is closest
    to the sequence's own end, since a changed text stays about as long as the prediction.
    """
    text, end = tokens[slots][:, : span + 1], lengths[slots]
    matched, place = _longest_match(text, end, sizes.shape[0] - 1)
    predicted = predictions.tokens[slots][:, : predictions.width]
    first, last = predictions.span[slots].clamp(max=predicted.shape[1] - 1).unbind(1)  # free slots may have longer ones
    found, at = _closest_match(predicted, text, end, (first, last), sizes.shape[0] - 1)
    is_predicted = (found > 0) & (found >= matched)
    ahead = at.unsqueeze(1) + 1 + torch.arange(nodes - 1, device=end.device)
    following = predicted.gather(1, torch.minimum(ahead, last.unsqueeze(1)))
    chain = following.where(is_predicted.unsqueeze(1), _repeated(text, end, place, nodes - 1))
    size = torch.minimum(predictions.sizes[found], 1 + last - at).where(is_predicted, sizes[matched])
    return torch.cat([text.gather(1, end.unsqueeze(1)), chain], dim=1), size, is_predicted


def _longest_match(text: Tensor, end: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """How many tokens match [b], at most `longest`, and where the match ends [b]: the longest match, and of those the
    latest."""
    columns = torch.arange(text.shape[1], device=text.device)
    run = columns < end.unsqueeze(1)  # a match ends before the root
    matched = _matched(text, text, end, run, longest)
    best = (matched * text.shape[1] + columns).argmax(1, keepdim=True)
    length = matched.gather(1, best).squeeze(1)
    # Without a match any place will do, since the draft is the root alone. It must lie before the end, for the period.
    return length, torch.minimum(best.squeeze(1), (end - 1).clamp(min=0)).where(end > 0, -1)


def _closest_match(
    predicted: Tensor, text: Tensor, end: Tensor, span: tuple[Tensor, Tensor], longest: int
) -> tuple[Tensor, Tensor]:
    """The same in a prediction [b, W]: the longest match, and of those the closest to the sequence's end; of two at the same
    distance the later one. The match ends at the last prompt token or in the prediction, before its last token."""
    columns, (first, last) = torch.arange(predicted.shape[1], device=end.device), span
    run = (columns >= first.unsqueeze(1)) & (columns < last.unsqueeze(1))
    matched = _matched(predicted, text, end, run, longest)
    beyond = columns - end.unsqueeze(1)
    distance = 2 * beyond.abs() - (beyond > 0).long()  # different at all places
    furthest = 2 * (predicted.shape[1] + text.shape[1])
    best = (matched * furthest - distance).argmax(1, keepdim=True)
    return matched.gather(1, best).squeeze(1), best.squeeze(1)


def _matched(haystack: Tensor, text: Tensor, end: Tensor, run: Tensor, longest: int) -> Tensor:
    """Return for each place of a haystack [b, W] how many tokens up to it equal the last tokens of a sequence: [b, W].

    text [b, L]: the sequences. end [b]: where their roots stand. run [b, W] bool: the places that count.
    """
    columns = torch.arange(haystack.shape[1], device=haystack.device)
    matched = torch.zeros_like(haystack)
    for back in range(longest):
        last = text.gather(1, (end - back).clamp(min=0).unsqueeze(1))
        same = (haystack == last).roll(back, dims=1) & (columns >= back) & (end >= back).unsqueeze(1)
        run = run & same
        matched += run
    return matched


def _repeated(text: Tensor, end: Tensor, place: Tensor, count: int) -> Tensor:
    """Return the `count` tokens after a place in each sequence, as a loop if they reach its end: [b, count]."""
    period = (end - place).unsqueeze(1)
    ahead = torch.arange(count, device=end.device)
    return text.gather(1, place.unsqueeze(1) + 1 + ahead % period)
