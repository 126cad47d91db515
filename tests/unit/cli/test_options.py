"""Options have the meaning and defaults of the library, and reach it unchanged."""

import inspect
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from foreword.api import DEFAULT_METHOD
from foreword.cli.options import GenerationOptions, MethodOptions, ModelOptions, unfold
from foreword.core.sampling import Sampling
from foreword.engine.request import Request


def test_defaults_are_those_of_the_library():
    settings = GenerationOptions().settings(as_json=False)
    for kind in (Sampling, Request):
        own = {one.name: one.default for one in fields(kind)}
        shared = own.keys() & settings.keys()
        assert {name: settings[name] for name in shared} == {name: own[name] for name in shared}
    assert MethodOptions().method == DEFAULT_METHOD


def test_every_setting_of_the_library_has_an_option():
    asked = {one.name for one in fields(GenerationOptions)} | {*GenerationOptions().settings(as_json=False)}
    asked |= {"stream", "prompt", "reuse", "cache_salt", "session", "model_defaults", "prediction", "trace_rounds"}
    assert {one.name for kind in (Sampling, Request) for one in fields(kind)} - {"sampling"} <= asked


def test_options_that_are_not_given_are_left_to_the_model():
    """Its defaults apply if an option is not given; 0 and 1 count as given."""
    silent = GenerationOptions().settings(as_json=False)
    given = GenerationOptions(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    names = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    assert not names & silent.keys() and names <= given.settings(as_json=False).keys()


def test_a_chat_template_comes_from_a_file_and_its_variables_as_json(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}", encoding="utf-8")
    options = GenerationOptions(chat_template=file, chat_template_kwargs='{"enable_thinking": false}')
    settings = options.settings(as_json=False)
    assert settings["chat_template"] == "{{ messages }}"
    assert settings["chat_template_kwargs"] == {"enable_thinking": False}


def test_forms_come_from_files(tmp_path):
    names = ("json_schema", "grammar", "structural_tag")
    for name in names:
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    settings = GenerationOptions(regex="a+", **{name: tmp_path / name for name in names}).settings(as_json=False)
    assert settings["regex"] == "a+" and all(settings[name] == f"text of {name}" for name in names)
    with pytest.raises(typer.BadParameter, match="cannot read"):
        GenerationOptions(json_schema=tmp_path / "missing").settings(as_json=False)


def test_biases_and_bad_words_are_parsed():
    options = GenerationOptions(logit_bias=["5=-3.5", "7=2"], bad_words=["a b"], bad_word_ids=["4,5"], presence_penalty=0.5)
    settings = options.settings(as_json=False)
    assert settings["logit_bias"] == {5: -3.5, 7: 2.0} and settings["bad_word_ids"] == [[4, 5]]
    assert settings["bad_words"] == ["a b"] and settings["presence_penalty"] == 0.5
    assert not {"logit_bias", "bad_words", "frequency_penalty"} & GenerationOptions().settings(as_json=False).keys()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"chat_template": Path("nowhere.jinja")}, "nowhere.jinja"),
        ({"chat_template_kwargs": "{thinking: no}"}, "not JSON"),
        ({"chat_template_kwargs": "[1]"}, "not a JSON object"),
        ({"chat_template_kwargs": "[" * 99999}, "not JSON"),
        ({"prompt_logprobs": 2}, "add --json"),
        ({"logit_bias": ["5"]}, "'5' is not ID=VALUE"),
        ({"logit_bias": ["x=1"]}, "'x=1' is not ID=VALUE"),
        ({"bad_word_ids": ["5,x"]}, "'5,x' is not ID,ID"),
    ],
)
def test_invalid_options(options, named):
    with pytest.raises(typer.BadParameter, match=named):
        GenerationOptions(**options).settings(as_json=False)


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
def test_method_options_are_numbers_tuples_or_strings(text, value):
    assert MethodOptions(method_option=[f"key={text}"]).own() == {"key": value}


@pytest.mark.parametrize("text", ["table", "=3", "two words=1", "rows=3", "slots=2", "device=cpu"])
def test_invalid_method_options(text):
    with pytest.raises(typer.BadParameter):
        MethodOptions(method_option=[text]).own()


def test_unfold_gives_fields_to_typer_and_the_group_to_the_command():
    calls = []
    app = typer.Typer()

    @app.command()
    @unfold
    def command(name: str, method: MethodOptions, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        calls.append((name, method, loud))

    result = CliRunner().invoke(app, ["Ada", "--rows", "3", "--method-option", "a=1", "--method-option", "b=2", "--loud"])
    assert result.exit_code == 0, result.output
    assert calls == [("Ada", MethodOptions(rows=3, method_option=["a=1", "b=2"]), True)]


def test_unfold_does_not_change_a_command_without_groups():
    def command(name: str = "x") -> None: ...

    assert list(inspect.signature(unfold(command)).parameters) == ["name"]


def model_of(*args, monkeypatch):
    """What a command with model options gets."""
    app, got = typer.Typer(), []

    def command(model: ModelOptions) -> None:
        got.append(model)

    app.command()(unfold(command))
    monkeypatch.setattr(sys, "argv", ["foreword", "bench", *args])
    result = CliRunner().invoke(app, list(args))
    return got[0] if got else None, result


def test_a_revision_reaches_load_and_is_left_out_otherwise(monkeypatch):
    model, _ = model_of("--model", "org/name", "--revision", "v1.1", monkeypatch=monkeypatch)
    assert model.where()["revision"] == "v1.1"
    model, _ = model_of(monkeypatch=monkeypatch)
    assert "revision" not in model.where()


def test_a_quantisation_reaches_load_and_is_refused_for_weights_in_floats(monkeypatch):
    model, _ = model_of("--quantization", "q4", monkeypatch=monkeypatch)
    assert model.where()["quantization"] == "q4"
    with pytest.raises(typer.BadParameter, match="a widened model runs weights in floats"):
        model.refuse_quantization("a widened model")
    model, _ = model_of(monkeypatch=monkeypatch)
    assert "quantization" not in model.where()
    model.refuse_quantization("a widened model")


@pytest.mark.parametrize("given", [("--token", "hf_secret"), ("--token=hf_secret",)])
def test_a_token_reaches_the_hub_and_is_written_nowhere(given, monkeypatch):
    """Results record the command line, and tracebacks and logs may show options."""
    monkeypatch.setenv("HF_TOKEN", "another")
    model, result = model_of("--model", "org/name", *given, monkeypatch=monkeypatch)
    assert os.environ["HF_TOKEN"] == "hf_secret"
    seen = f"{model!r} {model.where()} {vars(model)} {sys.argv} {result.output}"
    assert "hf_secret" not in seen and "***" in sys.argv[-1]


def test_the_token_of_the_environment_is_kept(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "another")
    model_of("--model", "org/name", monkeypatch=monkeypatch)
    assert os.environ["HF_TOKEN"] == "another"


def test_the_help_advises_the_environment(monkeypatch):
    _, result = model_of("--help", monkeypatch=monkeypatch)
    assert "--revision" in result.output and "--token" in result.output and "HF_TOKEN" in result.output
