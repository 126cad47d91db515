"""Training in bfloat16 on CUDA: the host runs ahead and reads figures late, and a broken step still changes nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import TRAINABLE, TRAINED, VOCABULARY, SequenceList, requests, tiny, tokenizer
from foreword.drafting.lessons import HeadOutputs, LearnedHead, losses
from foreword.drafting.transfer import Transfer
from foreword.engine.engine import Engine
from foreword.errors import NumericsError
from foreword.methods import untrained
from foreword.methods.plain import Plain
from foreword.model.linears import fuse
from foreword.model.model import Model
from foreword.train.evaluate import Evaluator, autocast_for, held_out_prompts
from foreword.train.loop import Training
from foreword.train.looped import LoopedOptions, LoopedTraining
from foreword.train.schedule import TrainingSettings
from foreword.train.step import Stepper
from foreword.train.sweep import Sweep
from rounds import check_cross_entropies
from tiers import slow

pytestmark = pytest.mark.gpu


def training(method: str, folder: Path, steps: int) -> Training:
    pytest.importorskip("accelerate")
    model = Model(copy.deepcopy(tiny("llama")).to(torch.bfloat16).cuda(), "tiny")
    runs = Engine(model, Plain(), slots=8, max_context=64).generate(requests(32, max_new_tokens=20, ignore_eos=True))
    sequences = [([*run.request.prompt, *run.tokens], len(run.request.prompt)) for run in runs]
    data = SequenceList([(torch.tensor(tokens), torch.arange(len(tokens)) >= first) for tokens, first in sequences])
    settings = TrainingSettings(
        batch=16, steps=steps, evaluate_every=steps, warm_up=2, learning_rate=0.01, new_tokens=8, max_length=64
    )
    return Training(
        model,
        lambda **more: untrained(method, **TRAINED[method] | more),
        data,
        data,
        held_out_prompts(data, 4, 40),
        settings,
        folder,
    )


@pytest.mark.parametrize("method", ["medusa", "chimera", "clover2", "masked"])
def test_one_step_learns(method: str) -> None:
    """Learn from tokens and from the target's distributions, as in training, but without accelerate: the weights change and
    stay finite, and the step reports that it was sound."""
    model = Model(copy.deepcopy(tiny("llama")).to(torch.bfloat16).cuda(), "tiny")
    model.hf.requires_grad_(False)
    learner: Any = untrained(method, **TRAINED[method])
    learner.prepare(model, 1)
    module = learner.module.float().train()
    before, stepper = [weight.detach().clone() for weight in module.parameters()], Stepper(module, 1.0, 0.0)
    tokens = torch.randint(3, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(0)).to(model.device)
    with autocast_for(model):
        loss, _ = learner.loss(tokens, torch.ones(8, 24, dtype=torch.bool), model.read(tokens, learner.needs), model)
    loss.backward()
    assert stepper.step(0.01) > 0 and stepper.check() is None
    after = [*module.parameters()]
    assert all(weight.isfinite().all() for weight in after)
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_looped_model_learns_in_half_precision(tmp_path: Path) -> None:
    """From fused layers of the original. What is evaluated are the weights of the last step, not those of the start."""
    pytest.importorskip("accelerate")
    hf = copy.deepcopy(tiny("llama", torch.float32)).to(torch.bfloat16).cuda()
    fuse(hf)
    data = SequenceList([((torch.arange(24) * step) % 40 + 3, torch.arange(24) > 3) for step in range(1, 33)])
    settings = TrainingSettings(batch=16, steps=40, evaluate_every=10, max_length=64, learning_rate=0.01, new_tokens=8)
    parts = LoopedOptions(group=2, repeats=3), data, data, held_out_prompts(data, 4, 40), settings, tmp_path
    record = LoopedTraining(Model(hf, "tiny"), tokenizer(), *parts).run()
    first, *_, last = record["history"]
    assert last["final"] < first["final"] and 1 <= record["stored"]["rounds_per_token"] <= 3
    assert record["stored"]["final"] == pytest.approx(record["best"]["final"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("method", TRAINABLE)
def test_the_loss_falls(method: str, tmp_path: Path) -> None:
    run, seen = training(method, tmp_path, 60), []
    run.watch = lambda step, steps, figures: seen.append((step, figures["loss"]))
    record = run.run()
    assert [step for step, _ in seen] == [20, 40, 60] and seen[-1][1] < seen[0][1]
    assert record["stored"]["tokens_per_round"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "chimera", "clover2", "masked"])
def test_recorded_rounds_follow_weights_that_change(method: str, tmp_path: Path) -> None:
    """Everything derived from weights, such as int8 codes, is computed again."""
    run = training(method, tmp_path, 60)
    before = {name: weight.to(torch.bfloat16, copy=True) for name, weight in run.module.state_dict().items()}
    for _ in range(2):  # the second run records graphs
        untrained = run.evaluator.run(before)
    run.run()
    after = {name: weight.to(torch.bfloat16) for name, weight in run.module.state_dict().items()}
    known = [run.evaluator.run(weights) for weights in (after, after, before)]
    fresh = Evaluator(run.model, run.make, run.evaluator.prompts, run.evaluator.new_tokens).run(after)
    assert known[0].accepted_per_position == known[1].accepted_per_position == fresh.accepted_per_position
    assert known[2].accepted_per_position == untrained.accepted_per_position != fresh.accepted_per_position


@pytest.mark.slow
def test_a_sweep_in_half_precision() -> None:
    """Sequences run through fused layers, the pseudo rows through those of transformers. Matrices at every layer learn."""
    hf = copy.deepcopy(tiny("llama", torch.float32)).to(torch.bfloat16).cuda()
    fuse(hf)
    data = SequenceList([((torch.arange(24) * step) % 40 + 3, torch.arange(24) > 3) for step in range(1, 33)])
    settings = TrainingSettings(batch=16, steps=60, max_length=64, learning_rate=0.01)
    found = Sweep(Model(hf, "tiny"), Transfer(steps=2, labels="hard"), data, data, settings, lambda *_: None).run()
    assert max(one["top5"] for one in found["accuracy"][1].values()) > 0.3
    assert all(-1 <= cosine <= 1 for by_layer in found["cosine"].values() for cosine in by_layer.values())


@pytest.mark.slow
def test_a_broken_step_changes_nothing(tmp_path: Path) -> None:
    run, sound = training("medusa", tmp_path / "broken", 20), training("medusa", tmp_path / "sound", 20)
    learned, passes = run.drafter.loss, iter(range(99))

    def broken(*given: Any) -> Any:
        loss, figures = learned(*given)
        return loss * (torch.nan if next(passes) == 6 else 1), figures

    run.drafter.loss = broken  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="step 7;"):
        run.run()
    for step in range(6):
        sound._learn(step)
    for one, other in zip(run.module.state_dict().values(), sound.module.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)  # sums on a GPU have no fixed order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, slow(torch.float16)], ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["label", "teacher"])
@pytest.mark.parametrize("width", [4097, 49152, slow(VOCABULARY), slow(128_257)])
def test_the_kernel_equals_the_cross_entropy(width: int, soft: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    logits, teacher = (4 * torch.randn(2, 300, width, generator=generator)).to(dtype)
    check_cross_entropies(logits, teacher if soft else None, "cuda")


@pytest.mark.parametrize("family", ["gemma2", slow("llama"), slow("granite")])
@pytest.mark.parametrize("soft", [False, True], ids=["label", "teacher"])
def test_losses_of_the_kernel_equal_those_of_torch(family: str, soft: bool) -> None:
    """Also through heads that cap or scale their logits. There are two heads; the second one's teacher is a row later."""
    generator, found = torch.Generator().manual_seed(3), {}
    rows = torch.randn(2, 3000, tiny(family).config.hidden_size, generator=generator)
    teacher = torch.randn(3001, rows.shape[2], generator=generator)
    labels = torch.randint(VOCABULARY, (2, 3000), generator=generator)
    counts = torch.rand(2, 3000, generator=generator) < 0.8
    for device in ("cpu", "cuda"):
        model = Model(copy.deepcopy(tiny(family)).float().to(device), "tiny")
        model.hf.requires_grad_(False)
        leaf = rows.to(device, copy=True).requires_grad_()
        outputs = [HeadOutputs(leaf[i], labels[i].to(device), counts[i].to(device), i) for i in range(2)]
        results = losses(outputs, LearnedHead.of(model), teacher.to(device) if soft else None)
        (results[0][0] + 2 * results[1][0]).backward()
        assert leaf.grad is not None
        found[device] = [leaf.grad.cpu(), *(one.detach().float().cpu() for pair in results for one in pair)]
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-6)
