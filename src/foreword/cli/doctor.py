"""`foreword doctor`: whether this machine is ready, check by check, with what to do where it is not."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from foreword.cli.console import print_json, screen, waiting
from foreword.cli.options import Json, ModelOptions

if TYPE_CHECKING:
    from foreword.cli.checks import Finding

DOCTOR_EXAMPLES = """\
[bold]Examples[/]

  foreword doctor

  foreword doctor --fetch

  foreword doctor --model ./my-model --dtype bfloat16 --json
"""

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    model: ModelOptions,
    fetch: Annotated[
        bool,
        typer.Option("--fetch", metavar="", help="Fetch the model if it is not here; without this nothing is downloaded."),
    ] = False,
    json: Json = False,
) -> None:
    """Check that everything Foreword needs is here and works, and say what to do where it does not.

    Looks at Python, torch, the device, threads, memory, the cache folder and the model, then writes two short texts to
    show that speculation gives the same tokens as plain decoding, and how much faster. Exit status 1 if a check fails.
    """
    if not fetch:
        os.environ["HF_HUB_OFFLINE"] = "1"  # heeded by the hub's client, which is imported below
    with waiting("looking around"):
        from foreword.cli.checks import examine  # noqa: PLC0415  imports torch

    findings = []
    for finding in examine(model, fetch):
        findings.append(finding)
        if not json:
            _print(finding)
    usable = all(finding.status != "fail" for finding in findings)
    if json:
        print_json({"usable": usable, "checks": [asdict(finding) for finding in findings]})
    if not usable:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    words = Text.assemble((f"{finding.status:<4}", COLOURS[finding.status]), f"  {finding.check:<26} {finding.said}")
    screen().print(words, soft_wrap=True)
    if finding.do:
        screen().print(Text(f"{'':33}{finding.do}", "dim"), soft_wrap=True)
