"""Every study can be run, explains itself, and names published results that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
# A looped model that was trained on a GPU; a picture.
WITHOUT_RESULTS = {"speed", "page_picture"}
STUDIES = sorted(
    path for path in (ROOT / "studies").glob("*.py") if "typer.run(" in path.read_text() or "app()" in path.read_text()
)


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.stem)
def test_a_study_names_its_command_and_its_results(study: Path) -> None:
    text = study.read_text(encoding="utf-8")
    about = text.split('"""')[1]
    assert f"python studies/{study.name}" in about
    made = re.findall(r"results/[\w./-]*\w", about.partition("Made ")[2])
    assert (made or study.stem in WITHOUT_RESULTS) and all((ROOT / name).exists() for name in made)


def test_a_study_explains_itself() -> None:
    """Run in its own process, as a user runs it."""
    command = [sys.executable, str(ROOT / "studies" / "asynchrony.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--draft-ms" in done.stdout, done.stderr
