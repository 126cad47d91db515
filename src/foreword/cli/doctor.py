"""`foreword doctor`: check whether this machine is ready, and say what to do if it is not."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from foreword.cli.console import print_json, screen, waiting
from foreword.cli.options import Json, ModelOptions, Remeasure, measuring

if TYPE_CHECKING:
    from foreword.cli.checks import Finding

DOCTOR_EXAMPLES = """\
[bold]Examples[/]

  foreword doctor

  foreword doctor --fetch

  foreword doctor --full

  foreword doctor --model ./my-model --dtype bfloat16 --json
"""

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    model: ModelOptions,
    fetch: Annotated[
        bool,
        typer.Option(
            "--fetch", metavar="", help="Fetch the model if it is not on this disk. Without this flag nothing is downloaded."
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            metavar="",
            help="Also try every method that fits the model, measure what rounds cost, show the speed-up `auto` expects "
            "of each, and compare the model's files with their checksums. Takes minutes on a CPU.",
        ),
    ] = False,
    remeasure: Remeasure = False,
    json: Json = False,
) -> None:
    """Check that everything Foreword needs is installed and works, and say what to do if it does not.

    Checks Python, torch, the device, threads, memory, the load of other programs, the cache folder and the model. Then it
    generates a few tokens to show that speculation gives the same as plain decoding. This takes half a minute on a CPU. The
    last line says what --full would add. The exit status is 1 if a check fails.
    """
    if not fetch:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by the hub's client, which is imported below
    with waiting("starting"):
        from foreword.cli.checks import examine  # noqa: PLC0415  imports torch

    findings = []
    full = full or remeasure
    with measuring(remeasure):
        for finding in examine(model, fetch, full):
            findings.append(finding)
            if not json:
                _print(finding)
    usable = all(finding.status != "fail" for finding in findings)
    if json:
        print_json({"usable": usable, "full": full, "checks": [asdict(finding) for finding in findings]})
    if not usable:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    line = Text.assemble((f"{finding.status:<4}", COLOURS[finding.status]), f"  {finding.check:<26} {finding.said}")
    screen().print(line, soft_wrap=True)
    if finding.do:
        screen().print(Text(f"{'':33}{finding.do}", "dim"), soft_wrap=True)
