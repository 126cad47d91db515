"""Where compiled loops cache their machine code, in separate processes: next to the source, in the fallback folder, nowhere.

A path that leads through a file cannot be written, not even by root.
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
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from foreword.ops.layer import small_loop
print(small_loop.twice(21.0), [f"{one.category.__name__}: {one.message}" for one in caught])
"""

LOAD = """
import sys, warnings, foreword
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    llm = foreword.load(sys.argv[1], "prompt_lookup", rows=3, device="cpu")
    assert llm.model.layer_stack.fused is not None
    out = llm.generate("hi", max_new_tokens=3, ignore_eos=True)
print(out.stats.new_tokens, [str(one.message) for one in caught if one.category.__name__ == "ForewordWarning"])
"""


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """The package as in a read-only container: it has no `__pycache__` to write to."""
    package = tmp_path / "site" / "foreword"
    layer = Path("ops", "layer")
    (package / layer).mkdir(parents=True)
    for place in (Path(), Path("ops"), layer):  # links to everything except the folders made here
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


def test_the_fallback_folder_is_not_used_if_numba_can_write(read_only: Path, tmp_path: Path) -> None:
    (read_only / "ops" / "layer" / "__pycache__").unlink()
    (read_only / "ops" / "layer" / "small_loop.py").write_text(LOOP)
    assert run(read_only, RUN, tmp_path / "fallback") == "42.0 []"
    assert (
        list((read_only / "ops" / "layer" / "__pycache__").glob("small_loop.*.nbc")) and not (tmp_path / "fallback").exists()
    )


def test_the_fallback_folder_is_used_if_numba_cannot_write(read_only: Path, tmp_path: Path) -> None:
    (read_only / "ops" / "layer" / "small_loop.py").write_text(LOOP)
    assert run(read_only, RUN, tmp_path / "fallback") == "42.0 []"
    assert list((tmp_path / "fallback").glob("*/small_loop.*.nbc"))


def test_a_model_loads_with_a_warning_if_nothing_is_writable(read_only: Path, folders: dict[str, Path]) -> None:
    printed = run(read_only, LOAD, folders["llama"])
    assert printed.startswith("3 [") and printed.count("cannot be cached") == 1 and "FOREWORD_HOME" in printed
