"""The faults that `make mutants` plants: each still applies to the source, and names tests that exist."""

import ast
from functools import cache
from pathlib import Path

from mutants.run import ROOT, Fault, read_faults

FAULTS = read_faults()


def test_there_are_some_fifty_with_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 50


def wrong_with(fault: Fault) -> list[str]:
    """What it replaces must stand once in its file; what comes out must be Python, and another program."""
    try:
        planted = ast.dump(ast.parse(fault.planted(ROOT)))
    except (ValueError, SyntaxError, OSError) as error:
        return [str(error)]
    wrong = [] if fault.tests and fault.why else ["it names no test, or no reason"]
    if planted == ast.dump(ast.parse((ROOT / "src" / "foreword" / fault.file).read_text())):
        wrong.append("the program stays the same")
    for file, _, name in (test.partition("::") for test in fault.tests):
        if not (ROOT / file).is_file():
            wrong.append(f"there is no {file}")
        elif name and name not in functions(ROOT / file):
            wrong.append(f"{file} has no {name}")
    return wrong


@cache
def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_fault_applies_and_its_tests_exist() -> None:
    assert not {fault.name: wrong for fault in FAULTS if (wrong := wrong_with(fault))}
