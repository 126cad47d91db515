"""DRAFT: the target's own runner-up tokens, used again. A table remembers, for every token of the vocabulary, the k
candidates that the target last ranked best after it; a draft is a walk through the table along a tree template.

After each round the rows of all tokens that stood in the tree, accepted or not, are overwritten with what the target
ranked there; prompts teach too. No training, a few megabytes. Of the template's nodes those are drafted whose remembered
chances promise more than a row costs on this machine.
Paper: Token Recycling (arXiv 2408.08696).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from foreword.core.choosing import likeliest, rank
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.trees import FixedRows, RowCosts, choose
from foreword.errors import InputError

TableMode = Literal["slot", "shared", "session", "reset"]

CANDIDATES = 8
ROWS_ON_GPU = 64
BEND = 0.0  # with 8, 16 and 81 rows 1.56, 1.73 and 2.18 tokens per round: by the logarithm as it is
GUESSING = 0.2  # passes over one row: a table is read, and no weights

# The paper's tree: how many candidates each node passes on, by its path of candidate ranks. 80 nodes and the root.
CHILDREN: dict[tuple[int, ...], int] = (
    {(): 8}
    | {(0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1}
    | {(0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1}
    | {(1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1}
    | {(0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1}
    | {(0, 1, 0): 1, (0, 2, 0): 1, (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1}
    | {(0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1}
    | {(0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1}
)


def template() -> list[tuple[int, ...]]:
    """The template's nodes as paths of candidate ranks, level by level, the root first."""
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        paths += [(*path, rank) for rank in range(CHILDREN.get(path, 0))]
    return paths


class TokenRecycling(Drafter):
    paper = "Token Recycling, arXiv 2408.08696"
    learns = True
    needs = Needs(logits=True, prompt="all")

    def __init__(self, rows: int | None = None, table: TableMode = "slot", fade: float = 0.75) -> None:
        """`table`: one for each place in the batch, passed on from text to text ("slot"); one for all ("shared"), where
        texts that are written side by side overwrite each other's candidates; one per place that lives as long as a
        conversation ("session"); or a fresh one for every request ("reset"). `fade` is what a remembered chance is worth
        after one more step."""
        if table not in get_args(TableMode):
            raise InputError(f"token_recycling: table is {table!r}; choose from {', '.join(get_args(TableMode))}")
        if not 0 < fade <= 1:
            raise InputError(f"token_recycling: fade is {fade}; it must be above 0 and at most 1")
        self.wants_cost = rows is None
        self.rows, self.mode, self.fade = rows, table, fade

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocab_size = target.vocab_size
        tables, device = 1 if self.mode == "shared" else slots, target.device
        # One row past the vocabulary takes the writes that must not count.
        self.tokens = torch.zeros(tables, self.vocab_size + 1, CANDIDATES, dtype=torch.int32, device=device)
        self.chances = torch.full(self.tokens.shape, -math.inf, dtype=torch.float32, device=device)
        depth = self.bind_template(device)
        # A GPU checks as many rows each time, used or not: as many as pay at its batch size, and never more than these.
        most = len(self.parent) if device.type == "cpu" else ROWS_ON_GPU
        nodes = min(self.rows or most, len(self.parent))
        self.shape = Shape(nodes, min(depth, nodes - 1))
        self.costs = RowCosts(target, nodes)
        self.fixed = None
        if self.rows is None and device.type == "cuda":
            self.fixed = FixedRows(target, self.shape, bend=BEND, guessing=GUESSING)

    def bind_template(self, device: torch.device) -> int:
        """The template as tensors: the nodes level by level, and the ranks along each node's way. Returns its depth."""
        paths = template()
        index = {path: i for i, path in enumerate(paths)}
        self.parent = torch.tensor([index[path[:-1]] for path in paths], device=device)
        self.rank = torch.tensor([path[-1] if path else 0 for path in paths], device=device)
        depths = [len(path) for path in paths]
        deepest = max(depths)
        self.levels = [(depths.index(d), depths.index(d) + depths.count(d)) for d in range(1, deepest + 1)]
        self.depths = torch.tensor(depths, dtype=torch.int32, device=device)
        self.fading = self.depths * math.log(self.fade)
        self.ways = torch.tensor([path + (0,) * (deepest - len(path)) for path in paths], dtype=torch.int32, device=device)
        return deepest

    def begin(self, state: State) -> None:
        if self.mode in ("slot", "shared"):
            return
        fresh = state.slots if self.mode == "reset" else state.slots[state.length == 0]
        self.chances[fresh] = -math.inf

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self._learn(state, chunk, scores)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self._learn(state, draft, scores, accepted)

    def propose(self, state: State) -> Draft:
        """Of the template's nodes the likeliest to be reached: as many as pay on this machine."""
        nodes = (self.shape if self.fixed is None else self.fixed.shape(len(state.batch.ids))).nodes
        if state.slots.is_cuda:
            from foreword.ops.drafting.recycle import walked  # noqa: PLC0415  Triton is there only where CUDA is

            template, table = (self.ways, self.depths, self.parent, self.fading), state.sampling.table
            noise = (state.lengths, table["key"], table["temperature"]) if state.sampling.kind.noise else None
            own = self.mode != "shared"
            drafted = walked((self.tokens, self.chances), template, state.slots, state.roots, nodes, own, noise)
            return Draft(drafted[0], Tree(drafted[1]), drafted[2])
        tokens, chances = self._walk(state)
        cost = self.costs.of(len(state.batch.ids)) if self.rows is None else None
        return choose(tokens, self.parent.unsqueeze(0), chances, nodes, cost)

    def _walk(self, state: State) -> tuple[Tensor, Tensor]:
        """The whole template from each root: tokens [b, 81], and log-chances that the target goes that way."""
        batch, table = len(state.batch.ids), self._tables(state)
        tokens = state.root.unsqueeze(1).repeat(1, len(self.parent))
        chances = torch.zeros(tokens.shape, device=tokens.device)
        sampling = state.sampling
        done = 1
        for depth, (first, stop) in enumerate(self.levels, start=1):
            known = tokens[:, :done]
            candidates = self.tokens[table, known].long()  # [b, done, K]
            remembered = self.chances[table, known]
            if sampling.kind.noise:
                position = (state.length + depth).unsqueeze(1).expand(batch, done)
                order = rank(remembered, position, sampling, CANDIDATES, candidates)
                candidates, remembered = candidates.gather(2, order), remembered.gather(2, order)
            parent, place = self.parent[first:stop], self.rank[first:stop]
            tokens[:, first:stop] = candidates[:, parent, place]
            chances[:, first:stop] = chances[:, parent] + remembered[:, parent, place]
            done = stop
        return tokens, chances + self.fading

    def _learn(self, state: State, draft: Draft, scores: Scores, accepted: Accepted | None = None) -> None:
        """Overwrite the table rows of a draft's tokens; of equal ones the latest has its way. Accepted rows saw the true
        text, so they have the last word."""
        candidates, chances = likeliest(scores.require_logits(), CANDIDATES)
        if candidates.is_cuda:
            from foreword.ops.drafting.recycle import learnt  # noqa: PLC0415  Triton is there only where CUDA is

            path = None if accepted is None else (accepted.path, accepted.count)
            table, own = (self.tokens, self.chances), self.mode != "shared"
            learnt(table, state.slots, draft.tokens, draft.size, (candidates, chances), path, own)
        else:
            self._write(state, draft, accepted, candidates, chances)

    def _write(self, state: State, draft: Draft, accepted: Accepted | None, candidates: Tensor, chances: Tensor) -> None:
        """Candidates and chances [b, n, K] into the table, as torch operations."""
        tokens, counts = draft.tokens, draft.counts
        when = torch.arange(draft.nodes, device=tokens.device).expand_as(tokens)
        if accepted is not None:
            counts = counts & (accepted.count > 0).unsqueeze(1)
            when = when + torch.zeros_like(when).scatter_add(1, accepted.path, accepted.kept * draft.nodes)
        chances = chances.where(chances.isfinite(), -math.inf)  # a NaN would be drafted before the root
        table = self._tables(state).expand_as(tokens)
        row = torch.where(counts, table * (self.vocab_size + 1) + tokens, -1).flatten()
        sequence = torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1)
        time = (when * tokens.shape[0] + sequence).flatten()
        beaten = ((row.unsqueeze(1) == row) & (time.unsqueeze(1) < time)).any(1)
        waste = self.vocab_size
        row = torch.where(beaten | (row < 0), waste, row)
        self.tokens.view(-1, CANDIDATES).index_copy_(0, row, candidates.reshape(-1, CANDIDATES).int())
        self.chances.view(-1, CANDIDATES).index_copy_(0, row, chances.reshape(-1, CANDIDATES).float())

    def _tables(self, state: State) -> Tensor:
        """Which table each sequence uses: [b, 1]."""
        return (state.slots if self.mode != "shared" else torch.zeros_like(state.slots)).unsqueeze(1)

    def end(self, slots: Sequence[int]) -> None:
        if self.mode == "reset":
            self.chances[list(slots)] = -math.inf
