"""The training loop, one for every Trainable: read texts with the frozen target, ask the drafter for its loss, step.

In: a target, a way to make the drafter, texts, prompts kept apart. Out: a folder with the best drafter by measured tokens
per round. A step depends on its number, the weights and the optimizer alone, random numbers included: a run that was cut
and goes on is the run that was not, bit for bit. On a GPU the host runs ahead, and asks for figures every few steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from foreword.core.drafter import Drafter
from foreword.core.trainable import Trainable
from foreword.drafters.checkpoint import Stored
from foreword.drafters.saved import load_into, method_of, save, write_config
from foreword.errors import CapacityError, DrafterError, InputError, NumericsError
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model
from foreword.train.evaluate import DrafterFigures, HeldOutPrompt, Measure, computing, rates_apart, read_apart, told_of
from foreword.train.frequent import among, counts_of, frequent, told_of_words, warn_of_few
from foreword.train.record import (
    CHECKPOINT,
    TrainingClock,
    TrainingProgress,
    read_checkpoint,
    read_record,
    refuses_damage,
    says_why,
    write_checkpoint,
    write_record,
)
from foreword.train.schedule import Order, Texts, TrainingSettings, padded
from foreword.train.step import Stepper

Watch = Callable[[int, int, dict[str, float]], None]  # step, of how many, figures
REPORT = {"cpu": 1, "cuda": 20}  # steps between two times that figures are asked for


def processes(device: str | None = None) -> Any:
    """accelerate's view of this process among those that train together; alone, there is one."""
    try:
        from accelerate import Accelerator  # noqa: PLC0415  an extra: only training needs it
    except ImportError as error:
        raise InputError("training needs accelerate; pip install accelerate") from error
    return Accelerator(cpu=device == "cpu")


class Training:
    def __init__(
        self,
        model: Model,
        make: Callable[..., Drafter],
        texts: Texts,
        apart: Texts,
        trials: Sequence[HeldOutPrompt],
        settings: TrainingSettings,
        folder: str | Path,
        about: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
        stored: Stored = "bfloat16",
        graph: bool = True,
        watch: Watch = lambda step, steps, figures: None,
    ) -> None:
        """`make` takes options of the method. `about`: what else decides the weights, such as where the texts are from;
        `origin`: who runs this where. Both go to the record; `about` must be equal for a run to go on. `graph`: as of
        `foreword.load`, when tokens per round are measured. `watch` is told of figures."""
        self.model, self.texts, self.apart, self.settings, self.watch = model, texts, apart, settings, watch
        self.graph = graph
        self.folder, self.run_folder, self.stored = Path(folder), Path(folder) / "run", stored
        self.group, self.origin, self.stopped = processes(model.device.type), origin or {}, False
        self.order = Order(texts.lengths, settings)
        self.at_once = _at_once(settings, self.group.num_processes)
        if settings.max_length > model.max_context:
            raise InputError(f"max_length is {settings.max_length}, {model.name} reads {model.max_context} tokens at most")
        model.hf.requires_grad_(False)
        counts = counts_of(texts, model.vocab_size)
        words = frequent(counts, model.ends, settings.cover)
        self.make = among(words, make)
        torch.manual_seed(settings.seed)
        self.drafter = _trainable(self.make(), model)
        self.measure = Measure(model, self.make, trials, settings.new_tokens, graph)
        self.module = self.drafter.module.to(torch.promote_types(model.dtype, torch.float32))
        self.module.train()
        self.stepper = Stepper(self.module, settings.clip, settings.weight_decay)
        told: dict[str, Any] = {"method": method_of(self.drafter), "config": self.drafter.config, "store": stored}
        told |= {"target": Fingerprint.of(model).to_dict(), "settings": asdict(settings), "trials": told_of(trials)}
        told |= {"words": told_of_words(words, counts)} if self.drafter.vocabulary is not None else {}
        if self.group.is_main_process:
            settings.warn_of_warm_up(self.order.steps)
            if "words" in told:
                warn_of_few(told["words"], counts)
        told |= about or {}
        self.progress = TrainingProgress(json.loads(json.dumps(told)))
        self.sums: dict[str, Tensor] = {}

    def stop(self) -> None:
        """End after the step that is being made, with a checkpoint to go on from."""
        self.stopped = True

    def run(self, resume: bool = False) -> dict[str, Any]:
        """To the end, from the beginning or from the last checkpoint; the record."""
        if resume:
            self._resume()
        elif (self.run_folder / CHECKPOINT).exists():
            raise InputError(f"{self.folder} holds a run already; go on with it by --resume, or name another folder")
        if self.progress.step == self.order.steps and (done := read_record(self.folder)):
            return done
        self.clock = TrainingClock(self.progress)
        for step in range(self.progress.step, self.order.steps):
            with _says_when_memory_is_out(self.at_once):
                self._learn(step)
            self.progress.step = step + 1
            every = REPORT[self.model.device.type], self.settings.evaluate_every, self.settings.checkpoint_every
            if any(map(self._is_due, every)) or (self.stopped and self.group.num_processes == 1):
                self._pause()
        return self._finish()

    def _is_due(self, every: int) -> bool:
        return self.progress.step == self.order.steps or self.progress.step % every == 0

    def _pause(self) -> None:
        """Ask the device for figures; evaluate, write and stop where that is due."""
        figures, stopped = self._report(), self._agreed_to_stop()
        evaluates = self._is_due(self.settings.evaluate_every)
        if evaluates:
            with self.clock.evaluating():
                figures |= self._evaluate()
        if stopped or evaluates or self._is_due(self.settings.checkpoint_every):
            self._checkpoint()
        self.watch(self.progress.step, self.order.steps, figures)
        if stopped and self.progress.step < self.order.steps:
            raise KeyboardInterrupt

    def _learn(self, step: int) -> None:
        """One step of the optimizer: passes over this process's share of the texts, then one change of the weights."""
        torch.manual_seed((self.settings.seed * 1_000_003 + step) * 4099 + self.group.process_index)
        self.stepper.forget()
        chosen = self.order.texts(step)
        self.progress.tokens += int(self.texts.lengths[chosen].clamp(max=self.settings.max_length).sum())
        parts = [chosen[first : first + self.at_once] for first in range(0, len(chosen), self.at_once)]
        for part in parts[self.group.process_index :: self.group.num_processes]:
            self._add(self._backward(part, len(parts) // self.group.num_processes))
        if self.group.num_processes > 1:
            for gradient in self.stepper.gradients():
                gradient.copy_(self.group.reduce(gradient, "mean"))
        norm = self.stepper.step(self.settings.rate(step, self.order.steps))
        self._add({"gradient": norm, "steps": torch.ones_like(norm)})

    def _add(self, figures: dict[str, Tensor]) -> None:
        for name, value in figures.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _report(self) -> dict[str, float]:
        """Figures of the steps since the last time, which all were sound."""
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
        """Processes that are told to stop hear it at different steps, and must stop at the same one."""
        if self.group.num_processes == 1:
            return self.stopped
        told = torch.tensor(float(self.stopped), device=self.model.device)
        return bool(self.group.reduce(told, "sum") > 0)

    def _backward(self, part: list[int], passes: int) -> dict[str, Tensor]:
        tokens, mask = padded(self.texts, part, self.settings.max_length, self.model.device)
        with computing(self.model):
            loss, figures = self.drafter.loss(tokens, mask, self.model.read(tokens, self.drafter.needs), self.model)
        (loss / passes).backward()
        shown = {name: value for name, value in figures.items() if not name.startswith("rows/")}
        return {name: value.detach().double() / passes for name, value in {"loss": loss, **shown}.items()}

    def _broken(self, step: int) -> NoReturn:
        kept = self.run_folder / CHECKPOINT
        where = f"the last good checkpoint is {kept}" if kept.exists() else "there is no checkpoint yet"
        raise NumericsError(
            f"the loss or its gradient is not a number at step {step}; nothing of that step was kept, and {where}. "
            f"Try a lower learning rate than {self.settings.learning_rate}, or a longer warm-up, in another folder"
        )

    def _evaluate(self) -> dict[str, float]:
        """Every process computes the same; the first of them writes."""
        self.module.eval()
        figures = read_apart(self.drafter, self.model, self.apart, self.settings, self.at_once)
        self.module.train()
        measured = self.measure.run(self.module.state_dict())
        found = {"step": self.progress.step, "figures": figures, **measured.to_dict()}
        brief = {"step": self.progress.step, **figures, "tokens_per_round": measured.tokens_per_round}
        self.progress.history.append(brief)
        if measured.tokens_per_round > self.progress.best_figure:
            self.progress.best = found
            if self.group.is_main_process:
                with says_why(self.folder):
                    save(self.drafter, self.folder, self.model, self.stored)
                    write_record(self.folder, self.progress, self.origin)
        apart = {f"apart/{name}": value for name, value in figures.items()}
        return {**apart, "tokens_per_round": measured.tokens_per_round, "best": self.progress.best_figure}

    def _checkpoint(self) -> None:
        if self.group.is_main_process:
            write_checkpoint(self.run_folder, self.progress, self.module.state_dict(), self.stepper.optimizer.state_dict())

    def _resume(self) -> None:
        self.progress, module, optimizer = read_checkpoint(self.run_folder, self.progress.about)
        with refuses_damage(self.run_folder):
            self.module.load_state_dict(module)
            self.stepper.optimizer.load_state_dict(optimizer)

    def _finish(self) -> dict[str, Any]:
        """Measure once more what lies in the folder, as it was stored."""
        if not self.group.is_main_process:
            return {}
        drafter = cast(Trainable, self.measure.drafter)
        with says_why(self.folder):  # a run that was cut below may have left rates of its own there
            write_config(drafter, self.folder, self.model, self.stored)
        load_into(drafter, self.folder, self.model)
        stored = self.measure.run()
        if hasattr(drafter, "calibrate") and "rates" not in self.progress.about.get("options", {}):
            drafter, stored = self._with_own_rates(drafter, stored)
        with says_why(self.folder):
            write_config(drafter, self.folder, self.model, self.stored)
            more = {"config": drafter.config, "stored": {"dtype": self.stored, **stored.to_dict()}, **self.origin}
            return write_record(self.folder, self.progress, more)

    def _with_own_rates(self, drafter: Trainable, before: DrafterFigures) -> tuple[Trainable, DrafterFigures]:
        """The same weights with trees built from what they get right, if those bring more than the usual ones."""
        rates = rates_apart(drafter, self.model, self.apart, self.settings, self.at_once)
        trials, new_tokens = self.measure.trials, self.settings.new_tokens
        measure = Measure(self.model, lambda: self.make(rates=rates), trials, new_tokens, self.graph)
        after = measure.run(drafter.module.state_dict())
        better = after.tokens_per_round > before.tokens_per_round
        return (cast(Trainable, measure.drafter), after) if better else (drafter, before)


@contextmanager
def _says_when_memory_is_out(at_once: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"a pass over {at_once} texts does not fit the memory of the device; lower --at-once, or --max-length"
        ) from error


def _trainable(drafter: Drafter, model: Model) -> Trainable:
    if not hasattr(drafter, "loss"):
        raise DrafterError(
            f"{method_of(cast(Trainable, drafter))} has no weights to train; `foreword methods` says which do"
        )
    drafter.prepare(model, 1)
    return cast(Trainable, drafter)


def _at_once(settings: TrainingSettings, count: int) -> int:
    at_once = settings.at_once or max(1, settings.batch // count)
    if at_once < 1 or settings.batch % (at_once * count):
        raise InputError(
            f"a batch of {settings.batch} texts does not divide into passes of {at_once} on each of {count} processes"
        )
    return at_once
