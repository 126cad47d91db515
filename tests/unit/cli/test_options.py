"""Options mean what the library means, and reach it unchanged."""

import inspect
from dataclasses import fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from foreword.api import DEFAULT_METHOD
from foreword.cli.options import MethodOptions, WritingOptions, unfold
from foreword.core.sampling import Sampling
from foreword.engine.request import Request


def test_defaults_are_those_of_the_library():
    settings = WritingOptions().settings(json=False)
    for kind in (Sampling, Request):
        own = {one.name: one.default for one in fields(kind)}
        shared = own.keys() & settings.keys()
        assert {name: settings[name] for name in shared} == {name: own[name] for name in shared}
    assert MethodOptions().method == DEFAULT_METHOD


def test_every_setting_of_the_library_has_an_option():
    asked = {*WritingOptions().settings(json=False), "stream", "prompt", "reuse"}
    assert {one.name for kind in (Sampling, Request) for one in fields(kind)} - {"sampling"} <= asked


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("reset", "reset"),
        ("3", 3),
        ("0.5", 0.5),
        ("0.2,0.4", (0.2, 0.4)),
        ("True", True),
        ("false", False),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_method_options_are_numbers_tuples_or_words(text, value):
    assert MethodOptions(method_option=[f"key={text}"]).own() == {"key": value}


@pytest.mark.parametrize("text", ["table", "=3", "two words=1", "rows=3", "slots=2", "device=cpu"])
def test_method_options_that_are_none(text):
    with pytest.raises(typer.BadParameter):
        MethodOptions(method_option=[text]).own()


def test_unfold_gives_typer_the_fields_and_the_command_the_group():
    heard = []
    app = typer.Typer()

    @app.command()
    @unfold
    def command(name: str, method: MethodOptions, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        heard.append((name, method, loud))

    result = CliRunner().invoke(app, ["Ada", "--rows", "3", "--method-option", "a=1", "--method-option", "b=2", "--loud"])
    assert result.exit_code == 0, result.output
    assert heard == [("Ada", MethodOptions(rows=3, method_option=["a=1", "b=2"]), True)]


def test_unfold_leaves_a_command_without_groups_alone():
    def command(name: str = "x") -> None: ...

    assert list(inspect.signature(unfold(command)).parameters) == ["name"]
