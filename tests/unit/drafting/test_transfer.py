"""Pseudo rows: what a matrix starts as, and the loss."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from doubles import VOCABULARY, hf_hidden, target, vocabulary_of
from foreword.core.needs import Needs
from foreword.drafting.lessons import Anchors
from foreword.drafting.transfer import Transfer, joins_of, learn, right_by_rank, walked
from foreword.errors import DrafterError, InputError
from foreword.model.model import Model
from foreword.ops.rows import unit_rms


def random_transfer(model: Model, **options: Any) -> tuple[Transfer, torch.nn.ModuleList]:
    """Return a transfer with random weights."""
    plan = Transfer(**{"steps": 2, "layers": (1, 3)} | options)
    module = plan.module(model)
    torch.manual_seed(3)
    for weight in module.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return plan, module


@pytest.mark.parametrize("options", [{}, {"squeeze": 4}, {"norm": False}, {"bias": False}], ids=str)
def test_a_matrix_starts_as_a_copy(options: dict[str, Any]) -> None:
    model = target()
    (projection,) = Transfer(steps=1, layers=(1,), conditioned=False, **options).module(model)
    rows = torch.randn(2, 3, model.hidden_size, dtype=torch.float64)
    assert torch.equal(projection(rows), rows)
    assert sum(weight.numel() for weight in projection.parameters()) == {
        "{}": 32 * 33, "{'squeeze': 4}": 2 * 8 * 32 + 32, "{'norm': False}": 32 * 33, "{'bias': False}": 32 * 32
    }[str(options)]  # fmt: skip


def test_a_row_keeps_its_size() -> None:
    """Rows ten thousand times as large move ten thousand times as far. Without the norm the bias does not scale."""
    model = target()
    rows = torch.randn(5, model.hidden_size, dtype=torch.float64)
    projection = random_transfer(model)[1][0]
    torch.testing.assert_close(projection(1e4 * rows), 1e4 * projection(rows))
    bare = random_transfer(model, norm=False)[1][0]
    assert not torch.allclose(bare(1e4 * rows), 1e4 * bare(rows))


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_the_loss_is_the_cross_entropy_to_the_target(labels: Any, conditioned: bool) -> None:
    """To the distribution that the target has where it decides the token, or to the token alone."""
    model = target()
    plan, module = random_transfer(model, labels=labels, conditioned=conditioned)
    sequences = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    scores = model.read(sequences, Needs(taps=(1, 3)))
    loss, figures = learn(module, plan, vocabulary_of(model), sequences, mask, scores, model)
    anchors = Anchors.of(sequences, mask, 2, 64, False)
    rows = walked(joins_of(module, plan), anchors, scores, model).rows
    own = torch.stack(
        [model.head(model.norm(hf_hidden(model.hf, sequence)[-1])) for sequence in sequences.tolist()]
    ).detach()
    slow, right = 0.0, [0, 0]
    for step in (1, 2):
        logits, total = model.head(rows[step - 1]), int(anchors.counts[:, :, step - 1].sum())
        for sequence, at in anchors.counts[:, :, step - 1].nonzero().tolist():
            place = int(anchors.place[sequence, at])
            if conditioned:  # the token that the pass was about to decide
                known = unit_rms(model.head_weight()[sequences[sequence, place + 1]])
                logits[sequence, at] += model.head((module[-1].of_step[step - 1].weight @ known).view(1, 1, -1)).view(-1)
            label = sequences[sequence, place + step + 1]
            goal = own[sequence, place + step].softmax(-1) if labels == "soft" else label
            slow += functional.cross_entropy(logits[sequence, at].detach(), goal).item() / total
            right[step - 1] += int(logits[sequence, at].argmax() == label)
        assert float(figures[f"top1/{step}"]) == pytest.approx(right[step - 1] / total)
        assert int(figures[f"rows/{step}"]) == total == {1: 12, 2: 10}[step]
    assert loss.item() == pytest.approx(slow, rel=1e-5)
    rates = right_by_rank(module, plan, vocabulary_of(model), sequences, mask, scores, model)
    assert [row[0] for row in rates] == pytest.approx([float(figures[f"top1/{step}"]) for step in (1, 2)])


def test_only_the_matrices_learn() -> None:
    model = target()
    plan, module = random_transfer(model)
    model.hf.zero_grad()  # of other tests with the same model
    frozen = [weight for weight in model.hf.parameters() if weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(False)
    try:
        sequences = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
        scores = model.read(sequences, Needs(taps=(1, 3)))
        loss, _ = learn(module, plan, vocabulary_of(model), sequences, torch.ones(2, 12, dtype=torch.bool), scores, model)
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
def test_invalid_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Transfer(**{"steps": 2} | options).check("firp")


def test_layers_follow_the_target() -> None:
    model = target()
    assert Transfer(steps=3).layers_of(model, "firp") == (2, 3, 3)
    with pytest.raises(DrafterError, match="after layer 4 of tiny-llama, which has 4.* from 0 to 3"):
        Transfer(steps=2, layers=(1, 4)).layers_of(model, "firp")
    for squeeze in (64, 5):  # a grown target could not tell how logits a part of a column is
        with pytest.raises(InputError, match=f"squeeze is {squeeze}, which does not divide the 32 columns"):
            Transfer(steps=1, squeeze=squeeze).module(model)
