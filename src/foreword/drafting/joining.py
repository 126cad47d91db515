"""DRAFT: attach a chain of candidates to a tree of others, so that one pass verifies both.

In: two drafts after the same roots, the second a chain. Out: one draft whose paths are those of both. As long as the tree
agrees with the chain, the tree's rows serve; where they diverge, the rest of the chain is attached.
"""

from __future__ import annotations

from foreword.core.draft import Draft, Tree
from foreword.ops.chains import ChainRows, TreeRows, attached, with_chain


def joined(tree: Draft, chain: Draft, levels: int) -> Draft:
    """Join a tree of at most `levels` levels and a chain. The draft has as many rows as both together, less one root. Rows
    that the two share leave padding at the end."""
    return _draft(with_chain(*_rows(tree, chain), levels))


def attach(tree: Draft, chain: Draft, levels: int, agreed: bool = False) -> Draft:
    """Do the same as `joined`, in torch. `agreed`: leave out chains whose first candidate the tree does not have."""
    return _draft(attached(*_rows(tree, chain), levels, agreed))


def _rows(tree: Draft, chain: Draft) -> tuple[TreeRows, ChainRows]:
    return (tree.tokens, tree.tree.parent, tree.size), (chain.tokens, chain.size)


def _draft(rows: TreeRows) -> Draft:
    tokens, parent, size = rows
    return Draft(tokens, Tree(parent), size)
