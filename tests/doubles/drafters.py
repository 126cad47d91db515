"""Drafters that lie, know the truth, play back a plan, or carry one hidden state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from doubles.states import sequence_of
from doubles.trees import random_tree
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target


class Liar(Drafter):
    """Proposes a tree of random tokens, nearly all of them wrong."""

    paper = "-"
    copies = True

    def __init__(self, nodes: int = 9, seed: int = 0) -> None:
        self.nodes, self.generator = nodes, torch.Generator().manual_seed(seed)

    def bind(self, target: Target, slots: int) -> None:
        self.shape = Shape(self.nodes, self.nodes - 1)
        self.vocabulary = target.vocab_size

    def propose(self, state: State) -> Draft:
        batch = len(state.batch.ids)
        tokens = torch.randint(0, self.vocabulary, (batch, self.nodes), generator=self.generator)
        tokens[:, 0] = state.root
        size = torch.randint(1, self.nodes + 1, (batch,), generator=self.generator)
        return Draft(tokens, random_tree(batch, self.nodes, self.generator), size)


class Oracle(Drafter):
    """Knows the truth, and hides the true chain among the rows of a random tree of lies. One lie in three repeats a true row
    under the same parent: it is right too, has no children, and may be the last row.

    Without lies the draft is the true chain alone, declared as a chain or as any tree.
    """

    paper = "-"
    copies = True

    def __init__(
        self, sequences: Iterable[Sequence[int]], depth: int = 4, lies: int = 5, seed: int = 0, as_chain: bool = False
    ) -> None:
        """`sequences`: whole sequences, prompts included. It drafts from the one that continues the sequence at hand."""
        self.sequences, self.depth, self.lies = [list(sequence) for sequence in sequences], depth, lies
        self.generator = torch.Generator().manual_seed(seed)
        self.as_chain = as_chain and not lies

    def bind(self, target: Target, slots: int) -> None:
        self.shape = Shape(1 + self.depth + self.lies, self.depth + self.lies)
        self.vocabulary = target.vocab_size

    def propose(self, state: State) -> Draft:
        rows = [self._row(sequence_of(state, index)) for index in range(len(state.batch.ids))]
        tokens = torch.tensor([row[0] for row in rows])
        parent = torch.tensor([row[1] for row in rows])
        tree = Tree.chain(self.shape.nodes) if self.as_chain else Tree(parent)
        return Draft(tokens, tree, torch.full((len(rows),), self.shape.nodes))

    def _row(self, sequence: list[int]) -> tuple[list[int], list[int]]:
        nodes = self.shape.nodes
        true = continuation(self.sequences, sequence, self.depth)
        places = (torch.randperm(nodes - 1, generator=self.generator)[: self.depth] + 1).sort().values.tolist()
        tokens = torch.randint(0, self.vocabulary, (nodes,), generator=self.generator).tolist()
        parent = [int(torch.randint(0, max(i, 1), (1,), generator=self.generator)) for i in range(nodes)]
        tokens[0] = sequence[-1]
        above = 0
        for place, token in zip(places, true, strict=True):
            tokens[place], parent[place], above = token, above, place
        for place in [place for place in range(nodes - 1, 0, -1) if place not in places][::3]:
            if twins := [twin for twin in places if twin < place]:
                twin = twins[int(torch.randint(0, len(twins), (1,), generator=self.generator))]
                tokens[place], parent[place] = tokens[twin], parent[twin]
        return tokens, parent


@dataclass(frozen=True)
class Plan:
    """One sequence's draft in one round. A node is (number, token): the number, modulo the rows before it, is its parent. A
    token of None stands for the true token at that depth."""

    nodes: tuple[tuple[int, int | None], ...]
    size: int


class Playback(Drafter):
    """Plays back given plans, one per sequence and round, in a cycle. It can propose any draft."""

    paper = "-"
    copies = True

    def __init__(self, plans: Sequence[Plan], sequences: Iterable[Sequence[int]]) -> None:
        self.plans, self.sequences, self.played = plans, [list(sequence) for sequence in sequences], 0

    def bind(self, target: Target, slots: int) -> None:
        nodes = 1 + max(len(plan.nodes) for plan in self.plans)
        self.shape = Shape(nodes, nodes - 1)

    def propose(self, state: State) -> Draft:
        rows = [self._row(sequence_of(state, index)) for index in range(len(state.batch.ids))]
        tokens, parent, size = zip(*rows, strict=True)
        return Draft(torch.tensor(tokens), Tree(torch.tensor(parent)), torch.tensor(size))

    def _row(self, sequence: list[int]) -> tuple[list[int], list[int], int]:
        plan = self.plans[self.played % len(self.plans)]
        self.played += 1
        true = continuation(self.sequences, sequence, self.shape.depth)
        tokens, parent, depth = [sequence[-1]], [0], [0]
        for number, token in plan.nodes:
            above = number % len(tokens)
            parent.append(above)
            depth.append(depth[above] + 1)
            tokens.append(true[depth[-1] - 1] if token is None else token)
        padding = self.shape.nodes - len(tokens)
        return tokens + [0] * padding, parent + [0] * padding, min(plan.size, len(tokens))


class LastHidden(Drafter):
    """Keeps the hidden state of the last committed row and proposes the best tokens of the target's head for it: the
    smallest drafter that carries state from `read` and `observe` to `propose`."""

    paper = "-"
    copies = True
    needs = Needs(hidden=True, prompt="last")
    shape = Shape(4, 1)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.hidden = torch.zeros(slots, target.hidden_size, dtype=target.dtype)

    def begin(self, state: State) -> None:
        self.hidden[state.slots] = 0

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.hidden[state.slots] = scores.require_hidden()[:, -1]

    def propose(self, state: State) -> Draft:
        logits = self.target.head(self.target.norm(self.hidden[state.slots]))
        tokens = torch.cat([state.root.unsqueeze(1), logits.topk(3).indices], dim=1)
        return Draft(tokens, Tree.of((0, 0, 0, 0)), torch.full_like(state.root, 4))

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        rows = torch.arange(len(state.batch.ids))
        self.hidden[state.slots] = scores.require_hidden()[rows, accepted.last]


def continuation(sequences: Iterable[list[int]], sequence: list[int], count: int) -> list[int]:
    """Return what follows `sequence` in the first of `sequences` that begins with it, padded with zeros."""
    known = next((one[len(sequence) :] for one in sequences if one[: len(sequence)] == sequence), [])
    return (known + [0] * count)[:count]
