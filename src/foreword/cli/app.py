"""The `foreword` command: its sub-commands, and the one place that turns errors into a line and an exit status.

An error of Foreword becomes a line on stderr and status 2. Ctrl-C is status 130. Any other exception is a bug and keeps its
traceback.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foreword import __version__
from foreword.cli.bench import BENCH_EXAMPLES, COMPARE_EXAMPLES, TABLE_EXAMPLES, bench, compare, table
from foreword.cli.chat import CHAT_EXAMPLES, chat
from foreword.cli.console import complain, notes
from foreword.cli.distill import DISTILL_EXAMPLES, distill
from foreword.cli.doctor import DOCTOR_EXAMPLES, doctor
from foreword.cli.draft_vocabulary import DRAFT_VOCABULARY_EXAMPLES, draft_vocabulary
from foreword.cli.draw import DRAW_EXAMPLES, draw
from foreword.cli.export import EXPORT_EXAMPLES, export
from foreword.cli.generate import GENERATE_EXAMPLES, generate
from foreword.cli.methods import METHODS_EXAMPLES, methods
from foreword.cli.options import unfold
from foreword.cli.profile import PROFILE_EXAMPLES, profile
from foreword.cli.prove import PROVE_EXAMPLES, prove
from foreword.cli.pull import MODELS_EXAMPLES, PULL_EXAMPLES, models, pull
from foreword.cli.search import SEARCH_EXAMPLES, search
from foreword.cli.serve import SERVE_EXAMPLES, serve
from foreword.cli.simulate import SIMULATE_EXAMPLES, simulate
from foreword.cli.train import TRAIN_EXAMPLES, train
from foreword.cli.try_model import TRY_EXAMPLES, try_model
from foreword.errors import ForewordError, ForewordWarning

CHATTY = ("torchao", "torch.utils._pytree")  # loggers that warn when transformers imports torchao, if it is installed
OLD_NAMES = {"words": "draft-vocabulary"}  # names of commands in 0.1: hidden, and still accepted


class Commands(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, OLD_NAMES.get(cmd_name, cmd_name))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForewordError as error:
            complain(error)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            if notes().is_terminal:
                notes().print()  # so that the shell's prompt starts on a new line
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(given: bool) -> None:
    if given:
        typer.echo(f"foreword {__version__}")
        raise typer.Exit


def _paragraphs(text: str | None) -> str:
    """Join the lines of each paragraph; they are wrapped to the width of the terminal."""
    return "\n\n".join(one.replace("\n", " ") for one in inspect.cleandoc(text or "").split("\n\n"))


ABOUT = """
Make a language model generate faster without changing a single token of its output.

A method drafts several tokens ahead, the model verifies all of them in one pass, and only tokens that the model itself
would have chosen are kept. Without --model, SmolLM2-135M-Instruct is used and fetched once (about 90 MB).
"""


@app.callback(help=_paragraphs(ABOUT), epilog="Every command has options and examples: foreword COMMAND --help")
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Prepare the process for every command."""
    _silence_libraries()


def _silence_libraries() -> None:
    """Keep other libraries from printing between our lines. Warnings of Foreword are printed like errors."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not notes().is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", ForewordWarning)
        warnings.showwarning = lambda message, *_, **__: complain(message, "warning", "yellow")


for command, examples in (
    (generate, GENERATE_EXAMPLES),
    (chat, CHAT_EXAMPLES),
    (serve, SERVE_EXAMPLES),
    (methods, METHODS_EXAMPLES),
    (models, MODELS_EXAMPLES),
    (pull, PULL_EXAMPLES),
    (doctor, DOCTOR_EXAMPLES),
    (prove, PROVE_EXAMPLES),
    (profile, PROFILE_EXAMPLES),
    (simulate, SIMULATE_EXAMPLES),
    (distill, DISTILL_EXAMPLES),
    (train, TRAIN_EXAMPLES),
    (search, SEARCH_EXAMPLES),
    (draft_vocabulary, DRAFT_VOCABULARY_EXAMPLES),
    (export, EXPORT_EXAMPLES),
    (draw, DRAW_EXAMPLES),
):
    app.command(help=_paragraphs(command.__doc__), epilog=examples)(unfold(command))

app.command("try", help=_paragraphs(try_model.__doc__), epilog=TRY_EXAMPLES)(try_model)

measuring = typer.Typer(rich_markup_mode="rich")
measuring.callback(help=_paragraphs(bench.__doc__), epilog=BENCH_EXAMPLES, invoke_without_command=True)(unfold(bench))
measuring.command(help=_paragraphs(compare.__doc__), epilog=COMPARE_EXAMPLES)(compare)
measuring.command(help=_paragraphs(table.__doc__), epilog=TABLE_EXAMPLES)(table)
app.add_typer(measuring, name="bench")
