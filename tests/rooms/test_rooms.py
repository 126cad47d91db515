"""The house rules that code can check: who imports whom, names and sizes, what every method brings along."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword.methods import METHODS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "foreword"
FILES = sorted(SOURCE.rglob("*.py"))

# From the ground up; rooms of one tier do not see each other. `foreword` is the package's own list of public names.
TIERS = [
    {"errors"},
    {"kernels"},
    {"core"},
    {"model", "text"},
    {"engine", "methods"},
    {"results"},
    {"api"},
    {"foreword"},
    {"serve", "bench", "train", "prove"},
    {"cli"},
    {"__main__"},
]
TIER = {room: tier for tier, rooms in enumerate(TIERS) for room in rooms}


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def room_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "foreword" if first == "__init__" else first


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too, by its full name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(file: Path) -> set[str]:
    """Of `foreword.engine.request.Request` the room is engine; a public name of the package itself is `foreword`."""
    rooms = {path.name.removesuffix(".py") for path in SOURCE.iterdir()}
    parts = [module.split(".") for module in imports(file) if module.split(".")[0] == "foreword"]
    return {part[1] if len(part) > 1 and part[1] in rooms else "foreword" for part in parts}


every_file = pytest.mark.parametrize("file", FILES, ids=name_of)


@every_file
def test_arrows_point_down(file: Path) -> None:
    room = room_of(file)
    assert room in TIER, f"{room} has no place in the house; draw it in TIERS"
    wrong = {other for other in rooms_imported(file) - {room} if TIER[other] >= TIER[room]}
    assert not wrong, f"{room} may not import {wrong}"


@every_file
def test_only_model_and_text_import_transformers(file: Path) -> None:
    outside = {module.split(".")[0] for module in imports(file)} & {"transformers", "tokenizers", "safetensors"}
    assert not outside or room_of(file) in {"model", "text"}


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file) == "core"], ids=name_of)
def test_core_imports_torch_only(file: Path) -> None:
    foreign = {module.split(".")[0] for module in imports(file)} - set(sys.stdlib_module_names)
    assert foreign <= {"torch", "foreword"}


def test_importing_needs_no_optional_package() -> None:
    """In a process of its own, where those packages cannot be found."""
    optional = ("gguf", "accelerate", "fastapi", "uvicorn", "tensorboard", "peft")
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in optional)
    rooms = "import foreword, foreword.methods, foreword.engine.engine, foreword.model.hub"
    program = f"import sys; {blocked}; {rooms}; [method.load() for method in foreword.methods.METHODS.values()]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Names and sizes


@every_file
def test_a_file_says_what_it_is(file: Path) -> None:
    words = set(file.stem.strip("_").split("_"))
    assert not words & {"utils", "util", "common", "helpers", "helper", "misc", "v2", "old", "new"}
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    longest = 20 if file.name == "errors.py" else 8  # the exception tree is drawn there
    assert docstring and len(docstring.splitlines()) <= longest


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def test_functions_fit_a_screen() -> None:
    lengths = {
        f"{name_of(file)}:{node.name}": node.end_lineno - node.lineno + 1
        for file in FILES
        for node in functions(file)
        if node.end_lineno is not None
    }
    too_long = {name: length for name, length in lengths.items() if length > 60}
    assert not too_long
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= 35


def test_inheritance_is_one_deep() -> None:
    """A class of ours may have one parent of ours; that one has none."""
    parents = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for file in FILES
        if file.name != "errors.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    deep = {name for name, bases in parents.items() if any(parents.get(base, set()) & set(parents) for base in bases)}
    assert not deep


def test_tests_have_names_of_their_own() -> None:
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


# Methods


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_all_that_belongs_to_it(name: str) -> None:
    method = METHODS[name]
    module, _ = method.place.split(":")
    assert module == name and (SOURCE / "methods" / f"{name}.py").is_file()
    assert (ROOT / "docs" / "methods" / f"{name}.md").is_file(), f"docs/methods/{name}.md is missing"
    assert method.load().paper and method.summary


def test_every_file_of_a_method_stands_in_the_table() -> None:
    files = {file.stem for file in (SOURCE / "methods").glob("*.py")} - {
        "__init__",
        "saved",
        "shipped",
        "wanted",
        "auto",
        "export",
        "words",
    }
    assert files == set(METHODS)
