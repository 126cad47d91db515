"""The files of a training run: a checkpoint to resume from, and next to the saved drafter its record and model card.

A checkpoint is complete or absent. The weights in the folder are those of the best evaluation so far, at any time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
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
    """How far a run is. `about`: the settings it was started with; a run with other settings may not resume it."""

    about: dict[str, Any]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training steps
    evaluating: float = 0.0  # seconds of evaluations
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def best_figure(self) -> float:
        return self.best.get("tokens_per_round", 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of training steps, without evaluations."""
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


def write_checkpoint(folder: Path, progress: TrainingProgress, module: dict[str, Any], stepper: dict[str, Any]) -> None:
    file, partial = folder / CHECKPOINT, folder / f"{CHECKPOINT}.partial"
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"progress": vars(progress), "module": module, "stepper": stepper}, partial)
        partial.replace(file)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Report a full disk as a StorageError; torch raises a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write to {folder} ({error}); free some space, then continue with --resume") from error


def read_checkpoint(folder: Path, about: dict[str, Any]) -> tuple[TrainingProgress, dict[str, Any], dict[str, Any]]:
    if not (folder / CHECKPOINT).is_file():
        raise InputError(f"{folder} holds no run to continue; leave --resume out to start one")
    with checkpoint_errors(folder):
        held = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
        progress, module, stepper = TrainingProgress(**held["progress"]), held["module"], held["stepper"]
        other = _differences(dict(progress.about), json.loads(json.dumps(about)))
    if other:
        raise InputError(f"the run in {folder} was started with {'; '.join(other)}; give the same, or name another folder")
    return progress, module, stepper


@contextmanager
def checkpoint_errors(folder: Path) -> Iterator[None]:
    """Report a damaged checkpoint as a StorageError; torch raises OSError, RuntimeError, KeyError, UnpicklingError..."""
    try:
        yield
    except Exception as error:
        reason = repr(error).partition(". ")[0]  # the rest of torch's message advises to trust the file
        problem = f"the checkpoint {folder / CHECKPOINT} cannot be read ({reason})"
        raise StorageError(f"{problem}; start again in another folder") from error


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the entries that differ, each with both values. Dictionaries are compared entry by entry."""
    found = []
    for name in new:
        before, now = old.get(name), new[name]
        if isinstance(before, dict) and isinstance(now, dict):
            found += _differences(before, {key: now.get(key) for key in {**before, **now}})
        elif before != now:
            found.append(f"{name} {before}, not {now}")
    return found


def write_record(
    folder: Path, progress: TrainingProgress, more: dict[str, Any], card: Callable[[dict[str, Any]], str] | None = None
) -> dict[str, Any]:
    """Write record.json and README.md next to the weights. `card` makes the latter from the record; None: a drafter's."""
    run = {"step": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 1)}
    run |= {"evaluating_seconds": round(progress.evaluating, 1), "tokens_per_second": round(progress.tokens_per_second)}
    record = {**progress.about, **run, "best": progress.best, "history": progress.history, **more}
    _write_both(folder, record, card or model_card)
    return record


def _write_both(folder: Path, record: dict[str, Any], card: Callable[[dict[str, Any]], str]) -> None:
    text = card(record)  # first: if the record is incomplete, nothing is written
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "README.md").write_text(text)


def record_draft_vocabulary(folder: Path, described: dict[str, Any]) -> None:
    """Note a draft vocabulary chosen after training in the record and the model card, if the folder has them."""
    file = folder / "record.json"
    if not file.is_file():
        return
    try:
        _write_both(folder, read_json(file, strict=False) | {"words": described}, model_card)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{file} cannot be updated ({error!r})"
        raise StorageError(f"{problem}; the draft vocabulary itself is stored: repair the record, or delete it") from error


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a finished run, or None."""
    try:
        record = read_json(folder / "record.json", strict=False)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "stored" in record else None


def _draft_vocabulary(record: dict[str, Any]) -> list[str]:
    words = record.get("words")
    if words is None or words["count"] == words["of"]:
        return []
    share = f"{100 * words['covered']:.1f} % of what the model wrote"
    return [f"Its draft vocabulary has {words['count']:,} of the {words['of']:,} tokens, which make up {share}.", ""]


def model_card(record: dict[str, Any]) -> str:
    """Return the text of README.md, the model card."""
    best, target, asked = record["best"], record["target"], record["settings"]["steps"]
    steps = (
        f"{record['step']} steps" if asked in (None, record["step"]) else f"{record['step']} of the {asked} steps asked for"
    )
    figure = (record.get("stored") or best)["tokens_per_round"]
    lines = [
        f"# A drafter for {target['name']}: {record['method']}",
        "",
        f"It drafts tokens for {target['name']}, which checks all of them: the output does not change, only the speed.",
        "Use it with Foreword and this model; it works with no other.",
        "",
        *_draft_vocabulary(record),
        f"Trained on {record['tokens']:,} tokens in {steps}; these are the weights of step {best['step']}, "
        f"the best by tokens per round on held-out prompts (greedy, at most {record['settings']['rows']} rows per pass): "
        f"**{figure:.2f}**.",
        "",
        "| category | prompts | tokens/round | accepted by position |",
        "|---|---|---|---|",
    ]
    for name, found in (record.get("stored") or best)["categories"].items():
        shares = " ".join(f"{share:.2f}" for share in found["accepted_per_position"])
        lines.append(f"| {name} | {found['prompts']} | {found['tokens_per_round']:.2f} | {shares} |")
    lines += ["", "| on held-out sequences | |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in best["figures"].items()]
    return "\n".join([*lines, "", "record.json says how it was trained, with every setting.", ""])
