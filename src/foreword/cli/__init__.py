"""The command line: one file per command, on top of all other packages.

In: arguments from a shell. Out: text for a person or JSON for a program, and an exit status: 0 done, 1 the answer is no
(`prove` found a bug, `doctor` a fault), 2 the input cannot be used, 130 interrupted. Only commands that load a model import
torch, inside their functions, so `--help` and `methods` answer at once.
"""

from foreword.cli.app import app


def main() -> None:
    """Run the command line: the entry point of `foreword` and of `python -m foreword`."""
    app(prog_name="foreword")
