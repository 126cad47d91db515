"""masked: passes of a round compute what training does, what training shows, how it is weighted, and that it learns."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import (
    CONTEXT,
    SAMPLINGS,
    VOCABULARY,
    Plan,
    Playback,
    Recorder,
    chain,
    drafts_of,
    engine,
    full_sequence,
    prompts,
    requests,
    sequences_of,
    target,
    truth,
    vocabulary_of,
    with_random_weights,
    written,
)
from foreword.core.choosing import likeliest
from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import Batch, State
from foreword.drafting.blocks import BlockLosses, all_masked, easier, kept, paced, partly_shown, random_views
from foreword.drafting.edges import Edges, Transitions
from foreword.drafting.lessons import Anchors
from foreword.engine.request import Request
from foreword.model.model import Model
from foreword.model.stack import Rows
from foreword.ops.rows import unit_rms

FORMS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "two passes": {"steps": 2},
    "three passes": {"steps": 3, "taps": ()},
    "easy first": {"steps": 2, "order": "disco"},
    "easy first, three passes": {"steps": 3, "order": "disco"},
}
every_form = pytest.mark.parametrize("form", FORMS)


def made(model: Model, form: str, **options: Any) -> Any:
    return with_random_weights("masked", model, **{"block": 4, "layers": 2, "edges": 4} | FORMS[form] | options)


def scores_of(model: Model, sequences: list[list[int]], needs: Needs) -> Scores:
    model.allocate(len(sequences), CONTEXT, len(sequences[0]))
    with torch.no_grad():
        return model.score(Batch.of(range(len(sequences)), 0), chain(sequences), needs)


def recorded(drafter: Any, name: str, monkeypatch: pytest.MonkeyPatch, given: int | None) -> list[Tensor]:
    """Record an argument of a method, or what it returns (None), call by call."""
    seen: list[Tensor] = []
    method = getattr(drafter, name)

    def call(*arguments: Any) -> Any:
        answer = method(*arguments)
        seen.append((answer if given is None else arguments[given]).detach().clone())
        return answer

    monkeypatch.setattr(drafter, name, call)
    return seen


class Right(Recorder):
    """Lets a drafter draft, and proposes what the target will choose: several rows of every round are accepted."""

    def __init__(self, inner: Any, sequences: list[list[int]]) -> None:
        super().__init__(inner)
        self.oracle = Playback([Plan(tuple((row, None) for row in range(inner.block)), inner.block + 1)], sequences)

    def bind(self, target: Any, slots: int) -> None:
        super().bind(target, slots)
        self.oracle.bind(target, slots)

    def propose(self, state: State) -> Draft:
        super().propose(state)
        return self.oracle.propose(state)


@every_form
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_every_pass_computes_what_training_does(form: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After prompts of several chunks, and rounds of several tokens: two sequences in a round, each alone in training."""
    model = target(family)
    drafter, asked = made(model, form), requests(3, max_new_tokens=40, ignore_eos=True)[1:]
    steps = engine(Right(drafter, [full_sequence(model.hf, one) for one in asked]), model, slots=2)
    for request in asked:
        steps.add(request)
    for _ in range(7):
        steps.step()
    running = steps.slots.running.values()
    assert [max(run.accepted) for run in running] == [drafter.block + 1] * 2
    state = steps.state.at(Batch.of([0, 1], max(run.length for run in running)))
    drafted = recorded(drafter, "_candidates", monkeypatch, given=1)
    with torch.inference_mode():
        drafter.propose(state)
    drafter.module.eval()
    for row, sequence in enumerate(sequences_of(state)):
        whole = [*sequence, 3, 5, 7, 9]
        mask = torch.arange(len(whole)).unsqueeze(0) >= len(sequence)
        learned = recorded(drafter, "_learned_rows", monkeypatch, given=None)
        drafter.loss(torch.tensor([whole]), mask, scores_of(model, [whole], drafter.needs), model)
        assert len(learned) == len(drafted) == drafter.steps
        for one, other in zip(drafted, learned, strict=True):
            torch.testing.assert_close(drafter.module.norm(one[row]), other[0, len(sequence) - 2])


@every_form
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_form_generates_the_truth(form: str, sampling: str) -> None:
    model, asked = target("smollm3"), requests(4, SAMPLINGS[sampling])
    drafter = made(model, form, edges=0 if sampling == "greedy" else 4)
    assert written(engine(drafter, model), asked) == [truth(model.hf, one) for one in asked]


def test_a_reused_slot_has_the_rows_of_the_last_round() -> None:
    """They were committed and not read when the sequence ended: the next request of the slot reads them again."""
    model, (asked,) = target(), requests(2, max_new_tokens=9, ignore_eos=True)[1:]
    known = [full_sequence(model.hf, asked)]
    prompt = (*asked.prompt, *truth(model.hf, asked), 9, 30)
    reusing, fresh = (Right(made(model, "one pass"), known) for _ in range(2))
    steps = engine(reusing, model, slots=1)
    (run,) = steps.generate([asked])
    assert run.accepted == [5, 4]
    (again,) = steps.generate([replace(asked, prompt=prompt, reuse=True)])
    assert again.reused == len(prompt) - 3 - 4 > 0  # all but the last two tokens and a root were cached, four rows unread
    engine(fresh, model, slots=1).generate([replace(asked, prompt=prompt)])
    assert drafts_of(reusing.proposed[2]) == drafts_of(fresh.proposed[0])


# Edges -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_transitions_are_what_training_learns(family: str) -> None:
    """With all tokens as candidates: the softmax of the target's head over rows that are conditioned on the token before.
    granite scales logits, and gemma2 caps them."""
    model = target(family)
    torch.manual_seed(0)
    edges, rows = Edges(model, 5).double(), torch.randn(2, 3, model.hidden_size).double()
    edges.after.weight.data.normal_()
    table = model.head_weight()
    found = likeliest(model.head(rows), VOCABULARY)
    steps = engine(with_random_weights("medusa", model), model, slots=2)
    sampling = steps.state.at(Batch.of([0, 1], 0)).sampling
    paths = Transitions.of(edges, rows, found, table, model, sampling, VOCABULARY)
    for place in (1, 2):
        before = unit_rms(table[found[0][:, place - 1]])  # [b, V, H]
        exact = model.head(edges(rows[:, place].unsqueeze(1), before)).log_softmax(-1)
        tokens, log_probs = paths.next_tokens[:, place - 1], paths.next_log_probs[:, place - 1]
        torch.testing.assert_close(log_probs, exact.gather(2, tokens), atol=1e-4, rtol=1e-4)
    live = found[0][:, 1, [7, 0]]
    assert torch.equal(paths.after(3, live, live)[0], paths.next_tokens[:, 1][:, [7, 0]])


def test_a_tree_follows_the_edges() -> None:
    """With edges that make one token follow another, the draft has that pair, though it is unlikely without edges."""
    model = target()
    drafter = made(model, "one pass", edges=1, tree="chain")
    steps = engine(drafter, model, slots=1)
    steps.add(Request(prompts(3)[2], SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True))
    for _ in range(7):
        steps.step()
    state, edges, table = steps.state.at(Batch.of([0], 40)), drafter.module.edges, model.head_weight()
    with torch.no_grad():
        edges.after.weight.zero_()
        alone, (candidates, _) = drafter.propose(state).tokens[0], found_of(drafter, state)
        tenth = candidates[0, 1, 9]
        edges.after.weight[:, 0] = table[tenth]
        edges.before.weight[0] = 1e3 * unit_rms(table[alone[1]])
        assert drafter.propose(state).tokens[0, :3].tolist() == [*alone[:2].tolist(), int(tenth)]


def found_of(drafter: Any, state: Any) -> tuple[Tensor, Tensor]:
    """Return the candidates of the first pass, once its rows are read."""
    block = drafter._filled(state.root.unsqueeze(-1), drafter.root_only, drafter.all_rows)
    return drafter._candidates(state, drafter._pass(state.batch, block))


# What training shows ------------------------------------------------------------------------------------------------------


def some_anchors(blocks: int = 400, size: int = 6) -> Anchors:
    """Sequences of which the target wrote the last 30 tokens; the last anchors have blocks beyond the end."""
    tokens = torch.arange(40).repeat(blocks, 1)
    return Anchors.of(tokens, tokens >= 10, size, 29, at_random=False)


def test_without_a_share_only_roots_are_shown() -> None:
    anchors = some_anchors(3)
    for found in (all_masked(anchors), partly_shown(anchors, 0.0, 99)):
        assert torch.equal(found.tokens[..., 0], anchors.before) and torch.equal(found.counts, anchors.counts)
        assert found.shown[..., 0].all() and not found.shown[..., 1:].any()


def test_a_random_part_of_a_block_is_shown() -> None:
    """Of the hidden tokens 80 % are masked, 10 % replaced and 10 % left in place; only hidden ones are learned."""
    torch.manual_seed(0)
    anchors = some_anchors()
    found, true = partly_shown(anchors, 1.0, 10**6), all_masked(anchors).tokens
    inside = anchors.counts[..., :-1]  # tokens after the root that the target wrote
    shown, hidden, other = found.shown[..., 1:], found.counts[..., :-1], (found.tokens != true)[..., 1:]
    assert not (shown & ~inside).any() and not (other & ~hidden & inside).any()
    assert torch.equal(found.counts[..., -1], anchors.counts[..., -1])  # the last token has no row that could show it
    assert (shown | hidden)[inside].all()
    at = hidden & inside
    shares = [float(part[at].float().mean()) for part in (~shown, shown & other, shown & ~other)]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.01)
    whole = inside.all(-1)
    by_count = torch.bincount(hidden[whole].sum(-1), minlength=6) / whole.sum()
    assert by_count.tolist() == pytest.approx([1 / 6] * 6, abs=0.02)
    half = partly_shown(anchors, 0.5, 99).shown[..., 1:].any(-1)[whole].float().mean()
    assert 0.4 < float(half) < 0.5


def test_a_prediction_never_sees_its_own_token() -> None:
    torch.manual_seed(0)
    anchors = some_anchors()
    views = random_views(anchors, 1.0)
    assert not views.diagonal(dim1=-2, dim2=-1).any() and not (views & ~anchors.counts[..., :-1].unsqueeze(-2)).any()
    whole = views[anchors.counts.all(-1)][:, -1]  # the last prediction may see all five
    assert (torch.bincount(whole.sum(-1)) / len(whole)).tolist() == pytest.approx([1 / 6] * 6, abs=0.02)
    assert not random_views(anchors, 0.0).any()


def test_what_stays_for_the_next_pass() -> None:
    tokens, confidence = torch.tensor([[4, 4, 7, 8, 8, 9]]), torch.tensor([[-0.1, -0.5, -0.2, -0.2, -0.9]])
    assert kept(tokens, confidence, 3).tolist() == [[True, False, False, True, False, False]]
    assert kept(tokens, confidence, 5).tolist() == [[True, False, True, True, False, True]]
    assert easier(torch.tensor([-0.3, -0.1, -0.2])).tolist() == [[False, True], [False, False], [False, True]]


def test_the_weights_are_what_depends_on_a_prediction() -> None:
    """Against a slow loop; predictions that are not learned from end no draft, and bring nothing."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(50, 4, generator=generator).log()
    counts = torch.rand(50, 4, generator=generator) < 0.7
    for found, row, counted in zip(paced(chances, counts), chances.exp(), counts, strict=True):
        for place in range(4):
            expected, reached = 0.0, 1.0
            for n in range(4):
                reached *= float(0.5 + 0.5 * row[n]) if counted[n] else 1.0
                expected += reached if n >= place and counted[n] else 0.0
            assert float(found[place]) == pytest.approx(expected if counted[place] else 0.0, rel=1e-5)


# Training ----------------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_cross_entropy() -> None:
    """Of rows and of conditioned rows, with soft labels, against torch."""
    model = target()
    torch.manual_seed(0)
    tokens, mask = torch.randint(0, VOCABULARY, (2, 9)), torch.arange(9).expand(2, -1) > 2
    scores = scores_of(model, tokens.tolist(), Needs(hidden=True))
    anchors = Anchors.of(tokens, mask, 3, 5, at_random=True)
    rows, conditioned = (torch.randn(2, 5, n, model.hidden_size).double().requires_grad_() for n in (3, 2))
    losses = BlockLosses(anchors, scores.require_hidden(), model, vocabulary_of(model), "soft")
    loss, figures = losses.of(rows, anchors.counts, conditioned)
    loss.backward()
    found = rows.grad, conditioned.grad
    rows.grad = conditioned.grad = None
    losses = torch.stack([_cross_entropy(model, anchors, scores, rows[:, :, head], head) for head in range(3)], -1)
    later = torch.stack([_cross_entropy(model, anchors, scores, conditioned[:, :, head - 1], head) for head in (1, 2)], -1)
    with torch.no_grad():
        logits = torch.cat([model.head(rows[:, :, :1]), model.head(conditioned)], 2).log_softmax(-1)
        weights = paced(logits.gather(3, anchors.labels.unsqueeze(3)).squeeze(3).flatten(0, 1), anchors.counts.flatten(0, 1))
        weights = weights.view(2, 5, 3) / weights.sum()
    exact = (weights * losses).sum() + (weights[..., 1:] * later).sum()
    exact.backward()
    torch.testing.assert_close(loss, exact, check_dtype=False, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, (rows.grad, conditioned.grad), rtol=1e-5, atol=1e-7)
    assert set(figures) == {f"{name}/{n}" for n in (1, 2, 3) for name in ("top1", "top5", "rows")} | {"edge/2", "edge/3"}


def _cross_entropy(model: Model, anchors: Anchors, scores: Scores, rows: Tensor, head: int) -> Tensor:
    goal = model.head(model.norm(anchors.teacher(head + 1, scores.require_hidden()))).detach().softmax(-1)
    return -(goal * model.head(rows.flatten(0, 1)).log_softmax(-1)).sum(-1).view(rows.shape[:2])


def test_blocks_attend_to_their_own_rows_and_their_past() -> None:
    """Changing a row of a block changes that block alone; changing a row of the sequence changes what comes after it."""
    stack = target().stack(0, 2, init=range(2))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 6 + 2 * 3, 32, generator=generator).double()
    rows = Rows.with_blocks(6, torch.tensor([[1, 3]]), torch.tensor([1, 2, 3]), torch.ones(1, 1, 3, 3, dtype=torch.bool))
    before = stack.walk_sequences(hidden, rows=rows)
    for changed, affected in ((8, {6, 7, 8}), (9, {9, 10, 11}), (2, {2, 3, 4, 5, 9, 10, 11}), (5, {5})):
        other = hidden.clone()
        other[0, changed] += 1
        moved = (stack.walk_sequences(other, rows=rows) - before).abs().amax(-1)[0] > 1e-9
        assert set(moved.nonzero().flatten().tolist()) == affected
    torch.testing.assert_close(before[:, :6], stack.walk_sequences(hidden[:, :6]))


@pytest.mark.parametrize("form", ["two passes", "easy first"])
def test_it_learns(form: str) -> None:
    """A few steps on a few sequences, with tokens shown at random: the loss of an evaluation falls, at every weight."""
    model = target()
    drafter = made(model, form, layers=1)
    asked = requests(4, max_new_tokens=20, ignore_eos=True)
    sequences = [[*request.prompt[:1], *truth(model.hf, request)] for request in asked]
    tokens, mask = torch.tensor(sequences), torch.arange(21).expand(4, -1) > 0
    scores = scores_of(model, sequences, drafter.needs)
    before = {name: weight.detach().clone() for name, weight in drafter.module.named_parameters()}
    update = torch.optim.Adam(drafter.module.parameters(), lr=0.01)
    torch.manual_seed(0)
    seen = []
    for _ in range(31):
        drafter.module.eval()
        with torch.no_grad():
            seen.append(drafter.loss(tokens, mask, scores, model))
        drafter.module.train()
        update.zero_grad()
        drafter.loss(tokens, mask, scores, model)[0].backward()
        update.step()
    assert seen[-1][0] < 0.7 * seen[0][0] and seen[-1][1]["top1/2"] > seen[0][1]["top1/2"]
    assert not [name for name, weight in drafter.module.named_parameters() if torch.equal(weight, before[name])]
