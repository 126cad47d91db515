"""The command line: one file per command, on top of every other room.

In come words from a shell, out go text for a person or JSON for a program, and an exit status: 0 done, 1 the answer is
no (`prove` found a bug, `doctor` a fault), 2 the input cannot be used, 130 interrupted. torch is imported only by
commands that load a model, inside them, so `--help` and `methods` answer at once.
"""

from foreword.cli.app import app


def main() -> None:
    """The entry point of `foreword` and of `python -m foreword`."""
    app(prog_name="foreword")
