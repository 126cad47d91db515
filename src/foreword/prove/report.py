"""The report of a proof: the figures of each method, every difference with its verdict, and the two files that hold them.

`proof` fills a Report; the command line prints it and asks for `bugs`. `to_dict` is the shape of `prove --json`; `write`
writes it as a JSON file with a Markdown page next to it. A report has no commit and no date: publish it together with the
command that made it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from foreword import __version__
from foreword.api import LLM
from foreword.core.sampling import Sampling
from foreword.errors import StorageError

Verdict = Literal["tie", "bug"]
Reason = Literal["gap", "router", "top-k edge", "top-p edge", "min-p edge", "filter", "length"]


@dataclass(frozen=True)
class ScoredToken:
    """A token and its float64 score: processed logit plus noise, before the filters. No token: the output had ended."""

    token: int | None
    text: str
    score: float | None


@dataclass(frozen=True)
class Difference:
    """Where a method diverged from plain decoding. `position` counts the new tokens from 0.

    `gap` is the distance of the two scores, `error` the run's own error at these tokens. `reason` says what decided: the gap
    against twice the error; a near-tie of a router, in a mixture of experts; a filter's edge at the likelier token; a filter
    that certainly drops one of them; or the length, if one output goes on and the other ends.
    """

    prompt: str
    sampling: str
    position: int
    plain: ScoredToken
    method: ScoredToken
    gap: float | None
    error: float | None
    verdict: Verdict
    reason: Reason


@dataclass(frozen=True)
class MethodProof:
    """One method's figures over all samplings; `samplings` has them for each sampling.

    `identical` counts the prompts without any difference; `tokens` counts the tokens of plain's outputs, which were all
    tested. `rounds`, `tokens_per_round`, `seconds`, `drafted` and `accepted` are the method's own and include runs that
    continue after a difference. A method that drafted almost nothing was hardly tested. `unjudged` counts the differences
    without a verdict yet; a complete report has none.
    """

    prompts: int
    tokens: int
    identical: int
    ties: int
    bugs: int
    differences: list[Difference]
    tokens_per_round: float
    rounds: int
    seconds: float
    drafted: int = 0
    accepted: int = 0
    unjudged: int = 0
    samplings: dict[str, MethodProof] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        if not self.samplings:
            del fields["samplings"]
            return fields
        # The method's own list already holds every difference.
        fields["samplings"] = {name: _without(proof.to_dict(), "differences") for name, proof in self.samplings.items()}
        return fields


@dataclass(frozen=True)
class Report:
    model: str
    dtype: str
    device: str
    versions: dict[str, str]
    threads: int
    slots: int
    samplings: dict[str, Sampling]
    max_new_tokens: int
    methods: dict[str, MethodProof]
    complete: bool = True
    """Whether every method was tested and every difference judged. An interrupted run leaves an incomplete report."""

    @staticmethod
    def of(
        llm: LLM, samplings: dict[str, Sampling], max_new_tokens: int, methods: dict[str, MethodProof], complete: bool
    ) -> Report:
        model = llm.model
        return Report(
            model=model.name,
            dtype=str(model.dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            versions={
                "foreword": __version__,
                "torch": torch.__version__,
                "transformers": version("transformers"),
                "python": platform.python_version(),
            },
            threads=torch.get_num_threads(),
            slots=llm.engine.slots.count,
            samplings=samplings,
            max_new_tokens=max_new_tokens,
            methods=methods,
            complete=complete,
        )

    @property
    def ties(self) -> int:
        return sum(proof.ties for proof in self.methods.values())

    @property
    def bugs(self) -> int:
        return sum(proof.bugs for proof in self.methods.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the shape of `prove --json`."""
        methods = {name: proof.to_dict() for name, proof in self.methods.items()}
        return {"methods": methods, "ties": self.ties, "bugs": self.bugs, **_without(asdict(self), "methods")}

    def write(self, path: str | Path) -> tuple[Path, Path]:
        """Write a JSON file and a Markdown page next to it: `proof.json` and `proof.md` if `path` is a folder."""
        path = Path(path)
        base = path / "proof" if path.is_dir() or not path.suffix else path
        data, page = base.with_suffix(".json"), base.with_suffix(".md")
        try:
            data.parent.mkdir(parents=True, exist_ok=True)
            data.write_text(json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
            page.write_text(self.to_markdown(), encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"the proof cannot be written to {data} ({error.strerror}); name a folder that can be written"
            ) from error
        return data, page

    def to_markdown(self) -> str:
        sections = [f"# Losslessness proof: {self.model}", _sentence(self), _facts(self), _figures(self)]
        sections += [_differences(name, proof) for name, proof in self.methods.items() if proof.differences]
        return "\n\n".join(sections) + "\n"


def name_of(sampling: Sampling) -> str:
    """Return a short name of a sampling; samplings that choose differently have different names."""
    sampled = sampling.temperature > 0
    terms = [f"T={sampling.temperature:g}"] if sampled else ["greedy"]
    terms += [f"top_k={sampling.top_k}"] if sampled and sampling.top_k else []
    terms += [f"top_p={sampling.top_p:g}"] if sampled and sampling.top_p < 1 else []
    terms += [f"min_p={sampling.min_p:g}"] if sampled and sampling.min_p > 0 else []
    terms += [f"penalty={sampling.repetition_penalty:g}"] if sampling.repetition_penalty != 1 else []
    terms += [f"seed={sampling.seed}"] if sampled else []
    return " ".join(terms)


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


# The page ---------------------------------------------------------------------------------------------------------------


def _sentence(report: Report) -> str:
    if not report.complete:
        unjudged = _count(sum(proof.unjudged for proof in report.methods.values()), "difference")
        found = f"{_count(report.bugs, 'bug')} and {_count(report.ties, 'proven tie')} so far, {unjudged} not judged"
        return f"**Incomplete: the run was interrupted.** Tested: {', '.join(report.methods)}. {found}."
    if report.bugs:
        broken = [name for name, proof in report.methods.items() if proof.bugs]
        return f"**{_count(report.bugs, 'bug')}** in {', '.join(broken)}: the output is not that of plain decoding."
    if report.ties:
        ties = _count(report.ties, "proven tie")
        return f"**No bugs.** Every token equals plain decoding's, except for {ties}; the tokens after them were tested too."
    return "**No bugs.** Every token equals plain decoding's."


def _facts(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    machine = f"{report.device}, {_count(report.threads, 'thread')}, {report.dtype}, {_count(report.slots, 'slot')}"
    return _table(
        ["", ""],
        [
            ["machine", machine],
            ["versions", versions],
            ["samplings", "; ".join(report.samplings)],
            ["new tokens", f"at most {report.max_new_tokens} per prompt"],
        ],
    )


def _figures(report: Report) -> str:
    heads = ["method", "sampling", "prompts", "identical", "tokens", "ties", "bugs", "drafted", "accepted"]
    heads += ["tokens per round", "seconds"]
    rows = []
    for name, proof in report.methods.items():
        rows.append(_row(name, "all", proof))
        rows += [_row("", sampling, one) for sampling, one in proof.samplings.items()]
    return _table(heads, rows)


def _row(name: str, sampling: str, proof: MethodProof) -> list[str]:
    counts = [proof.prompts, proof.identical, proof.tokens, proof.ties, proof.bugs, proof.drafted, proof.accepted]
    return [name, sampling, *map(str, counts), f"{proof.tokens_per_round:.2f}", f"{proof.seconds:.1f}"]


def _differences(name: str, proof: MethodProof) -> str:
    heads = ["verdict", "reason", "prompt", "sampling", "new token", "plain", "method", "gap", "run's error"]
    bugs_first = sorted(proof.differences, key=lambda difference: difference.verdict)
    return f"## Differences of {name}\n\n" + _table(heads, [_difference_row(one) for one in bugs_first])


def _difference_row(one: Difference) -> list[str]:
    cells = [one.verdict, one.reason, one.prompt, one.sampling, str(one.position)]
    return [*cells, _choice(one.plain), _choice(one.method), _number(one.gap), _number(one.error)]


def _choice(choice: ScoredToken) -> str:
    return "(ended)" if choice.token is None else f"{choice.text!r} ({choice.token}): {_number(choice.score)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
