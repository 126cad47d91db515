"""Answers on stdout, the rest on stderr, and neither disturbs the other."""

import re
import time
import warnings

import pytest

import foreword
from foreword.cli.app import _hush
from foreword.cli.console import Lines, bar, figures, note, screen, waiting
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


@pytest.fixture
def impatient(monkeypatch):
    """Everything takes long."""
    monkeypatch.setattr(Lines, "FIRST_S", 0.01)
    monkeypatch.setattr(Lines, "EVERY_S", 0.01)


def said(capsys) -> str:
    """What stderr has once something is there; the writer has a thread of its own."""
    for _ in range(500):
        if shown := capsys.readouterr().err:
            return shown
        time.sleep(0.01)
    return ""


def test_in_a_pipe_progress_is_a_line_now_and_then(impatient, capsys):
    with bar("answers") as show:
        show("run 1 of 2", 3, 60)
        capsys.readouterr()
        line = said(capsys).splitlines()[0]
    assert re.fullmatch(r"answers, 3 of 60: run 1 of 2 \(\d+ s\)", line)
    with waiting("measuring"):
        assert re.match(r"measuring \(\d+ s\)\n", said(capsys))
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "what has ended says nothing more"


def test_a_step_that_takes_long_is_told_of_while_it_lasts(impatient, capsys):
    """Nobody calls anything meanwhile."""
    with bar("learning"):
        assert said(capsys).startswith("learning (")


def test_no_lines_where_nobody_asks(impatient, capsys):
    with bar("learning", shown=False) as show, waiting("loading", only_here=True):
        show("learning", 1, 2)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_are_no_lines(impatient, as_terminal, capsys):
    with bar("answers") as show:
        show("answers", 1, 2)
        time.sleep(0.05)
    assert " s)" not in capsys.readouterr().err


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
