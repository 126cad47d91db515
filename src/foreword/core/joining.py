"""DRAFT: a chain of guesses hung into a tree of others, so that one pass checks both.

In: two drafts of the same roots, the second a chain. Out: one draft whose paths are those of both: as far as the tree goes
the chain's way already, its rows serve; where they part, the rest of the chain hangs on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.draft import Draft, Tree


def joined(tree: Draft, chain: Draft, levels: int) -> Draft:
    """`levels`: how deep the tree is at most. As many rows as both have, the root counted once; those shared are empty."""
    if tree.tokens.is_cuda:
        from foreword.kernels.joining import hung  # noqa: PLC0415  Triton is there only where CUDA is

        tokens, parent, size = hung((tree.tokens, tree.tree.parent, tree.size), (chain.tokens, chain.size), levels)
        return Draft(tokens, Tree(parent), size)
    return hang(tree, chain, levels)


def hang(tree: Draft, chain: Draft, levels: int, agreed: bool = False) -> Draft:
    """As torch operations. `agreed`: chains whose first guess the tree does not have are left out."""
    more = chain.nodes - 1
    parent = tree.tree.parent.expand_as(tree.tokens)
    at, shared = _shared(tree, parent, chain, min(levels, more))
    left = chain.size - 1 - shared
    if agreed:
        left = left.where(shared > 0, 0)
    row = torch.arange(tree.nodes + more, device=at.device).expand(len(at), -1)
    behind = row - tree.size.unsqueeze(1)
    hangs = (behind >= 0) & (behind < left.unsqueeze(1))
    source = (1 + shared.unsqueeze(1) + behind).clamp(min=0, max=more)
    stands = row < tree.size.unsqueeze(1)
    tokens = functional.pad(tree.tokens, (0, more)).where(stands, tree.tokens[:, :1])
    above = functional.pad(parent, (0, more)).where(stands, 0)
    tokens = chain.tokens.gather(1, source).where(hangs, tokens)
    above = (row - 1).where(behind > 0, at.unsqueeze(1)).where(hangs, above)
    return Draft(tokens, Tree(above), tree.size + left)


def _shared(tree: Draft, parent: Tensor, chain: Draft, most: int) -> tuple[Tensor, Tensor]:
    """The last row of the tree that stands on the chain's way [b], and how many guesses of the chain that are [b]."""
    at, shared = torch.zeros_like(tree.size), torch.zeros_like(tree.size)
    known = tree.counts.clone()
    known[:, 0] = False
    on = torch.ones_like(tree.size, dtype=torch.bool)
    for link in range(1, most + 1):
        next_one = known & (parent == at.unsqueeze(1)) & (tree.tokens == chain.tokens[:, link : link + 1])
        on = on & next_one.any(1) & (link < chain.size)
        at = next_one.int().argmax(1).where(on, at)
        shared = shared + on.long()
    return at, shared
