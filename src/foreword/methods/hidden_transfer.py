"""DRAFT: the pass that verifies this round's draft also prepares the next one. Tree nodes carry pseudo rows, which join in
the middle of the target. Whichever node is accepted last, predicted states of the tokens after it are ready.

A pseudo row attends to the sequence, to its node's path and to the earlier steps of its node. Real rows attend to no pseudo
row, and none is committed. Likely nodes carry more steps than unlikely ones. The target's head turns the states that the
last accepted node carried into candidates. Only a prompt takes a pass of its own, after the last row of each chunk.
Paper: Hidden Transfer (arXiv 2404.12022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Graft, Needs, on_device
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.allotment import Allotment, LikelyTrees, best_allotment, paying_allotment
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.lessons import Labels
from foreword.drafting.transfer import Source, Transfer, append_step, conditioned_steps, learn, right_by_rank, steps_after
from foreword.drafting.trees import BRANCH, MOST_NODES, USUAL_RATES, Path, Rates, TreePlan, greedy_paths, path_rate
from foreword.errors import InputError
from foreword.ops.growth import RankPaths, likeliest_paths
from foreword.ops.pseudo_rows import carried_on

Carry = Literal["likely", "all"]
Kind = Literal["static", "best"]
CANDIDATES = 256  # paths from which the likeliest are chosen


class HiddenTransfer(Drafter):
    paper = "Hidden Transfer, arXiv 2404.12022"
    copies = True
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
        """`steps`: how many tokens ahead it drafts, each from a pseudo row that joins after one of `layers`. `source`: a
        step is projected from its node's state ("anchor") or from the step before ("chain"). `squeeze`: divides the rank of
        the matrices. `told`: rows are conditioned on the token before them once it is decided. `tree`: the likeliest paths
        by `rates`, which `calibrate` measures, or by the candidates' own probabilities ("best"). `carry`: "all" nodes carry
        all steps, or "likely" ones carry more. `rows` counts nodes and pseudo rows together."""
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
        """How many nodes there are, and what each carries. Pseudo rows cost less than nodes: they skip the layers below."""
        steps, below = self.options.steps, self.layers[0] / target.layers

        def cost(one: Allotment) -> float:
            return below * target.cost(slots * one.nodes, slots) + (1 - below) * target.cost(slots * one.rows, slots)

        found = best_allotment(rates, steps, self.rows) if self.rows else paying_allotment(rates, steps, cost)
        if self.carry == "all":
            found = LikelyTrees(rates, steps, MOST_NODES).all_carry(max(1, found.rows // (1 + steps)))
        return found if found.depth else Allotment((0,), 1.0)

    def _carry(self, carries: Sequence[int], device: torch.device) -> None:
        """Ask for one graft per step, on the nodes that carry it."""
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
        """How a step's pseudo rows are made, from the rows `source` of the pass."""

        def onto(hidden: Tensor, real: int) -> Tensor:
            return append_step(self.module[step], hidden, hidden, source)

        return onto

    def begin(self, state: State) -> None:
        self.have.index_fill_(0, state.slots, 0)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        if not self.shape.depth:
            return
        layers = self.layers[: self.shape.depth]
        known = torch.stack([scores.taps[layer][:, -1] for layer in layers], dim=1)
        first, later = steps_after(self.module, layers, self.options.source, known)
        self.states.index_copy_(0, state.slots, self.target.onward(state.batch, first, layers[0], later))
        self.have.index_fill_(0, state.slots, self.shape.depth)

    def propose(self, state: State) -> Draft:
        if not self.shape.depth:
            return Draft.nothing(state.root)
        rows = conditioned_steps(self.module, self.target.norm(state.batch.take(self.states)), state.root, self.embedding)
        tokens, chances = self.vocabulary.candidates(rows, state.ahead(self.number), state.sampling, self.paths.branch)
        return self.paths.draft(state, tokens, chances, self.have, self.shape.nodes)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        if not self.shape.depth:
            return
        assert scores.grafted is not None
        kept, ended = (self.states, self.have, state.slots), (accepted.path, accepted.count)
        carried_on(*kept, *ended, scores.grafted, self.where, self.carries)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return learn(self.module, self.options, self.vocabulary, tokens, mask, scores, target)

    def calibrate(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> Rates:
        """How often the candidates of each step are right, by rank, on held-out sequences: `rates` for better trees."""
        return right_by_rank(self.module, self.options, self.vocabulary, tokens, mask, scores, target)


class Candidates:
    """Paths of ranks, likeliest first by `rates`; each sequence drafts those of them that its own steps reach."""

    def __init__(self, rates: Rates, nodes: int, kind: Kind, branch: int, device: torch.device) -> None:
        self.kind, self.branch = kind, branch
        most = CANDIDATES if kind == "best" else nodes
        known = {path for steps in range(1, len(rates) + 1) for path in greedy_paths(rates[:steps], most - 1)}
        paths: list[Path] = [(), *sorted(known, key=lambda path: (-path_rate(path, rates), len(path), path))]
        index = {path: node for node, path in enumerate(paths)}
        beyond = len(rates) * branch  # one past the table of probabilities by step and rank
        ways = [[step * branch + rank for step, rank in enumerate(path)] for path in paths]
        self.table = RankPaths(
            ways=torch.tensor([way + [beyond] * (len(rates) - len(way)) for way in ways], device=device),
            parents=torch.tensor([[index[path[:-1]] for path in paths]], device=device),
            lengths=torch.tensor([len(path) for path in paths], device=device),
            last=torch.tensor([way[-1] for way in ways[1:]], dtype=torch.long, device=device),
        )
        usual = torch.tensor([[[*row, *[0.0] * (branch - len(row))] for row in rates]], device=device)  # [1, steps, branch]
        self.usual = usual.clamp(min=1e-9).log()

    def draft(self, state: State, tokens: Tensor, chances: Tensor, have: Tensor, nodes: int) -> Draft:
        """Draft from candidates and their log-probabilities [b, steps, branch]. `have` [B]: how many steps each slot has."""
        likely = chances if self.kind == "best" else self.usual
        chosen, parent, size = likeliest_paths(state, tokens, likely, self.table, have, nodes)
        return Draft(chosen, Tree(parent), size)
