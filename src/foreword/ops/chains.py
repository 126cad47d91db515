"""A chain of candidates attached to a tree of others, as torch operations, so that one pass verifies both.

In: tokens, parents and size of a tree, and tokens and size of a chain after the same root. Out: tokens, parents and size of
one tree whose paths are those of both. On CUDA, ops/drafting/joining.py takes the place of `with_chain`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated

TreeRows = tuple[Tensor, Tensor, Tensor]  # tokens [b, N], parents [b or 1, N] and size [b]
ChainRows = tuple[Tensor, Tensor]  # tokens [b, M] and size [b]


@accelerated("drafting.joining:with_chain")
def with_chain(tree: TreeRows, chain: ChainRows, levels: int) -> TreeRows:
    """Attach a chain where it diverges from a tree of at most `levels` levels: [b, N + M - 1] twice, and [b].

    Where the tree already has the chain's first tokens, its own rows serve. The rows saved become padding at the end.
    """
    return attached(tree, chain, levels)


def attached(tree: TreeRows, chain: ChainRows, levels: int, agreed: Tensor | None = None) -> TreeRows:
    """Do the same as `with_chain`, in torch. `agreed` [b or 1] bool: whether to leave out a chain whose first candidate the
    tree does not have."""
    (tokens, parent, held), (links, length) = tree, chain
    nodes, more = tokens.shape[1], links.shape[1] - 1
    parent = parent.expand_as(tokens)
    at, shared = _shared((tokens, parent, held), chain, min(levels, more))
    left = length - 1 - shared
    if agreed is not None:
        left = left.where((shared > 0) | ~agreed, 0)
    row = torch.arange(nodes + more, device=at.device).expand(len(at), -1)
    after = row - held.unsqueeze(1)
    is_attached = (after >= 0) & (after < left.unsqueeze(1))
    source = (1 + shared.unsqueeze(1) + after).clamp(min=0, max=more)
    of_tree = row < held.unsqueeze(1)
    padded = functional.pad(tokens, (0, more)).where(of_tree, tokens[:, :1])
    above = functional.pad(parent, (0, more)).where(of_tree, 0)
    padded = links.gather(1, source).where(is_attached, padded)
    above = (row - 1).where(after > 0, at.unsqueeze(1)).where(is_attached, above)
    return padded, above, held + left


def _shared(tree: TreeRows, chain: ChainRows, most: int) -> tuple[Tensor, Tensor]:
    """Return the last row of the tree on the chain's path [b], and how many candidates of the chain lead there [b]."""
    (tokens, parent, held), (links, length) = tree, chain
    at, shared = torch.zeros_like(held), torch.zeros_like(held)
    row = torch.arange(tokens.shape[1], device=tokens.device)
    known = (row < held.unsqueeze(1)) & (row > 0)
    on = torch.ones_like(held, dtype=torch.bool)
    for link in range(1, most + 1):
        matches = known & (parent == at.unsqueeze(1)) & (tokens == links[:, link : link + 1])
        on = on & matches.any(1) & (link < length)
        at = matches.int().argmax(1).where(on, at)
        shared = shared + on.long()
    return at, shared
