"""What a training run stores: a checkpoint to resume from, and next to the saved drafter its record and model card.

A checkpoint is complete or absent. The weights in the folder are those of the best evaluation so far, at any time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foreword.errors import InputError, StorageError
from foreword.files import read_json

CHECKPOINT = "checkpoint.pt"


@dataclass
class TrainingProgress:
    """How far a run is. `about`: what it was started with; a run with other settings may not resume it."""

    about: dict[str, Any]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of learning
    evaluating: float = 0.0  # seconds too
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def best_figure(self) -> float:
        return self.best.get("tokens_per_round", 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Of learning; evaluations have a clock of their own."""
        return self.tokens / self.seconds if self.seconds else 0.0


class TrainingClock:
    """Adds elapsed time to a run's progress."""

    def __init__(self, progress: TrainingProgress) -> None:
        self.progress, self.last = progress, time.perf_counter()

    def read(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self.last
        self.last = now

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.read()
        yield
        now = time.perf_counter()
        self.progress.evaluating += now - self.last
        self.last = now


def write_checkpoint(folder: Path, progress: TrainingProgress, module: dict[str, Any], optimizer: dict[str, Any]) -> None:
    file, partial = folder / CHECKPOINT, folder / f"{CHECKPOINT}.partial"
    with says_why(folder):
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"progress": vars(progress), "module": module, "optimizer": optimizer}, partial)
        partial.replace(file)


@contextmanager
def says_why(folder: Path) -> Iterator[None]:
    """A full disk, by name; torch calls it a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write to {folder} ({error}); make room, then --resume") from error


def read_checkpoint(folder: Path, about: dict[str, Any]) -> tuple[TrainingProgress, dict[str, Any], dict[str, Any]]:
    if not (folder / CHECKPOINT).is_file():
        raise InputError(f"{folder} holds no run to go on with; leave --resume out to begin one")
    with refuses_damage(folder):
        held = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
        progress, module, optimizer = TrainingProgress(**held["progress"]), held["module"], held["optimizer"]
        other = _differences(dict(progress.about), json.loads(json.dumps(about)))
    if other:
        raise InputError(f"the run in {folder} was begun with {'; '.join(other)}; give the same, or name another folder")
    return progress, module, optimizer


@contextmanager
def refuses_damage(folder: Path) -> Iterator[None]:
    """Whatever a damaged checkpoint is to torch: OSError, RuntimeError, KeyError, UnpicklingError..."""
    try:
        yield
    except Exception as error:
        reason = repr(error).partition(". ")[0]  # torch goes on with advice to trust the file
        told = f"the checkpoint {folder / CHECKPOINT} cannot be read ({reason})"
        raise StorageError(f"{told}; begin again in another folder") from error


def _differences(made: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What differs, each with both values; of settings and the like only those that do."""
    found = []
    for name in wanted:
        before, now = made.get(name), wanted[name]
        if isinstance(before, dict) and isinstance(now, dict):
            found += _differences(before, {key: now.get(key) for key in {**before, **now}})
        elif before != now:
            found.append(f"{name} {before}, not {now}")
    return found


def write_record(folder: Path, progress: TrainingProgress, more: dict[str, Any]) -> dict[str, Any]:
    """Write record.json and README.md next to the weights."""
    run = {"step": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 1)}
    run |= {"evaluating_seconds": round(progress.evaluating, 1), "tokens_per_second": round(progress.tokens_per_second)}
    record = {**progress.about, **run, "best": progress.best, "history": progress.history, **more}
    _write_both(folder, record)
    return record


def _write_both(folder: Path, record: dict[str, Any]) -> None:
    told = card(record)  # first: of a record that holds too little nothing is written
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "README.md").write_text(told)


def note_words(folder: Path, told: dict[str, Any]) -> None:
    """VocabularyHead that were chosen after training, in the record and the card, where a run left these."""
    file = folder / "record.json"
    if not file.is_file():
        return
    try:
        _write_both(folder, read_json(file, strict=False) | {"words": told})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        told_of = f"{file} cannot be read and written again ({error!r})"
        raise StorageError(f"{told_of}; the words themselves are stored: mend the record, or delete it") from error


def read_record(folder: Path) -> dict[str, Any] | None:
    """Of a run that came to its end."""
    try:
        record = read_json(folder / "record.json", strict=False)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "stored" in record else None


def _words(record: dict[str, Any]) -> list[str]:
    told = record.get("words")
    if told is None or told["count"] == told["of"]:
        return []
    share = f"{100 * told['covered']:.1f} % of what the model wrote"
    return [f"It guesses among {told['count']:,} of the {told['of']:,} tokens: those that were {share}.", ""]


def card(record: dict[str, Any]) -> str:
    best, target, asked = record["best"], record["target"], record["settings"]["steps"]
    steps = (
        f"{record['step']} steps" if asked in (None, record["step"]) else f"{record['step']} of the {asked} steps asked for"
    )
    figure = (record.get("stored") or best)["tokens_per_round"]
    lines = [
        f"# A drafter for {target['name']}: {record['method']}",
        "",
        f"It guesses tokens ahead for {target['name']}, which checks every guess: the text does not change, only the speed.",
        "Use it with Foreword, on that model alone.",
        "",
        *_words(record),
        f"Trained on {record['tokens']:,} tokens in {steps}; these are the weights of step {best['step']}, "
        f"the best by tokens per round on prompts kept apart (greedy, at most {record['settings']['rows']} rows a pass): "
        f"**{figure:.2f}**.",
        "",
        "| category | prompts | tokens/round | accepted by position |",
        "|---|---|---|---|",
    ]
    for name, part in (record.get("stored") or best)["categories"].items():
        shares = " ".join(f"{share:.2f}" for share in part["accepted_per_position"])
        lines.append(f"| {name} | {part['prompts']} | {part['tokens_per_round']:.2f} | {shares} |")
    lines += ["", "| on texts kept apart | |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in best["figures"].items()]
    return "\n".join([*lines, "", "How it was trained, with every setting: record.json.", ""])
