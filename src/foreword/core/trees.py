"""DRAFT: how a tree of guesses is grown, level by level, for drafters that guess a token from the path before it.

In: a `Guess`, which answers the likeliest tokens behind some live nodes. Out: a `Draft` of fixed shape. Four ways to choose
nodes: a template fixed beforehand (`StaticTree`), the likeliest paths of all (`BestFirst`), Clover's running budget
(`Budgeted`), and one guess behind the other while they are sure (`Chain`). Of two nodes that are drafted, the likelier is
never the child, so what is chosen is again a tree.
Papers: Medusa (arXiv 2401.10774) for the templates, Clover (arXiv 2405.00263) for the budget.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.state import State
from foreword.core.target import Target
from foreword.errors import InputError

Path = tuple[int, ...]
Rates = Sequence[Sequence[float]]
"""By depth, then by rank among the guesses: how often that guess is right where everything before it was."""

Guess = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(level, tokens [b, w], origin [b, w]) -> guesses and their log-chances, each [b, w, k], best first.

`tokens` are those of the live nodes, one level above `level`; `origin` says which live node of the call before each of them
hangs on. The first call is about the root alone, with origin 0.
"""

TreeKind = Literal["static", "best", "budget", "chain"]
MOST_NODES = 64
BRANCH = 10
USUAL_GAIN = 1.5  # tokens beyond the target's own that a tree of MOST_NODES brings
GUESSING = 0.15  # passes over one row: what drafting costs beside its levels, two layers of thirty that read along and more
LEVEL_KERNELS = 8  # of a level of guesses: the state, the head, the best, and which of them are gone on from
GOES_ON = 0.45  # of the trees that are right at one level, how many are at the next
GAIN_BESIDE = 0.75  # tokens that an endless chain of lookups would bring beside a tree: results/bench_cuda_7b, both tables
LOOKS_ON = 0.87  # of those, what every row leaves to the next ones: between these results and results/trees_cpu
TRAINED_BEND = 0.67  # of `share_of_gain`, as trained drafters have it: results/trees_cpu, rows_*.json

# For templates of drafters that have not been calibrated: guesses of heads 1, 2, ... as a first try of Medusa had them.
USUAL_RATES: Rates = (
    (0.40, 0.10, 0.065, 0.045, 0.035, 0.028, 0.023, 0.019, 0.016, 0.014),
    (0.24, 0.09, 0.055, 0.042, 0.033, 0.027, 0.022, 0.019, 0.016, 0.014),
    (0.17, 0.08, 0.055, 0.042, 0.033, 0.027, 0.022, 0.019, 0.016, 0.014),
    (0.13, 0.075, 0.053, 0.041, 0.033, 0.027, 0.022, 0.019, 0.016, 0.014),
    (0.11, 0.07, 0.052, 0.040, 0.032, 0.026, 0.022, 0.019, 0.016, 0.014),
)


class Growth(Protocol):
    """A way to grow trees for one target."""

    @property
    def shape(self) -> Shape: ...

    @property
    def branch(self) -> int:
        """Guesses wanted behind each live node."""

    def depth(self, batch: int) -> int:
        """How many levels are guessed at this batch size; none where no row pays."""

    def beside(self, batch: int, most: int) -> int:
        """Of `most` rows that somebody else drafts beside the tree, how many pay at this batch size too."""

    def draft(self, state: State, guess: Guess) -> Draft: ...


@dataclass(frozen=True)
class TreePlan:
    """What a drafter's options say of its trees. `rows` None means: what pays on this machine."""

    kind: TreeKind
    rows: int | None
    width: int
    rates: Rates
    paths: Sequence[Sequence[int]] | None = None  # a template of one's own
    top_p: float = 0.8
    floor: float = 0.25
    stop: float = 0.0  # a chain ends before a guess that is less likely than this
    levels: int | None = None  # at most so many, whatever could be guessed
    beside: int = 0  # of `rows`, those that somebody else drafts in the same pass
    gain: float = USUAL_GAIN

    def check(self, method: str) -> None:
        if self.kind not in get_args(TreeKind):
            raise InputError(f"{method}: tree is {self.kind!r}; choose from {', '.join(get_args(TreeKind))}")
        if self.width < 1:
            raise InputError(f"{method}: width is {self.width}; at least 1 node of a level is carried on")
        if not all(0 <= rate <= 1 for row in self.rates for rate in row):
            raise InputError(f"{method}: rates is {self.rates!r}; each is how often a guess is right, from 0 to 1")
        if not 0 <= self.stop < 1:
            raise InputError(f"{method}: stop is {self.stop}; it is how likely a guess has to be, from 0 to below 1")
        known = {tuple(path) for path in self.paths or ()}
        orphans = [path for path in sorted(known) if not path or min(path) < 0 or (path[1:] and path[:-1] not in known)]
        if orphans:
            raise InputError(
                f"{method}: paths has {orphans[0]}; a path is of ranks from 0 on, and what it goes on from is one"
            )

    def on(self, target: Target, depth: int, level: float = 0.0, kernels: int = 0) -> Growth:
        """For trees of at most `depth` levels behind the root, of which each costs `level`, a pass over one row being 1.0,
        and at least so many kernels on CUDA. There a round's rows are fixed beforehand, and rows that stay empty save
        nothing: the batch alone decides how many there are, and how many levels."""
        nodes, beforehand = (self.rows or MOST_NODES) - self.beside, target.device.type == "cuda"
        depth, branch = min(depth, self.levels or depth, nodes - 1), min(BRANCH, target.vocab_size)
        if self.kind == "static" and self.paths is not None:
            known = sorted({tuple(path) for path in self.paths if len(path) <= depth}, key=lambda path: (len(path), path))
            return StaticTree(target, known[: self.rows and nodes - 1])
        if self.kind == "static":
            rates = [row[:branch] for row in self.rates[:depth]]
            return StaticTree(target, greedy_paths(rates, nodes - 1), None if self.rows else rates)
        costs = None if self.rows or beforehand else RowCosts(target, nodes, level)
        level = max(level, target.launches(kernels)) if beforehand else level
        fixed = None
        if beforehand and not self.rows:
            fixed = FixedRows(target, Shape(nodes, depth), self.gain, level=level, beside=self.beside)
        if self.kind == "chain":
            return Chain(Shape(depth + 1, depth), costs, self.stop)
        if self.kind == "best":
            return BestFirst(Shape(nodes, depth), self.width, branch, costs, fixed)
        return Budgeted(Shape(nodes, depth), self.width, branch, costs, self.top_p, self.floor, fixed)


class RowCosts:
    """What 1 .. `nodes` rows of each sequence cost on this machine, and a level of guesses: in passes of one row each."""

    def __init__(self, target: Target, nodes: int, level: float = 0.0) -> None:
        self.target, self.nodes, self.level = target, nodes, level
        self._known: dict[int, Tensor] = {}

    def of(self, batch: int) -> Tensor:
        """[nodes], asked of the target once for every batch size."""
        if batch not in self._known:
            cost = [self.target.cost(batch * rows, batch) for rows in range(1, self.nodes + 1)]
            self._known[batch] = torch.tensor(cost, device=self.target.device)
        return self._known[batch]

    def after(self, batch: int, levels: int) -> Tensor:
        """[nodes], with what so many levels have cost already."""
        return self.of(batch) + self.level * levels

    def go_on(self, batch: int, chances: Tensor, live: Tensor, sure: Tensor, levels: int) -> bool:
        """Whether one level more is expected to pay, where nodes were found with log-chances `chances` [b, M], of these the
        `live` ones [b, w] may be gone on from, and a first guess is as `sure` as those of the last level were: what a round
        brings for what it costs, now and then."""
        found = chances.exp()
        more = torch.cat([found, live.exp() * sure], dim=1)
        return bool(self._worth(batch, more, levels + 1) > self._worth(batch, found, levels))

    def _worth(self, batch: int, found: Tensor, levels: int) -> Tensor:
        """Tokens for a pass over one row, by the best number of rows, the mean over the batch."""
        best = found.sort(1, descending=True).values[:, : self.nodes].cumsum(1)
        return (best / self.after(batch, levels)[: best.shape[1]]).amax(1).mean()


def paying_rows(target: Target, batch: int, promised: Sequence[float]) -> int:
    """Rows of each text that bring most for what they cost, where 1, 2, .. of them bring so many tokens."""
    gain = [tokens / target.cost(batch * rows, batch) for rows, tokens in enumerate(promised, start=1)]
    return 1 + gain.index(max(gain))


def sureness(chance: Tensor, likely: Tensor) -> Tensor:
    """How much of the chance of live nodes [b, w] their first guesses [b, w, k] hold, all as log-chances."""
    return (likely[..., 0] + chance).exp().sum() / chance.exp().sum()


def share_of_gain(rows: int, most: int, bend: float) -> float:
    """Of what a tree of `most` rows brings beyond the target's own token, what a smaller one does: about the logarithm of
    its rows, bent upwards. The better the guesses, the more of them the first few rows hold."""
    straight = math.log(rows) / math.log(most)
    return straight * (1 + bend * (1 - straight))


def chain_lengths(most: int) -> list[int]:
    """How long a chain beside a tree may be: none, a few rows, or all of them."""
    return sorted({0, most, *(rows for rows in (3, 7) if rows < most)})


def share_of_levels(depth: int, usual: int) -> float:
    """The same of a tree of fewer levels than usual: ever fewer are right all the way to the next."""
    return (1 - GOES_ON ** min(depth, usual)) / (1 - GOES_ON**usual)


class FixedRows:
    """How large trees are where that is settled before anything is guessed, as in a captured round: what pays by batch size.

    A tree brings more with every row and every level, and ever less; a row costs what the target says, a level what the
    drafter does, and guessing at all something too. In a large batch rows are dear, and in the end none of them pays; those
    that somebody else drafts `beside` the tree are the first to go.
    """

    def __init__(
        self,
        target: Target,
        most: Shape,
        gain: float = USUAL_GAIN,
        bend: float = TRAINED_BEND,
        guessing: float = GUESSING,
        level: float = 0.0,
        beside: int = 0,
    ) -> None:
        self.target, self.most, self.gain, self.bend = target, most, gain, bend
        self.guessing, self.level, self.beside = guessing, level, beside
        self._known: dict[int, tuple[Shape, int]] = {}

    def shape(self, batch: int) -> Shape:
        return self._settled(batch)[0]

    def rows_beside(self, batch: int) -> int:
        """Those beside the tree that pay too."""
        return self._settled(batch)[1]

    def _settled(self, batch: int) -> tuple[Shape, int]:
        """The tree, and the rows beside it."""
        if batch not in self._known:
            counts = [*(1 << power for power in range((self.most.nodes - 1).bit_length())), self.most.nodes]
            shapes = [Shape(rows, depth) for rows in counts for depth in range(min(self.most.depth, rows - 1) + 1)]
            ways = [(one, beside) for one in shapes for beside in chain_lengths(self.beside)]
            sound = [(one, beside) for one, beside in ways if one.depth or (one.nodes, beside) == (1, 0)]
            self._known[batch] = max(sound, key=lambda way: (self._speed(batch, *way), way[0].depth))
        return self._known[batch]

    def _speed(self, batch: int, shape: Shape, beside: int) -> float:
        """Tokens for a pass over one row. Levels of a large batch are dearer as its passes are."""
        if shape.nodes == 1:
            return 1 / self.target.cost(batch, batch)
        usual = min((shape.nodes - 1).bit_length(), self.most.depth)  # levels that a tree of so many rows has use for
        rows, levels = share_of_gain(shape.nodes, MOST_NODES, self.bend), share_of_levels(shape.depth, usual)
        gain = self.gain * rows * levels + GAIN_BESIDE * (1 - LOOKS_ON**beside)
        guessing = self.guessing + self.level * shape.depth * self.target.cost(batch, batch)
        return (1 + gain) / (self.target.cost(batch * (shape.nodes + beside), batch) + guessing)


def choose(tokens: Tensor, parent: Tensor, chance: Tensor, nodes: int, cost: Tensor | None = None) -> Draft:
    """The draft of the nodes likeliest to be reached, `nodes` of them at most: all that have a chance, or as many as pay.

    `tokens` [b, M], the root first and every parent before its children; `parent` [b or 1, M]; `chance` [b, M] the
    log-chance of the whole way to a node, so that no child is above its parent. `cost` [nodes or more] by number of rows.
    """
    count = tokens.shape[1]
    nodes = min(nodes, count)
    order = chance.argsort(dim=1, descending=True, stable=True)[:, :nodes]
    likely = chance.gather(1, order)  # falls from 0, the root
    size = (likely > -math.inf).sum(1)
    if cost is not None:
        likely = likely.exp()
        size = torch.minimum(size, (likely.cumsum(1) / cost[:nodes]).argmax(1) + 1)
    rows = torch.arange(nodes, device=tokens.device)
    kept = rows < size.unsqueeze(1)
    # Back in the given order, so that parents come first; dropped nodes go to the end.
    chosen = torch.where(kept, order, count).sort(1).values
    place = torch.zeros(tokens.shape[0], count + 1, dtype=torch.long, device=tokens.device)
    place.scatter_(1, chosen, rows.expand_as(chosen))
    chosen = chosen.where(kept, 0)
    above = parent.expand_as(tokens).gather(1, chosen)
    return Draft(tokens.gather(1, chosen), Tree(place.gather(1, above)), size)


def carried(rows: Tensor, origin: Tensor) -> Tensor:
    """What a drafter keeps of its live nodes [b, w, H], for those that hang on them: [b, w', H]."""
    if rows.shape[1] == origin.shape[1] == 1:
        return rows  # one hangs on the only one
    return rows.gather(1, origin.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def _known(state: State, draft: Draft) -> Draft:
    """Before the second token of a text no row has been read, and nothing can be guessed."""
    return Draft(draft.tokens, draft.tree, draft.size.where(state.length > 0, 1))


# Templates -------------------------------------------------------------------------------------------------------------


def greedy_paths(rates: Rates, count: int) -> list[Path]:
    """Medusa's construction: the `count` likeliest paths of ranks, each behind its parent and its elder sibling.

    From the single path (0) on, the best of all next siblings and first children is added, again and again.
    """
    if not rates or not rates[0] or count < 1:
        return []
    paths: list[Path] = []
    waiting: list[tuple[float, Path]] = [(-rates[0][0], (0,))]
    while waiting and len(paths) < count:
        _, path = heapq.heappop(waiting)
        paths.append(path)
        near = [(*path[:-1], path[-1] + 1), (*path, 0)]
        for one in near:
            if len(one) <= len(rates) and one[-1] < len(rates[len(one) - 1]):
                heapq.heappush(waiting, (-promise(one, rates), one))
    return paths


def level_paths(counts: Sequence[int], rates: Rates) -> list[Path]:
    """The likeliest paths with so many nodes at each depth: how published templates are described."""
    paths: list[Path] = []
    above: list[Path] = [()]
    for count, ranks in zip(counts, rates, strict=False):
        below = [(*path, rank) for path in above for rank in range(len(ranks))]
        above = sorted(below, key=lambda path: (-promise(path, rates), path))[:count]
        paths += above
    return paths


def promise(path: Path, rates: Rates) -> float:
    """How often all of a path is right."""
    return math.prod(rates[depth][rank] for depth, rank in enumerate(path))


@dataclass(frozen=True)
class Level:
    """One level of a template: which nodes above it are live, and where its own nodes get their tokens."""

    live: Tensor  # [w] nodes of the level above that have children
    origin: Tensor  # [w] which live node of the level before each hangs on
    nodes: Tensor  # [m]
    place: Tensor  # [m] which live node each hangs on
    rank: Tensor  # [m] which of its guesses it takes


class Template:
    """A tree of paths of ranks, fixed beforehand."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        self.paths: list[Path] = [(), *paths]
        self.device = device
        self.index = {path: node for node, path in enumerate(self.paths)}
        self.depth = max(map(len, self.paths))
        self.tree = Tree.of(tuple(self.index[path[:-1]] for path in self.paths), device)

    @cached_property
    def levels(self) -> list[Level]:
        levels: list[Level] = []
        above: list[Path] = []
        for depth in range(1, self.depth + 1):
            own = [path for path in self.paths if len(path) == depth]
            live = sorted({path[:-1] for path in own}, key=self.index.__getitem__)
            columns = (
                [self.index[path] for path in live],
                [above.index(path[:-1]) if above else 0 for path in live],
                [self.index[path] for path in own],
                [live.index(path[:-1]) for path in own],
                [path[-1] for path in own],
            )
            levels.append(Level(*(torch.tensor(column, device=self.device) for column in columns)))
            above = live
        return levels

    @cached_property
    def ranks(self) -> Tensor:
        """[N - 1, 2]: of all nodes but the root, the level, from 0 on, and the rank."""
        pairs = [(len(path) - 1, path[-1]) for path in self.paths[1:]]
        return torch.tensor(pairs, dtype=torch.long, device=self.device).view(-1, 2)  # of none, too

    def tokens(self, root: Tensor, guess: Guess) -> Tensor:
        """[b, N]: the tokens that stand at the template's nodes."""
        tokens = root.unsqueeze(1).repeat(1, len(self.paths))
        for depth, level in enumerate(self.levels, start=1):
            guessed, _ = guess(depth, tokens[:, level.live], level.origin.expand(root.shape[0], -1))
            tokens.index_copy_(1, level.nodes, guessed[:, level.place, level.rank])
        return tokens


class StaticTree:
    """A template. With `rates` its paths come likeliest first, and as many are drafted as pay at this batch size."""

    def __init__(self, target: Target, paths: Sequence[Path], rates: Rates | None = None) -> None:
        self.target, self.paths = target, list(paths)
        self.promised = None if rates is None else list(accumulate((promise(one, rates) for one in paths), initial=1.0))
        self.shape = Shape(len(self.paths) + 1, max(map(len, self.paths), default=0))
        self.branch = 1 + max((max(path) for path in self.paths), default=0)
        self._templates: dict[int, Template] = {}

    def template(self, batch: int) -> Template:
        if batch not in self._templates:
            self._templates[batch] = Template(self.paths[: self._pay(batch)], self.target.device)
        return self._templates[batch]

    def _pay(self, batch: int) -> int:
        """How many paths are worth their rows."""
        if self.promised is None:
            return len(self.paths)
        return paying_rows(self.target, batch, self.promised) - 1

    def depth(self, batch: int) -> int:
        return self.template(batch).depth

    def beside(self, batch: int, most: int) -> int:
        return most

    def draft(self, state: State, guess: Guess) -> Draft:
        template = self.template(len(state.lanes.ids))
        return self._draft(state, template, template.tokens(state.root, guess))

    def filled(self, state: State, guessed: Tensor) -> Draft:
        """The draft of guesses [b, depth or more, k] that do not depend on what was guessed before them."""
        template = self.template(len(state.lanes.ids))
        if guessed.is_cuda:
            from foreword.kernels.growth import filled  # noqa: PLC0415  Triton is there only where CUDA is

            tokens, size = filled(state, guessed, template.ranks)
            return Draft(tokens, template.tree, size)
        return self.by_rank(state, template, guessed)

    def by_rank(self, state: State, template: Template, guessed: Tensor) -> Draft:
        """The same as torch operations."""
        level, rank = template.ranks.unbind(1)
        return self._draft(state, template, torch.cat([state.root.unsqueeze(1), guessed[:, level, rank]], dim=1))

    def _draft(self, state: State, template: Template, tokens: Tensor) -> Draft:
        return _known(state, Draft(tokens, template.tree, torch.full_like(state.root, tokens.shape[1])))


# Trees that follow the guesses -----------------------------------------------------------------------------------------


class _Nodes:
    """Nodes as they are found: the root, then level by level."""

    def __init__(self, root: Tensor) -> None:
        self.tokens, self.parent = [root.unsqueeze(1)], [torch.zeros_like(root).unsqueeze(1)]
        self.chance = [torch.zeros(root.shape[0], 1, device=root.device)]
        self.count = 1

    def add(self, tokens: Tensor, parent: Tensor, chance: Tensor) -> Tensor:
        """Their numbers [b, m]."""
        rows = torch.arange(self.count, self.count + tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.tokens, self.parent, self.chance = [*self.tokens, tokens], [*self.parent, parent], [*self.chance, chance]
        self.count += tokens.shape[1]
        return rows

    @property
    def chances(self) -> Tensor:
        return torch.cat(self.chance, 1)

    def draft(self, nodes: int, cost: Tensor | None) -> Draft:
        return choose(torch.cat(self.tokens, 1), torch.cat(self.parent, 1), self.chances, nodes, cost)


@dataclass(frozen=True)
class BestFirst:
    """The likeliest nodes of all: of every level the best `width` are carried on, and the best of everything is drafted.
    Where rows are not fixed beforehand, neither are levels: the next one is guessed if that is expected to pay."""

    shape: Shape
    width: int
    branch: int
    costs: RowCosts | None
    fixed: FixedRows | None = None

    def depth(self, batch: int) -> int:
        return shape_at(self, batch).depth

    def beside(self, batch: int, most: int) -> int:
        return most if self.fixed is None else self.fixed.rows_beside(batch)

    def draft(self, state: State, guess: Guess) -> Draft:
        return _grown(self, state, guess)

    def grow(self, state: State, guess: Guess, shape: Shape) -> Draft:
        nodes, root = _Nodes(state.root), state.root.unsqueeze(1)
        tokens, rows, origin, chance = root, torch.zeros_like(root), torch.zeros_like(root), nodes.chance[0]
        limited = self.costs if self.costs is not None and self.costs.level else None
        sure = torch.ones(())
        for level in range(1, shape.depth + 1):
            if level > 1 and limited and not limited.go_on(len(root), nodes.chances, chance, sure, level - 1):
                break
            guessed, likely = guess(level, tokens, origin)  # [b, w, k]
            if limited:
                sure = sureness(chance, likely)
            whole = _finite(chance.unsqueeze(2) + likely).flatten(1)
            below, above = guessed.flatten(1), rows.unsqueeze(2).expand_as(guessed).flatten(1)
            rows = nodes.add(below, above, whole)
            chance, best = _largest(whole, self.width)
            tokens, rows, origin = below.gather(1, best), rows.gather(1, best), best // guessed.shape[2]
        cost = None if self.costs is None else self.costs.after(len(root), len(nodes.chance) - 1)
        return _known(state, nodes.draft(shape.nodes, cost))


@dataclass(frozen=True)
class Budgeted:
    """Clover's rule: what is likely enough is taken level by level until a budget is spent, the root not counted.

    Behind each live node those guesses stand that together hold `top_p`, and of these the ones that have at least `floor`
    times the first one's chance; the first always stands. A wide first level leaves little for the next, a confident one a
    deep chain. Once nothing is left the later levels are masked. Of a wide level the best `width` nodes are carried on.
    """

    shape: Shape
    width: int
    branch: int
    costs: RowCosts | None
    top_p: float
    floor: float
    fixed: FixedRows | None = None

    def depth(self, batch: int) -> int:
        return shape_at(self, batch).depth

    def beside(self, batch: int, most: int) -> int:
        return most if self.fixed is None else self.fixed.rows_beside(batch)

    def draft(self, state: State, guess: Guess) -> Draft:
        return _grown(self, state, guess)

    def grow(self, state: State, guess: Guess, shape: Shape) -> Draft:
        nodes, root = _Nodes(state.root), state.root.unsqueeze(1)
        tokens, rows, origin, chance = root, torch.zeros_like(root), torch.zeros_like(root), nodes.chance[0]
        left = torch.full_like(root, shape.nodes - 1)  # [b, 1]
        for level in range(1, shape.depth + 1):
            guessed, likely = guess(level, tokens, origin)  # [b, w, k]
            whole = _finite(chance.unsqueeze(2) + likely).masked_fill(~self._likely_enough(likely), -math.inf).flatten(1)
            chance, best = _largest(whole, shape.nodes - 1)
            place = torch.arange(best.shape[1], device=best.device)
            chance = chance.masked_fill(place >= left, -math.inf)
            left = left - (chance > -math.inf).sum(1, keepdim=True)
            tokens, origin = guessed.flatten(1).gather(1, best), best // guessed.shape[2]
            rows = nodes.add(tokens, rows.gather(1, origin), chance)
            tokens, rows, origin, chance = (part[:, : self.width] for part in (tokens, rows, origin, chance))
        return _known(state, nodes.draft(shape.nodes, _cost(self.costs, state)))

    def _likely_enough(self, likely: Tensor) -> Tensor:
        chance = likely.exp()
        inside = chance.cumsum(-1) <= self.top_p + 1e-6  # a sum that is exactly top_p may be rounded up
        first = torch.arange(likely.shape[-1], device=likely.device) == 0
        return (inside & (chance >= self.floor * chance[..., :1])) | first


@dataclass(frozen=True)
class Chain:
    """The likeliest guess behind the one before it, until one is less likely than `stop`: that one and what follows is
    masked, since every level is guessed in any case."""

    shape: Shape
    costs: RowCosts | None
    stop: float
    branch: int = 1

    def depth(self, batch: int) -> int:
        return self.shape.depth

    def beside(self, batch: int, most: int) -> int:
        return most

    def draft(self, state: State, guess: Guess) -> Draft:
        tokens, chances = [state.root.unsqueeze(1)], [torch.zeros(state.root.shape[0], 1, device=state.root.device)]
        origin = torch.zeros_like(tokens[0])
        for level in range(1, self.shape.depth + 1):
            guessed, likely = guess(level, tokens[-1], origin)  # [b, 1, 1]
            tokens.append(guessed[..., 0])
            chances.append(likely[..., 0])
        chance = torch.cat(chances, 1).exp()
        reached = (chance * (chance >= self.stop)).nan_to_num(0).cumprod(1)  # [b, depth + 1], falls from 1, the root
        size = (reached > 0).sum(1)
        if (cost := _cost(self.costs, state)) is not None:
            size = torch.minimum(size, (reached.cumsum(1) / cost[: len(tokens)]).argmax(1) + 1)
        return _known(state, Draft(torch.cat(tokens, 1), Tree.chain(len(tokens), origin.device), size))


def shape_at(growth: BestFirst | Budgeted, batch: int) -> Shape:
    """What its trees have at this batch size."""
    return growth.shape if growth.fixed is None else growth.fixed.shape(batch)


def _grown(growth: BestFirst | Budgeted, state: State, guess: Guess) -> Draft:
    shape = shape_at(growth, len(state.lanes.ids))
    if shape.depth == 0:
        return Draft.nothing(state.root)
    return by_kernel(growth, state, guess, shape) if state.slots.is_cuda else growth.grow(state, guess, shape)


def by_kernel(growth: BestFirst | Budgeted, state: State, guess: Guess, shape: Shape) -> Draft:
    from foreword.kernels.growth import Budget, Grown  # noqa: PLC0415  Triton is there only where CUDA is

    budget = Budget(shape.nodes - 1, growth.top_p, growth.floor) if isinstance(growth, Budgeted) else None
    grown = Grown(state, shape.depth, growth.width, growth.branch, budget)
    tokens = state.root.unsqueeze(1)
    origin = _at_the_root(tokens.shape[0], tokens.device)
    for level in range(1, shape.depth + 1):
        tokens, origin = grown.add(*guess(level, tokens, origin))
    tokens, parent, size = grown.chosen(shape.nodes)
    return Draft(tokens, Tree(parent), size)


@cache
def _at_the_root(batch: int, device: torch.device) -> Tensor:
    """[b, 1]: where the root hangs. Made once, and it stays where it is: captured rounds read it."""
    return torch.zeros(batch, 1, dtype=torch.long, device=device)


def unconditional(growth: Growth, state: State, guessed: Tensor, likely: Tensor) -> Draft:
    """The draft of guesses and log-chances [b, depth or more, k] that do not depend on what was guessed before them: every
    node of a level shares them."""
    if isinstance(growth, StaticTree):
        return growth.filled(state, guessed)

    def guess(level: int, live: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, live.shape[1], -1)
        return guessed[:, level - 1 : level].expand(shape), likely[:, level - 1 : level].expand(shape)

    return growth.draft(state, guess)


def _finite(chance: Tensor) -> Tensor:
    """A NaN would be drafted before everything else."""
    return chance.where(chance.isfinite(), -math.inf)


def _largest(chance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of [b, m] and where they are, of equal ones the first: an order that `topk` does not promise."""
    values, places = chance.sort(dim=1, descending=True, stable=True)
    return values[:, :count], places[:, :count]


def _cost(costs: RowCosts | None, state: State) -> Tensor | None:
    return None if costs is None else costs.of(len(state.lanes.ids))
