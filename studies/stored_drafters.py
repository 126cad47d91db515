"""What storing drafters in fewer bits costs, and storing them again: `python studies/stored_drafters.py measure --help`.

In: folders of trained drafters. `measure` answers prompts with every drafter in several forms. It prints bits per weight,
tokens per round, and their ratio to those of the folder as it is, with a 95% interval over the prompts. `convert` stores a
folder in another form. `sizes` answers nothing. Made results/stored_drafters_cpu/.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

from foreword.api import load
from foreword.bench.figures import bootstrap_interval
from foreword.cli.train import Store
from foreword.core.sampling import Sampling
from foreword.core.trainable import Trainable
from foreword.drafters.checkpoint import read_weights, write_weights
from foreword.drafters.deflated import deflated, inflated
from foreword.drafters.saved import CONFIG, VOCABULARY, WEIGHTS, read_config, restore
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.model.draft_linears import int8_codes
from foreword.model.model import Model
from foreword.results import Stats
from study import first_turns, keep, write

AS_IT_IS = "as it is"
CLIPS = torch.tensor([1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7])
GROUP = 32  # columns that share a scale of 2 bytes
SAMPLE = 100_000  # weights that the levels of a matrix are learned from
app = typer.Typer(add_completion=False, help=__doc__)

Rounded = tuple[Tensor, float]  # the weights as they come back, and their bytes


def int8(weight: Tensor) -> Rounded:
    """One scale per row, which holds the row's largest weight."""
    codes, scale = int8_codes(weight)
    return codes.float() * scale, codes.numel() + 4 * scale.numel()


def grouped(weight: Tensor, bits: int) -> Rounded:
    """One scale for 32 columns of a row: of eight, the one with the smallest squared error."""
    groups, lowest = weight.unflatten(1, (-1, GROUP)), -(2 ** (bits - 1))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / lowest
    scales = (largest.where(largest != 0, 1.0) * CLIPS).bfloat16().float().unsqueeze(-1)  # [N, K / 32, clips, 1]
    each = groups.unsqueeze(2)
    found = (each / scales).round_().clamp_(lowest, -lowest - 1).mul_(scales)
    best = (found - each).square_().sum(-1).argmin(-1)[..., None, None].expand(*groups.shape[:2], 1, GROUP)
    return found.gather(2, best).flatten(1), (bits / 8 + 2 / GROUP) * weight.numel()


def learned(weight: Tensor, levels: int = 16) -> Rounded:
    """One scale for 32 columns of a row, and levels between -1 and 1 learned for the matrix (Lloyd's algorithm)."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12).bfloat16().float()
    values = (groups / scales).flatten()
    chosen = torch.randint(len(values), (SAMPLE,), generator=torch.Generator().manual_seed(0))
    sample, counts = values[chosen], scales.expand_as(groups).flatten()[chosen].square()  # errors grow with the scale
    table = sample.quantile((torch.arange(levels) + 0.5) / levels)
    for _ in range(25):
        nearest = torch.bucketize(sample, (table[1:] + table[:-1]) / 2)
        sums, weights = (torch.zeros(levels).index_add_(0, nearest, one) for one in (sample * counts, counts))
        table = torch.where(weights > 0, sums / weights, table)
    found = table[torch.bucketize(values, (table[1:] + table[:-1]) / 2)].view_as(groups) * scales
    return found.flatten(1), (0.5 + 2 / GROUP) * weight.numel() + 2 * levels


def in_steps(weight: Tensor, steps: int) -> Rounded:
    """Deflated codes, as `--store int4` has them with 4 steps in a row's median magnitude."""
    parts = deflated(weight, steps)
    return inflated(*parts), sum(part.nbytes for part in parts)


FORMS: dict[str, Callable[[Tensor], Rounded]] = {
    "int8": int8,
    "4 bits, groups": lambda weight: grouped(weight, 4),
    "5 bits, groups": lambda weight: grouped(weight, 5),
    "16 levels, groups": learned,
    "2 steps": lambda weight: in_steps(weight, 2),
    "4 steps": lambda weight: in_steps(weight, 4),
    "8 steps": lambda weight: in_steps(weight, 8),
}


def in_form(weights: dict[str, Tensor], form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all matrices in a form; and its bits per weight, its bytes, and the mean error relative to a matrix."""
    made = {name: FORMS[form](weight) for name, weight in weights.items() if weight.dim() > 1}
    size, count = sum(size for _, size in made.values()), sum(weight.numel() for weight, _ in made.values())
    errors = [float((weight - weights[name]).norm() / weights[name].norm()) for name, (weight, _) in made.items()]
    about = {"bits": 8 * size / count, "bytes": round(size), "error": sum(errors) / len(errors)}
    return {name: weight for name, (weight, _) in made.items()}, about


def floats(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder, without the bitmap of its draft vocabulary."""
    return {name: weight.float() for name, weight in read_weights(folder / WEIGHTS).items() if name != VOCABULARY}


class StoredDrafter:
    """A drafter whose weights are replaced by what a form makes of them, and the prompts that it is measured on."""

    def __init__(self, folder: Path, model: Model, asked: list[tuple[int, ...]], new_tokens: int, rows: int, slots: int):
        self.asked, self.new_tokens = asked, new_tokens
        self.weights, drafter = floats(folder), restore(folder, model, rows=rows)
        self.module = cast(Trainable, drafter).module
        self.engine = Engine(model, drafter, slots=slots, max_context=max(map(len, asked)) + new_tokens)

    def form(self, name: str) -> dict[str, Any]:
        """Take the weights in a form, and return what is known about it."""
        matrices, about = ({}, {}) if name == AS_IT_IS else in_form(self.weights, name)
        self.module.load_state_dict(self.weights | matrices)
        self.engine.loop.forget()
        return about

    def answer(self) -> list[tuple[int, int]]:
        """Answer all prompts. Return tokens and rounds of each."""
        runs = self.engine.generate([Request(one, Sampling(seed=0), self.new_tokens) for one in self.asked])
        return [(len(run.tokens), Stats.of(run).rounds) for run in runs]


@app.command()
def measure(
    drafters: Annotated[str, typer.Option(help="Folders of trained drafters, separated by commas.")],
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")],
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    forms: Annotated[str, typer.Option(help=f"Forms, separated by semicolons: {'; '.join(FORMS)}.")] = ";".join(FORMS),
    per_group: Annotated[int, typer.Option(min=1, help="Prompts of each category, at most.")] = 4,
    longest: Annotated[int, typer.Option(min=1, help="Leave out prompts of more tokens.")] = 600,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 96,
    rows: Annotated[int, typer.Option(min=2, help="Rows of a pass, at most.")] = 32,
    slots: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Answer prompts greedily with every drafter in every form, and print tokens per round."""
    chosen = _known(forms)
    llm = load(model, method="plain", slots=1, device=device)
    asked = [one for one in first_turns(llm, prompts, per_group) if len(one) <= longest]
    found: list[dict[str, Any]] = []
    for folder in map(Path, drafters.split(",")):
        stored = StoredDrafter(folder, llm.model, asked, max_new_tokens, rows, slots)
        for one in _compared(stored, chosen):
            found.append({"method": read_config(folder)["method"], **one})
            print(_line(found[-1]), flush=True)
            keep(out, "stored", llm.model, found, prompts=len(asked), max_new_tokens=max_new_tokens, rows=rows)


@app.command()
def sizes(
    drafters: Annotated[str, typer.Option(help="Folders of trained drafters, separated by commas.")],
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    forms: Annotated[str, typer.Option(help=f"Forms, separated by semicolons: {'; '.join(FORMS)}.")] = ";".join(FORMS),
) -> None:
    """Print bits per weight and the error of every form, without a model."""
    found: list[dict[str, Any]] = []
    for folder in map(Path, drafters.split(",")):
        weights = floats(folder)
        for form in _known(forms):
            found.append({"method": read_config(folder)["method"], "form": form, **in_form(weights, form)[1]})
            print(_line(found[-1]), flush=True)
    write(out, "stored", found, torch.device("cpu"))


def _known(forms: str) -> list[str]:
    """Return the forms of a list, if all of them are known."""
    chosen = forms.split(";")
    if unknown := sorted(set(chosen) - set(FORMS)):
        raise typer.BadParameter(f"{unknown[0]!r} is no form; choose from {'; '.join(FORMS)}")
    return chosen


def _compared(stored: StoredDrafter, forms: list[str]) -> Iterator[dict[str, Any]]:
    base: list[tuple[int, int]] = []
    for form in (AS_IT_IS, *forms):
        about = stored.form(form)
        counts = stored.answer()
        base = base or counts
        tokens, rounds, base_tokens, base_rounds = (
            sum(column) for column in zip(*((*own, *other) for own, other in zip(counts, base, strict=True)), strict=True)
        )
        low, high = bootstrap_interval([[*own, *other] for own, other in zip(counts, base, strict=True)])
        figures = {"tokens_per_round": tokens / rounds, "ratio": tokens / rounds * base_rounds / base_tokens}
        yield {"form": form, **about, **figures, "low": low, "high": high, "tokens": tokens, "rounds": rounds}


def _line(one: dict[str, Any]) -> str:
    size = f"{one['bits']:.2f} bits, error {one['error']:.3f}" if "bits" in one else ""
    if "ratio" not in one:
        return f"{one['method']:16}{one['form']:20}{size}"
    interval = "" if one["low"] is None or one["form"] == AS_IT_IS else f", {one['low']:.3f} to {one['high']:.3f}"
    rate = f"{one['tokens_per_round']:.3f} tokens per round, {one['ratio']:.3f}{interval}"
    return f"{one['method']:16}{one['form']:20}{size:26}{rate}"


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(help="A trained drafter.")],
    out: Annotated[Path, typer.Argument(help="Write it to this folder.")],
    store: Annotated[Store, typer.Option(help="The form.")] = Store.int4,
) -> None:
    """Store a drafter again in another form. Its record is copied; the figures there are of the form before."""
    about, weights = read_config(folder), read_weights(folder / WEIGHTS)
    out.mkdir(parents=True, exist_ok=True)
    write_weights(weights, out / WEIGHTS, store.value)
    (out / CONFIG).write_text(json.dumps(about | {"dtype": store.value}, indent=1) + "\n", encoding="utf-8")
    for name in ("record.json", "README.md"):
        if (folder / name).is_file() and folder.resolve() != out.resolve():
            shutil.copyfile(folder / name, out / name)
    before, after = ((one / WEIGHTS).stat().st_size for one in (folder, out))
    print(f"{out}: {after:,} bytes, {folder}: {before:,}")


if __name__ == "__main__":
    app()
