"""The training loop: it learns, resumes exactly, measures what the engine does, and refuses bad input."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import SequenceList, TwoHeads, fresh, requests
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.drafters.checkpoint import write_weights
from foreword.drafters.saved import load_into, save
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.errors import DrafterError, ForewordWarning, InputError, NumericsError, StorageError
from foreword.methods.plain import Plain
from foreword.model.model import Model
from foreword.results import Stats
from foreword.train import loop
from foreword.train.evaluate import held_out_prompts
from foreword.train.loop import Training
from foreword.train.record import model_card, read_record, record_draft_vocabulary
from foreword.train.schedule import Order, TrainingSettings, batch_for, length_on, padded

QUICK = dict(batch=8, at_once=4, steps=12, evaluate_every=6, checkpoint_every=4, warm_up=2, learning_rate=0.02)
QUICK |= dict(new_tokens=8, max_length=64, texts_apart=8)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(fresh("llama", torch.float32), name="tiny")


@pytest.fixture(scope="module")
def data(model: Model) -> SequenceList:
    """Sequences that the target itself generated."""
    runs = Engine(model, Plain(), slots=4, max_context=64).generate(requests(32, max_new_tokens=20, ignore_eos=True))
    whole = [(run.request.prompt, run.tokens) for run in runs]
    return SequenceList(
        [(torch.tensor([*a, *b]), torch.tensor([False] * len(a) + [True] * len(b))) for a, b in whole if len(b) > 4]
    )


def training(model: Model, data: SequenceList, folder: Path, make: Any = TwoHeads, **changes: Any) -> Training:
    held_out = SequenceList(data.sequences[:6])
    stored, prompts = changes.pop("stored", "bfloat16"), held_out_prompts(held_out, changes.pop("prompts", 3), 40)
    return Training(model, make, data, held_out, prompts, TrainingSettings(**QUICK | changes), folder, stored=stored)


def weights(run: Training) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in run.module.state_dict().items()}


def test_steps_do_not_use_cudnn(model: Model, data: SequenceList, tmp_path: Path, monkeypatch: Any) -> None:
    """It plans attention for every new length, which takes the host longer than a step takes the device."""
    run, seen = training(model, data, tmp_path, steps=2, evaluate_every=2), []
    learn = run._learn
    monkeypatch.setattr(run, "_learn", lambda step: seen.append(torch.backends.cuda.cudnn_sdp_enabled()) or learn(step))
    run.run()
    assert seen == [False, False] and torch.backends.cuda.cudnn_sdp_enabled()


def test_it_learns_and_saves_a_drafter(model: Model, data: SequenceList, tmp_path: Path) -> None:
    run, seen = training(model, data, tmp_path, steps=160, evaluate_every=80), []
    run.watch = lambda step, steps, figures: seen.append(figures)
    record = run.run()
    first, last = (sum(one["loss"] for one in some) / 4 for some in (seen[:4], seen[-4:]))
    assert len(seen) == 160 and last < 0.75 * first
    assert {"config.json", "model.safetensors", "record.json", "README.md"} <= {file.name for file in tmp_path.iterdir()}
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert [one["step"] for one in record["history"]] == [80, 160]
    assert record["best"]["tokens_per_round"] == max(one["tokens_per_round"] for one in record["history"])
    assert f"**{record['stored']['tokens_per_round']:.2f}**" in (tmp_path / "README.md").read_text()
    cut = record | {"step": record["step"] - 1}
    assert f" in {record['step']} steps;" in model_card(record)
    assert f" in {cut['step']} of the {record['step']} steps asked for;" in model_card(cut)


def test_a_warm_up_that_does_not_fit_into_the_run_gives_a_warning(model: Model, data: SequenceList, tmp_path: Path) -> None:
    message = r"warm_up is 100 steps, but the run has 12: it is shortened to 6\. Train longer .* or set --warm-up 1"
    with pytest.warns(ForewordWarning, match=message):
        training(model, data, tmp_path, warm_up=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForewordWarning)
        training(model, data, tmp_path, warm_up=6)


@pytest.mark.parametrize(
    ("sequences", "at_once", "processes", "batch"),
    [(100_000, None, 1, 64), (1024, None, 1, 64), (1023, None, 1, 63), (16, None, 1, 1), (3, None, 1, 1)]
    + [(100_000, 48, 1, 48), (640, 16, 2, 32), (300, 16, 1, 16), (20, 16, 1, 16), (1000, None, 8, 56)],
)
def test_the_default_batch_is_smaller_for_little_data(
    sequences: int, at_once: int | None, processes: int, batch: int
) -> None:
    assert batch_for(sequences, at_once, processes) == batch


def test_a_moving_average_of_the_weights_is_evaluated_and_kept(model: Model, data: SequenceList, tmp_path: Path) -> None:
    run = training(model, data, tmp_path, average=0.8, evaluate_every=12)
    measured, means = [], weights(run)
    measure = run.evaluator.run

    def watch(step: int, steps: int, figures: dict[str, float]) -> None:
        decay = min(0.8, step / (step + 9))
        for name, weight in weights(run).items():
            means[name] = decay * means[name] + (1 - decay) * weight

    def evaluate(given: Any = None) -> Any:
        measured.append({name: weight.clone() for name, weight in (given or {}).items()})
        return measure(given)

    run.watch, run.evaluator.run = watch, evaluate  # type: ignore[method-assign]
    run.run()
    for name, last in weights(run).items():
        torch.testing.assert_close(measured[0][name], means[name])
        assert not torch.allclose(measured[0][name], last)
    with pytest.raises(InputError, match=r"average is 1; it must be at least 0 and below 1"):
        TrainingSettings(average=1)


@pytest.mark.parametrize("average", [0, 0.9])
def test_a_resumed_run_equals_an_uninterrupted_one(average: float, model: Model, data: SequenceList, tmp_path: Path) -> None:
    whole = training(model, data, tmp_path / "whole", average=average)
    record = whole.run()
    cut = training(model, data, tmp_path / "cut", average=average)

    def stop(step: int, steps: int, figures: dict[str, float]) -> None:
        if step == 10:  # two steps after the checkpoint of step 8
            raise KeyboardInterrupt

    cut.watch = stop
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    again = training(model, data, tmp_path / "cut", average=average)
    resumed = again.run(resume=True)
    ours, theirs = weights(again), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (resumed["history"], resumed["tokens"], resumed["best"]) == (record["history"], record["tokens"], record["best"])


def test_a_damaged_checkpoint_is_named(model: Model, data: SequenceList, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run to continue"):
        training(model, data, tmp_path).run(resume=True)
    run = training(model, data, tmp_path, steps=4, evaluate_every=4)
    run.run()
    file = tmp_path / "run" / "checkpoint.pt"
    whole, held = file.read_bytes(), torch.load(file, weights_only=True)
    spoilt = [
        held | {"progress": None},
        held | {"progress": {}},
        held | {"module": {}},
        held | {"stepper": {}},
        held | {"module": {name: one[:1] for name, one in held["module"].items()}},
        {},
        [1],
    ]
    for content in (b"", whole[: len(whole) // 2], b"x" * 100, *spoilt):
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        with pytest.raises(StorageError, match="checkpoint.pt cannot be read .*start again in another folder"):
            training(model, data, tmp_path, steps=4, evaluate_every=4).run(resume=True)


def test_a_broken_record_is_not_a_finished_run(tmp_path: Path) -> None:
    for content in ("{", "[" * 100_000, "5", "{}", '"stored"'):
        (tmp_path / "record.json").write_text(content)
        assert read_record(tmp_path) is None
        with pytest.raises(StorageError, match="the draft vocabulary itself is stored: repair the record, or delete it"):
            record_draft_vocabulary(tmp_path, {"count": 16})
    (tmp_path / "record.json").write_text('{"stored": {}, "history": [NaN]}')
    assert read_record(tmp_path) is not None


def test_passes_of_a_step_add_up(model: Model, data: SequenceList, tmp_path: Path) -> None:
    """Every pass of a step counts once: two passes of four sequences nearly equal one of eight, up to the means per pass."""
    one, two = (training(model, data, tmp_path / str(n), at_once=n) for n in (8, 4))
    found = []
    for run in (one, two):
        run._learn(0)
        found.append(float(run.sums["loss"]))
    assert found[1] == pytest.approx(found[0], rel=0.1)


def test_the_measured_figure_is_that_of_the_engine(model: Model, data: SequenceList, tmp_path: Path) -> None:
    run = training(model, data, tmp_path)
    record = run.run()
    drafter = TwoHeads()
    engine = Engine(model, drafter, slots=1, max_context=64)
    load_into(drafter, tmp_path, model)
    asked = [Request(one.prompt, Sampling(seed=0), max_new_tokens=8) for one in run.evaluator.prompts]
    assert Stats.of(engine.generate(asked)).tokens_per_round == record["stored"]["tokens_per_round"]


def test_nan_stops_and_keeps_the_last_good_checkpoint(model: Model, data: SequenceList, tmp_path: Path) -> None:
    run = training(model, data, tmp_path)
    learned = run.drafter.loss
    run.drafter.loss = lambda *given: (learned(*given)[0] * (torch.nan if run.progress.step >= 5 else 1), {})  # type: ignore
    with pytest.raises(NumericsError, match=r"step 6; .*last good checkpoint is .*checkpoint.pt.*lower learning rate"):
        run.run()
    assert all(torch.isfinite(weight).all() for weight in weights(run).values())
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["progress"]["step"] == 4


def test_nan_that_is_noticed_late_changes_nothing(
    model: Model, data: SequenceList, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the host reads figures every few steps: the weights are still those before the broken step."""
    monkeypatch.setitem(loop.REPORT, "cpu", 5)
    run, other = (training(model, data, tmp_path / name, checkpoint_every=100) for name in ("broken", "sound"))
    learned = run.drafter.loss
    bad = iter([False] * 12 + [True] + [False] * 99)  # two passes per step: the seventh step
    run.drafter.loss = lambda *given: (learned(*given)[0] * (torch.nan if next(bad) else 1), {})  # type: ignore
    with pytest.raises(NumericsError, match=r"step 7; .*there is no checkpoint yet"):
        run.settings = replace(run.settings, evaluate_every=100)
        run.run()
    for step in range(6):
        other._learn(step)
    assert run.progress.step == 10 and all(torch.equal(weights(run)[name], w) for name, w in weights(other).items())


def test_refusals(model: Model, data: SequenceList, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run to continue"):
        training(model, data, tmp_path).run(resume=True)
    training(model, data, tmp_path, steps=4).run()
    with pytest.raises(InputError, match="already holds a run; continue it with --resume"):
        training(model, data, tmp_path).run()
    with pytest.raises(InputError, match="was started with steps 4, not 5; learning_rate 0.02, not 0.5; give the same"):
        training(model, data, tmp_path, steps=5, learning_rate=0.5).run(resume=True)
    with pytest.raises(InputError, match="was started with trials 3, sha256 .*, not 2, sha256 "):
        training(model, data, tmp_path, prompts=2, steps=4).run(resume=True)
    with pytest.raises(InputError, match="a batch of 8 sequences does not divide into passes of 3"):
        training(model, data, tmp_path, at_once=3)
    with pytest.raises(InputError, match="a step reads 99; lower --batch"):
        training(model, data, tmp_path, batch=99)
    with pytest.raises(DrafterError, match="plain has no weights to train"):
        training(model, data, tmp_path, make=Plain)
    with pytest.raises(InputError, match="no prompts to measure"):
        Training(model, TwoHeads, data, data, [], TrainingSettings(**QUICK), tmp_path)  # type: ignore[arg-type]


def test_an_epoch_reads_every_sequence_once_in_its_own_order() -> None:
    settings = TrainingSettings(batch=4, steps=12)
    order = Order(torch.arange(24) + 5, settings)
    first, second = ([order.batch_at(step) for step in range(6 * e, 6 * e + 6)] for e in (0, 1))
    assert order.steps == 12
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(24)) and first != second
    assert Order(torch.arange(24) + 5, settings).batch_at(7) == second[1]


def test_lengths_are_rounded_up_on_cuda() -> None:
    """On CUDA to a multiple, at most to the maximum; on the CPU to the longest sequence."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [length_on(cuda, length, 640) for length in (1, 64, 65, 630, 640)] == [64, 64, 128, 640, 640]
    assert length_on(cuda, 90, 100) == 100 and length_on(cpu, 65, 640) == 65
    data = SequenceList([(torch.arange(1, length), torch.ones(length - 1).bool()) for length in (4, 70, 9)])
    tokens, mask = padded(data, [0, 2], 640, cpu)
    assert tokens.shape == mask.shape == (2, 8) and tokens[0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_the_rate_rises_and_falls() -> None:
    settings = TrainingSettings(learning_rate=1.0, warm_up=4, floor=0.1)
    rates = [settings.rate(step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_read_equals_the_pass_of_the_engine_and_ignores_padding(model: Model) -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    longer = torch.cat([torch.tensor([[5, 6, 7, 0, 0]]), tokens])
    alone, both = (model.read(rows, Needs(hidden=True, logits=True, taps=(2,))) for rows in (tokens, longer))
    stock = model.hf(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(alone.require_logits(), stock, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both.require_hidden()[0, :3], alone.require_hidden()[0, :3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both.taps[2][1], alone.taps[2][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("int8", 1 / 254), ("int4", 1 / 8)])
def test_saved_weights_come_back(model: Model, tmp_path: Path, dtype: Any, error: float) -> None:
    one, other = TwoHeads(), TwoHeads()
    one.prepare(model, 1)
    other.prepare(model, 1)
    save(one, tmp_path, model, dtype)
    load_into(other, tmp_path, model)
    for name, weight in one.module.state_dict().items():
        scale = weight.abs().amax(-1, keepdim=True)
        assert ((other.module.state_dict()[name] - weight).abs() <= scale * error * 1.01).all()


def test_a_drafter_of_another_target_is_refused(model: Model, tmp_path: Path) -> None:
    drafter = TwoHeads()
    drafter.prepare(model, 1)
    with pytest.raises(DrafterError, match=r"config.json is missing"):
        load_into(drafter, tmp_path, model)
    save(drafter, tmp_path, model)
    half = Model(fresh("llama", torch.float16), name="the same in half precision")
    load_into(drafter, tmp_path, half)
    with pytest.raises(DrafterError, match="trained for tiny .* but the target is other .* train one"):
        load_into(drafter, tmp_path, Model(fresh("llama", torch.float32, seed=1), name="other"))
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"vocab_size"', '"words"'))
    with pytest.raises(DrafterError, match="does not say which model it was trained for"):
        load_into(drafter, tmp_path, model)
    (tmp_path / "config.json").write_text(config)
    held = drafter.module.state_dict()
    write_weights({**held, "0.weight": held["0.weight"][1:]}, tmp_path / "model.safetensors", "bfloat16")
    with pytest.raises(DrafterError, match=r"0.weight has shape \(31, 32\), but needs \(32, 32\)"):
        load_into(drafter, tmp_path, model)
    write_weights({"0.weight": held["0.weight"]}, tmp_path / "model.safetensors", "bfloat16")
    with pytest.raises(DrafterError, match="lacks tensor '0.bias'"):
        load_into(drafter, tmp_path, model)
    save(drafter, tmp_path, model)
    with pytest.raises(DrafterError, match="was trained with {'heads': 2}"):
        three = TwoHeads(3)
        three.prepare(model, 1)
        load_into(three, tmp_path, model)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(DrafterError, match="cannot be read"):
        load_into(drafter, tmp_path, model)
    file.unlink()
    with pytest.raises(DrafterError, match="model.safetensors is missing"):
        load_into(drafter, tmp_path, model)
