"""The house rules that code can check: who imports whom, names and sizes, what every method brings along."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foreword.methods import METHODS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "foreword"
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom. A room sees itself, and `errors` and `files` are open to all.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "ops": set(),
    "ranks": set(),
    "core": {"ops"},
    "text": set(),
    "hub": {"core", "ops"},
    "model": {"hub", "ranks", "core", "ops"},
    "drafting": {"model", "core", "ops"},
    "methods": {"drafting", "model", "hub", "core", "ops"},
    "drafters": {"methods", "drafting", "model", "hub", "text", "ranks", "core", "ops"},
    "vllm": {"drafters", "methods", "core", "ops"},
    "engine": {"model", "text", "ranks", "core", "ops"},
    "requests": {"engine", "text", "core"},
    "results": {"engine", "core"},
    "trace": {"core"},
    "version": set(),
}
# Above these anything below goes, in this order; `foreword` is the package's own list of public names.
UPPER = ("api", "launch", "serve", "foreword", "bench", "train", "prove", "simulate", "cli", "__main__")
PEERS = {"serve", "bench", "train", "prove"}  # of one another they see nothing
WITH_TRANSFORMERS = {
    "model",
    "text",
    "hub",
    "drafting",
    "drafters",
    "methods",
}  # may import it, and its kin

# `ops/dispatch.py` chooses kernels, and `ops/device.py` answers by purpose. These files are about devices themselves.
DEVICE_FILES = ("model/loading.py", "methods/amusd/", "engine/graph.py", "ranks/group.py")
TYPES_OF_KERNELS = {"model/fused/cuda.py"}  # names a type of theirs, for type checkers alone


def allowed(room: str) -> set[str]:
    open_to_all = {"errors", "files", room}
    if room in ARROWS:
        return ARROWS[room] | open_to_all
    below = set(UPPER[: UPPER.index(room)]) - (PEERS if room in PEERS else set())
    return set(ARROWS) | below | open_to_all


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def room_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "foreword" if first == "__init__" else first


@cache
def nodes(source: str) -> list[Any]:
    """Return all nodes of the syntax tree of some source code, the module first."""
    return [*ast.walk(ast.parse(source))]


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    yield
    nodes.cache_clear()


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too, by its full name."""
    for node in nodes(file.read_text()):
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


def outside(file: Path) -> set[str]:
    """Packages that a file imports, ours and the standard library's left out."""
    return {module.split(".")[0] for module in imports(file)} - set(sys.stdlib_module_names) - {"foreword"}


def test_arrows_point_down() -> None:
    wrong = {name_of(file): found for file in FILES if (found := rooms_imported(file) - allowed(room_of(file)))}
    assert not wrong


def test_every_room_has_a_place_in_the_house() -> None:
    assert {room_of(file) for file in FILES} <= {*ARROWS, *UPPER}


def test_only_some_rooms_import_transformers() -> None:
    kin = {"transformers", "tokenizers", "safetensors"}
    wrong = [name_of(file) for file in FILES if outside(file) & kin and room_of(file) not in WITH_TRANSFORMERS]
    assert not wrong


def test_core_imports_torch_only() -> None:
    assert not [name_of(file) for file in FILES if room_of(file) == "core" and not outside(file) <= {"torch"}]


def test_core_holds_nouns_and_promises() -> None:
    nouns = {"draft", "needs", "sampling", "sampling_table", "choosing", "scores", "state"}
    promises = {"drafter", "loop", "target", "trainable"}
    assert {file.stem for file in FILES if room_of(file) == "core"} == nouns | promises | {"__init__"}


def device_tests(source: str) -> list[str]:
    """Where code asks whether a tensor lies on a GPU, or compares the type of a device."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and node.attr in {"is_cuda", "is_cpu"}:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found += [ast.unparse(node) for side in sides if isinstance(side, ast.Attribute) and side.attr == "type"]
    return found


def imports_in_functions(source: str) -> list[str]:
    """Modules of `ops` that are imported where they are used and not at the top of the file."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [part for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom)]
            found += [ast.unparse(part) for part in inner if "foreword.ops" in ast.unparse(part)]
    return found


def chooses_by_device(file: Path) -> bool:
    """Whether a file may: what is about devices, and tools that measure on them."""
    return room_of(file) in {"ops", "train", "bench", "prove", "cli"} or name_of(file).startswith(DEVICE_FILES)


def test_only_ops_and_what_is_about_devices_chooses_by_device() -> None:
    found = {name_of(file): device_tests(file.read_text()) for file in FILES if not chooses_by_device(file)}
    assert not {name: tests for name, tests in found.items() if tests}


def test_kernels_are_imported_by_ops_alone() -> None:
    """Not inside a function, where an import hides; and at the top only modules of `ops` that need no Triton."""
    kernels = tuple(f"foreword.ops.{path.name}." for path in (SOURCE / "ops").iterdir() if path.is_dir())
    for file in FILES:
        if room_of(file) == "ops":
            continue
        assert not imports_in_functions(file.read_text()), name_of(file)
        if name_of(file) not in TYPES_OF_KERNELS:
            assert not [module for module in imports(file) if f"{module}.".startswith(kernels)], name_of(file)


def test_a_choice_by_device_is_found() -> None:
    assert device_tests("if x.is_cuda: pass") == ["x.is_cuda"]
    assert device_tests("y = x.device.type != 'cpu'") and device_tests("y = 'cuda' == x.device.type")
    assert imports_in_functions("def f():\n    from foreword.ops.round import top") and not device_tests("type(x) is int")
    assert imports_in_functions("async def f():\n    import foreword.ops.round.top")
    assert not imports_in_functions("from foreword.ops.rounds import fit")


def test_json_is_read_in_one_place() -> None:
    """`json.loads` raises more than it says. What Python has just written itself (`loads(dumps(...))`) is no file of
    anyone's, and a process that we started answers what we printed there."""
    for file in FILES:
        if name_of(file) in {"files.py", "bench/cold.py"}:
            continue
        calls = [node for node in nodes(file.read_text()) if isinstance(node, ast.Call)]
        read = [call for call in calls if ast.unparse(call.func) in {"json.load", "json.loads"}]
        wrong = [ast.unparse(call) for call in read if not ast.unparse(call.args[0]).startswith("json.dumps(")]
        assert not wrong, f"{name_of(file)}: use foreword.files, not {wrong}"


def test_importing_needs_no_optional_package() -> None:
    """In a process of its own, where those packages cannot be found."""
    optional = ("gguf", "accelerate", "fastapi", "uvicorn", "tensorboard", "peft", "xgrammar", "ray", "vllm")
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in optional)
    rooms = "import foreword, foreword.methods, foreword.engine.engine, foreword.hub.resolve, foreword.vllm"
    program = f"import sys; {blocked}; {rooms}; [method.load() for method in foreword.methods.METHODS.values()]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Core and the loop


def core_names() -> set[str]:
    """Classes, functions, methods and fields that core defines, private ones left out."""
    found = set()
    for file in FILES:
        if room_of(file) == "core":
            for node in nodes(file.read_text()):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
    return {name for name in found if not name.startswith("_")}


def names_used(file: Path) -> set[str]:
    """Every identifier that a file reads: names, attributes, keywords and imports."""
    found = set()
    for node in nodes(file.read_text()):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def test_core_has_nothing_that_only_one_method_uses() -> None:
    """A method's folder counts as one. Core itself counts as a user: what it needs itself is nobody's private affair."""
    users: dict[str, set[str]] = {name: set() for name in core_names()}
    assert {"propose", "Draft", "grafts", "captures"} <= set(users)
    for file in FILES:
        parts = name_of(file).split("/")
        user = "/".join(parts[:2]).removesuffix(".py") if parts[0] == "methods" else parts[0]
        for name in names_used(file) & set(users):
            users[name].add(user)
    lonely = {name: found for name, found in users.items() if len(found) == 1 and next(iter(found)).startswith("methods/")}
    assert not lonely


def calls_of(function: str) -> dict[str, list[ast.Call]]:
    """Calls of a builtin, by file."""
    found: dict[str, list[ast.Call]] = {}
    for file in FILES:
        calls = [node for node in nodes(file.read_text()) if isinstance(node, ast.Call)]
        found[name_of(file)] = [call for call in calls if ast.unparse(call.func) == function]
    return found


def test_nobody_asks_for_the_kind_of_a_loop() -> None:
    for name, calls in calls_of("isinstance").items():
        assert not [call for call in calls if ast.unparse(call.args[0]).split(".")[-1] == "loop"], name


def test_nobody_asks_whether_it_is_built() -> None:
    """`build` makes a drafter's weights before `bind`, so that nothing has to look for them."""
    for name, calls in calls_of("hasattr").items():
        assert not [call for call in calls if ast.unparse(call.args[0]) == "self"], name


# Names and sizes


def test_a_file_says_what_it_is() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "v2", "old", "new"}
    for file in FILES:
        assert not set(file.stem.strip("_").split("_")) & vague, name_of(file)
        docstring = ast.get_docstring(nodes(file.read_text())[0])
        longest = 24 if file.name == "errors.py" else 8  # the exception tree is drawn there
        assert docstring and len(docstring.splitlines()) <= longest, name_of(file)


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    for node in nodes(file.read_text()):
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
        for node in nodes(file.read_text())
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
    assert module.split(".")[0] == name and (SOURCE / "methods" / f"{module.replace('.', '/')}.py").is_file()
    assert (ROOT / "docs" / "methods" / f"{name}.md").is_file(), f"docs/methods/{name}.md is missing"
    assert method.load().paper and method.summary


def test_every_file_of_a_method_stands_in_the_table() -> None:
    found = {
        path.stem for path in (SOURCE / "methods").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert found - {"__init__"} == set(METHODS)


# Type names


def test_a_type_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in nodes(file.read_text()):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(file))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice


# Model


def set_by_model() -> set[str]:
    """The attributes that a Model gives itself."""
    tree = ast.parse((SOURCE / "model" / "model.py").read_text())
    model = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Model")
    stored = [node for node in ast.walk(model) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in stored if ast.unparse(node.value) == "self"}


def test_nobody_fills_a_model_from_outside() -> None:
    """It is told by methods (`use_costs`, `use_pieces`, `limit_context`); other rooms assign none of its attributes."""
    names = set_by_model() - {"layers"}  # a transformers model has some, too
    assert {"curve", "pieces", "context"} <= names
    for file in FILES:
        if room_of(file) == "model":
            continue
        found = [node for node in nodes(file.read_text()) if isinstance(node, ast.Attribute)]
        stored = [node for node in found if isinstance(node.ctx, ast.Store) and node.attr in names]
        wrong = [ast.unparse(node) for node in stored if ast.unparse(node.value) != "self"]
        assert not wrong, f"{name_of(file)} assigns {wrong}"
