"""`foreword train`: train a drafter, or a looped model, on folders of `foreword distill`."""

from __future__ import annotations

import json as encoder
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from foreword.cli.console import bar, complain, notes, print_json, screen
from foreword.cli.options import METHOD, Json, MethodOptions, ModelOptions
from foreword.cli.prove import make_folder
from foreword.errors import DrafterError, InputError
from foreword.methods import all_methods, find, trained_as

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.core.drafter import Drafter
    from foreword.train import HeldOutPrompt, LoopedOptions, Sequences, Shards, TrainingLoop, TrainingSettings

TRAIN_EXAMPLES = """\
[bold]Examples[/]

  foreword train medusa --data data/greedy --out drafters/medusa

  foreword train clover2 --data data/greedy --data data/sampled --out drafters/clover2 --tokens 60000000 --option taps=10,20

  foreword train clover --data data/greedy --out drafters/clover --prompts questions.jsonl --store int8

  foreword train hidden_transfer --sweep --data data/greedy --out sweeps/hidden_transfer

  foreword train looped --data data/greedy --data data/sampled --out looped --tokens 200000000 --option group=6

  accelerate launch -m foreword train hydra --data data/greedy --out drafters/hydra
"""

LOOPED = "looped"  # in place of a method: make a looped model, which is no drafter
LEARNING, MEASURING = "Learning", "Measuring"  # panels of --help
_of_learning = partial(typer.Option, rich_help_panel=LEARNING)
_of_measuring = partial(typer.Option, rich_help_panel=MEASURING)


Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "--method-option",
        metavar="KEY=VALUE",
        rich_help_panel=METHOD,
        help="An option of the method, such as heads=5, labels=soft or taps=10,20; may be repeated. Default: none.",
    ),
]


SweepFlag = Annotated[
    bool,
    typer.Option(
        "--sweep",
        metavar="",
        help="For hidden_transfer: find the layers that its steps should join, with one short run per step. Trains no "
        "drafter. --steps is the length of such a run.",
    ),
]


class Store(StrEnum):
    bfloat16 = "bfloat16"
    int8 = "int8"
    int4 = "int4"


@dataclass(frozen=True)
class LearningOptions:
    """Everything that decides the weights; the names are those of `TrainingSettings`."""

    tokens: Annotated[
        int | None, _of_learning(min=1, metavar="N", help="Train on about N tokens. Default: every sequence once.")
    ] = None
    steps: Annotated[
        int | None, _of_learning(min=1, metavar="N", help="Train for N steps, instead of --tokens. Default: see --tokens.")
    ] = None
    batch: Annotated[
        int | None,
        _of_learning(
            min=1,
            metavar="N",
            help="Sequences per step. Default: 64, or a sixteenth of all sequences if there are fewer than 1,024.",
        ),
    ] = None
    at_once: Annotated[
        int | None,
        _of_learning(
            min=1,
            metavar="N",
            help="Sequences per pass on one device; a step accumulates as many passes as it needs. Lower it if memory runs "
            "out. Default: the whole batch.",
        ),
    ] = None
    max_length: Annotated[
        int | None,
        _of_learning(min=3, metavar="N", help="Cut sequences to N tokens. Default: 1024, or the model's context."),
    ] = None
    learning_rate: Annotated[
        float, _of_learning(metavar="X", help="The highest learning rate; it is reached linearly and falls along a cosine.")
    ] = 2e-3
    warm_up: Annotated[int, _of_learning(min=0, metavar="N", help="Steps until the highest learning rate.")] = 100
    weight_decay: Annotated[float, _of_learning(min=0, metavar="X", help="Weight decay of AdamW.")] = 0.0
    average: Annotated[
        float,
        _of_learning(
            metavar="X",
            help="Evaluate and keep a moving average of the weights with this decay, such as 0.998; 0: the last weights.",
        ),
    ] = 0.0
    seed: Annotated[int, _of_learning(metavar="N", help="Seed of the order of sequences and of the initial weights.")] = 0
    cover: Annotated[
        float,
        _of_learning(
            metavar="X",
            help="Draft only the most frequent tokens that cover this share of the data; 1 takes all tokens.",
        ),
    ] = 0.98
    evaluate_every: Annotated[int, _of_measuring(min=1, metavar="N", help="Steps between evaluations.")] = 500
    checkpoint_every: Annotated[
        int, _of_learning(min=1, metavar="N", help="Steps between checkpoints; --resume continues from the last one.")
    ] = 200
    rows: Annotated[int, _of_measuring(min=2, metavar="N", help="The most rows of a verify pass in an evaluation.")] = 64
    new_tokens: Annotated[int, _of_measuring(min=1, metavar="N", help="Tokens per answer in an evaluation.")] = 128

    def settings(self) -> TrainingSettings:
        """Return the settings, with the library's defaults for what is not given."""
        from foreword.train import TrainingSettings  # noqa: PLC0415  imports torch

        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return TrainingSettings(**{name: value for name, value in given.items() if value is not None})

    def reaching(self, context: int) -> TrainingSettings:
        """Return the settings for a model with this context."""
        settings = self.settings()
        return settings if self.max_length else replace(settings, max_length=min(settings.max_length, context))

    def fitted(self, settings: TrainingSettings, sequences: int, processes: int) -> TrainingSettings:
        """Return the settings for this many training sequences."""
        from foreword.train import batch_for  # noqa: PLC0415  imports torch

        return settings if self.batch else replace(settings, batch=batch_for(sequences, self.at_once, processes))


@dataclass(frozen=True)
class MeasuringOptions:
    """Which prompts a drafter is evaluated on."""

    held_out: Annotated[
        float | None,
        _of_measuring(
            min=0,
            max=1,
            metavar="X",
            help="Share of the prompts that is held out and never trained on. Default: 0.01, but at least 4 prompts.",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        _of_measuring(metavar="FILE", help="Prompts on which tokens per round are measured. Default: the held-out ones."),
    ] = None
    measured: Annotated[
        int,
        _of_measuring(min=1, metavar="N", help="Measure on about N prompts, spread evenly over the categories of the file."),
    ] = 48

    def evaluation_prompts(self, held_out: Sequences, llm: LLM, new_tokens: int) -> list[HeldOutPrompt]:
        from foreword.train.evaluate import held_out_prompts, prompts_in_file  # noqa: PLC0415  imports torch

        longest = llm.engine.max_context - new_tokens
        if self.prompts is None:
            return held_out_prompts(held_out, self.measured, longest)
        return prompts_in_file(self.prompts, self.measured, longest, llm.tokenizer)


def _trained(method: str) -> str:
    if method == LOOPED:
        return method
    if find(method).looped:
        raise DrafterError(f"{method} has no weights to train; it runs the models that `foreword train {LOOPED}` makes")
    if not find(method).trained:
        known = ", ".join(name for name, one in all_methods().items() if one.trained and trained_as(name) == name)
        raise DrafterError(f"{method} has no weights to train; these have: {known}")
    if trained_as(method) != method:
        raise DrafterError(f"{method} takes the drafters of {trained_as(method)}; train that one")
    return method


def train(
    method: Annotated[
        str,
        typer.Argument(
            callback=_trained,
            autocompletion=lambda: [*all_methods(), LOOPED],
            metavar="METHOD",
            help="The method to train; `foreword methods` lists them. Or `looped`, which makes a looped model.",
        ),
    ],
    model: ModelOptions,
    learning: LearningOptions,
    measuring: MeasuringOptions,
    data: Annotated[
        list[Path], typer.Option(metavar="DIR", help="A folder that `foreword distill` wrote; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Write the drafter to this folder.")],
    option: Option = None,
    store: Annotated[
        Store,
        typer.Option(
            help="The format of the stored weights; int8 is half as large as bfloat16; int4, with deflated codes, is 0.3 "
            "times as large."
        ),
    ] = Store.bfloat16,
    resume: Annotated[bool, typer.Option("--resume", metavar="", help="Continue the run in --out.")] = False,
    sweep: SweepFlag = False,
    json: Json = False,
) -> None:
    """Train a drafter on what the model wrote: small weights that draft its next tokens.

    The frozen model reads the sequences of `foreword distill` during training, so only tokens are stored. At every
    evaluation the drafter answers prompts in the real engine. The folder holds the weights with the most tokens per round
    so far. A drafter works only with the model it was trained for.

    `looped` makes a model and not a drafter. The new model applies a group of layers (--option group=6) several times
    (--option repeats=5), and learns to answer as the given model does. The method `speed` is for such models alone.

    Ctrl-C ends the run after the current step; the same command with --resume continues exactly. On several GPUs:
    accelerate launch -m foreword train ... Needs accelerate, which the extra "train" installs.
    """
    settings, own = learning.settings(), MethodOptions(method_option=option or []).own()
    if method == LOOPED:
        return _make_looped(model, learning, measuring, data, out, _looped_options(own, sweep, store), resume, json)
    drafter = _check_options(method, settings.rows, own)
    if sweep:
        _check_sweep(method, drafter, own, resume)
    make_folder(out)
    group, model = _with_processes(model)
    with model.load(MethodOptions(method="plain"), slots=1) as llm:
        if sweep:
            record = _sweep(llm, drafter, own, _split(llm, learning, measuring, data, group.num_processes), out)
            return print_json(record) if json else screen().print(_swept(method, record, out), soft_wrap=True)
        split = _split(llm, learning, measuring, data, group.num_processes)
        training = _training(llm, method, own, split, measuring, out, store.value, not model.no_cuda_graphs)
        record = _run(training, out, resume, shown=group.is_main_process)
    if json and group.is_main_process:
        print_json(record)
    elif group.is_main_process:
        screen().print(_summary(record, out), soft_wrap=True)


def _check_options(method: str, rows: int, own: dict[str, Any]) -> Drafter:
    """Check the options before the model is loaded."""
    from foreword.methods import untrained  # noqa: PLC0415  the method imports torch

    return untrained(method, rows=rows, **own)


def _check_sweep(method: str, drafter: Drafter, own: dict[str, Any], resume: bool) -> None:
    from foreword.drafting.transfer import Transfer  # noqa: PLC0415  imports torch

    if not isinstance(getattr(drafter, "options", None), Transfer):
        raise InputError(f"--sweep finds the layers of hidden_transfer; {method} has none to find: leave it out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("--sweep runs on one device; start it without accelerate launch")
    if resume:
        raise InputError("--sweep is short and always starts from the beginning; leave --resume out")
    if "layers" in own:
        raise InputError(f"--sweep finds the layers, and layers={own['layers']} is given; give one of them")


class Split(NamedTuple):
    """The data, split into training and held-out sequences, and the settings that fit it."""

    data: list[Shards]
    share: float
    train: Sequences
    held_out: Sequences
    settings: TrainingSettings


def _split(llm: LLM, learning: LearningOptions, measuring: MeasuringOptions, folders: list[Path], processes: int) -> Split:
    from foreword.model.fingerprint import Fingerprint  # noqa: PLC0415  imports torch
    from foreword.train import held_out_share, open_data, split_data  # noqa: PLC0415  imports torch

    data = open_data(folders, Fingerprint.of(llm.model))
    share = held_out_share(data) if measuring.held_out is None else measuring.held_out
    settings = learning.reaching(llm.model.max_context)
    train, held_out = split_data(data, share, settings.max_length)
    return Split(data, share, train, held_out, learning.fitted(settings, len(train.lengths), processes))


def _sweep(llm: LLM, drafter: Any, own: dict[str, Any], split: Split, out: Path) -> dict[str, Any]:
    """Run the sweep. Write sweep.json and its charts."""
    from foreword.bench.report import facts  # noqa: PLC0415  imports torch
    from foreword.bench.sweeps import draw  # noqa: PLC0415  start-up time
    from foreword.train import describe_data  # noqa: PLC0415  imports torch
    from foreword.train.record import storage_errors  # noqa: PLC0415  imports torch
    from foreword.train.sweep import Sweep  # noqa: PLC0415  imports torch

    with bar("sweeping") as show:
        found = Sweep(llm.model, drafter.options, split.train, split.held_out, split.settings, show).run()
    origin = {
        "options": own,
        "data": describe_data(split.data),
        "run": facts(dtype=str(llm.model.dtype).removeprefix("torch.")),
    }
    record: dict[str, Any] = encoder.loads(encoder.dumps(found | origin))
    with storage_errors(out):
        (out / "sweep.json").write_text(encoder.dumps(record, indent=1) + "\n")
        draw(record, out)
    return record


def _swept(method: str, record: dict[str, Any], out: Path) -> Table:
    """Return a table of accuracies by layer and step, in percent, and the command that trains with the best layers."""
    accuracy, blind = record["accuracy"], record["step 2 without sight of step 1"]
    layers = ",".join(map(str, record["layers"]))
    chosen = record["options"] | {"layers": layers + "," * (len(record["layers"]) == 1)}  # a comma makes a list of one
    options = " ".join(f"--option {name}={value}" for name, value in chosen.items())
    caption = f"layers {layers} · {record['seconds']:.0f} s · {out}\nforeword train {method} {options} ..."
    table = Table("layer", title="top-1 / top-5 of each step by the layer it joins after, %", caption=caption)
    columns = {f"step {step}": by_layer for step, by_layer in accuracy.items()}
    columns |= {"step 2 without step 1": blind} if blind else {}
    for name in columns:
        table.add_column(name, justify="right")
    for layer in sorted({layer for by_layer in columns.values() for layer in by_layer}, key=int):
        found = [by_layer.get(layer) for by_layer in columns.values()]
        cells = [f"{100 * one['top1']:.1f} / {100 * one['top5']:.1f}" if one else "" for one in found]
        table.add_row(layer, *cells)
    return table


def _with_processes(model: ModelOptions) -> tuple[Any, ModelOptions]:
    """Return accelerate's view, and the model options with this process's device. Packed linears have no gradients."""
    from foreword.model.loading import choose_device  # noqa: PLC0415  imports torch
    from foreword.train.loop import processes  # noqa: PLC0415  imports torch

    device = choose_device(model.device)
    group = processes(device.type)
    if group.num_processes > 1:
        device = group.device
    return group, replace(model, device=str(device), no_fused_layers=model.no_fused_layers or device.type == "cpu")


def _training(
    llm: LLM,
    method: str,
    own: dict[str, Any],
    split: Split,
    measuring: MeasuringOptions,
    out: Path,
    stored: Any,
    graph: bool,
) -> TrainingLoop:
    from foreword.bench.report import facts  # noqa: PLC0415  imports torch
    from foreword.methods import untrained  # noqa: PLC0415  imports torch
    from foreword.train import Training, describe_data  # noqa: PLC0415  imports torch

    data, share, train, held_out, settings = split

    def make(**more: Any) -> Drafter:
        return untrained(method, rows=settings.rows, **own | more)

    prompts = measuring.evaluation_prompts(held_out, llm, settings.new_tokens)
    about = {"options": own, "held_out": share, "data": describe_data(data)}
    origin = {"run": facts(dtype=str(llm.model.dtype).removeprefix("torch."))}
    return Training(llm.model, make, train, held_out, prompts, settings, out, about, origin, stored, graph)


def _looped_options(own: dict[str, Any], sweep: bool, store: Store) -> LoopedOptions:
    """Check the options of a looped model before the model is loaded."""
    from foreword.train import LoopedOptions  # noqa: PLC0415  imports torch

    if sweep:
        raise InputError("--sweep finds the layers of hidden_transfer; a looped model has none to find: leave it out")
    if store != Store.bfloat16:
        raise InputError(f"a looped model is stored in bfloat16; --store {store.value} is for drafters: leave it out")
    known = [one.name for one in fields(LoopedOptions)]
    if unknown := [name for name in own if name not in known]:
        raise InputError(f"{LOOPED}: no option is called {unknown[0]!r}; there are: {', '.join(known)}")
    return LoopedOptions(**own)


def _make_looped(
    model: ModelOptions,
    learning: LearningOptions,
    measuring: MeasuringOptions,
    data: list[Path],
    out: Path,
    options: LoopedOptions,
    resume: bool,
    json: bool,
) -> None:
    """Make a looped model from a model."""
    from foreword.bench.report import facts  # noqa: PLC0415  imports torch
    from foreword.train import LoopedTraining, describe_data  # noqa: PLC0415  imports torch

    make_folder(out)
    group, model = _with_processes(model)
    with model.load(MethodOptions(method="plain"), slots=1) as llm:
        found, share, train, held_out, settings = _split(llm, learning, measuring, data, group.num_processes)
        prompts = measuring.evaluation_prompts(held_out, llm, settings.new_tokens)
        about = {"held_out": share, "data": describe_data(found)}
        origin = {"run": facts(dtype=str(llm.model.dtype).removeprefix("torch."))}
        sources = llm.model, llm.tokenizer, options, train, held_out, prompts, settings, out, about, origin
        training = LoopedTraining(*sources, graph=not model.no_cuda_graphs)
        record = _run(training, out, resume, shown=group.is_main_process)
    if json and group.is_main_process:
        print_json(record)
    elif group.is_main_process:
        screen().print(_looped_summary(record, out), soft_wrap=True)


def _run(training: TrainingLoop, out: Path, resume: bool, shown: bool) -> dict[str, Any]:
    from foreword.train.tensorboard import HINT, tensorboard_writer  # noqa: PLC0415  start-up time

    write = tensorboard_writer(out / "run") if shown else None
    if shown and write is None:
        notes().print(f"[dim]{HINT}[/]", soft_wrap=True)
    with bar("training", shown) as show, _finishing(training):
        last: dict[str, float] = {}

        def watch(step: int, steps: int, figures: dict[str, float]) -> None:
            last.update(figures)
            show(_line(last), step, steps)
            if shown and "best" in figures:
                notes().print(f"step {step} of {steps}: {_evaluation(figures)}", soft_wrap=True)
            if write is not None:
                write(step, figures)

        training.watch = watch
        try:
            return training.run(resume)
        except KeyboardInterrupt:
            if shown:
                complain(
                    f"stopped after step {training.progress.step}; the same command with --resume continues", "note", "bold"
                )
            raise


@contextmanager
def _finishing(training: TrainingLoop) -> Iterator[None]:
    """Let the first Ctrl-C end the current step; the second interrupts it."""

    def interrupted(*_: object) -> None:
        training.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _line(figures: dict[str, float]) -> str:
    parts = [f"loss {figures['loss']:.3f}", f"{figures['tokens_per_second']:,.0f} tokens/s", *_accuracies(figures, "")]
    if "tokens_per_round" in figures:
        parts.append(f"{figures['tokens_per_round']:.2f} tokens/round, best {figures['best']:.2f}")
    elif "best" in figures:
        parts.append(f"held-out loss {figures['held_out/final']:.3f}, best {figures['best']:.3f}")
    return " · ".join(parts)


def _evaluation(figures: dict[str, float]) -> str:
    if "tokens_per_round" not in figures:
        return _looped_evaluation(figures)
    round_ = f"{figures['tokens_per_round']:.3f} tokens/round (best {figures['best']:.3f})"
    parts = [round_, f"loss {figures['held_out/loss']:.3f}", *_accuracies(figures, "held_out/")]
    return " · ".join([*parts, f"{figures['tokens_per_second']:,.0f} tokens/s"])


def _looped_evaluation(figures: dict[str, float]) -> str:
    exits = " ".join(f"{value:.3f}" for name, value in figures.items() if name.startswith("held_out/loss/"))
    parts = [f"loss after each repeat {exits} (best {figures['best']:.3f})", f"original {figures['held_out/original']:.3f}"]
    parts += [f"settled after {figures['held_out/settled']:.2f} repeats", f"{figures['tokens_per_second']:,.0f} tokens/s"]
    return " · ".join(parts)


def _looped_summary(record: dict[str, Any], out: Path) -> str:
    stored = record["stored"]
    parts = [
        f"{stored['rounds_per_token']:.2f} rounds/token with speed",
        f"loss {stored['final']:.3f}, after the first repeat {stored['first']:.3f}, original {stored['original']:.3f}",
        f"the weights of step {record['best']['step']}",
        f"{record['tokens']:,} tokens in {record['seconds']:.0f} s, {record['tokens_per_second']:,}/s",
    ]
    return f"{out}: " + " · ".join(parts)


def _accuracies(figures: dict[str, float], prefix: str) -> list[str]:
    """Return the accuracies by head, in percent."""
    found = []
    for kind, name in (("top1", "top-1"), ("top5", "top-5")):
        values = [f"{100 * value:.0f}" for key, value in figures.items() if key.startswith(f"{prefix}{kind}/")]
        found += [f"{name} {' '.join(values)} %"] if values else []
    return found


def _summary(record: dict[str, Any], out: Path) -> str:
    best, stored = record["best"], record["stored"]
    parts = [
        f"{stored['tokens_per_round']:.2f} tokens/round as {stored['dtype']}",
        f"the weights of step {best['step']}",
        f"{record['tokens']:,} tokens in {record['seconds']:.0f} s, {record['tokens_per_second']:,}/s",
        f"evaluations {record['evaluating_seconds']:.0f} s",
    ]
    return f"{out}: " + " · ".join(parts)
