"""Pseudo rows: which rows of a text are learned from, what a matrix starts as, and what is lost where a guess is wrong."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from doubles import VOCABULARY, own_hidden, target
from foreword.core.needs import Needs
from foreword.drafting.transfer import Anchors, Transfer, joins_of, learn, right_by_rank, walked
from foreword.errors import DrafterError, InputError
from foreword.model.model import Model
from foreword.ops.rows import at_one


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), st.booleans(), st.integers(0, 10**6))
def test_the_rows_to_learn_from(batch: int, length: int, steps: int, most: int, at_random: bool, seed: int) -> None:
    """Against a slow walk over the text: as many as there are up to `most`, in order, with what stands further on."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (batch, length), generator=generator)
    mask = torch.rand(batch, length, generator=generator) < 0.7
    found = Anchors.of(tokens, mask, steps, most, at_random)
    for text in range(batch):
        open_ = [t for t in range(length) if t + 2 < length and mask[text, t + 2]]
        chosen = [int(place) for place, counts in zip(found.place[text], found.counts[text, :, 0], strict=True) if counts]
        assert chosen == sorted(set(chosen) & set(open_)) and len(chosen) == min(most, len(open_))
        for row, place in enumerate(found.place[text].tolist()):
            for step in range(1, steps + 1):
                guessed = range(place + 2, place + 2 + step)
                counts = all(one < length and mask[text, one] for one in guessed)
                assert bool(found.counts[text, row, step - 1]) == counts
                if counts:
                    assert found.labels[text, row, step - 1] == tokens[text, place + 1 + step]


def test_training_draws_and_everything_else_does_not() -> None:
    tokens, mask = torch.ones(2, 60, dtype=torch.long), torch.ones(2, 60, dtype=torch.bool)
    drawn, fixed = ([Anchors.of(tokens, mask, 2, 8, at_random).place for _ in range(2)] for at_random in (True, False))
    assert not torch.equal(*drawn) and torch.equal(*fixed)
    torch.manual_seed(5)
    first = Anchors.of(tokens, mask, 2, 8, True).place
    torch.manual_seed(5)
    assert torch.equal(Anchors.of(tokens, mask, 2, 8, True).place, first)


def drawn(model: Model, **options: Any) -> tuple[Transfer, torch.nn.ModuleList]:
    """A transfer with random weights."""
    plan = Transfer(**{"steps": 2, "layers": (1, 3)} | options)
    module = plan.module(model)
    torch.manual_seed(3)
    for weight in module.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return plan, module


@pytest.mark.parametrize("options", [{}, {"squeeze": 4}, {"norm": False}, {"bias": False}], ids=str)
def test_a_matrix_starts_as_a_copy(options: dict[str, Any]) -> None:
    model = target()
    (projection,) = Transfer(steps=1, layers=(1,), told=False, **options).module(model)
    rows = torch.randn(2, 3, model.hidden_size, dtype=torch.float64)
    assert torch.equal(projection(rows), rows)
    assert sum(weight.numel() for weight in projection.parameters()) == {
        "{}": 32 * 33, "{'squeeze': 4}": 2 * 8 * 32 + 32, "{'norm': False}": 32 * 33, "{'bias': False}": 32 * 32
    }[str(options)]  # fmt: skip


def test_a_row_keeps_its_size() -> None:
    """Rows ten thousand times as large are moved ten thousand times as far; without the norm the bias is lost on them."""
    model = target()
    rows = torch.randn(5, model.hidden_size, dtype=torch.float64)
    projection = drawn(model)[1][0]
    torch.testing.assert_close(projection(1e4 * rows), 1e4 * projection(rows))
    bare = drawn(model, norm=False)[1][0]
    assert not torch.allclose(bare(1e4 * rows), 1e4 * bare(rows))


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_the_loss_is_what_the_guess_misses_of_the_target(labels: Any, told: bool) -> None:
    """Cross-entropy to what the target answers at the place where the token is decided, or to the token alone."""
    model = target()
    plan, module = drawn(model, labels=labels, told=told)
    texts = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    scores = model.read(texts, Needs(taps=(1, 3)))
    loss, figures = learn(module, plan, texts, mask, scores, model)
    anchors = Anchors.of(texts, mask, 2, 64, False)
    rows = walked(joins_of(module, plan), anchors, scores, model).rows
    own = torch.stack([model.head(model.norm(own_hidden(model.hf, text)[-1])) for text in texts.tolist()]).detach()
    slow, right = 0.0, [0, 0]
    for step in (1, 2):
        wide, total = model.head(rows[step - 1]), int(anchors.counts[:, :, step - 1].sum())
        for text, at in anchors.counts[:, :, step - 1].nonzero().tolist():
            place = int(anchors.place[text, at])
            if told:  # the token that the pass was about to decide
                known = at_one(model.head_weight()[texts[text, place + 1]])
                wide[text, at] += model.head((module[-1].of_step[step - 1].weight @ known).view(1, 1, -1)).view(-1)
            label = texts[text, place + step + 1]
            wanted = own[text, place + step].softmax(-1) if labels == "soft" else label
            slow += functional.cross_entropy(wide[text, at].detach(), wanted).item() / total
            right[step - 1] += int(wide[text, at].argmax() == label)
        assert float(figures[f"top1/{step}"]) == pytest.approx(right[step - 1] / total)
        assert int(figures[f"rows/{step}"]) == total == {1: 12, 2: 10}[step]
    assert loss.item() == pytest.approx(slow, rel=1e-5)
    rates = right_by_rank(module, plan, texts, mask, scores, model)
    assert [row[0] for row in rates] == pytest.approx([float(figures[f"top1/{step}"]) for step in (1, 2)])


def test_only_the_matrices_learn() -> None:
    model = target()
    plan, module = drawn(model)
    model.hf.zero_grad()  # of other tests with the same model
    frozen = [weight for weight in model.hf.parameters() if weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(False)
    try:
        texts = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
        scores = model.read(texts, Needs(taps=(1, 3)))
        loss, _ = learn(module, plan, texts, torch.ones(2, 12, dtype=torch.bool), scores, model)
        loss.backward()
    finally:
        for weight in frozen:
            weight.requires_grad_(True)
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())
    assert all(weight.grad is None for weight in model.hf.parameters())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"steps": 0}, "each must be 1 or more, got steps=0"),
        ({"squeeze": 0}, "squeeze=0"),
        ({"anchors": 0}, "anchors=0"),
        ({"layers": (3, 1)}, "2 steps need one each, in rising order"),
        ({"layers": (1,)}, "2 steps need one each"),
        ({"layers": (1.5, 2)}, "each is the number of a layer"),
        ({"source": "root"}, "source is 'root'; choose from anchor, chain"),
        ({"labels": "firm"}, "labels is 'firm'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Transfer(**{"steps": 2} | options).check("firp")


def test_layers_follow_the_target() -> None:
    model = target()
    assert Transfer(steps=3).layers_of(model, "firp") == (2, 3, 3)
    with pytest.raises(DrafterError, match="after layer 4 of tiny-llama, which has 4.* from 0 to 3"):
        Transfer(steps=2, layers=(1, 4)).layers_of(model, "firp")
    for squeeze in (64, 5):  # a grown target could not tell how wide a part of a column is
        with pytest.raises(InputError, match=f"squeeze is {squeeze}, which does not divide the 32 columns"):
            Transfer(steps=1, squeeze=squeeze).module(model)
