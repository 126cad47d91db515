"""Every script in examples/ runs as it stands, and says what it promises."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "chat_keeps_its_cache": "Paris",
    "many_at_once": "Name a city.",
    "side_by_side": "the same tokens, ",
    "wrap_a_model": "tokens a round",
}

pytestmark = pytest.mark.model


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_runs(script: Path, python: Callable[..., subprocess.CompletedProcess[str]], model_home: Path) -> None:
    ran = python(script, FOREWORD_HOME=str(model_home))
    assert ran.returncode == 0, ran.stderr
    assert SAYS[script.stem] in ran.stdout
