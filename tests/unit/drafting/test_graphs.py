"""The graph of candidates against a slow one, built node by node in plain Python; and that it has no loops."""

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from doubles import path_to, state_of
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.state import State
from foreword.drafting.trees import BestFirst
from foreword.ops.candidate_graphs import Rule, TorchGraph
from foreword.ops.rows import carried

Tokens = tuple[int, ...]
Predictions = dict[Tokens, list[tuple[int, float]]]


@dataclass(frozen=True)
class ToyModel:
    """Candidates that are a fixed function of the tokens so far, out of few tokens, so that they occur again."""

    seed: int
    branch: int
    vocabulary: int = 6
    given: Predictions = field(default_factory=dict)

    def after(self, tokens: Tokens) -> list[tuple[int, float]]:
        if tokens in self.given:
            return [(token, math.log(chance)) for token, chance in self.given[tokens]]
        generator = random.Random(hash((self.seed, tokens)))
        found = generator.sample(range(10, 10 + self.vocabulary), self.branch)
        weights = sorted((math.exp(1.5 * generator.gauss(0, 1)) for _ in found), reverse=True)
        return [(token, math.log(weight / sum(weights) / 1.05)) for token, weight in zip(found, weights, strict=True)]

    def candidates(self, paths: Tensor) -> tuple[Tensor, Tensor]:
        predicted = [[self.after(tuple(one)) for one in sequence] for sequence in paths.tolist()]
        found = torch.tensor(predicted, dtype=torch.float64)
        return found[..., 0].long(), found[..., 1]


def graph_of(rule: Rule, model: ToyModel, roots: list[int], depth: int) -> TorchGraph:
    graph, paths = TorchGraph(torch.tensor(roots), rule), torch.tensor(roots).view(-1, 1, 1)
    for _ in range(depth):
        tokens, origin = graph.add(*model.candidates(paths))
        paths = torch.cat([carried(paths, origin), tokens.unsqueeze(2)], dim=2)
    return graph


Edges = dict[Tokens, list[tuple[int, Tokens]]]
"""The children of each node. A node is named by the tokens on its path through the tree."""


def edges_of(graph: TorchGraph, row: int, root: int) -> Edges:
    known, branch = graph.candidates, graph.rule.branch
    goal, read = known.goal[row].tolist(), known.read[row].tolist()
    tokens = known.tokens[row].tolist()
    node_of = {0: (root,)} | {number: () for number in read if number >= 0}
    names: dict[int, Tokens] = {}
    for candidate, number in enumerate(goal):
        if number == candidate:
            names[candidate] = (*node_of[candidate // branch], tokens[candidate])
            if read[candidate] >= 0:
                node_of[read[candidate]] = names[candidate]
    edges: Edges = {}
    for candidate, number in enumerate(goal):
        if number >= 0:
            edges.setdefault(node_of[candidate // branch], []).append((tokens[candidate], names[number]))
    return edges


# Slow ----------------------------------------------------------------------------------------------------------------


def ending(path: Tokens, repeat: int) -> tuple[int | None, ...]:
    return ((None,) * (repeat + 1) + path)[-repeat - 1 :]


def leads(edges: Edges, start: Tokens, goal: Tokens) -> bool:
    return start == goal or any(leads(edges, below, goal) for _, below in edges.get(start, []))


def slow(rule: Rule, model: ToyModel, root: int, depth: int) -> Edges:
    edges: Edges = {}
    older: list[Tokens] = []
    front = [((root,), 0.0)]
    for _ in range(depth):
        predicted = [
            (u, path, chance, *one) for u, (path, chance) in enumerate(front) for one in counting(rule, model, path)
        ]
        places = [path for path, _ in front]
        merged = older_ones(rule, edges, older, predicted, places) if rule.repeat >= 0 else {}
        fresh: dict[tuple[int | None, ...], Tokens] = {}
        made, added = [], {}
        for number, (_, path, chance, token, log_prob) in enumerate(predicted):
            name, end = (*path, token), ending((*path, token), rule.repeat)
            twin = fresh.get(end) if rule.repeat >= 0 else None
            goal = merged.get(number) or twin or name
            added.setdefault(path, []).append((token, goal))
            if goal == name:
                fresh[end] = name
                made.append((name, chance + log_prob, log_prob))
        edges |= added
        older += [name for name, _, _ in made]
        sure = [(name, chance) for name, chance, log_prob in made if rule.sure == 0 or log_prob >= math.log(rule.sure)]
        front = sorted(sure, key=lambda one: -one[1])[: rule.width]
    return edges


def counting(rule: Rule, model: ToyModel, path: Tokens) -> list[tuple[int, float]]:
    predicted = model.after(path)
    return [one for one in predicted if rule.siblings == 0 or one[1] >= predicted[0][1] + math.log(rule.siblings)]


def older_ones(rule: Rule, edges: Edges, older: list[Tokens], predicted: list, places: list[Tokens]) -> dict[int, Tokens]:  # type: ignore[type-arg]
    """Find for each candidate the first older node with the same last tokens that does not lead back to it. Of those that
    would close a loop together, keep the ones that lead to a later node."""
    found: dict[int, Tokens] = {}
    for number, (_, path, _, token, _) in enumerate(predicted):
        same = [w for w in older if ending(w, rule.repeat) == ending((*path, token), rule.repeat)]
        allowed = [w for w in same if not leads(edges, w, path)]
        if allowed:
            found[number] = allowed[0]
    onward = {number: {g for g, place in enumerate(places) if leads(edges, w, place)} for number, w in found.items()}
    step = {(predicted[number][0], g) for number, all_g in onward.items() for g in all_g}
    for _ in places:
        step |= {(a, d) for a, b in step for c, d in step if b == c}
    bad = [n for n, all_g in onward.items() if any((g, predicted[n][0]) in step and g <= predicted[n][0] for g in all_g)]
    return {number: w for number, w in found.items() if number not in bad}


# Properties ------------------------------------------------------------------------------------------------------------

rules = st.builds(
    Rule,
    branch=st.integers(1, 4),
    repeat=st.sampled_from([-1, 0, 0, 1, 2]),
    siblings=st.sampled_from([0.0, 0.1, 0.5]),
    sure=st.sampled_from([0.0, 0.15, 0.3]),
    width=st.sampled_from([1, 3, 5, 16]),
)


@settings(deadline=None, max_examples=150)
@given(rules, st.integers(0, 10**6), st.integers(1, 5))
def test_the_graph_is_the_slow_one(rule: Rule, seed: int, depth: int) -> None:
    model, roots = ToyModel(seed, rule.branch), [1, 2, 11]
    graph = graph_of(rule, model, roots, depth)
    for row, root in enumerate(roots):
        assert edges_of(graph, row, root) == slow(rule, model, root, depth)


def longest_walk(edges: Edges, start: Tokens, below: tuple[Tokens, ...] = ()) -> int:
    assert start not in below, "there is a loop"
    return 1 + max((longest_walk(edges, goal, (*below, start)) for _, goal in edges.get(start, [])), default=0)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 3))
def test_every_walk_ends(seed: int, depth: int, branch: int) -> None:
    """With three tokens, merged by the last one alone, nearly everything is merged."""
    rule = Rule(branch, 0, 0.0, 0.0, 8)
    graph = graph_of(rule, ToyModel(seed, branch, vocabulary=3), [1, 10], depth)
    for row, root in enumerate((1, 10)):
        assert longest_walk(edges_of(graph, row, root), (root,)) > depth


def test_two_aliases_that_would_close_a_loop() -> None:
    """r leads to a and b, a to c, b to d. An alias from c to b or from d to a is possible alone; only one is made."""
    r, a, b, c, d = 1, 20, 21, 22, 23
    given_predictions: Predictions = {
        (r,): [(a, 0.5), (b, 0.4)],
        (r, a): [(c, 0.9), (30, 0.01)],
        (r, b): [(d, 0.9), (31, 0.01)],
        (r, a, c): [(b, 0.9), (32, 0.01)],
        (r, b, d): [(a, 0.9), (33, 0.01)],
    }
    graph = graph_of(Rule(2, 0, 0.1, 0.0, 8), ToyModel(0, 2, given=given_predictions), [r], 3)
    edges = edges_of(graph, 0, r)
    assert edges[r, a, c] == [(b, (r, b))] and edges[r, b, d] == [(a, (r, b, d, a))]
    assert graph.saved.tolist() == [1]


def test_a_node_may_have_several_aliases() -> None:
    given_predictions: Predictions = {
        (1,): [(20, 0.4), (21, 0.3), (22, 0.3)],
        (1, 20): [(21, 0.5), (22, 0.4), (30, 0.1)],
        (1, 21): [(31, 0.5), (32, 0.4), (33, 0.1)],
        (1, 22): [(34, 0.5), (35, 0.4), (36, 0.1)],
    }
    edges = edges_of(graph_of(Rule(3, 0, 0.0, 0.0, 8), ToyModel(0, 3, given=given_predictions), [1], 2), 0, 1)
    assert edges[1, 20] == [(21, (1, 21)), (22, (1, 22)), (30, (1, 20, 30))]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0, 1]))
def test_merging_saves_rows(seed: int, repeat: int) -> None:
    """With room for all, merging never reads more nodes. The rows that it saves are counted."""
    model, depth = ToyModel(seed, 3, vocabulary=4), 4
    with_, without = (graph_of(Rule(3, k, 0.1, 0.1, 81), model, [1], depth) for k in (repeat, -1))
    read = [int((graph.candidates.read >= 0).sum()) for graph in (with_, without)]
    assert read[0] <= read[1] and without.saved.tolist() == [0]
    assert (read[0] < read[1]) == bool((with_.counts[1] + with_.saved).item())


def test_a_nan_candidate_is_not_in_the_graph() -> None:
    graph = TorchGraph(torch.tensor([1]), Rule(2, 1, 0.0, 0.0, 4))
    tokens = torch.tensor([[[20, 21]]])
    graph.add(tokens, torch.tensor([[[-0.1, math.nan]]]))
    assert graph.candidates.goal.tolist() == [[0, -1]] and graph.candidates.read.tolist() == [[1, -1]]
    graph.add(torch.tensor([[[22, 23]] * 2]), torch.full((1, 2, 2), -0.1))
    assert graph.candidates.goal.tolist() == [[0, -1, 2, 3, -1, -1]]  # the second node that was read is padding


# Unrolled --------------------------------------------------------------------------------------------------------------


def paths_of(draft: Draft, row: int) -> set[Tokens]:
    parent = draft.tree.parent[row].tolist()
    rows = range(int(draft.size[row]))
    return {tuple(int(draft.tokens[row, node]) for node in path_to(parent, last)) for last in rows}


def unrolled(graph: TorchGraph, state: State, shape: Shape) -> Draft:
    tokens, parent, size = graph.unrolled(state, shape.depth, 64, shape.nodes)
    return Draft(tokens, Tree(parent), size)


def all_walks(edges: Edges, model: ToyModel, start: Tokens, most: int) -> dict[Tokens, float]:
    """Return the tokens of every walk, and its log-probability by the nodes on it."""
    found, waiting = {}, [(start, start, 0.0)]
    while waiting:
        name, walk, chance = waiting.pop()
        found[walk] = chance
        log_probs = dict(model.after(name))
        if len(walk) <= most:
            waiting += [(goal, (*walk, token), chance + log_probs[token]) for token, goal in edges.get(name, [])]
    return found


@settings(deadline=None, max_examples=60)
@given(rules, st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 24))
def test_the_likeliest_walks_are_unrolled(rule: Rule, seed: int, depth: int, nodes: int) -> None:
    model, roots = ToyModel(seed, rule.branch), [1, 12]
    graph = graph_of(rule, model, roots, depth)
    shape = Shape(nodes, min(depth + 2, nodes - 1))
    draft = unrolled(graph, state_of([[5, root] for root in roots]), shape)
    for row, root in enumerate(roots):
        walks = all_walks(edges_of(graph, row, root), model, (root,), shape.depth)
        assert paths_of(draft, row) == set(sorted(walks, key=lambda walk: -walks[walk])[:nodes])


@pytest.mark.parametrize("width", [1, 4, 16])
def test_without_merging_it_is_an_ordinary_tree(width: int) -> None:
    model, depth = ToyModel(3, 4), 4
    state, shape = state_of([[5, 1], [5, 2]]), Shape(20, depth)
    graph = graph_of(Rule(4, -1, 0.0, 0.0, width), model, [1, 2], depth)
    paths = torch.zeros(0)

    def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal paths
        before = torch.zeros(*tokens.shape, 0).long() if level == 1 else carried(paths, origin)
        paths = torch.cat([before, tokens.unsqueeze(2)], dim=2)
        return model.candidates(paths)

    tree = BestFirst(shape, width, 4, None).draft(state, guess)
    walks = unrolled(graph, state, shape)
    assert [paths_of(walks, row) for row in range(2)] == [paths_of(tree, row) for row in range(2)]
