"""Where compiled loops keep their machine code, in processes of their own: next to the source, in the spare folder, nowhere.

A folder that nobody can write, not even root, is one whose path leads through a file.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import foreword

SOURCE = Path(foreword.__file__).parent

LOOP = """
from foreword.ops.layer.compiled import loop

@loop("float64(float64)")
def twice(x):
    return 2 * x
"""

RUN = """
import sys, warnings
from pathlib import Path
from foreword.ops.layer import compiled
compiled.fallback_folder = Path(sys.argv[1])
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from foreword.ops.layer import small_loop
print(small_loop.twice(21.0), [f"{one.category.__name__}: {one.message}" for one in told])
"""

LOAD = """
import sys, warnings, foreword
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    llm = foreword.load(sys.argv[1], "prompt_lookup", rows=3, device="cpu")
    assert llm.model.layer_stack.fused is not None
    out = llm.generate("hi", max_new_tokens=3, ignore_eos=True)
print(out.stats.new_tokens, [str(one.message) for one in told if one.category.__name__ == "ForewordWarning"])
"""


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """The package as it lies in a read-only container: there is no `__pycache__` to write to."""
    package = tmp_path / "site" / "foreword"
    layer = Path("ops", "layer")
    (package / layer).mkdir(parents=True)
    for place in (Path(), Path("ops"), layer):  # links to all but the folders that are made anew
        for entry in (SOURCE / place).iterdir():
            if entry.name != "__pycache__" and not (package / place / entry.name).exists():
                (package / place / entry.name).symlink_to(entry)
    (package / layer / "__pycache__").write_text("a file")
    return package


def run(package: Path, script: str, *arguments: str | Path) -> str:
    nowhere = str(package / "__init__.py" / "nowhere")
    places = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "FOREWORD_HOME": nowhere, "NUMBA_CACHE_DIR": ""}
    environment = os.environ | places | {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_where_numba_can_write_the_spare_folder_is_not_used(read_only: Path, tmp_path: Path) -> None:
    (read_only / "ops" / "layer" / "__pycache__").unlink()
    (read_only / "ops" / "layer" / "small_loop.py").write_text(LOOP)
    assert run(read_only, RUN, tmp_path / "spare") == "42.0 []"
    assert list((read_only / "ops" / "layer" / "__pycache__").glob("small_loop.*.nbc")) and not (tmp_path / "spare").exists()


def test_where_numba_cannot_write_the_spare_folder_is_used(read_only: Path, tmp_path: Path) -> None:
    (read_only / "ops" / "layer" / "small_loop.py").write_text(LOOP)
    assert run(read_only, RUN, tmp_path / "spare") == "42.0 []"
    assert list((tmp_path / "spare").glob("*/small_loop.*.nbc"))


def test_where_nothing_can_be_written_a_model_is_loaded_with_a_warning(read_only: Path, folders: dict[str, Path]) -> None:
    told = run(read_only, LOAD, folders["llama"])
    assert told.startswith("3 [") and told.count("cannot be kept") == 1 and "FOREWORD_HOME" in told
