"""DRAFT: a tree of candidate tokens with a fixed number of rows. Every method proposes one, and the target verifies it.

Node 0 is the root: the last decided token, which is known and not cached yet. The parent of every other node is an earlier
node, so any prefix of the rows is again a tree. A chain is a tree without branches. Rows past `size` are padding: the target
scores them with the rest, because shapes are fixed, and they are never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from foreword.errors import DrafterError
from foreword.ops.trees import lineage

KEPT_CHAINS = 128  # rows of the longest chain that is built once and kept

ORIGINS = ("root", "drafter", "lookup", "prediction")
"""Where the candidate of a row comes from, by its number in `Draft.origin`. "lookup": an earlier place of the sequence.
"prediction": the text that the request predicts."""
ROOT, DRAFTER, LOOKUP, PREDICTION = range(len(ORIGINS))


@dataclass(frozen=True)
class Shape:
    """Upper bounds of a drafter's trees, fixed when it is bound. They size every buffer and graph."""

    nodes: int = 1
    depth: int = 0

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 <= self.depth < self.nodes:
            raise DrafterError(
                f"a tree of {self.nodes} nodes and depth {self.depth} is impossible: "
                "it needs at least the root, and a depth below the number of nodes"
            )


@dataclass(eq=False)
class Tree:
    """The parent of every row. `parent` is [b or 1, N]; the root is its own parent."""

    parent: Tensor
    is_chain: bool = False
    """Known in advance to be a chain, so accepted rows already lie where they belong."""

    @staticmethod
    def of(parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
        """A static tree, shared by all sequences and built once per shape."""
        return _static_tree(tuple(parents), torch.device(device))

    @staticmethod
    def chain(nodes: int, device: torch.device | str = "cpu") -> Tree:
        """A chain. Chains as long as drafts are built once and kept, because recorded rounds read them. Longer ones, for
        prompts, come in too many lengths to keep; a recorded prompt pass keeps its own."""
        return (_kept_chain if nodes <= KEPT_CHAINS else _chain)(nodes, torch.device(device))

    @staticmethod
    def forked(nodes: int, device: torch.device | str = "cpu") -> Tree:
        """A static tree in which each row has two children, for timing passes."""
        return Tree.of(tuple(max(row - 1, 0) // 2 for row in range(nodes)), device)

    @property
    def nodes(self) -> int:
        return self.parent.shape[1]

    @property
    def ancestors(self) -> Tensor:
        """[b or 1, N, N] bool: entry (i, j) says that j lies on the path from the root to i, i itself included."""
        return self.lineage[0]

    @property
    def depth(self) -> Tensor:
        """[b or 1, N]: edges between the root and each row."""
        return self.lineage[1]

    @cached_property
    def lineage(self) -> tuple[Tensor, Tensor]:
        """Ancestors and depth, computed together."""
        return lineage(self.parent)

    def head(self, nodes: int) -> Tree:
        """The tree of the first `nodes` rows."""
        if nodes == self.nodes:
            return self
        tree = Tree(self.parent[:, :nodes], self.is_chain)
        # If the lineage of the whole tree is known, that of its prefix is a part of it.
        if "lineage" in self.__dict__:
            tree.lineage = self.ancestors[:, :nodes, :nodes], self.depth[:, :nodes]
        return tree

    def clone(self) -> Tree:
        """A tree of its own memory, which `overwrite` may write. Chains of a length are all the same, so they are shared."""
        if self.is_chain:
            return self
        tree = Tree(self.parent.clone())
        tree.lineage = self.ancestors.clone(), self.depth.clone()
        return tree

    def overwrite(self, other: Tree) -> None:
        """Write another tree of the same shape to the memory of this one."""
        if not self.is_chain:
            for mine, new in zip((self.parent, *self.lineage), (other.parent, *other.lineage), strict=True):
                mine.copy_(new)


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
    tree.lineage  # noqa: B018 - computed here once, shared by every later round
    return tree


@dataclass(frozen=True)
class Early:
    """The states [b, N, H] that a draft's rows have after the target's first `layer` layers. `Target.early` computed them,
    and wrote the keys and values of these layers to the scratch rows, in the order of the draft."""

    layer: int
    states: Tensor


@dataclass(frozen=True)
class Draft:
    """Candidates after the root: `tokens` [b, N], the `tree` they form, and `size` [b], how many rows count. With `early`,
    all rows have run through the first layers already, and the pass that verifies them begins after these. `origin` [b or 1,
    N] holds the numbers of `ORIGINS`; None: the root, and rows of the drafter.

    `allowed` [b, N, W]: the tokens that grammars allow after each row; token t is bit t % 32 of word t // 32. The engine
    adds it; None: no request of the round has a grammar."""

    tokens: Tensor
    tree: Tree
    size: Tensor
    early: Early | None = None
    origin: Tensor | None = None
    allowed: Tensor | None = None

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

    @property
    def origins(self) -> Tensor:
        """[b, N]: where each row comes from, by the numbers of `ORIGINS`."""
        if self.origin is not None:
            return self.origin.expand_as(self.tokens)
        return (torch.arange(self.nodes, device=self.size.device) > 0).long().expand_as(self.tokens)  # ROOT, then DRAFTER

    def head(self, nodes: int) -> Draft:
        """The draft of the first `nodes` rows."""
        if nodes >= self.nodes:
            return self
        early = self.early and Early(self.early.layer, self.early.states[:, :nodes])
        origin = None if self.origin is None else self.origin[:, :nodes]
        allowed = None if self.allowed is None else self.allowed[:, :nodes]
        return Draft(self.tokens[:, :nodes], self.tree.head(nodes), self.size.clamp(max=nodes), early, origin, allowed)

    def first_chain(self) -> Draft:
        """The draft of one path alone: the root, its first child, the first child of that one, and so on."""
        if self.tree.is_chain:
            return self
        parent, order = self.tree.parent.expand_as(self.tokens), torch.arange(self.nodes, device=self.tokens.device)
        path, size = [torch.zeros_like(self.size)], torch.ones_like(self.size)
        for _ in range(self.nodes - 1):
            is_child = self.counts & (order > 0) & (parent == path[-1].unsqueeze(1)) & (size == len(path)).unsqueeze(1)
            if not is_child.any():
                break
            size = size + is_child.any(1)
            path.append(is_child.int().argmax(1))
        rows = torch.stack(path, 1)
        origin = None if self.origin is None else self.origins.gather(1, rows)
        words = None if self.allowed is None else rows.unsqueeze(-1).expand(-1, -1, self.allowed.shape[-1])
        allowed = None if self.allowed is None or words is None else self.allowed.gather(1, words)
        return Draft(self.tokens.gather(1, rows), Tree.chain(rows.shape[1], rows.device), size, None, origin, allowed)

    @property
    def form(self) -> tuple[int, int, bool]:
        """What two drafts must have in common for one to overwrite the other: rows, trees, and whether these are chains."""
        return self.nodes, self.tree.parent.shape[0], self.tree.is_chain

    def clone(self) -> Draft:
        """A draft of its own memory, which `overwrite` may write."""
        early = self.early and replace(self.early, states=self.early.states.clone())
        origin = None if self.origin is None else self.origin.clone()
        allowed = None if self.allowed is None else self.allowed.clone()
        return Draft(self.tokens.clone(), self.tree.clone(), self.size.clone(), early, origin, allowed)

    def overwrite(self, other: Draft) -> None:
        """Write another draft of the same form to the memory of this one, which a recorded round reads."""
        self.tokens.copy_(other.tokens)
        self.tree.overwrite(other.tree)
        self.size.copy_(other.size)
        if self.early and other.early:
            self.early.states.copy_(other.early.states)
        if self.origin is not None and other.origin is not None:
            self.origin.copy_(other.origin)
        if self.allowed is not None and other.allowed is not None:
            self.allowed.copy_(other.allowed)
