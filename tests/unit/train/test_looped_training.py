"""A looped model in training: what it computes is what the saved model computes, and it learns from the original."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import SequenceList, fresh, requests, tokenizer
from foreword.core.needs import Needs
from foreword.engine.engine import Engine
from foreword.methods import make
from foreword.model.loading import load_weights
from foreword.model.model import Model
from foreword.train.evaluate import held_out_prompts
from foreword.train.exits import exits_of, measure_exits
from foreword.train.looped import LoopedLearner, LoopedOptions, LoopedTraining
from foreword.train.schedule import TrainingSettings

OPTIONS = LoopedOptions(group=2, repeats=3)
QUICK = TrainingSettings(batch=8, steps=48, evaluate_every=12, warm_up=3, learning_rate=0.02, new_tokens=12, max_length=64)


def sequences(original: Model) -> SequenceList:
    """Sequences that the original generated."""
    asked = requests(40, max_new_tokens=20, ignore_eos=True)
    runs = Engine(original, make("plain"), slots=8, max_context=64).generate(asked)
    whole = [(run.request.prompt, run.tokens) for run in runs]
    return SequenceList([(torch.tensor([*a, *b]), torch.tensor([False] * len(a) + [True] * len(b))) for a, b in whole])


@pytest.fixture(scope="module")
def original() -> Model:
    return Model(fresh("llama"), name="tiny")


@pytest.fixture(scope="module")
def data(original: Model) -> SequenceList:
    return sequences(original)


def batch_of(data: SequenceList) -> tuple[Tensor, Tensor]:
    rows = [data[index] for index in range(4)]
    tokens, mask = (torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True))
    return tokens, mask


def test_training_computes_what_the_model_does(original: Model, data: SequenceList) -> None:
    """The state after every repeat, and the logits of the last, by the saved model's own pass."""
    learner, (tokens, _) = LoopedLearner(original, OPTIONS), batch_of(data)
    with torch.no_grad():
        for weight in learner.module.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        hf: Any = learner.model()
        for module in hf.modules():  # those of transformers round to float32
            if "RMSNorm" in type(module).__name__:
                module.__class__ = type(original.hf.model.norm)
        made, states = Model(hf), learner.exits(tokens)
        for own, other in zip(states, exits_of(made)(tokens), strict=True):
            torch.testing.assert_close(own, other, atol=1e-10, rtol=0)
        logits = made.read(tokens, Needs(logits=True)).require_logits()
        torch.testing.assert_close(original.head(states[-1]), logits, atol=1e-10, rtol=0)


def test_the_loss_weighs_the_exits_against_the_original(original: Model, data: SequenceList) -> None:
    learner, (tokens, mask) = LoopedLearner(original, OPTIONS), batch_of(data)
    scores = original.read(tokens, Needs(hidden=True, logits=True))
    loss, figures = learner.loss(tokens, mask, scores, original)
    rows = torch.cat([mask[:, 1:], torch.zeros(4, 1, dtype=torch.bool)], 1)
    rows[:, 0] = False  # as for drafters: the first row predicts nothing
    expected, teacher = torch.zeros(()).double(), scores.require_logits()[rows].softmax(-1)
    for repeat, state in enumerate(learner.exits(tokens), 1):
        expected += repeat / 6 * -(teacher * original.head(state)[rows].log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, expected, check_dtype=False, atol=1e-6, rtol=0)
    assert set(figures) == {f"{name}/{repeat}" for name in ("top1", "top5", "rows") for repeat in (1, 2, 3)}
    loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in learner.module.parameters())


def test_it_learns_and_the_pipeline_profits(tmp_path: Path) -> None:
    """Held-out loss falls; what is stored is measured as a user would load it, and a token takes fewer rounds than
    repeats."""
    original = Model(fresh("llama", torch.float32), name="tiny")
    data = sequences(original)
    held_out = SequenceList(data.sequences[:8])
    run = LoopedTraining(original, tokenizer(), OPTIONS, data, held_out, held_out_prompts(held_out, 4, 40), QUICK, tmp_path)
    record = run.run()
    first, last = record["history"][0], record["history"][-1]
    assert last["final"] < first["final"] - 0.1 and record["best"]["final"] == min(one["final"] for one in record["history"])
    stored = record["stored"]
    assert stored["original"] < stored["final"] and stored["rounds_per_token"] < 2.9
    made = Model(load_weights(tmp_path, torch.device("cpu"), torch.float32))
    found = measure_exits(exits_of(made), made.head, original, held_out, QUICK, 8)
    assert found.losses == pytest.approx(stored["losses"], abs=1e-3)
    assert found.settled == pytest.approx(stored["settled"], abs=0.02)


def test_exits_are_measured_by_hand(original: Model, data: SequenceList) -> None:
    """Losses, agreements and the repeat from which on the prediction stays, one row after the other."""
    learner, few = LoopedLearner(original, OPTIONS), SequenceList(data.sequences[:3])
    found = measure_exits(learner.exits, original.head, original, few, QUICK, 2)
    losses, agreements, settled, own = [], [], [], []
    for tokens, mask in few.sequences:
        with torch.no_grad():
            logits = [original.head(state)[0] for state in learner.exits(tokens.unsqueeze(0))]
            truth = original.read(tokens.unsqueeze(0), Needs(logits=True)).require_logits()[0]
        for row in [place - 1 for place in range(1, len(tokens)) if mask[place]]:
            losses.append([float(-one[row].log_softmax(-1)[tokens[row + 1]]) for one in logits])
            own.append(float(-truth[row].log_softmax(-1)[tokens[row + 1]]))
            picks = [int(one[row].argmax()) for one in logits]
            agreements.append([pick == picks[-1] for pick in picks])
            settled.append(next(r for r in (1, 2, 3) if len(set(picks[r - 1 :])) == 1))
    assert found.losses == pytest.approx(torch.tensor(losses).mean(0).tolist(), abs=1e-4)
    assert found.agreements == pytest.approx(torch.tensor(agreements).double().mean(0).tolist())
    assert found.settled == pytest.approx(sum(settled) / len(settled)) and found.tokens == len(settled)
    assert found.original == pytest.approx(sum(own) / len(own), abs=1e-4)
