"""The training loop, one for everything that learns from a target: read sequences with it, get a loss, update.

In: a frozen target, what learns, and sequences; for a drafter also held-out prompts. Out: a folder with the best weights, of
a drafter those with the most measured tokens per round. A step depends only on its number, the weights and the optimizer,
random numbers included: an interrupted and resumed run equals an uninterrupted one bit for bit. On a GPU the host runs ahead
and reads figures every few steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn

from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.target import Target
from foreword.core.trainable import Trainable
from foreword.drafters.checkpoint import StoredDtype
from foreword.drafters.saved import load_into, method_of, save, write_config
from foreword.errors import CapacityError, DrafterError, InputError, NumericsError
from foreword.model.attention import for_any_length
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model
from foreword.train.evaluate import (
    DrafterFigures,
    Evaluator,
    HeldOutPrompt,
    autocast_for,
    held_out_figures,
    held_out_rates,
    prompts_digest,
)
from foreword.train.frequent_tokens import (
    counts_of,
    describe_draft_vocabulary,
    frequent,
    warn_of_few,
    with_draft_vocabulary,
)
from foreword.train.record import (
    CHECKPOINT,
    TrainingClock,
    TrainingProgress,
    checkpoint_errors,
    read_checkpoint,
    read_record,
    storage_errors,
    write_checkpoint,
    write_record,
)
from foreword.train.schedule import Order, TrainingData, TrainingSettings, padded
from foreword.train.step import Stepper

Watch = Callable[[int, int, dict[str, float]], None]  # step, number of steps, figures
REPORT = {"cpu": 1, "cuda": 20}  # steps between reads of the figures


def processes(device: str | None = None) -> Any:
    """Return accelerate's view of the processes that train together; there may be only this one."""
    try:
        from accelerate import Accelerator  # noqa: PLC0415  an extra: only training needs it
    except ImportError as error:
        raise InputError("training needs accelerate; pip install accelerate") from error
    return Accelerator(cpu=device == "cpu")


class Learner(Protocol):
    """What is trained: a drafter (`core.Trainable`), or a model that is made from the target."""

    @property
    def needs(self) -> Needs: ...  # of the target's pass

    @property
    def module(self) -> nn.Module: ...  # the weights

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        """As in `core.Trainable`."""


class TrainingLoop:
    """The steps of a run and its checkpoints. Who inherits it says how weights are evaluated and saved."""

    def __init__(
        self,
        model: Model,
        learner: Learner,
        data: TrainingData,
        settings: TrainingSettings,
        folder: str | Path,
        about: dict[str, Any],
        origin: dict[str, Any] | None = None,
        watch: Watch = lambda step, steps, figures: None,
    ) -> None:
        """`about`: everything that decides the weights; a run with another `about` may not resume this one. `origin`:
        machine and versions. Both go to the record. `watch` is called with figures."""
        self.model, self.learner, self.data, self.settings, self.watch = model, learner, data, settings, watch
        self.folder, self.run_folder = Path(folder), Path(folder) / "run"
        self.group, self.origin, self.stopped = processes(model.device.type), origin or {}, False
        self.order = Order(data.lengths, settings)
        self.at_once = _at_once(settings, self.group.num_processes)
        if settings.max_length > model.max_context:
            raise InputError(f"max_length is {settings.max_length}, {model.name} takes {model.max_context} tokens at most")
        model.hf.requires_grad_(False)
        self.module = learner.module.to(torch.promote_types(model.dtype, torch.float32))
        self.module.train()
        self.stepper = Stepper(self.module, settings.clip, settings.weight_decay, settings.average)
        if self.group.is_main_process:
            settings.warn_of_warm_up(self.order.steps)
        self.progress = TrainingProgress(json.loads(json.dumps(about)))
        self.sums: dict[str, Tensor] = {}

    def stop(self) -> None:
        """Stop after the current step, with a checkpoint to resume from."""
        self.stopped = True

    def run(self, resume: bool = False) -> dict[str, Any]:
        """Train to the end, from the start or from the last checkpoint. Return the record."""
        if resume:
            self._resume()
        elif (self.run_folder / CHECKPOINT).exists():
            raise InputError(f"{self.folder} already holds a run; continue it with --resume, or name another folder")
        if self.progress.step == self.order.steps and (done := read_record(self.folder)):
            return done
        self.clock = TrainingClock(self.progress)
        with for_any_length():
            self._learn_all()
        return self._finish()

    def _learn_all(self) -> None:
        """Make the steps that are left."""
        for step in range(self.progress.step, self.order.steps):
            with _memory_errors(self.at_once):
                self._learn(step)
            self.progress.step = step + 1
            every = REPORT[self.model.device.type], self.settings.evaluate_every, self.settings.checkpoint_every
            if any(map(self._is_due, every)) or (self.stopped and self.group.num_processes == 1):
                self._pause()

    def _is_due(self, every: int) -> bool:
        return self.progress.step == self.order.steps or self.progress.step % every == 0

    def _pause(self) -> None:
        """Read figures from the device; evaluate, write a checkpoint and stop if that is due."""
        figures, stopped = self._report(), self._agreed_to_stop()
        evaluates = self._is_due(self.settings.evaluate_every)
        if evaluates:
            with self.clock.evaluating(), self.stepper.averaged():
                figures |= self._evaluate()
        if stopped or evaluates or self._is_due(self.settings.checkpoint_every):
            self._checkpoint()
        self.watch(self.progress.step, self.order.steps, figures)
        if stopped and self.progress.step < self.order.steps:
            raise KeyboardInterrupt

    def _learn(self, step: int) -> None:
        """Make one optimizer step: passes over this process's share of the batch, then one update of the weights."""
        torch.manual_seed((self.settings.seed * 1_000_003 + step) * 4099 + self.group.process_index)
        self.stepper.zero_gradients()
        chosen = self.order.batch_at(step)
        self.progress.tokens += int(self.data.lengths[chosen].clamp(max=self.settings.max_length).sum())
        passes = [chosen[first : first + self.at_once] for first in range(0, len(chosen), self.at_once)]
        for indices in passes[self.group.process_index :: self.group.num_processes]:
            self._add(self._backward(indices, len(passes) // self.group.num_processes))
        if self.group.num_processes > 1:
            for gradient in self.stepper.gradients():
                gradient.copy_(self.group.reduce(gradient, "mean"))
        norm = self.stepper.step(self.settings.rate(step, self.order.steps))
        self._add({"gradient": norm, "steps": torch.ones_like(norm)})

    def _add(self, figures: dict[str, Tensor]) -> None:
        for name, value in figures.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _report(self) -> dict[str, float]:
        """Return the mean figures of the steps since the last call, and check that these steps were sound."""
        found = dict(zip(self.sums, torch.stack([value.double() for value in self.sums.values()]).tolist(), strict=True))
        self.sums, steps = {}, found.pop("steps")
        sound = self.stepper.check()
        if sound is not None:
            self._broken(self.progress.step - int(steps) + sound + 1)
        self.clock.read()
        rate = self.settings.rate(self.progress.step - 1, self.order.steps)
        figures = {name: value / steps for name, value in found.items()}
        return figures | {"rate": rate, "tokens_per_second": self.progress.tokens_per_second}

    def _agreed_to_stop(self) -> bool:
        """Return whether any process was asked to stop. The signal reaches them at different steps; all stop at the same."""
        if self.group.num_processes == 1:
            return self.stopped
        stopped = torch.tensor(float(self.stopped), device=self.model.device)
        return bool(self.group.reduce(stopped, "sum") > 0)

    def _backward(self, indices: list[int], passes: int) -> dict[str, Tensor]:
        tokens, mask = padded(self.data, indices, self.settings.max_length, self.model.device)
        with autocast_for(self.model):
            loss, figures = self.learner.loss(tokens, mask, self.model.read(tokens, self.learner.needs), self.model)
        (loss / passes).backward()
        shown = {name: value for name, value in figures.items() if not name.startswith("rows/")}
        return {name: value.detach().double() / passes for name, value in {"loss": loss, **shown}.items()}

    def _broken(self, step: int) -> NoReturn:
        kept = self.run_folder / CHECKPOINT
        where = f"the last good checkpoint is {kept}" if kept.exists() else "there is no checkpoint yet"
        raise NumericsError(
            f"the loss or its gradient is not a number at step {step}; that step was discarded, and {where}. "
            f"Try a lower learning rate than {self.settings.learning_rate}, or a longer warm-up, in another folder"
        )

    def _evaluate(self) -> dict[str, float]:
        """Evaluate in every process, with equal results. Only the main process writes."""
        raise NotImplementedError

    def _checkpoint(self) -> None:
        if self.group.is_main_process:
            write_checkpoint(self.run_folder, self.progress, self.module.state_dict(), self.stepper.state_dict())

    def _resume(self) -> None:
        self.progress, module, stepper = read_checkpoint(self.run_folder, self.progress.about)
        with checkpoint_errors(self.run_folder):
            self.module.load_state_dict(module)
            self.stepper.load_state_dict(stepper)

    def _finish(self) -> dict[str, Any]:
        """Measure the stored weights once more, as a user would load them, and write the final record."""
        raise NotImplementedError


class Training(TrainingLoop):
    """Trains a drafter. The folder holds the weights with the most tokens per round so far."""

    def __init__(
        self,
        model: Model,
        make: Callable[..., Drafter],
        data: TrainingData,
        held_out: TrainingData,
        prompts: Sequence[HeldOutPrompt],
        settings: TrainingSettings,
        folder: str | Path,
        about: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
        stored: StoredDtype = "bfloat16",
        graph: bool = True,
        watch: Watch = lambda step, steps, figures: None,
    ) -> None:
        """`make` takes options of the method. `about`: what else decides the weights, such as the origin of the data.
        `graph`: as in `foreword.load`, for evaluations."""
        self.held_out, self.stored, self.graph = held_out, stored, graph
        counts = counts_of(data, model.vocab_size)
        bits = frequent(counts, model.ends, settings.cover)
        self.make = with_draft_vocabulary(bits, make)
        model.hf.requires_grad_(False)
        torch.manual_seed(settings.seed)
        self.drafter = _trainable(self.make(), model)
        record: dict[str, Any] = {"method": method_of(self.drafter), "config": self.drafter.config, "store": stored}
        record |= {
            "target": Fingerprint.of(model).to_dict(),
            "settings": asdict(settings),
            "trials": prompts_digest(prompts),
        }
        record |= {"words": describe_draft_vocabulary(bits, counts)} if self.drafter.vocabulary is not None else {}
        super().__init__(model, self.drafter, data, settings, folder, record | (about or {}), origin, watch)
        self.evaluator = Evaluator(model, self.make, prompts, settings.new_tokens, graph)
        if self.group.is_main_process and "words" in record:
            warn_of_few(record["words"], counts)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate in every process, with equal results. Only the main process writes."""
        self.module.eval()
        figures = held_out_figures(self.drafter, self.model, self.held_out, self.settings, self.at_once)
        self.module.train()
        measured = self.evaluator.run(self.module.state_dict())
        found = {"step": self.progress.step, "figures": figures, **measured.to_dict()}
        brief = {"step": self.progress.step, **figures, "tokens_per_round": measured.tokens_per_round}
        self.progress.history.append(brief)
        if measured.tokens_per_round > self.progress.best_figure:
            self.progress.best = found
            if self.group.is_main_process:
                with storage_errors(self.folder):
                    save(self.drafter, self.folder, self.model, self.stored)
                    write_record(self.folder, self.progress, self.origin)
        held_out = {f"held_out/{name}": value for name, value in figures.items()}
        return {**held_out, "tokens_per_round": measured.tokens_per_round, "best": self.progress.best_figure}

    def _finish(self) -> dict[str, Any]:
        """Measure the stored weights once more, as a user would load them, and write the final record."""
        if not self.group.is_main_process:
            return {}
        drafter = cast(Trainable, self.evaluator.drafter)
        with storage_errors(self.folder):  # an interrupted run may have left its measured rates in the config
            write_config(drafter, self.folder, self.model, self.stored)
        load_into(drafter, self.folder, self.model)
        stored = self.evaluator.run()
        if hasattr(drafter, "calibrate") and "rates" not in self.progress.about.get("options", {}):
            drafter, stored = self._with_measured_rates(drafter, stored)
        with storage_errors(self.folder):
            write_config(drafter, self.folder, self.model, self.stored)
            more = {"config": drafter.config, "stored": {"dtype": self.stored, **stored.to_dict()}, **self.origin}
            return write_record(self.folder, self.progress, more)

    def _with_measured_rates(self, drafter: Trainable, before: DrafterFigures) -> tuple[Trainable, DrafterFigures]:
        """Return the same weights with trees built from their own hit rates, if those give more tokens per round."""
        rates = held_out_rates(drafter, self.model, self.held_out, self.settings, self.at_once)
        prompts, new_tokens = self.evaluator.prompts, self.settings.new_tokens
        evaluator = Evaluator(self.model, lambda: self.make(rates=rates), prompts, new_tokens, self.graph)
        after = evaluator.run(drafter.module.state_dict())
        better = after.tokens_per_round > before.tokens_per_round
        return (cast(Trainable, evaluator.drafter), after) if better else (drafter, before)


@contextmanager
def _memory_errors(at_once: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"a pass over {at_once} sequences does not fit the memory of the device; lower --at-once, or --max-length"
        ) from error


def _trainable(drafter: Drafter, model: Model) -> Trainable:
    if not hasattr(drafter, "loss"):
        raise DrafterError(
            f"{method_of(cast(Trainable, drafter))} has no weights to train; `foreword methods` lists those that do"
        )
    drafter.prepare(model, 1)
    return cast(Trainable, drafter)


def _at_once(settings: TrainingSettings, count: int) -> int:
    at_once = settings.at_once or max(1, settings.batch // count)
    if at_once < 1 or settings.batch % (at_once * count):
        raise InputError(
            f"a batch of {settings.batch} sequences does not divide into passes of {at_once} on each of {count} processes"
        )
    return at_once
