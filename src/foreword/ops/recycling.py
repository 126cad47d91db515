"""Token Recycling's table, as torch operations: walk it along a tree template, and overwrite it with new candidates.

In: for every token of the vocabulary the K candidates that the target last ranked best after it, with log-probabilities.
Out: a draft of the likeliest nodes of the template; or the table itself, changed in place. On CUDA,
ops/drafting/recycle.py takes the place of both functions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated
from foreword.ops.growth import likeliest
from foreword.ops.noise import Noise, under
from foreword.ops.top import top


class CandidateTable(NamedTuple):
    """Candidates by token. A row past the vocabulary takes the writes that must not count."""

    tokens: Tensor  # [tables, V + 1, K] int32
    chances: Tensor  # [tables, V + 1, K] float32: log-probabilities, -inf where nothing is known


class RankTemplate(NamedTuple):
    """A tree whose nodes are named by the candidate ranks on their way from the root, level by level, the root first."""

    ways: Tensor  # [M, D] int32: ranks from the root on; 0 past a node's depth
    depths: Tensor  # [M] int32
    parents: Tensor  # [M]
    fading: Tensor  # [M]: what a node's depth adds to its log-probability
    level_sizes: tuple[int, ...]  # nodes of each level after the root


class SlotNoise(NamedTuple):
    """What the noise of all slots is made of."""

    lengths: Tensor  # [B]
    keys: Tensor  # [B, 2]
    temperatures: Tensor  # [B]


@accelerated("drafting.recycle:walked")
def walked(
    table: CandidateTable,
    template: RankTemplate,
    slots: Tensor,
    roots: Tensor,
    nodes: int,
    own: bool,
    noise: SlotNoise | None = None,
    cost: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft the `nodes` likeliest nodes of the template: tokens and parents [b, nodes], and sizes [b].

    slots [b], roots [B]. own: every slot has a table of its own; else all share one. noise: candidates are ranked under the
    noise that the target will sample with. cost [nodes or more]: of a pass by its rows; with it only as many nodes are
    drafted as pay off. The kernel has no `cost`: where it runs, the number of rows is fixed before.
    """
    tokens, chances = _along_template(table, template, slots, roots, own, noise)
    return likeliest(tokens, template.parents.unsqueeze(0), chances, nodes, cost)


def _along_template(
    table: CandidateTable, template: RankTemplate, slots: Tensor, roots: Tensor, own: bool, noise: SlotNoise | None
) -> tuple[Tensor, Tensor]:
    """Tokens [b, M] of the whole template, and log-probabilities [b, M] that the target goes that way."""
    which, root = _table_of(slots, own), roots[slots].unsqueeze(1)
    tokens = root.repeat(1, len(template.parents))
    chances = torch.zeros(tokens.shape, device=tokens.device)
    done = 1
    for depth, count in enumerate(template.level_sizes, start=1):
        known = tokens[:, :done]
        candidates, remembered = table.tokens[which, known].long(), table.chances[which, known]  # [b, done, K]
        if noise is not None:
            order = _order(candidates, remembered, slots, depth, noise)
            candidates, remembered = candidates.gather(2, order), remembered.gather(2, order)
        level = slice(done, done + count)
        parent, rank = template.parents[level], template.ways[level, depth - 1].long()
        tokens[:, level] = candidates[:, parent, rank]
        chances[:, level] = chances[:, parent] + remembered[:, parent, rank]
        done += count
    return tokens, chances + template.fading


def _order(candidates: Tensor, remembered: Tensor, slots: Tensor, depth: int, noise: SlotNoise) -> Tensor:
    """The order of candidates [b, n, K] under the noise of the position that they are proposed for."""
    position = (noise.lengths[slots] + depth).unsqueeze(1).expand(candidates.shape[:-1])
    of_slots = Noise(noise.keys[slots], position, noise.temperatures[slots])
    return top(under(remembered, of_slots, candidates), candidates.shape[-1])


@accelerated("drafting.recycle:learnt")
def learnt(
    table: CandidateTable,
    slots: Tensor,
    seen: Tensor,
    size: Tensor,
    ranked: tuple[Tensor, Tensor],
    accepted: tuple[Tensor, Tensor] | None,
    own: bool,
) -> None:
    """Overwrite the table's rows of the tokens `seen` [b, n], the first `size` [b] of each sequence.

    ranked: the new candidates and their log-probabilities, each [b, n, K]. If a token occurs several times, its latest row
    wins. Accepted rows saw the true sequence, so they come after all others: `accepted` is a path [b, D + 1] and how many
    entries of it count [b]. A sequence that accepted nothing teaches nothing.
    """
    (candidates, chances), (batch, nodes) = ranked, seen.shape
    rows = torch.arange(nodes, device=seen.device)
    counts, when = rows < size.unsqueeze(1), rows.expand_as(seen)
    if accepted is not None:
        path, count = accepted
        kept = torch.arange(path.shape[1], device=path.device) < count.unsqueeze(1)
        counts = counts & (count > 0).unsqueeze(1)
        when = when + torch.zeros_like(when).scatter_add(1, path, kept * nodes)
    chances = chances.where(chances.isfinite(), -math.inf)  # a NaN would be drafted before the root
    waste, k = table.tokens.shape[1] - 1, table.tokens.shape[2]
    row = torch.where(counts, _table_of(slots, own) * (waste + 1) + seen, -1).flatten()
    sequence = torch.arange(batch, device=seen.device).unsqueeze(1)
    time = (when * batch + sequence).flatten()
    beaten = ((row.unsqueeze(1) == row) & (time.unsqueeze(1) < time)).any(1)
    row = torch.where(beaten | (row < 0), waste, row)
    table.tokens.view(-1, k).index_copy_(0, row, candidates.reshape(-1, k).int())
    table.chances.view(-1, k).index_copy_(0, row, chances.reshape(-1, k).float())


def _table_of(slots: Tensor, own: bool) -> Tensor:
    """Which table each sequence uses: [b, 1]."""
    return (slots if own else torch.zeros_like(slots)).unsqueeze(1)
