"""Which rows teach which head, against a slow loop over the sequences; and the loss in chunks against the whole loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from doubles import VOCABULARY, target, vocabulary_of
from foreword.drafting import lessons
from foreword.drafting.lessons import (
    Anchors,
    HeadLosses,
    HeadOutputs,
    LearnedHead,
    Lesson,
    check_labels,
    losses,
    rank_rates,
    row_losses,
)
from foreword.errors import InputError


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(0, 10**6))
def test_the_rows_to_learn_from(batch: int, length: int, heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (batch, length), generator=generator)
    mask = torch.rand(batch, length, generator=generator) < 0.7
    lesson = Lesson.of(tokens, mask, heads)
    found = {
        (int(row), head): (int(lesson.token(head)[i]), int(lesson.label(head)[i]))
        for i, row in enumerate(lesson.rows)
        for head in range(1, heads + 1)
        if lesson.counts[i, head - 1]
    }
    slow = {}
    for row in range(batch):
        for t in range(length):
            for head in range(1, heads + 1):
                predicted = range(t + 2, t + 2 + head)
                if all(place < length and mask[row, place] for place in predicted):
                    slow[row * length + t, head] = int(tokens[row, t + head]), int(tokens[row, t + 1 + head])
    assert found == slow


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(0, 10**6))
def test_the_teacher_is_where_the_label_is_decided(batch: int, length: int, heads: int, seed: int) -> None:
    """Also with gaps in what the target wrote, and across the borders of sequences."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    tokens = torch.arange(batch * length).view(batch, length)
    lesson = Lesson.of(tokens, mask, heads)
    teacher = lesson.teacher(tokens.unsqueeze(-1))
    for head in range(1, heads + 1):
        output = lesson.outputs(head, lesson.rows)
        found = teacher[output.teacher_offset :, 0][: len(output.rows)][output.counts]
        assert torch.equal(found + 1, output.labels[output.counts])


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), st.booleans(), st.integers(0, 10**6))
def test_some_rows_to_learn_from(batch: int, length: int, heads: int, most: int, at_random: bool, seed: int) -> None:
    """Against a slow loop over the sequences: up to `most` rows, in order, with the labels that follow."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (batch, length), generator=generator)
    mask = torch.rand(batch, length, generator=generator) < 0.7
    found = Anchors.of(tokens, mask, heads, most, at_random)
    for sequence in range(batch):
        open_ = [t for t in range(length) if t + 2 < length and mask[sequence, t + 2]]
        chosen = [
            int(place) for place, counts in zip(found.place[sequence], found.counts[sequence, :, 0], strict=True) if counts
        ]
        assert chosen == sorted(set(chosen) & set(open_)) and len(chosen) == min(most, len(open_))
        for row, place in enumerate(found.place[sequence].tolist()):
            for head in range(1, heads + 1):
                predicted = range(place + 2, place + 2 + head)
                counts = all(one < length and mask[sequence, one] for one in predicted)
                assert bool(found.counts[sequence, row, head - 1]) == counts
                if counts:
                    assert found.labels[sequence, row, head - 1] == tokens[sequence, place + 1 + head]


def test_only_training_samples_anchors_at_random() -> None:
    tokens, mask = torch.ones(2, 60, dtype=torch.long), torch.ones(2, 60, dtype=torch.bool)
    sampled, fixed = ([Anchors.of(tokens, mask, 2, 8, at_random).place for _ in range(2)] for at_random in (True, False))
    assert not torch.equal(*sampled) and torch.equal(*fixed)
    torch.manual_seed(5)
    first = Anchors.of(tokens, mask, 2, 8, True).place
    torch.manual_seed(5)
    assert torch.equal(Anchors.of(tokens, mask, 2, 8, True).place, first)


@pytest.fixture
def sampled() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(37, 8, generator=generator, dtype=torch.float64)
    teacher = torch.randn(37, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (37,), generator=generator)
    return rows, teacher, weight, labels, torch.rand(37, generator=generator) < 0.6


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_in_chunks_is_the_whole_loss(
    soft: bool, sampled: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradient; seven rows at a time."""
    monkeypatch.setattr(lessons, "LOGITS_AT_A_TIME", 7 * VOCABULARY)
    rows, teacher, weight, labels, counts = sampled
    one, other = (rows.clone().requires_grad_() for _ in range(2))
    outputs = [HeadOutputs(one, labels, counts)]
    [(loss, ranks)] = losses(
        outputs, LearnedHead(lambda x: x @ weight.T, VOCABULARY, torch.float64), teacher if soft else None
    )
    (3 * loss).backward()
    expected = (teacher @ weight.T).softmax(-1)[counts] if soft else labels[counts]
    whole = functional.cross_entropy(other[counts] @ weight.T, expected)
    (3 * whole).backward()
    torch.testing.assert_close(loss, whole, check_dtype=False, rtol=1e-6, atol=0)
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(one.grad, other.grad)
    order = (rows @ weight.T).argsort(-1, descending=True)
    expected = [order[i].tolist().index(label) for i, label in enumerate(labels.tolist())]
    assert ranks.tolist() == expected


@pytest.mark.parametrize("soft", [False, True])
def test_heads_together_and_each_alone_have_the_same_loss(
    soft: bool, sampled: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a target's head that caps its logits; the second head's teacher is two rows later."""
    monkeypatch.setattr(lessons, "LOGITS_AT_A_TIME", 7 * VOCABULARY)
    rows, teacher, weight, labels, counts = sampled

    def capped(given: torch.Tensor) -> torch.Tensor:
        return (given @ weight.T / 2).tanh() * 3

    outputs = [
        HeadOutputs((scale * rows[:35]).requires_grad_(), labels[:35], counts[:35], offset)
        for scale, offset in ((1, 0), (2, 2))
    ]
    found = losses(outputs, LearnedHead(capped, VOCABULARY, torch.float64), teacher if soft else None)
    sum(loss for loss, _ in found).backward()
    for one, (loss, _) in zip(outputs, found, strict=True):
        alone = one.rows.detach().requires_grad_()
        expected = capped(teacher)[one.teacher_offset :][:35].softmax(-1) if soft else one.labels
        whole = functional.cross_entropy(capped(alone)[one.counts], expected[one.counts])
        whole.backward()
        torch.testing.assert_close(loss, whole, check_dtype=False, rtol=1e-6, atol=0)
        torch.testing.assert_close(one.rows.grad, alone.grad)


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_over_a_draft_vocabulary(soft: bool) -> None:
    """It is that of the logits of these tokens. A label outside teaches nothing without a teacher, and is never right."""
    generator, model = torch.Generator().manual_seed(5), target("granite")  # which scales its logits
    chosen = torch.rand(VOCABULARY, generator=generator) < 0.5
    rows, teacher = torch.randn(2, 40, model.hidden_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (40,), generator=generator)
    counts = torch.rand(40, generator=generator) < 0.7
    vocabulary = vocabulary_of(model, chosen)
    output = HeadOutputs(rows.requires_grad_(), labels, counts)
    head = LearnedHead.of(model, vocabulary.tokens)
    [found] = row_losses([output], head, teacher if soft else None, with_chances=True)
    found.weighted(torch.ones(40, dtype=torch.float64)).backward()
    alone = rows.detach().requires_grad_()
    logits, known = model.head(alone)[:, chosen], chosen[labels]
    learned = counts if soft else counts & known
    goal = model.head(teacher)[:, chosen].softmax(-1) if soft else (labels.unsqueeze(1) == chosen.nonzero().T).double()
    whole = -(goal * logits.log_softmax(-1)).sum(-1)[learned].sum()
    whole.backward()
    torch.testing.assert_close(found.losses.sum(), whole, check_dtype=False, rtol=1e-5, atol=0)
    torch.testing.assert_close(rows.grad, alone.grad)
    order = logits.argsort(-1, descending=True)
    tokens = chosen.nonzero().squeeze(1)
    for row, label in enumerate(labels.tolist()):
        places = tokens[order[row]].tolist()
        assert found.ranks[row] == (places.index(label) if label in places else len(places))
        assert bool(found.chances[row].isfinite()) == (label in places)
    assert 0 < int(known.sum()) < 40


def test_without_gradients_the_loss_has_none(sampled: tuple[torch.Tensor, ...]) -> None:
    rows, _, weight, labels, counts = sampled
    with torch.no_grad():
        [(loss, _)] = losses(
            [HeadOutputs(rows.requires_grad_(), labels, counts)],
            LearnedHead(lambda x: x @ weight.T, VOCABULARY, torch.float64),
        )
    assert not loss.requires_grad and loss > 0


def test_a_sequence_without_rows_to_learn_from_has_no_loss(sampled: tuple[torch.Tensor, ...]) -> None:
    model, tokens = target(), torch.ones(1, 6, dtype=torch.long)
    hidden = torch.randn(1, 6, model.hidden_size, dtype=torch.float64)
    head_losses = HeadLosses(
        Lesson.of(tokens, torch.zeros(1, 6, dtype=torch.bool), 2),
        model,
        vocabulary_of(model),
        "soft",
        hidden,
        regression=1.0,
    )
    rows = head_losses.lesson.of_rows(hidden).requires_grad_()
    head_losses.add(1, rows, 1.0)
    loss, figures = head_losses.result
    loss.backward()
    assert loss == 0 and figures["top1/1"] == 0 and rows.shape[0] == 0


def test_figures_and_distances() -> None:
    """A head that returns the target's own states: right candidates, no distance, and the least possible soft loss."""
    model = target()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 9, model.hidden_size, generator=generator, dtype=torch.float64)
    logits = model.head(model.norm(hidden)).detach()
    tokens = functional.pad(logits.argmax(-1)[:, :-1], (1, 0))
    mask = torch.ones(2, 9, dtype=torch.bool)
    losses = {}
    for name, noise in (("own", 0.0), ("off", 0.5)):
        head_losses = HeadLosses(Lesson.of(tokens, mask, 2), model, vocabulary_of(model), "soft", hidden, regression=10.0)
        rows = model.norm(head_losses.lesson.teacher(hidden)[1:]).detach()
        head_losses.add(2, rows + noise * torch.randn(rows.shape, generator=generator, dtype=torch.float64), 0.5)
        losses[name], figures = head_losses.result
        if name == "own":
            assert figures == {"top1/2": 1, "top5/2": 1, "rows/2": 12}
            counts = head_losses.lesson.counts[:, 1]
            probabilities = head_losses.lesson.teacher(logits)[1:][counts].softmax(-1)
            entropy = -(probabilities * probabilities.log()).sum(-1).mean()
            assert float(losses[name]) == pytest.approx(0.5 * float(entropy), rel=1e-5)
    assert losses["off"] > losses["own"] + 0.1


def test_rates_by_rank() -> None:
    ranks, counts = torch.tensor([0, 0, 1, 5, 2, 0]), torch.tensor([True, True, True, True, False, False])
    assert rank_rates(ranks, counts, 3) == [0.5, 0.25, 0.0]


def test_labels_are_hard_or_soft() -> None:
    with pytest.raises(InputError, match="clover: labels is 'firm'; choose from hard, soft"):
        check_labels("clover", "firm")
