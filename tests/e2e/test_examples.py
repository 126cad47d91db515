"""Every script in examples/ runs and prints what it should."""

import importlib.util
import logging
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORTER = {"side_by_side": ("--turns", "1", "--tokens", "12")}  # `make demo` runs it with its defaults
PRINTS = {
    "chat_keeps_its_cache": "Paris",
    "many_at_once": "Name a city.",
    "side_by_side": "the same tokens, ",
    "wrap_a_model": "tokens per round",
}

pytestmark = pytest.mark.model


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
@pytest.mark.usefixtures("in_model_home")
def test_an_example_runs(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python` runs it, in this process: others take seconds to import what is here."""
    monkeypatch.setattr(sys, "argv", [str(script), *SHORTER.get(script.stem, ())])
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)  # a script may disable some
    runpy.run_path(str(script), run_name="__main__")
    assert PRINTS[script.stem] in capsys.readouterr().out


def test_the_demo_shows_three_kinds_of_prompts() -> None:
    """Copying, an open question and code: the speed-up depends on the output, so a single prompt would be cherry-picked."""
    spec = importlib.util.spec_from_file_location("side_by_side", ROOT / "examples" / "side_by_side.py")
    assert spec and spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    assert list(demo.PROMPTS) == ["copying", "open question", "code"]
