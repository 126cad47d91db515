"""What all commands share: quick start-up, exit codes, one line per error."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import foreword
from foreword.cli.app import Commands, app
from foreword.errors import InputError

COMMANDS = ("generate", "chat", "methods", "doctor", "prove", "profile", "distill", "train", "draft-vocabulary", "export")
COMMANDS += ("draw", "bench")


def failing_app(raises: BaseException) -> typer.Typer:
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @app.callback()
    def root() -> None: ...

    @app.command()
    def fail() -> None:
        raise raises

    return app


def test_help_lists_every_command(run):
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(f"│ {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", [*COMMANDS, "bench compare", "bench table"])
def test_every_command_has_help_with_examples(run, name):
    shown = run(*name.split(), "--help")
    assert shown.exit_code == 0
    assert "Examples" in shown.stdout and shown.stdout.count(" foreword ") >= 2
    assert "\x1b" not in shown.stdout


def commands(group: Any, name: str = "") -> dict[str, Any]:
    found = {name: group}
    for one, command in getattr(group, "commands", {}).items():
        found |= commands(command, f"{name} {one}".strip())
    return found


def test_every_option_has_help_and_says_its_default():
    """A flag is off by default, and typer shows defaults that are not empty; any other option must say its default."""
    for name, command in commands(typer.main.get_command(app)).items():
        for option in command.params:
            if getattr(option, "hidden", False) or option.name in ("help", "install_completion", "show_completion"):
                continue
            assert option.help and option.help.endswith("."), (name, option.name)
            silent = option.default in (None, "", [], ()) and not option.required and option.param_type_name == "option"
            assert not silent or option.is_flag or "Default" in option.help, (name, option.name)


@pytest.mark.parametrize("name", ["bench", "profile"])
def test_grow_is_a_hidden_alias_of_widen(run, name):
    shown = run(name, "--help").stdout
    assert "--widen" in shown and "--grow" not in shown
    assert any("--grow" in option.opts for option in commands(typer.main.get_command(app))[name].params)


def test_version(run):
    assert run("--version").stdout == f"foreword {foreword.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["methods"], ["methods", "--json"], ["generate", "--help"]])
def test_torch_is_not_imported_without_a_model(arguments):
    script = (
        "import sys\nfrom foreword.cli import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert not left.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(foreword.__file__).parents[1])}
    line = [sys.executable, "-c", script, *arguments]
    ran = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr


def test_public_names_exist_and_no_others():
    assert sorted(foreword.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)) == (foreword.__all__)
    assert all(getattr(foreword, name).__name__ == name for name in foreword.__all__)
    assert set(foreword.__all__) <= set(dir(foreword))
    with pytest.raises(AttributeError, match="nonsense"):
        foreword.nonsense  # noqa: B018


def test_an_error_is_one_line_and_status_2():
    result = CliRunner().invoke(failing_app(InputError("the first half,\n\n  and the second")), ["fail"])
    assert result.exit_code == 2
    assert result.stderr == "error: the first half, and the second\n"
    assert result.stdout == ""


def test_markup_in_an_error_is_not_interpreted():
    result = CliRunner().invoke(failing_app(InputError("no [bold] here: [/x]")), ["fail"])
    assert result.stderr == "error: no [bold] here: [/x]\n"


def test_ctrl_c_is_status_130_without_traceback():
    result = CliRunner().invoke(failing_app(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_a_bug_keeps_its_traceback():
    result = CliRunner().invoke(failing_app(ZeroDivisionError("a bug")), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--metod", "plain"], "--method"),
        (["gnerate"], "generate"),
        (["generate", "hi", "--rows", "many"], "--rows"),
        ([], "Usage"),
    ],
)
def test_usage_errors_are_status_2(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr + result.stdout


def test_a_closed_pipe_ends_quietly(command, tiny_model):
    reader, writer = os.pipe()
    os.close(reader)
    prompts = Path(tiny_model) / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    with os.fdopen(writer, "w") as closed:
        options = {"stdout": closed, "stderr": subprocess.PIPE, "capture_output": False}
        ran = command("generate", "--model", tiny_model, "--prompts", prompts, "--max-new-tokens", 4, "--json", **options)
    assert ran.returncode == 1
    assert ran.stderr == ""
