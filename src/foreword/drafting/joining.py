"""DRAFT: attach a chain of candidates to a tree of others, so that one pass verifies both.

In: two drafts after the same roots, the second a chain. Out: one draft whose paths are those of both. As long as the tree
agrees with the chain, the tree's rows serve; where they diverge, the rest of the chain is attached. Rows that both have
count as the chain's: how much of a chain was right does not depend on the tree.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foreword.core.draft import DRAFTER, Draft, Tree
from foreword.ops.chains import ChainRows, TreeRows, attached, with_chain


def joined(tree: Draft, chain: Draft, levels: int) -> Draft:
    """Join a tree of at most `levels` levels and a chain. The draft has as many rows as both together, less one root. Rows
    that the two share leave padding at the end."""
    return _draft(with_chain(*_rows(tree, chain), levels))


def attach(tree: Draft, chain: Draft, levels: int, agreed: Tensor | None = None) -> Draft:
    """Do the same as `joined`, in torch. `agreed` [b or 1] bool: whether to leave out a chain whose first candidate the tree
    does not have."""
    return _draft(attached(*_rows(tree, chain), levels, agreed))


def with_origin(both: Draft, chain: Draft) -> Draft:
    """Return a joined draft with the origin of its rows: that of the chain [b or 1, M] for the rows on its path."""
    assert chain.origin is not None
    depth = both.tree.depth.expand_as(both.tokens)
    link = depth.clamp(max=chain.nodes - 1)
    is_linked = (both.tokens == chain.tokens.gather(1, link)) & (depth < chain.size.unsqueeze(1))
    on_path = (is_linked.unsqueeze(1) | ~both.tree.ancestors).all(-1)
    return replace(both, origin=chain.origin.expand_as(chain.tokens).gather(1, link).where(on_path, DRAFTER))


def _rows(tree: Draft, chain: Draft) -> tuple[TreeRows, ChainRows]:
    return (tree.tokens, tree.tree.parent, tree.size), (chain.tokens, chain.size)


def _draft(rows: TreeRows) -> Draft:
    tokens, parent, size = rows
    return Draft(tokens, Tree(parent), size)
