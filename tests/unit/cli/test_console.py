"""Answers on stdout, the rest on stderr, and neither disturbs the other."""

import warnings

import pytest

import foreword
from foreword.cli.app import _hush
from foreword.cli.console import bar, figures, note, screen
from foreword.errors import ForewordWarning


@pytest.fixture
def as_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams count as terminals."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")


def test_a_bar_leaves_stdout_alone(as_terminal, capsys):
    with bar("writing") as show:
        show("writing", 1, 2)
        print("the answer")
        show("writing", 2, 2)
    shown = capsys.readouterr()
    assert shown.out == "the answer\n"
    assert "2/2" in shown.err and "the answer" not in shown.err


def test_no_bar_in_a_pipe(capsys):
    with bar("writing") as show:
        show("writing", 1, 2)
    assert capsys.readouterr().err == ""


def test_notes_are_for_terminals(as_terminal, capsys, monkeypatch):
    note("by the way")
    assert capsys.readouterr().err == "\x1b[2mby the way\x1b[0m\n"
    monkeypatch.delenv("FORCE_COLOR")
    note("by the way")
    assert capsys.readouterr().err == ""


def test_nothing_is_folded_in_a_pipe(capsys):
    screen().print("word " * 30)
    assert capsys.readouterr().out.count("\n") == 1


def test_only_our_own_warnings_are_shown(capsys):
    with warnings.catch_warnings():
        _hush()
        warnings.warn("from elsewhere", UserWarning, stacklevel=1)
        warnings.warn("the cache is small", ForewordWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: the cache is small\n"


def test_figures_are_pooled(tiny_model):
    with foreword.load(tiny_model, "prompt_lookup") as llm:
        results = llm.generate(["one", "two"], max_new_tokens=8, ignore_eos=True)
    rounds = sum(result.stats.rounds for result in results)
    assert (
        figures(results, seconds=4)
        == f"2 answers · 16 tokens · {16 / rounds:.2f} tokens/round · 4.0 tokens/s · prompt_lookup"
    )
