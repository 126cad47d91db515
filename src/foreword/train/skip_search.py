"""Search a plan of self_speculative: the half-layers that the target leaves out while it drafts for itself.

In: sequences that the target generated. Out: a folder with the plan and its record. A plan is judged by the speed-up that is
expected of it: from its agreement with the whole target, measured in one pass over parts of those sequences, and from what
passes and half-layers cost on this machine. Each step leaves out one more half-layer, the one after which the plan is the
fastest. Measured agreements are stored, so an interrupted search repeats its steps without passes.
Paper: Self-Speculative Decoding (arXiv 2309.08168), which searches by Bayesian optimisation of measured speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.core.draft import Draft, Tree
from foreword.core.needs import Half, Needs, Skip
from foreword.core.state import Batch
from foreword.drafters.saved import save_plan
from foreword.drafting.self_drafting import best_length, break_even, expected_tokens
from foreword.drafting.skipped_target import firsts
from foreword.errors import DataError, InputError
from foreword.files import read_json
from foreword.model.cost import HalfCosts, curve_for, half_costs
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model
from foreword.ops.top import first_largest
from foreword.train.record import storage_errors
from foreword.train.schedule import TrainingData

METHOD, TRIALS, RECORD = "self_speculative", "search.json", "record.json"

ShowProgress = Callable[[str, int, int], None]  # what is tried, trials done, trials of this step


@dataclass(frozen=True)
class SearchSettings:
    """A plan is judged on `windows` parts of sequences, each `length` tokens long and after at most `prefix` tokens. The
    first step tries every half-layer, a later one the `tried` that were best so far. The search ends `patience` steps after
    the best plan. Drafts are as long as a part at most."""

    windows: int = 64
    length: int = 12
    prefix: int = 256
    tried: int = 16
    patience: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more")


@dataclass(frozen=True)
class Window:
    """A part of a sequence that the target generated, and all tokens before it."""

    prefix: Tensor  # [p]
    tokens: Tensor  # [length]


def windows_of(data: TrainingData, settings: SearchSettings) -> list[Window]:
    """Return one window of each sequence that has room for one, from places spread evenly, until there are enough."""
    found: list[Window] = []
    for index in range(len(data.lengths)):
        tokens, mask = data[index]
        starts = [
            start
            for start in range(1, min(len(tokens) - settings.length, settings.prefix) + 1)
            if bool(mask[start : start + settings.length].all())
        ]
        if starts:
            start = starts[len(found) * len(starts) // settings.windows]
            found.append(Window(tokens[:start], tokens[start : start + settings.length]))
        if len(found) == settings.windows:
            break
    if not found:
        needed = f"{settings.length} tokens that the model wrote, after at most {settings.prefix}"
        raise DataError(f"no sequence of the data has {needed}; lower --length, or distil longer answers")
    return found


@contextmanager
def agreement_on(model: Model, windows: Sequence[Window]) -> Iterator[Callable[[Skip], float]]:
    """Yield a function that returns how often the target without some half-layers has the token first that the whole target
    has first. The rows before a window are those of the whole target, as in a draft."""
    slots, length = len(windows), len(windows[0].tokens)
    batch = Batch.of(list(range(slots)), max(len(one.prefix) for one in windows), model.device)
    tokens = torch.stack([one.tokens for one in windows]).to(model.device)
    draft = Draft(tokens, Tree.chain(length, model.device), torch.full((slots,), length, device=model.device))
    with model.temporary_cache(slots, batch.span, length), torch.inference_mode():

        def hidden(skip: Skip | None) -> Tensor:
            return model.score(batch, draft, Needs(hidden=True), skip=skip, logits="none").require_hidden()

        for slot, one in enumerate(windows):
            _read(model, slot, one.prefix)
        own = first_largest(model.head(model.norm(hidden(None))))
        yield lambda skip: float(firsts(model, hidden(skip)).eq(own).float().mean())


def _read(model: Model, slot: int, tokens: Tensor) -> None:
    """Read the tokens of a sequence into the cache, and commit them."""
    batch, rows = Batch.of([slot], 0, model.device), tokens.unsqueeze(0).to(model.device)
    size = torch.tensor([len(tokens)], device=model.device)
    model.score(batch, Draft(rows, Tree.chain(len(tokens), model.device), size), Needs(), logits="none")
    model.cache.advance(batch, size)


@dataclass(frozen=True)
class MachineCosts:
    """What drafting and verifying cost on this machine. A pass over one row costs 1."""

    halves: HalfCosts
    passes: tuple[float, ...]  # over 1, 2, .. rows

    @staticmethod
    def of(model: Model, length: int) -> MachineCosts:
        """Measure the costs, or recall them."""
        model.use_costs(model.curve or curve_for(model))
        return MachineCosts(half_costs(model), tuple(round(model.cost(rows), 4) for rows in range(1, length + 2)))

    def verify(self, rows: int) -> float:
        return self.passes[rows - 1]

    @staticmethod
    def read(kept: dict[str, Any]) -> MachineCosts:
        return MachineCosts(HalfCosts.read(kept["halves"]), tuple(map(float, kept["passes"])))


class Trials:
    """The measured agreements of a search, by plan, and the costs that it goes by. They are in a file after each trial."""

    def __init__(self, folder: Path, about: dict[str, Any], measure: Callable[[], MachineCosts]) -> None:
        """`about`: what the agreements depend on. A file of another search is refused."""
        self.folder, self.about = folder, json.loads(json.dumps(about))
        kept = self._read()
        self.costs = measure() if kept is None else MachineCosts.read(kept["costs"])
        self.agreements: dict[str, float] = {} if kept is None else dict(kept["agreements"])

    def _read(self) -> dict[str, Any] | None:
        file = self.folder / TRIALS
        if not file.is_file():
            return None
        try:
            kept: dict[str, Any] = read_json(file)
            about, _ = kept["about"], MachineCosts.read(kept["costs"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{file} cannot be read ({error!r}); start the search in another folder") from error
        if about != self.about:
            other = ", ".join(name for name in self.about if about.get(name) != self.about[name])
            raise InputError(f"the search in {self.folder} was started with another {other}; name another folder")
        return kept

    def agreement(self, skip: Skip, measure: Callable[[Skip], float]) -> float:
        """Return the agreement of a plan, measured now or before."""
        key = " ".join(f"{kind}{layer}" for kind, layer in skip.halves)
        if key not in self.agreements:
            self.agreements[key] = round(measure(skip), 5)
            self._write()
        return self.agreements[key]

    def _write(self) -> None:
        content = {"about": self.about, "costs": asdict(self.costs), "agreements": self.agreements}
        write_json(self.folder, TRIALS, content)


@dataclass(frozen=True)
class Judged:
    """A plan, and what is expected of it."""

    skip: Skip
    agreement: float
    draft_cost: float
    draft_tokens: int
    speedup: float

    @staticmethod
    def of(skip: Skip, agreement: float, costs: MachineCosts, most: int) -> Judged:
        cost = costs.halves.of(skip)
        length = best_length(agreement, cost, costs.verify, most, least=1)
        return Judged(skip, agreement, cost, length.tokens, length.speedup)

    @property
    def plan(self) -> dict[str, Any]:
        """The options that a drafter stores."""
        attention, mlp = sorted(self.skip.attention), sorted(self.skip.mlp)
        return {"attention": attention, "mlp": mlp, "agreement": self.agreement}

    def figures(self) -> dict[str, Any]:
        found = {"draft_cost": self.draft_cost, "draft_tokens": self.draft_tokens, "expected_speedup": self.speedup}
        return {**self.plan, **{name: round(value, 4) for name, value in found.items()}}


class SkipSearch:
    def __init__(self, model: Model, data: TrainingData, settings: SearchSettings, folder: Path, show: ShowProgress) -> None:
        """Search in a folder, which gets the best plan so far at any time. `data`: sequences that the model generated."""
        self.model, self.settings, self.folder, self.show = model, settings, folder, show
        if settings.length + settings.prefix > model.max_context:
            raise InputError(
                f"windows end {settings.length + settings.prefix} tokens after the start of a sequence, but {model.name} "
                f"takes {model.max_context}; lower --length"
            )
        self.windows = windows_of(data, settings)
        self.halves = Skip.of(tuple(range(model.layers)), tuple(range(model.layers))).halves

    def run(self, about_data: Any = None, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Search until the end, and return the record. `about_data` identifies the data, `more` is added to the record."""
        target = Fingerprint.of_function(self.model).to_dict()
        about = {"target": target, "settings": asdict(self.settings), "data": about_data}
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.trials = Trials(self.folder, about, lambda: MachineCosts.of(self.model, self.settings.length))
        steps: list[Judged] = []
        with agreement_on(self.model, self.windows) as measure:
            for step in self._steps(measure):
                steps.append(step)
                best = max(steps, key=lambda one: one.speedup)
                if best is step:
                    save_plan(METHOD, best.plan, self.folder, self.model)
                if len(steps) - steps.index(best) > self.settings.patience:
                    break
        record = about | self._record(best, steps) | (more or {})
        write_json(self.folder, RECORD, record)
        return record

    def _steps(self, measure: Callable[[Skip], float]) -> Iterator[Judged]:
        """Yield plans, each with one half-layer more than the one before it."""
        last: dict[Half, float] = {}  # the expected speed-up when a half-layer was last tried
        plan = Skip()
        for step in range(len(self.halves)):
            left = [half for half in self.halves if half not in plan.halves]
            ranked = sorted(left, key=lambda half: -last.get(half, 0.0))
            tried = ranked[: self.settings.tried] if step else left
            judged: list[Judged] = []
            for half in tried:
                judged.append(self._judged(Skip.of_halves([*plan.halves, half]), measure))
                last[half] = judged[-1].speedup
                expected = max(one.speedup for one in judged)
                self.show(f"{step + 1} half-layers, expected {expected:.2f}x", len(judged), len(tried))
            best = max(judged, key=lambda one: one.speedup)
            plan = best.skip
            yield best

    def _judged(self, skip: Skip, measure: Callable[[Skip], float]) -> Judged:
        return Judged.of(skip, self.trials.agreement(skip, measure), self.trials.costs, self.settings.length)

    def _record(self, best: Judged, steps: list[Judged]) -> dict[str, Any]:
        costs, most = self.trials.costs, self.settings.length
        needed = break_even(best.draft_cost, costs.verify, most)
        tokens = expected_tokens(best.agreement, best.draft_tokens)
        return {
            "method": METHOD,
            "settings": {**asdict(self.settings), "rows": best.draft_tokens + 1},
            "layers": self.model.layers,
            "best": self._figures(best) | {"tokens_per_round": round(tokens, 4), "break_even": needed and round(needed, 4)},
            "costs": asdict(costs),
            "windows": len(self.windows),
            "trials": len(self.trials.agreements),
            "steps": [self._figures(one) for one in steps],
        }

    def _figures(self, judged: Judged) -> dict[str, Any]:
        """Return the plan, what is expected of it, and the share of a pass's weights that it reads, for other machines."""
        return judged.figures() | {"weights_read": round(self.model.skip_cost(judged.skip), 4)}


def write_json(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Write a file completely, or leave the earlier one."""
    partial = folder / f"{name}.partial"
    with storage_errors(folder):
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(folder / name)
