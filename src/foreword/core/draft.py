"""DRAFT: the one currency between a method and the target, a tree of candidate tokens with a fixed number of rows.

Node 0 is the root: the last decided token, known and not yet cached. Every other node names an earlier node as its
parent, so any prefix of the rows is again a tree. A chain is a thin tree. Rows past `size` are padding: they are scored
with the rest, because shapes are fixed, and can never be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from foreword.errors import DrafterError

KEPT_CHAINS = 128  # rows


@dataclass(frozen=True)
class Shape:
    """Upper bounds of a drafter's trees, fixed when it is bound: they size every buffer and graph."""

    nodes: int = 1
    depth: int = 0

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 <= self.depth < self.nodes:
            raise DrafterError(
                f"a tree of {self.nodes} nodes and depth {self.depth} cannot be: "
                "it needs at least the root, and a depth below the number of nodes"
            )


@dataclass(eq=False)
class Tree:
    """Who hangs on whom. `parent` is [b or 1, N]; the root is its own parent."""

    parent: Tensor
    is_chain: bool = False
    """Known beforehand to be a chain, so that accepted rows already lie where they belong."""

    @staticmethod
    def of(parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
        """A static tree, shared by all sequences and built once per shape."""
        return _static_tree(tuple(parents), torch.device(device))

    @staticmethod
    def chain(nodes: int, device: torch.device | str = "cpu") -> Tree:
        """Those that drafts are made of are built once, and stay where they are: captured rounds read them. Longer ones,
        which prompts are read in, come in too many lengths to be kept; a captured prompt pass keeps its own."""
        return (_kept_chain if nodes <= KEPT_CHAINS else _chain)(nodes, torch.device(device))

    @staticmethod
    def forked(nodes: int, device: torch.device | str = "cpu") -> Tree:
        """A static tree for those who time passes: each row has two behind it."""
        return Tree.of(tuple(max(row - 1, 0) // 2 for row in range(nodes)), device)

    @property
    def nodes(self) -> int:
        return self.parent.shape[1]

    @property
    def ancestors(self) -> Tensor:
        """[b or 1, N, N] bool: entry (i, j) says that j lies on the way from the root to i, i itself included."""
        return self.lineage[0]

    @property
    def depth(self) -> Tensor:
        """[b or 1, N]: edges between the root and each row."""
        return self.lineage[1]

    @cached_property
    def lineage(self) -> tuple[Tensor, Tensor]:
        """Ancestors and depth, derived together."""
        if self.parent.is_cuda:
            from foreword.kernels.tree import lineage  # noqa: PLC0415  Triton is there only where CUDA is

            return lineage(self.parent)
        return lineage_of(self.parent)

    def head(self, nodes: int) -> Tree:
        """The tree of the first `nodes` rows."""
        if nodes == self.nodes:
            return self
        tree = Tree(self.parent[:, :nodes], self.is_chain)
        # What the whole tree already knows, its prefix knows too.
        if "lineage" in self.__dict__:
            tree.lineage = self.ancestors[:, :nodes, :nodes], self.depth[:, :nodes]
        return tree


def lineage_of(parent: Tensor) -> tuple[Tensor, Tensor]:
    """Ancestors and depth of trees [b or 1, N]."""
    nodes = parent.shape[1]
    rows = torch.arange(nodes, device=parent.device)
    reach = (rows == parent.unsqueeze(-1)) | (rows == rows.unsqueeze(-1))
    # Each squaring doubles how far up a row can look, so log2(N) of them reach the root.
    for _ in range((nodes - 1).bit_length()):
        step = reach.to(torch.float32)
        reach = (step @ step) > 0
    return reach, reach.sum(-1) - 1


def hanging(sees: Tensor, parent: Tensor) -> Tensor:
    """Ancestors of one more level, of rows that hang on rows `parent` [b, w] of those whose ancestors among all m rows above
    are `sees` [b or 1, v, m]: theirs and, behind those, themselves. [b, w, m + w]"""
    if sees.is_cuda:
        from foreword.kernels.tree import hang  # noqa: PLC0415  Triton is there only where CUDA is

        return hang(sees, parent)
    lanes, width = parent.shape
    above = sees.expand(lanes, -1, -1).gather(1, parent.unsqueeze(2).expand(-1, -1, sees.shape[2]))
    itself = torch.eye(width, dtype=torch.bool, device=sees.device).expand(lanes, -1, -1)
    return torch.cat([above, itself], dim=2)


def _chain(nodes: int, device: torch.device) -> Tree:
    if nodes < 1:
        raise DrafterError(f"not a tree: a chain of {nodes} rows; it needs the root at least")
    rows = torch.arange(nodes, device=device)
    tree = Tree((rows - 1).clamp(min=0).unsqueeze(0), is_chain=True)
    tree.lineage = (rows.unsqueeze(1) >= rows).unsqueeze(0), rows.unsqueeze(0)
    return tree


_kept_chain = cache(_chain)


@cache
def _static_tree(parents: tuple[int, ...], device: torch.device) -> Tree:
    wrong = [i for i, parent in enumerate(parents) if not 0 <= parent < max(i, 1)]
    if not parents or wrong:
        raise DrafterError(f"not a tree: every parent must be an earlier row, rows {wrong} of {parents} are not")
    is_chain = parents == (0, *range(len(parents) - 1))
    tree = Tree(torch.tensor([parents], device=device), is_chain)
    tree.lineage  # noqa: B018 - derived here once, shared by every later round
    return tree


@dataclass(frozen=True)
class Draft:
    """Candidates after the root: `tokens` [b, N], the `tree` they form, and `size` [b], the rows that count."""

    tokens: Tensor
    tree: Tree
    size: Tensor

    @staticmethod
    def nothing(root: Tensor) -> Draft:
        """No speculation: the root alone. `root` is [b]."""
        return Draft(root.unsqueeze(1), Tree.chain(1, root.device), torch.ones_like(root))

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def counts(self) -> Tensor:
        """[b, N] bool: rows that are not padding."""
        return torch.arange(self.nodes, device=self.size.device) < self.size.unsqueeze(1)

    def head(self, nodes: int) -> Draft:
        """The draft of the first `nodes` rows."""
        if nodes >= self.nodes:
            return self
        return Draft(self.tokens[:, :nodes], self.tree.head(nodes), self.size.clamp(max=nodes))
