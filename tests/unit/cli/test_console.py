"""Answers go to stdout and the rest to stderr, and neither disturbs the other."""

import re
import time
import warnings

import pytest

import foreword
from foreword.cli.app import _silence_libraries
from foreword.cli.console import ProgressLines, bar, figures, note, screen, waiting
from foreword.errors import ForewordWarning


@pytest.fixture
def as_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat both streams as terminals."""
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
    """Print progress lines almost at once."""
    monkeypatch.setattr(ProgressLines, "FIRST_S", 0.01)
    monkeypatch.setattr(ProgressLines, "EVERY_S", 0.01)


def next_stderr(capsys) -> str:
    """Return stderr once it has something; a thread prints the lines."""
    for _ in range(500):
        if shown := capsys.readouterr().err:
            return shown
        time.sleep(0.01)
    return ""


def test_in_a_pipe_progress_is_a_line_now_and_then(impatient, capsys):
    with bar("answers") as show:
        show("run 1 of 2", 3, 60)
        capsys.readouterr()
        line = next_stderr(capsys).splitlines()[0]
    assert re.fullmatch(r"answers, 3 of 60: run 1 of 2 \(\d+ s\)", line)
    with waiting("measuring"):
        assert re.match(r"measuring \(\d+ s\)\n", next_stderr(capsys))
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "nothing is printed after the end"


def test_a_single_long_step_is_shown(impatient, capsys):
    """No update is called meanwhile."""
    with bar("training"):
        assert next_stderr(capsys).startswith("training (")


def test_hidden_progress_prints_no_lines(impatient, capsys):
    with bar("training", shown=False) as show, waiting("loading", terminal_only=True):
        show("training", 1, 2)
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
        _silence_libraries()
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
