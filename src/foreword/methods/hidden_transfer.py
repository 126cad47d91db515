"""DRAFT: the pass that checks the guesses of this round makes those of the next. Tree nodes carry pseudo rows, which join in
the middle of the target: whichever node turns out to be the last right one, states of the tokens behind it are there.

A pseudo row sees the text, its node's path and the earlier steps of its node; real rows see none, and none is kept. Likely
nodes carry more steps than unlikely ones. The target's head reads guesses off what the last right node carried; only the
first draft of a text takes a walk of its own, behind the last row of each chunk of its prompt.
Paper: Hidden Transfer (arXiv 2404.12022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Graft, Needs, on_device
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.allotment import Allotment, Ways, best_allotment, paying_allotment
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.lessons import Labels
from foreword.drafting.transfer import Source, Transfer, ahead, behind, learn, right_by_rank, told
from foreword.drafting.trees import BRANCH, MOST_NODES, USUAL_RATES, Path, Rates, TreePlan, choose, greedy_paths, promise
from foreword.errors import InputError

Carry = Literal["likely", "all"]
Kind = Literal["static", "best"]
CANDIDATES = 256  # paths that the likeliest are chosen from


class HiddenTransfer(Drafter):
    paper = "Hidden Transfer, arXiv 2404.12022"
    module: nn.ModuleList
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        steps: int = 3,
        layers: Sequence[int] | None = None,
        source: Source = "anchor",
        bias: bool = True,
        squeeze: int = 1,
        norm: bool = True,
        told: bool = True,
        tree: Kind = "static",
        carry: Carry = "likely",
        rates: Rates = USUAL_RATES,
        labels: Labels = "soft",
        anchors: int = 64,
    ) -> None:
        """`steps` tokens are guessed ahead, each by a row that joins after one of `layers`. `source`: a step is made of its
        node's state ("anchor") or of the step before ("chain"). `squeeze`: matrices of a lower rank. `told`: rows hear
        of the token before them once it is decided. `tree`: the likeliest paths by `rates`, which `calibrate` measures, or
        by the guesses' own chances ("best"). `carry`: all nodes carry all steps, or likely ones more. `rows` counts nodes
        and the rows that they carry."""
        layers = None if layers is None else tuple(layers)
        self.options = Transfer(steps, layers, source, bias, squeeze, norm, told, labels, anchors)
        self.options.check("hidden_transfer")
        for name, value, known in (("tree", tree, get_args(Kind)), ("carry", carry, get_args(Carry))):
            if value not in known:
                raise InputError(f"hidden_transfer: {name} is {value!r}; choose from {', '.join(known)}")
        TreePlan(tree, rows, 1, rates).check("hidden_transfer")
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.rows, self.tree, self.carry, self.rates = rows, tree, carry, rates
        self.wide = self.options.wide

    @property
    def config(self) -> dict[str, Any]:
        return {**self.options.config, "rates": [list(row) for row in self.rates]}

    def build(self, target: Target) -> None:
        self.layers = self.options.layers_of(target, "hidden_transfer")
        self.options = replace(self.options, layers=self.layers)
        self.module = self.options.module(target)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocabulary.bind(target)
        branch = min(BRANCH, target.vocab_size)
        rates = [tuple(row[:branch]) for row in self.rates]
        allotted = self._allot(rates, target, slots)
        self.shape = Shape(allotted.nodes, allotted.depth)
        if self.shape.depth:
            self.paths = Candidates(rates[: self.shape.depth], allotted.nodes, self.tree, branch, target.device)
        self._carry([min(one, self.shape.depth) for one in allotted.carries], target.device)
        self.embedding = target.head_weight()
        self.number = torch.arange(1, self.shape.depth + 1, device=target.device)
        size = slots, self.shape.depth, target.hidden_size
        self.states = torch.zeros(size, dtype=target.dtype, device=target.device)
        self.have = torch.zeros(slots, dtype=torch.long, device=target.device)

    def _allot(self, rates: Rates, target: Target, slots: int) -> Allotment:
        """Nodes and what they carry. Pseudo rows cost less than nodes: they skip the layers below their own."""
        steps, below = self.options.steps, self.layers[0] / target.layers

        def cost(one: Allotment) -> float:
            return below * target.cost(slots * one.nodes, slots) + (1 - below) * target.cost(slots * one.rows, slots)

        found = best_allotment(rates, steps, self.rows) if self.rows else paying_allotment(rates, steps, cost)
        if self.carry == "all":
            found = Ways(rates, steps, MOST_NODES).all_carry(max(1, found.rows // (1 + steps)))
        return found if found.depth else Allotment((0,), 1.0)

    def _carry(self, carries: Sequence[int], device: torch.device) -> None:
        """Ask for a graft a step, on the nodes that carry it."""
        grafts: list[Graft] = []
        where = [[0] * self.shape.depth for _ in carries]
        rows = 0
        for step, layer in enumerate(self.layers[: self.shape.depth]):
            nodes = tuple(node for node, count in enumerate(carries) if count > step)
            chained = step > 0 and self.options.source == "chain"
            source = tuple(len(carries) + where[node][step - 1] for node in nodes) if chained else nodes
            grafts.append(Graft(layer, nodes, (step + 1,) * len(nodes), self._onto(step, on_device(source, device))))
            for place, node in enumerate(nodes):
                where[node][step] = rows + place
            rows += len(nodes)
        taps = tuple(sorted(set(self.layers)))
        self.needs = Needs(taps=taps, grafts=tuple(grafts), prompt="last")
        self.carries = on_device(tuple(carries), device)
        self.where = torch.tensor(where, dtype=torch.long, device=device)  # [nodes, depth] places among the grafted rows

    def _onto(self, step: int, source: Tensor) -> Callable[[Tensor, int], Tensor]:
        """`source`: which rows of the pass a step's are made of."""

        def onto(hidden: Tensor, real: int) -> Tensor:
            return ahead(self.module[step], hidden, hidden, source)

        return onto

    def begin(self, state: State) -> None:
        self.have.index_fill_(0, state.slots, 0)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        if not self.shape.depth:
            return
        layers = self.layers[: self.shape.depth]
        known = torch.stack([scores.taps[layer][:, -1] for layer in layers], dim=1)
        first, later = behind(self.module, layers, self.options.source, known)
        self.states.index_copy_(0, state.slots, self.target.onward(state.batch, first, layers[0], later))
        self.have.index_fill_(0, state.slots, self.shape.depth)

    def propose(self, state: State) -> Draft:
        if not self.shape.depth:
            return Draft.nothing(state.root)
        rows = told(self.module, self.target.norm(state.batch.take(self.states)), state.root, self.embedding)
        tokens, chances = self.vocabulary.guesses(rows, state.ahead(self.number), state.sampling, self.paths.branch)
        return self.paths.draft(state, tokens, chances, self.have, self.shape.nodes)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        if not self.shape.depth:
            return
        assert scores.grafted is not None
        if scores.grafted.is_cuda:
            from foreword.ops.drafting.carry import carried_on  # noqa: PLC0415  Triton is there only where CUDA is

            kept, ended = (self.states, self.have, state.slots), (accepted.path, accepted.count)
            return carried_on(*kept, *ended, scores.grafted, self.where, self.carries)
        self.carry_on(state.slots, accepted, scores.grafted)

    def carry_on(self, slots: Tensor, accepted: Accepted, grafted: Tensor) -> None:
        """Keep what the last right node carried; where nothing was decided, what there was."""
        last, decided = accepted.last, accepted.count > 0
        place = self.where[last].unsqueeze(-1).expand(-1, -1, self.states.shape[2])
        rows = grafted.gather(1, place).where(decided.view(-1, 1, 1), self.states[slots])
        self.states.index_copy_(0, slots, rows)
        self.have.index_copy_(0, slots, self.carries[last].where(decided, self.have[slots]))

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return learn(self.module, self.options, tokens, mask, scores, target)

    def calibrate(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> Rates:
        """How often the guesses of each step are right by rank, on text kept apart: the `rates` of better trees."""
        return right_by_rank(self.module, self.options, tokens, mask, scores, target)


class Candidates:
    """Paths of ranks, likeliest first by `rates`; each sequence drafts those of them that its own steps reach."""

    def __init__(self, rates: Rates, nodes: int, kind: Kind, branch: int, device: torch.device) -> None:
        self.kind, self.branch = kind, branch
        most = CANDIDATES if kind == "best" else nodes
        known = {path for steps in range(1, len(rates) + 1) for path in greedy_paths(rates[:steps], most - 1)}
        paths: list[Path] = [(), *sorted(known, key=lambda path: (-promise(path, rates), len(path), path))]
        index = {path: node for node, path in enumerate(paths)}
        beyond = len(rates) * branch  # of a table of chances by step and rank: the place behind its end
        ways = [[step * branch + rank for step, rank in enumerate(path)] for path in paths]
        self.ways = torch.tensor([way + [beyond] * (len(rates) - len(way)) for way in ways], device=device)  # [C, steps]
        self.last = torch.tensor([way[-1] for way in ways[1:]], dtype=torch.long, device=device)  # [C - 1]
        self.parent = torch.tensor([[index[path[:-1]] for path in paths]], device=device)
        self.length = torch.tensor([len(path) for path in paths], device=device)
        table = torch.tensor([[[*row, *[0.0] * (branch - len(row))] for row in rates]], device=device)  # [1, steps, branch]
        self.usual = table.clamp(min=1e-9).log()

    def draft(self, state: State, tokens: Tensor, chances: Tensor, have: Tensor, nodes: int) -> Draft:
        """Of guesses and log-chances [b, steps, branch], of which slots `have` [B] steps."""
        likely = chances if self.kind == "best" else self.usual
        if tokens.is_cuda:
            from foreword.ops.drafting.growth import likeliest_paths  # noqa: PLC0415  Triton is there only where CUDA is

            chosen, above, size = likeliest_paths(state, tokens, likely, (self.ways, self.parent), have, nodes)
            return Draft(chosen, Tree(above), size)
        return choose(*self.reached(state, tokens, likely, have), nodes)

    def reached(self, state: State, tokens: Tensor, likely: Tensor, have: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and log-chances of all paths; a path that is longer than its sequence has steps has no chance."""
        root = state.root
        whole = functional.pad(likely.expand_as(tokens).flatten(1), (0, 1))[:, self.ways].sum(-1)  # [b, C]
        there = (self.length <= have[state.slots].unsqueeze(1)) & (whole == whole)
        drafted = torch.cat([root.unsqueeze(1), tokens.flatten(1)[:, self.last]], dim=1)
        return drafted, self.parent, whole.masked_fill(~there, -math.inf)
