"""`foreword export`: turn a trained drafter of draft_model into a model folder that other programs can load too."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.console import print_json, screen, waiting
from foreword.cli.options import Json, ModelOptions

if TYPE_CHECKING:
    from foreword.drafters.export import Exported

EXPORT_EXAMPLES = """\
[bold]Examples[/]

  foreword export --out small

  foreword export runs/draft_model --model ./my-model --out small --dtype float32

  foreword generate "Why is the sky blue?" --drafter small

  foreword bench --methods draft_model=small --baselines hf_assistant=small
"""


def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write the model to this folder, which must be new or empty.")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            show_default=False,
            help="A folder that `foreword train draft_model` wrote. Default: the drafter that ships for the default model.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|FILE|ID",
            help="The model it was trained for: a folder, a GGUF file or a Hugging Face id. Default: SmolLM2-135M-Instruct.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Precision of the stored weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    json: Json = False,
) -> None:
    """Turn a trained drafter of draft_model into a standalone model.

    The drafter is a few layers that use the embedding and the head of the model it was trained for. With copies of both it
    is a small model: config.json, model.safetensors and the tokenizer, in the format of transformers.

    In Foreword, draft_model, gsd and amusd take the folder as --drafter. In transformers it is an assistant_model, and in
    vLLM the model of a speculative config.
    """
    done = _run(out, folder, model, dtype)
    if json:
        print_json(asdict(done))
        return
    made = f"{done.layers} layers, {done.parameters / 1e6:,.1f} M parameters, {done.bytes / 1e6:,.1f} MB in {done.dtype}"
    screen().print(f"{done.out}: {made} · a draft model for {done.target}", soft_wrap=True)
    screen().print(f"use it here with --drafter {done.out}, or as an assistant_model of transformers", soft_wrap=True)


def _run(out: Path, folder: Path | None, model: str | None, dtype: str) -> Exported:
    from foreword.drafters.export import export as run  # noqa: PLC0415  imports torch

    if not ModelOptions(model).is_here():  # fetching shows its own progress bar
        return run(out, folder, model, dtype)
    with waiting("exporting the drafter"):
        return run(out, folder, model, dtype)
