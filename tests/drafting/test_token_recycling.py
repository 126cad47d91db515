"""token_recycling: the template, what the table stores and from which requests, and which walks are drafted."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from doubles import SAMPLINGS, VOCABULARY, chain, engine, fresh, hf_logits, random_tree, state_of, target, tokenizer
from foreword.api import wrap
from foreword.core.draft import Draft
from foreword.core.sampling import Sampling
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.engine.request import Request
from foreword.errors import InputError
from foreword.methods import make
from foreword.methods.token_recycling import CANDIDATES, TokenRecycling, template
from foreword.model.cost import CostCurve
from foreword.ops.noise import gumbel

Table = dict[int, list[int]]


def bound(slots: int = 4, curve: CostCurve | None = None, **options: object) -> TokenRecycling:
    model = target()
    model.curve = curve
    drafter = TokenRecycling(**options)  # type: ignore[arg-type]
    drafter.prepare(model, slots)
    return drafter


def random_logits(batch: int, rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(batch, rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()


def filled(seed: int = 0, **options: object) -> TokenRecycling:
    """Make a drafter with a shared table that has seen every token of the vocabulary once."""
    drafter = bound(**{"table": "shared", **options})  # type: ignore[arg-type]
    tokens = torch.arange(VOCABULARY).unsqueeze(0)
    drafter.read(state_of([[1, 2]]), chain(tokens.tolist()), Scores(random_logits(1, VOCABULARY, seed)))
    return drafter


def rows_of(drafter: TokenRecycling, table: int = 0) -> Table:
    """Return the table: for each known token its candidates, best first."""
    known = (drafter.table.chances[table, :VOCABULARY] > -math.inf).all(-1)
    return {token: drafter.table.tokens[table, token].tolist() for token in range(VOCABULARY) if known[token]}


def accepted_rows(paths: list[list[int]], width: int) -> Accepted:
    padded = torch.tensor([path + [0] * (width - len(path)) for path in paths])
    return Accepted(padded, torch.tensor([len(path) for path in paths]), torch.zeros(len(paths), dtype=torch.long))


# The template


def test_the_template_is_that_of_the_paper() -> None:
    paths = template()
    assert len(paths) == len(set(paths)) == 81
    assert [Counter(map(len, paths))[depth] for depth in range(7)] == [1, 8, 21, 25, 15, 8, 3]
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    assert all(path[:-1] in paths[:i] for i, path in enumerate(paths) if path)
    leaves = [path for path in paths if not any(other[:-1] == path for other in paths if other)]
    assert len(leaves) == 40


def test_the_default_has_81_rows() -> None:
    assert (bound().shape.nodes, bound().shape.depth) == (81, 6)


@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_a_chain_takes_the_best_candidate_after_each_token(rows: int) -> None:
    drafter = filled(rows=rows, tree="chain")
    found, table = drafter.propose(state_of([[3, 9]])), rows_of(drafter)
    expected = [9]
    while len(expected) < rows:
        expected.append(table[expected[-1]][0])
    assert found.tokens.tolist() == [expected] and found.size.tolist() == [rows] and drafter.shape.depth == rows - 1
    assert found.tree.parent.tolist() == [[0, *range(rows - 1)]]


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 81, 200])
def test_rows_are_respected(rows: int) -> None:
    drafter = filled(rows=rows)
    draft = drafter.propose(state_of([[5, 6, 7], [9]]))
    assert drafter.shape.nodes == draft.nodes == min(rows, 81)
    assert draft.size.tolist() == [min(rows, 81)] * 2


# What the table stores


def test_after_a_round_the_table_holds_the_best_tokens_of_the_target() -> None:
    """If several rows have the same token, the later row wins, and accepted rows win over all; row by row over the batch."""
    drafter, generator = bound(table="shared"), torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 6, (3, 12), generator=generator)  # few ids, so that they repeat
    draft = Draft(tokens, random_tree(3, 12, generator), torch.tensor([12, 7, 10]))
    logits, paths = random_logits(3, 12), [[0, 2, 5], [0], [0, 1, 4, 6]]
    drafter.observe(state_of([[1], [1], [1]]), draft, Scores(logits), accepted_rows(paths, 5))
    writes = sorted(
        (row + 12 * (row in paths[index]), index, row) for index in range(3) for row in range(int(draft.size[index]))
    )
    expected = {int(tokens[index, row]): logits[index, row].topk(8).indices.tolist() for _, index, row in writes}
    assert rows_of(drafter) == expected


def test_stored_chances_are_log_probabilities() -> None:
    drafter, logits = bound(), random_logits(1, 3)
    drafter.read(state_of([[1]]), chain([[5, 6, 7]]), Scores(logits))
    best = logits[0].log_softmax(-1).topk(8).values
    torch.testing.assert_close(drafter.table.chances[0, 5:8].double(), best, atol=1e-5, rtol=0)


def test_padding_is_not_stored() -> None:
    """Neither rows beyond `size` nor rows of a frozen sequence."""
    drafter = bound()
    draft = Draft(torch.tensor([[5, 6, 7], [8, 9, 10]]), random_tree(1, 3, torch.Generator()), torch.tensor([2, 3]))
    frozen = Accepted(torch.zeros(2, 2, dtype=torch.long), torch.tensor([1, 0]), torch.zeros(2, dtype=torch.long))
    drafter.observe(state_of([[5], [8]]), draft, Scores(random_logits(2, 3)), frozen)
    assert set(rows_of(drafter)) == {5, 6}


def test_a_prompt_is_stored() -> None:
    """After the first chunk, before any round, the table holds the target's best tokens after those of the chunk."""
    model, drafter, prompt = target(), make("token_recycling"), (4, 9, 4, 30, 8, 11, 12, 13)
    assert isinstance(drafter, TokenRecycling)
    steps = engine(drafter, model, slots=1)
    steps.add(Request(prompt, SAMPLINGS["greedy"]))
    assert steps.step() == []
    own = hf_logits(model.hf, prompt).topk(8).indices.tolist()
    assert rows_of(drafter) == dict(zip(prompt[:5], own[:5], strict=True))


# Which requests share a table


def learn(drafter: TokenRecycling, state: State, tokens: list[int], seed: int = 0) -> None:
    batch = len(state.batch.ids)
    drafter.read(state, chain([tokens] * batch), Scores(random_logits(batch, len(tokens), seed)))


def window(state: State, slot: int) -> State:
    return state.at(type(state.batch).of([slot], state.batch.span))


def test_a_shared_table_serves_all() -> None:
    drafter, state = bound(table="shared"), state_of([[5], [5]])
    learn(drafter, window(state, 0), [5, 6])
    drafter.end([0])
    drafter.begin(window(state, 0))
    draft = drafter.propose(state)
    assert drafter.table.tokens.shape[0] == 1 and int(draft.size[0]) == int(draft.size[1]) > 1


@pytest.mark.parametrize("mode", ["slot", "session", "reset"])
def test_slots_do_not_learn_from_one_another(mode: str) -> None:
    drafter, state = bound(table=mode), state_of([[5], [5], [5]])
    learn(drafter, window(state, 1), [5, 6])
    assert (drafter.propose(state).size > 1).tolist() == [False, True, False]
    assert [set(rows_of(drafter, table)) for table in range(3)] == [set(), {5, 6}, set()]


@pytest.mark.parametrize(("mode", "remembers"), [("slot", True), ("shared", True), ("session", True), ("reset", False)])
def test_a_second_turn_of_a_conversation(mode: str, remembers: bool) -> None:
    """The slot still holds the prefix: `session` keeps its table, `reset` clears it."""
    drafter, state = bound(table=mode), state_of([[5, 6, 5]])
    learn(drafter, state, [5, 6])
    drafter.end([0])
    drafter.begin(state)
    assert bool(drafter.propose(state).size > 1) == remembers


@pytest.mark.parametrize(("mode", "remembers"), [("slot", True), ("shared", True), ("session", False), ("reset", False)])
def test_another_request_in_the_same_slot(mode: str, remembers: bool) -> None:
    drafter, state = bound(table=mode), state_of([[5]])
    learn(drafter, state, [5, 6])
    drafter.end([0])
    drafter.begin(state)  # nothing of the slot's earlier sequence is reused: length 0
    assert bool(drafter.propose(state).size > 1) == remembers


def test_an_isolated_llm_drafts_nothing_from_earlier_requests() -> None:
    """The second of two equal requests: it is drafted from the first one's tokens, or as if it were the first."""
    rounds = {}
    for isolated in (False, True):
        with wrap(
            fresh("llama", torch.float64), tokenizer().hf, "token_recycling", rows=8, slots=1, isolated=isolated
        ) as llm:
            both = [llm.generate([5, 6, 7, 8], max_new_tokens=24, ignore_eos=True, reuse=False) for _ in range(2)]
        rounds[isolated] = [one.stats.rounds for one in both]
    assert rounds[True][0] == rounds[True][1] == rounds[False][0] > rounds[False][1]


# What is drafted


def test_an_empty_table_drafts_nothing() -> None:
    assert bound().propose(state_of([[5, 6], [7]])).size.tolist() == [1, 1]


@pytest.mark.parametrize("rows", [3, 10, 40, None])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_draft_is_a_walk_through_the_table(sampling: Sampling, rows: int | None) -> None:
    drafter = filled(rows=rows)
    state = state_of([[5, 6, 7], [9], [11, 3]], sampling)
    draft, table = drafter.propose(state), rows_of(drafter)
    for index, root in enumerate([7, 9, 3]):
        tokens, parent = draft.tokens[index].tolist(), draft.tree.parent[index].tolist()
        size = int(draft.size[index])
        assert tokens[0] == root and size > 1
        assert all(parent[row] < row for row in range(1, draft.nodes))
        assert all(tokens[row] in table[tokens[parent[row]]] for row in range(1, size))
        siblings = [(parent[row], tokens[row]) for row in range(1, size)]
        assert len(set(siblings)) == len(siblings)
    assert int(draft.tree.depth.max()) <= drafter.shape.depth


def slow_walk(drafter: TokenRecycling, root: int, fade: float) -> list[tuple[int, float]]:
    """Return for every node of the template its token and its log-probability."""
    found: dict[tuple[int, ...], tuple[int, float]] = {(): (root, 0.0)}
    for path in template()[1:]:
        token, chance = found[path[:-1]]
        step = float(drafter.table.chances[0, token, path[-1]])
        found[path] = (int(drafter.table.tokens[0, token, path[-1]]), chance + step)
    return [(token, chance + len(path) * math.log(fade)) for path, (token, chance) in found.items()]


@pytest.mark.parametrize("price", [0.0, 0.02, 0.2, 1.0])
def test_the_nodes_that_pay_off_are_drafted(price: float) -> None:
    """The likeliest nodes, as many as give the most tokens per cost, in the order of the template."""
    curve = CostCurve((1, 100), (1.0, 1.0 + 99 * price))
    drafter = filled(curve=curve, fade=0.8)
    nodes = slow_walk(drafter, root=7, fade=0.8)
    order = sorted(range(81), key=lambda node: -nodes[node][1])
    promised = [sum(math.exp(nodes[node][1]) for node in order[:count]) / curve.relative(count) for count in range(1, 82)]
    size = 1 + promised.index(max(promised))
    draft = drafter.propose(state_of([[7]]))
    assert int(draft.size) == size
    assert draft.tokens[0, :size].tolist() == [nodes[node][0] for node in sorted(order[:size])]


def test_prices_make_a_difference() -> None:
    """The cases above differ: expensive rows make smaller trees, and a batch pays for all its rows."""
    curve = CostCurve((1, 100), (1.0, 1.0 + 99 * 0.02))
    sizes = [int(filled(curve=CostCurve((1, 100), (1.0, 1.0 + 99 * p))).propose(state_of([[7]])).size) for p in (0, 0.05, 1)]
    assert sizes[0] > sizes[1] > sizes[2] >= 1
    alone, together = (filled(curve=curve).propose(state_of([[7]] * count)).size for count in (1, 4))
    assert int(together[0]) < int(alone[0])


def test_with_a_temperature_candidates_are_ranked_with_the_sampling_noise() -> None:
    """First level: the eight candidates of the root, ordered by stored log-probability / T plus noise of their position."""
    sampling = Sampling(temperature=0.8, seed=11)
    drafter, state = filled(), state_of([[5, 6, 7]], sampling)
    candidates, chances = drafter.table.tokens[0, 7].long(), drafter.table.chances[0, 7]
    noise = gumbel(state.sampling.key, torch.tensor([[3]]), candidates.view(1, 1, -1)).view(-1)
    ranked = candidates[(chances / 0.8 + noise).argsort(descending=True)].tolist()
    assert ranked != candidates.tolist()
    assert drafter.propose(state).tokens[0, 1:9].tolist() == ranked


def test_greedy_and_sampled_requests_in_one_batch() -> None:
    """A greedy request in a batch with a sampled one gets its greedy draft."""
    drafter, state = filled(), state_of([[7], [7]])
    alone = drafter.propose(window(state, 0))
    state.table.set(1, Sampling(temperature=0.8, seed=11))
    together = drafter.propose(state)
    assert together.tokens[0].tolist() == alone.tokens[0].tolist()
    assert together.tokens[1].tolist() != alone.tokens[0].tolist()


@pytest.mark.parametrize(("options", "named"), [({"table": "own"}, "table"), ({"fade": 0.0}, "fade"), ({"fade": 2}, "fade")])
def test_invalid_options_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        TokenRecycling(**options)  # type: ignore[arg-type]


def test_the_table_is_small() -> None:
    drafter = bound(slots=1)
    assert drafter.table.tokens.dtype == torch.int32 and drafter.table.tokens.shape == (1, VOCABULARY + 1, CANDIDATES)
