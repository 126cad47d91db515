"""The graph of guesses against a slow one, built node by node in plain Python; and that no way in it leads back."""

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

Words = tuple[int, ...]
Answers = dict[Words, list[tuple[int, float]]]


@dataclass(frozen=True)
class Speaker:
    """Guesses that are a fixed function of the words so far, out of few words, so that they come back."""

    seed: int
    branch: int
    words: int = 6
    told: Answers = field(default_factory=dict)

    def behind(self, words: Words) -> list[tuple[int, float]]:
        if words in self.told:
            return [(token, math.log(chance)) for token, chance in self.told[words]]
        draw = random.Random(hash((self.seed, words)))
        tokens = draw.sample(range(10, 10 + self.words), self.branch)
        weights = sorted((math.exp(1.5 * draw.gauss(0, 1)) for _ in tokens), reverse=True)
        return [(token, math.log(weight / sum(weights) / 1.05)) for token, weight in zip(tokens, weights, strict=True)]

    def answers(self, words: Tensor) -> tuple[Tensor, Tensor]:
        said = [[self.behind(tuple(one)) for one in sequence] for sequence in words.tolist()]
        found = torch.tensor(said, dtype=torch.float64)
        return found[..., 0].long(), found[..., 1]


def grown(rule: Rule, speaker: Speaker, roots: list[int], depth: int) -> TorchGraph:
    graph, words = TorchGraph(torch.tensor(roots), rule), torch.tensor(roots).view(-1, 1, 1)
    for _ in range(depth):
        tokens, origin = graph.add(*speaker.answers(words))
        words = torch.cat([carried(words, origin), tokens.unsqueeze(2)], dim=2)
    return graph


Edges = dict[Words, list[tuple[int, Words]]]
"""Who hangs on whom: nodes are called by the words on their way through the tree."""


def edges_of(graph: TorchGraph, lane: int, root: int) -> Edges:
    known, branch = graph.candidates, graph.rule.branch
    goal, read = known.goal[lane].tolist(), known.read[lane].tolist()
    tokens = known.tokens[lane].tolist()
    node_of = {0: (root,)} | {number: () for number in read if number >= 0}
    names: dict[int, Words] = {}
    for guess, number in enumerate(goal):
        if number == guess:
            names[guess] = (*node_of[guess // branch], tokens[guess])
            if read[guess] >= 0:
                node_of[read[guess]] = names[guess]
    edges: Edges = {}
    for guess, number in enumerate(goal):
        if number >= 0:
            edges.setdefault(node_of[guess // branch], []).append((tokens[guess], names[number]))
    return edges


# Slow ----------------------------------------------------------------------------------------------------------------


def ending(words: Words, repeat: int) -> tuple[int | None, ...]:
    return ((None,) * (repeat + 1) + words)[-repeat - 1 :]


def leads(edges: Edges, start: Words, goal: Words) -> bool:
    return start == goal or any(leads(edges, below, goal) for _, below in edges.get(start, []))


def slow(rule: Rule, speaker: Speaker, root: int, depth: int) -> Edges:
    edges: Edges = {}
    older: list[Words] = []
    front = [((root,), 0.0)]
    for _ in range(depth):
        said = [
            (u, words, chance, *one) for u, (words, chance) in enumerate(front) for one in counting(rule, speaker, words)
        ]
        places = [words for words, _ in front]
        merged = older_ones(rule, edges, older, said, places) if rule.repeat >= 0 else {}
        fresh: dict[tuple[int | None, ...], Words] = {}
        made, added = [], {}
        for number, (_, words, chance, token, likely) in enumerate(said):
            name, end = (*words, token), ending((*words, token), rule.repeat)
            twin = fresh.get(end) if rule.repeat >= 0 else None
            goal = merged.get(number) or twin or name
            added.setdefault(words, []).append((token, goal))
            if goal == name:
                fresh[end] = name
                made.append((name, chance + likely, likely))
        edges |= added
        older += [name for name, _, _ in made]
        sure = [(name, chance) for name, chance, likely in made if rule.sure == 0 or likely >= math.log(rule.sure)]
        front = sorted(sure, key=lambda one: -one[1])[: rule.width]
    return edges


def counting(rule: Rule, speaker: Speaker, words: Words) -> list[tuple[int, float]]:
    said = speaker.behind(words)
    return [one for one in said if rule.siblings == 0 or one[1] >= said[0][1] + math.log(rule.siblings)]


def older_ones(rule: Rule, edges: Edges, older: list[Words], said: list, places: list[Words]) -> dict[int, Words]:  # type: ignore[type-arg]
    """For each guess the first older node that ends like it and does not lead back to it; of those that would close a loop
    together, the ones that lead to a later node."""
    found: dict[int, Words] = {}
    for number, (_, words, _, token, _) in enumerate(said):
        same = [w for w in older if ending(w, rule.repeat) == ending((*words, token), rule.repeat)]
        allowed = [w for w in same if not leads(edges, w, words)]
        if allowed:
            found[number] = allowed[0]
    onward = {number: {g for g, place in enumerate(places) if leads(edges, w, place)} for number, w in found.items()}
    step = {(said[number][0], g) for number, all_g in onward.items() for g in all_g}
    for _ in places:
        step |= {(a, d) for a, b in step for c, d in step if b == c}
    bad = [n for n, all_g in onward.items() if any((g, said[n][0]) in step and g <= said[n][0] for g in all_g)]
    return {number: w for number, w in found.items() if number not in bad}


# The laws ------------------------------------------------------------------------------------------------------------

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
    speaker, roots = Speaker(seed, rule.branch), [1, 2, 11]
    graph = grown(rule, speaker, roots, depth)
    for lane, root in enumerate(roots):
        assert edges_of(graph, lane, root) == slow(rule, speaker, root, depth)


def longest_walk(edges: Edges, start: Words, below: tuple[Words, ...] = ()) -> int:
    assert start not in below, "a way leads back"
    return 1 + max((longest_walk(edges, goal, (*below, start)) for _, goal in edges.get(start, [])), default=0)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 3))
def test_every_walk_ends(seed: int, depth: int, branch: int) -> None:
    """Of three words and by the last one alone, nearly everything is merged."""
    rule = Rule(branch, 0, 0.0, 0.0, 8)
    graph = grown(rule, Speaker(seed, branch, words=3), [1, 10], depth)
    for lane, root in enumerate((1, 10)):
        assert longest_walk(edges_of(graph, lane, root), (root,)) > depth


def test_two_aliases_that_would_close_a_loop() -> None:
    """r leads to a and b, a to c, b to d. That c leads to b, and d to a, holds for each alone: only one of them is made."""
    r, a, b, c, d = 1, 20, 21, 22, 23
    told: Answers = {
        (r,): [(a, 0.5), (b, 0.4)],
        (r, a): [(c, 0.9), (30, 0.01)],
        (r, b): [(d, 0.9), (31, 0.01)],
        (r, a, c): [(b, 0.9), (32, 0.01)],
        (r, b, d): [(a, 0.9), (33, 0.01)],
    }
    graph = grown(Rule(2, 0, 0.1, 0.0, 8), Speaker(0, 2, told=told), [r], 3)
    edges = edges_of(graph, 0, r)
    assert edges[r, a, c] == [(b, (r, b))] and edges[r, b, d] == [(a, (r, b, d, a))]
    assert graph.saved.tolist() == [1]


def test_a_node_may_have_several_aliases() -> None:
    told: Answers = {
        (1,): [(20, 0.4), (21, 0.3), (22, 0.3)],
        (1, 20): [(21, 0.5), (22, 0.4), (30, 0.1)],
        (1, 21): [(31, 0.5), (32, 0.4), (33, 0.1)],
        (1, 22): [(34, 0.5), (35, 0.4), (36, 0.1)],
    }
    edges = edges_of(grown(Rule(3, 0, 0.0, 0.0, 8), Speaker(0, 3, told=told), [1], 2), 0, 1)
    assert edges[1, 20] == [(21, (1, 21)), (22, (1, 22)), (30, (1, 20, 30))]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0, 1]))
def test_merging_saves_rows(seed: int, repeat: int) -> None:
    """With room for all, never more nodes are read than without merging; how many fewer at the first chance is counted."""
    speaker, depth = Speaker(seed, 3, words=4), 4
    with_, without = (grown(Rule(3, k, 0.1, 0.1, 81), speaker, [1], depth) for k in (repeat, -1))
    read = [int((graph.candidates.read >= 0).sum()) for graph in (with_, without)]
    assert read[0] <= read[1] and without.saved.tolist() == [0]
    assert (read[0] < read[1]) == bool((with_.counts[1] + with_.saved).item())


def test_a_guess_that_is_no_number_is_not_in_it() -> None:
    graph = TorchGraph(torch.tensor([1]), Rule(2, 1, 0.0, 0.0, 4))
    tokens = torch.tensor([[[20, 21]]])
    graph.add(tokens, torch.tensor([[[-0.1, math.nan]]]))
    assert graph.candidates.goal.tolist() == [[0, -1]] and graph.candidates.read.tolist() == [[1, -1]]
    graph.add(torch.tensor([[[22, 23]] * 2]), torch.full((1, 2, 2), -0.1))
    assert graph.candidates.goal.tolist() == [[0, -1, 2, 3, -1, -1]]  # the second node that was read is padding


# Unrolled --------------------------------------------------------------------------------------------------------------


def paths_of(draft: Draft, lane: int) -> set[Words]:
    parent = draft.tree.parent[lane].tolist()
    rows = range(int(draft.size[lane]))
    return {tuple(int(draft.tokens[lane, node]) for node in path_to(parent, row)) for row in rows}


def unrolled(graph: TorchGraph, state: State, shape: Shape) -> Draft:
    tokens, parent, size = graph.unrolled(state, shape.depth, 64, shape.nodes)
    return Draft(tokens, Tree(parent), size)


def all_walks(edges: Edges, speaker: Speaker, start: Words, most: int) -> dict[Words, float]:
    """Tokens of every walk, and how likely it is as the nodes on it say."""
    found, waiting = {}, [(start, start, 0.0)]
    while waiting:
        name, said, chance = waiting.pop()
        found[said] = chance
        likely = dict(speaker.behind(name))
        if len(said) <= most:
            waiting += [(goal, (*said, token), chance + likely[token]) for token, goal in edges.get(name, [])]
    return found


@settings(deadline=None, max_examples=60)
@given(rules, st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 24))
def test_what_is_unrolled_are_the_likeliest_walks(rule: Rule, seed: int, depth: int, nodes: int) -> None:
    speaker, roots = Speaker(seed, rule.branch), [1, 12]
    graph = grown(rule, speaker, roots, depth)
    shape = Shape(nodes, min(depth + 2, nodes - 1))
    draft = unrolled(graph, state_of([[5, root] for root in roots]), shape)
    for lane, root in enumerate(roots):
        walks = all_walks(edges_of(graph, lane, root), speaker, (root,), shape.depth)
        assert paths_of(draft, lane) == set(sorted(walks, key=lambda words: -walks[words])[:nodes])


@pytest.mark.parametrize("width", [1, 4, 16])
def test_without_merging_it_is_an_ordinary_tree(width: int) -> None:
    speaker, depth = Speaker(3, 4), 4
    state, shape = state_of([[5, 1], [5, 2]]), Shape(20, depth)
    graph = grown(Rule(4, -1, 0.0, 0.0, width), speaker, [1, 2], depth)
    words = torch.zeros(0)

    def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal words
        before = torch.zeros(*tokens.shape, 0).long() if level == 1 else carried(words, origin)
        words = torch.cat([before, tokens.unsqueeze(2)], dim=2)
        return speaker.answers(words)

    tree = BestFirst(shape, width, 4, None).draft(state, guess)
    walks = unrolled(graph, state, shape)
    assert [paths_of(walks, lane) for lane in range(2)] == [paths_of(tree, lane) for lane in range(2)]
