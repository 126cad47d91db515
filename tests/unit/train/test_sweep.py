"""The sweep: its figures for a layer are those of a drafter with that layer and those matrices."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from doubles import VOCABULARY, SequenceList, hf_hidden, target, vocabulary_of
from foreword.core.needs import Needs
from foreword.drafting.lessons import Anchors
from foreword.drafting.transfer import Transfer, right_by_rank
from foreword.errors import InputError, NumericsError
from foreword.model.model import Model
from foreword.train.schedule import TrainingSettings, padded
from foreword.train.sweep import Sweep, layers_tried


def counting(count: int, seed: int) -> SequenceList:
    """Return sequences that count up, each by its own step: easy to predict once the step is seen."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        first, step = torch.randint(1, 9, (2,), generator=generator).tolist()
        tokens = (first + step * torch.arange(24)) % (VOCABULARY - 3) + 3
        found.append((tokens, torch.arange(24) > 8))
    return SequenceList(found)


def swept(model: Model, show: Any = lambda *_: None, **options: Any) -> tuple[Sweep, dict[str, Any]]:
    settings = TrainingSettings(steps=options.pop("learning", 12), batch=6, max_length=24, learning_rate=0.01, warm_up=2)
    sweep = Sweep(model, Transfer(**{"steps": 3} | options), counting(24, 0), counting(10, 1), settings, show)
    return sweep, sweep.run()


def test_layers_tried() -> None:
    assert layers_tried(30) == [4, 8, 11, 15, 19, 22, 26]
    assert layers_tried(30, 15) == [15, 16, 17, 19, 22, 26] and layers_tried(30, 28) == [28, 29]
    assert layers_tried(4) == [0, 1, 2, 3] and layers_tried(1) == [0] and layers_tried(4, 3) == [3]


@pytest.mark.parametrize("source", ["anchor", "chain"])
def test_its_figures_are_those_of_the_matrices(source: Any) -> None:
    model = target(dtype=torch.float32)
    shown: list[tuple[str, int, int]] = []
    sweep, found = swept(model, lambda *progress: shown.append(progress), source=source)
    layers = found["layers"]
    assert layers == sorted(layers) and len(layers) == 3
    assert shown[0] == ("step 1, 4 variants", 1, 12) and shown[-1][1:] == (12, 12)
    options = replace(sweep.options, layers=tuple(layers))
    tokens, mask = padded(sweep.held_out, list(range(10)), 24, model.device)
    scores = model.read(tokens, Needs(taps=tuple(layers)))
    rates = right_by_rank(nn.ModuleList(sweep.kept), options, vocabulary_of(model), tokens, mask, scores, model)
    for step, layer in enumerate(layers, start=1):
        best = found["accuracy"][step][layer]
        assert best["top1"] == max(one["top1"] for one in found["accuracy"][step].values())
        assert best["top1"] == pytest.approx(rates[step - 1][0], abs=1e-4)
        assert best["top5"] == pytest.approx(sum(rates[step - 1][:5]), abs=1e-3)
    assert set(found["step 2 without sight of step 1"]) == set(found["accuracy"][2]) == set(layers_tried(4, layers[0]))
    assert found["step 2 without sight of step 1"] != found["accuracy"][2]


def test_the_cosine_is_that_of_pseudo_and_real_rows() -> None:
    """Where a step joins: its matrix applied to the anchor's row, against the real row further on."""
    model = target(dtype=torch.float32)
    sweep, found = swept(model, steps=2, learning=2)
    slow: dict[int, list[float]] = {1: [], 2: []}
    for tokens, written in sweep.held_out.sequences:  # type: ignore[attr-defined]
        states = hf_hidden(model.hf, tokens.tolist())
        anchors = Anchors.of(tokens.unsqueeze(0), written.unsqueeze(0), 2, 99, False)
        for step in (1, 2):
            rows = states[found["layers"][step - 1]].float()
            for place, counts in zip(anchors.place[0], anchors.counts[0, :, step - 1], strict=True):
                if counts:
                    made = sweep.kept[step - 1](rows[place])
                    slow[step].append(float(functional.cosine_similarity(made, rows[place + step], dim=-1)))
    assert (len(slow[1]), len(slow[2])) == (150, 140)
    for step in (1, 2):
        assert list(found["cosine"][step]) == list(range(found["layers"][step - 1], 5))
        joined = found["cosine"][step][found["layers"][step - 1]]
        assert joined == pytest.approx(sum(slow[step]) / len(slow[step]), abs=1e-4)


def test_it_learns_and_chosen_steps_do_not_change() -> None:
    model = target(dtype=torch.float32)
    _, before = swept(model, steps=1, labels="hard", learning=1)
    sweep, after = swept(model, steps=1, labels="hard", learning=40)
    best = [max(one["top1"] for one in found["accuracy"][1].values()) for found in (before, after)]
    assert best[1] > best[0] + 0.05
    again, _ = swept(model, steps=2, labels="hard", learning=40)
    for one, other in zip(sweep.kept[0].parameters(), again.kept[0].parameters(), strict=True):
        assert torch.equal(one, other) and not other.requires_grad


def test_refusals() -> None:
    model = target(dtype=torch.float32)
    with pytest.raises(InputError, match="takes 256 tokens at most"):
        Sweep(
            model,
            Transfer(steps=1),
            counting(8, 0),
            counting(2, 1),
            TrainingSettings(max_length=300, batch=4),
            lambda *_: None,
        )
    settings = TrainingSettings(steps=2, batch=4, max_length=24, learning_rate=1e38, warm_up=0)
    with pytest.raises(NumericsError, match="step 1 .* lower learning rate than 1e"):
        Sweep(model, Transfer(steps=1), counting(8, 0), counting(2, 1), settings, lambda *_: None).run()
