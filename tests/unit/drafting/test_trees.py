"""Trees against slow ones, built node by node in plain Python from candidates that depend on the whole path."""

import math
import random
from itertools import accumulate, product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from doubles import path_to, state_of, target
from foreword.core.draft import Draft, Shape
from foreword.drafting.trees import (
    LEVEL_KERNELS,
    USUAL_GAIN,
    USUAL_RATES,
    BestFirst,
    Budgeted,
    Chain,
    FixedRows,
    Growth,
    NextCandidates,
    Path,
    RowCosts,
    StaticTree,
    Template,
    TreeKind,
    TreePlan,
    greedy_paths,
    level_paths,
    path_rate,
)
from foreword.errors import InputError
from foreword.methods.clover2 import GAIN, Clover2
from foreword.model.cost import CostCurve
from foreword.model.model import KERNEL_S
from foreword.ops.growth import likeliest
from foreword.ops.rows import carried

Tokens = tuple[int, ...]
SOME_RATES = st.lists(
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4).map(lambda row: tuple(sorted(row, reverse=True))),
    min_size=1,
    max_size=3,
)


class ToyModel:
    """Candidates are a fixed function of the tokens so far, which pass from level to level like a drafter's state."""

    def __init__(self, seed: int, branch: int, sharp: float = 2.0) -> None:
        self.seed, self.branch, self.sharp = seed, branch, sharp

    def after(self, path: Tokens) -> list[tuple[int, float]]:
        """Return (token, log-probability), best first. A little probability is left over."""
        generator = random.Random(hash((self.seed, path)))
        tokens = generator.sample(range(1000), self.branch)
        weights = sorted((math.exp(self.sharp * generator.gauss(0, 1)) for _ in tokens), reverse=True)
        whole = sum(weights) * 1.05
        return [(token, math.log(weight / whole)) for token, weight in zip(tokens, weights, strict=True)]

    def __call__(self) -> NextCandidates:
        paths = torch.zeros(0)

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal paths
            before = torch.zeros(*tokens.shape, 0).long() if level == 1 else carried(paths, origin)
            paths = torch.cat([before, tokens.unsqueeze(-1)], dim=-1)
            assert paths.shape[-1] == level
            predicted = [[self.after(tuple(one)) for one in sequence] for sequence in paths.tolist()]
            found = torch.tensor(predicted, dtype=torch.float64)  # [b, w, k, 2]
            return found[..., 0].long(), found[..., 1]

        return guess


def paths_of(draft: Draft, index: int) -> set[Tokens]:
    """Return the draft as the tokens on the path to each node, the root included."""
    parent = draft.tree.parent.expand_as(draft.tokens)[index].tolist()
    tokens = draft.tokens[index].tolist()
    found = [tuple(tokens[row] for row in path_to(parent, node)) for node in range(int(draft.size[index]))]
    assert len(found) == len(set(found)) and all(parent[node] < node for node in range(1, len(found)))
    return set(found)


def chance_of(path: Tokens, toy: ToyModel) -> float:
    return sum(dict(toy.after(path[:i]))[path[i]] for i in range(1, len(path)))


# Templates


def slow_greedy(rates: list[tuple[float, ...]], count: int) -> list[Path]:
    """As in the paper: start from (0), look at all neighbours of all nodes, add the best."""
    chosen: list[Path] = [(0,)]
    while len(chosen) < count:
        near = [(*path[:-1], path[-1] + 1) for path in chosen] + [(*path, 0) for path in chosen]
        real = [p for p in near if p not in chosen and len(p) <= len(rates) and p[-1] < len(rates[len(p) - 1])]
        if not real:
            break
        chosen.append(max(real, key=lambda path: (path_rate(path, rates), tuple(-rank for rank in path))))
    return chosen


@given(SOME_RATES, st.integers(1, 30))
def test_the_greedy_template(rates: list[tuple[float, ...]], count: int) -> None:
    fast, slow = greedy_paths(rates, count), slow_greedy(rates, count)
    assert len(fast) == len(slow) and len(set(fast)) == len(fast)
    expected = [sum(path_rate(path, rates) for path in paths) for paths in (fast, slow)]
    assert expected[0] == pytest.approx(expected[1])
    for place, path in enumerate(fast):
        assert len(path) == 1 or path[:-1] in fast[:place]
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in fast[:place]


@given(SOME_RATES, st.integers(1, 6))
def test_no_template_of_that_size_is_expected_to_bring_more(rates: list[tuple[float, ...]], count: int) -> None:
    """Against every set of paths that is a tree, for falling rates."""
    all_paths = [p for depth in range(1, len(rates) + 1) for p in product(*(range(len(row)) for row in rates[:depth]))]
    best = sum(sorted((path_rate(path, rates) for path in all_paths), reverse=True)[:count])
    assert sum(path_rate(path, rates) for path in greedy_paths(rates, count)) == pytest.approx(best)


def test_no_rates_no_paths() -> None:
    assert greedy_paths([], 5) == greedy_paths([()], 5) == greedy_paths([(0.5,)], 0) == []


def test_a_template_by_levels() -> None:
    paths = level_paths((4, 8, 8, 3, 2), USUAL_RATES)
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert all(len(path) == 1 or path[:-1] in paths for path in paths)
    assert paths[:4] == [(0,), (1,), (2,), (3,)] and (0, 0, 0, 0, 0) in paths


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 3))
def test_a_template_is_filled_with_the_candidates_of_its_ranks(seed: int, count: int, batch: int) -> None:
    paths, toy = greedy_paths([(0.5, 0.3, 0.1)] * 3, count), ToyModel(seed, 3)
    template = Template(paths, torch.device("cpu"))
    roots = list(range(batch))
    tokens = template.tokens(torch.tensor(roots), toy())
    for index, root in enumerate(roots):
        for node, path in enumerate(template.paths):
            chosen: Tokens = (root,)
            for rank in path:
                chosen = (*chosen, toy.after(chosen)[rank][0])
            assert tokens[index, node] == chosen[-1]


@pytest.mark.parametrize("pays", [True, False])
def test_candidates_known_beforehand_fill_a_template_at_once(pays: bool) -> None:
    guessed = torch.randint(0, 1000, (2, 3, 10))
    tree = growth("static", rows=20) if pays else growth("static", curve=CURVES["expensive"])
    assert isinstance(tree, StaticTree)

    def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        found = guessed[:, level - 1 : level].expand(-1, tokens.shape[1], -1)
        return found, torch.zeros(found.shape)

    state = state_of([[1, 2, 3], [4]])
    found, exact = tree.filled(state, guessed), tree.draft(state, guess)
    assert torch.equal(found.tokens, exact.tokens) and torch.equal(found.size, exact.size) and found.tree is exact.tree
    assert exact.nodes == (20 if pays else 1)


def growth(kind: TreeKind, rows: int | None = None, curve: CostCurve | None = None, **options: object) -> Growth:
    model = target()
    model.curve = curve
    plan = {"width": 4, "rates": USUAL_RATES} | options
    return TreePlan(kind, rows, **plan).on(model, 3)  # type: ignore[arg-type]


def test_paths_given_by_the_user() -> None:
    grown = growth("static", paths=[[0, 0], [0], [1]])
    assert isinstance(grown, StaticTree) and grown.paths == [(0,), (1,), (0, 0)]
    assert grown.shape == Shape(4, 2) and grown.branch == 2
    assert growth("static", rows=3, paths=[[0, 0], [0], [1]]).shape == Shape(3, 1)


@pytest.mark.parametrize("paths", [[[1, 0]], [[]], [[-1]], [[0], [0, 1, 0]]])
def test_a_path_without_its_parent_is_refused(paths: list[list[int]]) -> None:
    with pytest.raises(InputError, match="medusa: paths has .* a path lists ranks from 0 on"):
        TreePlan("static", None, 4, USUAL_RATES, paths).check("medusa")


@pytest.mark.parametrize(
    ("kind", "width", "match"), [("tall", 4, "tree is 'tall'; choose from static"), ("best", 0, "width")]
)
def test_an_invalid_plan_is_refused(kind: TreeKind, width: int, match: str) -> None:
    with pytest.raises(InputError, match=f"hydra: {match}"):
        TreePlan(kind, None, width, USUAL_RATES).check("hydra")


@pytest.mark.parametrize("rates", [[[1.5]], [[-0.1]], [[0.5], [2, 0.1]]])
def test_rates_that_are_no_shares_are_refused(rates: list[list[float]]) -> None:
    with pytest.raises(InputError, match="medusa: rates is .* from 0 to 1"):
        TreePlan("static", None, 4, rates).check("medusa")


# Rows that pay off


CURVES = {
    "expensive": CostCurve((1, 64), (1.0, 64.0)),
    "free": CostCurve((1, 64), (1.0, 1.0)),
    "middling": CostCurve((1, 9), (1, 2.0)),
}


@pytest.mark.parametrize("kind", get_args(TreeKind))
def test_rows_follow_their_cost(kind: TreeKind) -> None:
    state, toy = state_of([[1, 2, 3]]), ToyModel(0, 10)
    sizes = {name: int(growth(kind, curve=curve).draft(state, toy()).size) for name, curve in CURVES.items()}
    assert sizes["expensive"] == 1 < sizes["middling"] < sizes["free"]


@pytest.mark.parametrize("kind", ["static", "best", "budget"])
def test_rows_that_are_asked_for_are_drafted_at_any_cost(kind: TreeKind) -> None:
    state, toy = state_of([[1, 2, 3]]), ToyModel(0, 10)
    options = {"top_p": 1.0, "floor": 0.0} if kind == "budget" else {}
    for rows in (1, 2, 7, 30):
        draft = growth(kind, rows, CURVES["expensive"], **options).draft(state, toy())
        assert draft.size.tolist() == [rows] and draft.nodes == rows


@pytest.mark.parametrize("kind", ["static", "best", "budget"])
def test_without_a_row_before_the_root_nothing_is_drafted(kind: TreeKind) -> None:
    assert growth(kind, 8).draft(state_of([[1], [1, 2]]), ToyModel(0, 10)()).size.tolist() == [1, 8]


@pytest.mark.parametrize("kind", [BestFirst, Budgeted])
def test_rows_that_are_fixed_before_depend_on_the_batch(kind: type) -> None:
    """As in captured rounds: the more sequences, the fewer rows for each, down to the root alone."""
    model = target()
    model.curve = CostCurve((1, 4, 64, 256), (1.0, 1.0, 2.0, 20.0))
    fixed = FixedRows(model, Shape(32, 3), bend=0.0)
    rule = {"top_p": 1.0, "floor": 0.0} if kind is Budgeted else {}
    trees = kind(Shape(32, 3), 8, 10, None, **rule, fixed=fixed)
    drafts = [trees.draft(state_of([[1, 2, 3]] * batch), ToyModel(0, 10)()) for batch in (1, 2, 64)]
    assert [draft.nodes for draft in drafts] == [16, 8, 1]
    assert [trees.depth(batch) for batch in (1, 2, 64)] == [3, 3, 0]
    assert [int(draft.size[0]) for draft in drafts] == [16, 8, 1]
    assert FixedRows(model, Shape(32, 3), bend=0.9).shape(1).nodes == 8  # the first rows hold more of the gain


def test_if_rows_are_nearly_free_small_models_still_draft_fewer() -> None:
    """The costs of passes on an H200: of the model widened to 7 B, and of the small one."""
    model, rows = target(), (1, 2, 4, 8, 16, 32, 64)
    for milliseconds, nodes in (
        ((4.036, 4.080, 4.108, 4.270, 4.270, 4.391, 4.705), 32),
        ((0.308, 0.347, 0.395, 0.398, 0.404, 0.461, 0.516), 16),
    ):
        model.curve = CostCurve(rows, tuple(each * 1e-3 for each in milliseconds))
        for gain in (USUAL_GAIN, 2.05):
            assert FixedRows(model, Shape(64, 5), gain, level=0.01).shape(1).nodes == nodes


def test_small_trees_are_worth_drafting_for_many_sequences() -> None:
    """Costs of an H200 for the default model with 1 and 32 sequences. A small tree does not need the levels of a large one,
    and a drafter with a higher gain drafts where others do not."""
    model = target()
    many = CostCurve((32, 64, 128, 256, 1024), (0.54e-3, 0.59e-3, 0.67e-3, 1.02e-3, 1.57e-3), sequences=32)
    model.curve = CostCurve((1, 4, 16, 64), (0.31e-3, 0.4e-3, 0.41e-3, 0.52e-3), batches=(many,))
    found = [FixedRows(model, Shape(64, 6), gain, level=level).shape(32) for level in (0.12, 0.3) for gain in (1.5, 2.05)]
    assert found == [Shape(4, 2), Shape(4, 2), Shape(1, 0), Shape(2, 1)]
    assert Clover2().plan.gain == GAIN > USUAL_GAIN


def test_chain_rows_next_to_a_tree_are_dropped_first() -> None:
    """As the batch grows, the rows of the chain are dropped first, then the tree."""
    model = target()
    model.curve = CostCurve((1, 64, 1024), (1e-3, 1.4e-3, 12e-3))
    shared, alone = (FixedRows(model, Shape(49, 4), chain=chain) for chain in (15, 0))
    batches = (1, 2, 4, 8, 16, 32, 64, 128)
    chains, depths = [shared.chain_rows(batch) for batch in batches], [shared.shape(batch).depth for batch in batches]
    assert chains[0] == 15 and chains[-1] == 0 and chains == sorted(chains, reverse=True) and {*chains} & {3, 7}
    assert any(depth and not also for depth, also in zip(depths, chains, strict=True)) and depths[-1] == 0
    assert not any(alone.chain_rows(batch) for batch in batches)
    for batch in batches:
        if not shared.chain_rows(batch):
            assert shared.shape(batch) == alone.shape(batch)


def test_a_short_chain_pays_before_a_long_one() -> None:
    """About the costs of an H200 for the 7 B model: with 8 sequences 128 rows cost little more than 64, and 256 cost 1.5
    times as much as 128, so tree and chain share the cheap rows."""
    model, eight = target(), {8: 4.32, 32: 4.33, 64: 4.66, 128: 4.88, 256: 7.49, 512: 12.86}
    batch = CostCurve(tuple(eight), tuple(each * 1e-3 for each in eight.values()), sequences=8)
    model.curve = CostCurve((1, 16, 64, 79), (4.04e-3, 4.22e-3, 4.8e-3, 5.17e-3), batches=(batch,))
    fixed = FixedRows(model, Shape(49, 6), GAIN, level=0.01, chain=15)
    assert [(fixed.shape(batch).nodes, fixed.chain_rows(batch)) for batch in (1, 8)] == [(32, 15), (8, 7)]


def test_levels_that_are_fixed_before_depend_on_their_cost() -> None:
    model = target()
    model.curve = CostCurve((1, 64), (1e-3, 1.2e-3))
    depths = [FixedRows(model, Shape(16, 6), level=level).shape(1).depth for level in (0.0, 0.01, 0.05, 0.2, 9.0)]
    assert depths == sorted(depths, reverse=True) and depths[0] == 6 and 1 < depths[2] < 6 and depths[-1] == 0
    on_cuda, kernels = TreePlan("best", None, 8, USUAL_RATES), LEVEL_KERNELS * KERNEL_S / 1e-3
    assert model.launch_cost(LEVEL_KERNELS) == pytest.approx(kernels)
    assert on_cuda.on(model, 6, 0.01, LEVEL_KERNELS).costs.level == 0.01  # type: ignore[attr-defined]  the CPU launches none


# Choosing


def slow_choice(chance: list[float], nodes: int, cost: list[float] | None) -> set[int]:
    order = sorted(range(len(chance)), key=lambda node: (-chance[node], node))[:nodes]
    order = [node for node in order if math.exp(chance[node]) > 0]
    if cost is None:
        return set(order)
    gain = [sum(math.exp(chance[node]) for node in order[:n]) / cost[n - 1] for n in range(1, len(order) + 1)]
    return set(order[: gain.index(max(gain)) + 1])


@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(1, 12), st.booleans())
def test_the_likeliest_nodes_are_chosen(seed: int, count: int, nodes: int, pays: bool) -> None:
    draw = random.Random(seed)
    parent = [0, *(draw.randrange(i) for i in range(1, count))]
    chance = [0.0]
    for node in range(1, count):
        step = draw.choice([0.0, -draw.random() * 3, -math.inf])  # a sure child is as likely as its parent
        chance.append(chance[parent[node]] + step)
    cost = list(accumulate([1.0] + [0.3 * draw.random() for _ in range(nodes - 1)])) if pays else None
    given_cost = None if cost is None else torch.tensor(cost, dtype=torch.float64)
    tokens = torch.arange(100, 100 + count).unsqueeze(0)
    given = torch.tensor([parent]), torch.tensor([chance], dtype=torch.float64)
    drafted, above, sizes = likeliest(tokens, *given, nodes, given_cost)
    size = int(sizes)
    kept = [int(token) - 100 for token in drafted[0, :size]]
    assert set(kept) == slow_choice(chance, nodes, cost) and kept == sorted(kept)
    assert [kept[one] for one in above[0, :size].tolist()] == [parent[node] for node in kept]


# Best first


def slow_best_first(root: int, toy: ToyModel, depth: int, width: int, nodes: int) -> set[Tokens]:
    live, found = [((root,), 0.0)], [((root,), 0.0)]
    for _ in range(depth):
        below = [((*path, token), chance + more) for path, chance in live for token, more in toy.after(path)]
        found += below
        live = sorted(below, key=lambda one: -one[1])[:width]
    return {path for path, _ in sorted(found, key=lambda one: -one[1])[:nodes]}


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(2, 20), st.integers(1, 5))
def test_the_likeliest_paths(seed: int, depth: int, width: int, nodes: int, branch: int) -> None:
    toy, shape = ToyModel(seed, branch), Shape(nodes, min(depth, nodes - 1))
    draft = BestFirst(shape, width, branch, None).draft(state_of([[5, 1], [5, 2]]), toy())
    for index, root in enumerate((1, 2)):
        assert paths_of(draft, index) == slow_best_first(root, toy, shape.depth, width, nodes)


def test_with_room_for_all_the_likeliest_of_all_are_found() -> None:
    """No width in the way: against every path there is."""
    toy = ToyModel(3, 4, sharp=1.0)
    everything: list[Tokens] = [(1,)]
    for path in everything:
        if len(path) <= 3:
            everything += [(*path, token) for token, _ in toy.after(path)]
    best = sorted(everything, key=lambda path: -chance_of(path, toy))[:20]
    draft = BestFirst(Shape(20, 3), 64, 4, None).draft(state_of([[5, 1]]), toy())
    assert paths_of(draft, 0) == set(best)


# Clover's budget


def slow_budget(root: int, toy: ToyModel, rule: Budgeted) -> set[Tokens]:
    live, found, left = [((root,), 1.0)], {(root,)}, rule.shape.nodes - 1
    for _ in range(rule.shape.depth):
        level = []
        for path, chance in live:
            mass, likely = 0.0, [(token, math.exp(more)) for token, more in toy.after(path)]
            for place, (token, more) in enumerate(likely):
                mass += more
                if place == 0 or (mass <= rule.top_p and more >= rule.floor * likely[0][1]):
                    level.append(((*path, token), chance * more))
        level = sorted(level, key=lambda one: -one[1])[:left]
        left -= len(level)
        found |= {path for path, _ in level}
        live = level[: rule.width]
        if left == 0:
            break
    return found


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 20), st.floats(0.3, 1.0), st.sampled_from([0.0, 0.25, 0.6]))
def test_the_running_budget(seed: int, depth: int, nodes: int, top_p: float, floor: float) -> None:
    toy = ToyModel(seed, 6)
    rule = Budgeted(Shape(nodes, min(depth, nodes - 1)), 8, 6, None, top_p=top_p, floor=floor)
    draft = rule.draft(state_of([[5, 1], [5, 2]]), toy())
    for index, root in enumerate((1, 2)):
        assert paths_of(draft, index) == slow_budget(root, toy, rule)


def given_candidates(answers: dict[Tokens, list[tuple[int, float]]]) -> NextCandidates:
    """Return given candidates and probabilities."""

    class Given(ToyModel):
        def after(self, path: Tokens) -> list[tuple[int, float]]:
            known = answers.get(path, [(901, 0.001), (902, 0.0005)])
            return [(token, math.log(chance)) for token, chance in known]

    return Given(0, 2)()


def test_the_paper_s_example() -> None:
    """Budget 4, p = 0.8: the first head keeps two, the second two, and the third adds none."""
    first = {(7,): [(1, 0.5), (2, 0.3)], (7, 1): [(11, 0.8), (12, 0.05)], (7, 2): [(21, 0.3), (22, 0.01)]}
    rule = Budgeted(Shape(5, 3), 8, 2, None, top_p=0.8, floor=0.25)
    draft = rule.draft(state_of([[5, 7]]), given_candidates(first))
    assert paths_of(draft, 0) == {(7,), (7, 1), (7, 2), (7, 1, 11), (7, 2, 21)}


def test_a_confident_head_gives_a_chain() -> None:
    sure = {(7,): [(1, 0.9), (2, 0.05)], (7, 1): [(2, 0.9), (3, 0.05)], (7, 1, 2): [(3, 0.9), (4, 0.05)]}
    draft = Budgeted(Shape(5, 3), 8, 2, None, top_p=0.8, floor=0.25).draft(state_of([[5, 7]]), given_candidates(sure))
    assert paths_of(draft, 0) == {(7,), (7, 1), (7, 1, 2), (7, 1, 2, 3)}


# Chains


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_a_chain_ends_before_the_first_unlikely_candidate(seed: int, depth: int, stop: float) -> None:
    toy = ToyModel(seed, 6)
    draft = Chain(Shape(depth + 1, depth), None, stop).draft(state_of([[5, 1], [5, 2]]), toy())
    for index, root in enumerate((1, 2)):
        path: Tokens = (root,)
        while len(path) <= depth and math.exp(toy.after(path)[0][1]) >= stop:
            path = (*path, toy.after(path)[0][0])
        assert draft.tokens[index, : draft.size[index]].tolist() == list(path)
    assert draft.tree.is_chain


@pytest.mark.parametrize("kind", ["best", "budget", "chain"])
def test_a_nan_candidate_is_not_drafted(kind: TreeKind) -> None:
    def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.arange(10).expand(*tokens.shape, 10)
        return found, torch.full(found.shape, math.nan)

    draft = growth(kind, 8).draft(state_of([[1, 2]]), guess)
    assert draft.size.tolist() == [1] and draft.tokens[0, 0] == 2


@pytest.mark.parametrize(
    ("level", "sure", "levels"), [(0.0, 0.5, 5), (0.05, 0.9, 5), (0.3, 0.9, 5), (0.3, 0.3, 1), (0.5, 0.2, 1), (2.0, 0.9, 1)]
)
def test_levels_that_are_not_expected_to_pay_off_are_not_drafted(level: float, sure: float, levels: int) -> None:
    """With sure candidates a level may cost much. Otherwise, or if it costs more than a pass, one level is drafted."""
    drafted: list[int] = []

    def guess(at: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        drafted.append(at)
        chances = torch.tensor([sure, (1 - sure) / 2, (1 - sure) / 4]).log()
        return torch.arange(3).expand(*tokens.shape, 3), chances.expand(*tokens.shape, 3)

    model = target()
    model.curve = CostCurve((1, 101), (1.0, 3.0))
    costs = RowCosts(model, 16, level)
    growth = BestFirst(Shape(16, 5), 4, 3, costs)
    draft = growth.draft(state_of([[5, 6, 7]]), guess)
    assert drafted == list(range(1, levels + 1))
    assert int(draft.tree.depth.max()) <= levels and int(draft.size) > 1
