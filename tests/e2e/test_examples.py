"""Every script in examples/ runs and prints what it should."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORTER = {"side_by_side": ("--turns", "1", "--tokens", "24")}  # `make demo` runs it with its defaults
PRINTS = {
    "chat_keeps_its_cache": "Paris",
    "many_at_once": "Name a city.",
    "side_by_side": "the same tokens, ",
    "wrap_a_model": "tokens per round",
}

pytestmark = pytest.mark.model


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_runs(script: Path, python: Callable[..., subprocess.CompletedProcess[str]], model_home: Path) -> None:
    ran = python(script, *SHORTER.get(script.stem, ()), FOREWORD_HOME=str(model_home))
    assert ran.returncode == 0, ran.stderr
    assert PRINTS[script.stem] in ran.stdout


def test_the_demo_shows_three_kinds_of_prompts() -> None:
    """Copying, an open question and code: the speed-up depends on the output, so a single prompt would be cherry-picked."""
    spec = importlib.util.spec_from_file_location("side_by_side", ROOT / "examples" / "side_by_side.py")
    assert spec and spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    assert list(demo.PROMPTS) == ["copying", "open question", "code"]
