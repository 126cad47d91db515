"""Make a looped model from a model: a group of its layers learns to do in several repeats what all of them do in one pass.

In: a Llama, and sequences that it generated. Out: a folder that `foreword.load` and transformers read. Every repeat ends in
an exit: norm and head give a prediction, which learns the original's distribution. Exit r of R weighs r / (1 + .. + R), so
the last counts most, and the first ones still predict well enough for a pipeline. Embedding and head are the original's and
stay as they are. The weights with the lowest held-out loss of the last exit are kept.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.target import Target
from foreword.drafting.lessons import LearnedHead, Lesson, figures_of, losses
from foreword.errors import InputError
from foreword.methods.speed import Speed
from foreword.model.fingerprint import Fingerprint
from foreword.model.loading import DTYPES, load_weights, without_progress_bars
from foreword.model.looped import Start, check_loopable, group_of, looped_model
from foreword.model.model import Model
from foreword.model.stack import Rows, Stack
from foreword.text import Tokenizer
from foreword.train.evaluate import Evaluator, HeldOutPrompt, prompts_digest
from foreword.train.exits import exits_of, measure_exits
from foreword.train.loop import TrainingLoop
from foreword.train.record import storage_errors, write_record
from foreword.train.schedule import TrainingData, TrainingSettings

STORED = "bfloat16"


@dataclass(frozen=True)
class LoopedOptions:
    """A group of `group` layers that is applied `repeats` times. `start`: its layers start as means of the original's layers
    at the same place ("average"), as its first layers ("first"), or as layers at even distances ("spread")."""

    group: int = 6
    repeats: int = 5
    start: Start = "average"

    def __post_init__(self) -> None:
        for name in ("group", "repeats"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"looped: {name} is {getattr(self, name)!r}; it must be a whole number, 1 or more")
        if self.start not in get_args(Start):
            raise InputError(f"looped: start is {self.start!r}; choose from {', '.join(get_args(Start))}")


class LoopedWeights(nn.Module):
    """What is trained: the layers of the group, and the final norm."""

    def __init__(self, original: Model, options: LoopedOptions) -> None:
        super().__init__()
        self.layers = group_of(original.family.layers(original.hf), options.group, options.start)
        self.norm = copy.deepcopy(original.hf.model.norm).requires_grad_(True)


class LoopedLearner:
    """Implements `Learner`: the loss of all exits."""

    needs = Needs(hidden=True)

    def __init__(self, original: Model, options: LoopedOptions) -> None:
        check_loopable(original.hf.config, options.group, options.repeats)
        self.original, self.options, self.module = original, options, LoopedWeights(original, options)
        self.weights = [2 * r / (options.repeats * (options.repeats + 1)) for r in range(1, options.repeats + 1)]

    def exits(self, tokens: Tensor) -> list[Tensor]:
        """Return the normed states [b, n, H] of sequences [b, n] after each repeat."""
        group, rows = self.options.group, Rows.whole_sequences(tokens.shape[1], tokens.device)
        taps = tuple(range(group, group * self.options.repeats + 1, group))
        applied = nn.ModuleList([*self.module.layers] * self.options.repeats)
        stack = Stack(self.original.hf, self.original.family, applied)  # a new one: fused layers would keep old weights
        walked = stack.walk(self.original.embed(tokens), rows, taps=taps)
        return [self.module.norm(state) for state in walked.taps.values()]

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        lesson = Lesson.of(tokens, mask, 1)
        outputs = [lesson.outputs(1, lesson.teacher(state)) for state in self.exits(tokens)]
        with torch.no_grad():
            teacher = target.norm(lesson.teacher(scores.require_hidden()))
        found = losses(outputs, LearnedHead.of(target), teacher)
        figures: dict[str, Tensor] = {}
        for repeat, (_, ranks) in enumerate(found, 1):
            figures |= figures_of(repeat, ranks, lesson.counts[:, 0])
        weighted = [weight * loss for weight, (loss, _) in zip(self.weights, found, strict=True)]
        return torch.stack(weighted).sum(), figures

    def model(self) -> Any:
        """Return the looped model with the current weights, as transformers has it."""
        head = self.original.head_weight()
        return looped_model(self.original.hf, self.module.layers, self.module.norm.weight, head, self.options.repeats)


class LoopedTraining(TrainingLoop):
    """Trains a looped model. The folder holds the weights with the lowest held-out loss so far."""

    learner: LoopedLearner

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        options: LoopedOptions,
        data: TrainingData,
        held_out: TrainingData,
        prompts: list[HeldOutPrompt],
        settings: TrainingSettings,
        folder: str | Path,
        about: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
        graph: bool = True,
    ) -> None:
        """`prompts`: of the final evaluation, in the real engine. The others are as in `Training`."""
        self.tokenizer, self.held_out, self.prompts, self.graph = tokenizer, held_out, prompts, graph
        record: dict[str, Any] = {"looped": asdict(options), "target": Fingerprint.of(model).to_dict()}
        record |= {"settings": asdict(settings), "trials": prompts_digest(prompts), **(about or {})}
        super().__init__(model, LoopedLearner(model, options), data, settings, folder, record, origin)

    def _evaluate(self) -> dict[str, float]:
        self.module.eval()
        found = measure_exits(self.learner.exits, self.model.head, self.model, self.held_out, self.settings, self.at_once)
        self.module.train()
        brief = {"step": self.progress.step, **found.to_dict()}
        self.progress.history.append(brief)
        if not self.progress.best or found.final < self.progress.best["final"]:
            self.progress.best = brief
            if self.group.is_main_process:
                with storage_errors(self.folder):
                    self._save()
                    write_record(self.folder, self.progress, self.origin, looped_card)
        figures = {f"held_out/loss/{repeat}": loss for repeat, loss in enumerate(found.losses, 1)}
        figures |= {"held_out/original": found.original, "held_out/settled": found.settled}
        return figures | {"held_out/final": found.final, "best": self.progress.best["final"]}

    def _save(self) -> None:
        """Write model and tokenizer as a folder that `foreword.load` reads. Each file is replaced when the new one is
        complete."""
        building = self.run_folder / "model"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        with without_progress_bars():
            self.learner.model().to(DTYPES[STORED]).save_pretrained(building)
            self.tokenizer.hf.save_pretrained(building)
        for file in sorted(building.iterdir()):
            file.replace(self.folder / file.name)
        building.rmdir()

    def _finish(self) -> dict[str, Any]:
        if not self.group.is_main_process:
            return {}
        made = Model(load_weights(self.folder, self.model.device, self.model.dtype), name=self.folder.name)
        figures = measure_exits(exits_of(made), made.head, self.model, self.held_out, self.settings, self.at_once)
        drafted = Evaluator(made, Speed, self.prompts, self.settings.new_tokens, self.graph).run()
        made.release()
        stored = {"dtype": STORED, "rounds_per_token": 1 / drafted.tokens_per_round, **figures.to_dict()}
        with storage_errors(self.folder):
            return write_record(self.folder, self.progress, {"stored": stored, **self.origin}, looped_card)


def looped_card(record: dict[str, Any]) -> str:
    """Return the text of README.md, the model card."""
    made, found = record["looped"], record.get("stored") or record["best"]
    name, depth = record["target"]["name"], made["group"] * made["repeats"]
    lines = [
        f"# A looped model made from {name}",
        "",
        f"{made['group']} layers are applied {made['repeats']} times: {depth} layers deep, with the weights of "
        f"{made['group']}.",
        f"It learned to answer as {name} does; its text is its own. Foreword runs it with every method; `speed` pipelines",
        "its repeats. Transformers loads it after `import foreword.model.looped`.",
        "",
        f"Trained on {record['tokens']:,} tokens in {record['step']} steps; these are the weights of step "
        f"{record['best']['step']}, those with the lowest held-out loss.",
        "",
        "| held-out loss, nats | |",
        "|---|---|",
        f"| {name} | {found['original']:.3f} |",
        *(f"| after repeat {repeat} | {loss:.3f} |" for repeat, loss in enumerate(found["losses"], 1)),
    ]
    if "rounds_per_token" in found:
        said = f"With the method `speed` a token took {found['rounds_per_token']:.2f} rounds on held-out prompts, greedy."
        lines += ["", f"{said} Without a pipeline it takes {made['repeats']}."]
    return "\n".join([*lines, "", "record.json says how it was trained, with every setting.", ""])
