"""Plant faults, one at a time, and see that the tests catch them: `make mutants`, or `python tests/mutants/run.py NAME ..`.

In: `faults.toml`. Each fault names a file below src/foreword, a text that stands there once, what takes its place, and the
tests that must fail then. Out: a line for each fault, and status 1 if one survived. The tree is copied first; nothing of
the checkout changes. First all of those tests have to pass without a fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
SOURCE = Path("src/foreword")
FAULTS = Path(__file__).with_name("faults.toml")
SECONDS = 900  # a fault may also make the tests hang
CAUGHT, SURVIVED = "caught", "SURVIVED"


@dataclass(frozen=True)
class Fault:
    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, root: Path) -> str:
        """The file's text with the fault in it."""
        text = (root / SOURCE / self.file).read_text()
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name!r}: its text stands {count} times in {self.file}; it must stand there once")
        return text.replace(self.old, self.new)


def read_faults(file: Path = FAULTS) -> list[Fault]:
    return [Fault(**one | {"tests": tuple(one["tests"])}) for one in tomllib.loads(file.read_text())["fault"]]


def copied(root: Path) -> Path:
    """What git knows of the tree, in another place."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith("results/"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


def clean(roots: SimpleQueue[Path], faults: list[Fault]) -> str:
    """What the tests of all faults say of the tree as it is."""
    root = roots.get()
    try:
        return passed(root, tuple(sorted({test for fault in faults for test in fault.tests})), seconds=None)
    finally:
        roots.put(root)


def run(roots: SimpleQueue[Path], fault: Fault) -> tuple[Fault, str, float]:
    """Plant a fault in a copy that is free; what its tests say of it, and how long they took."""
    started, root = time.perf_counter(), roots.get()
    file = root / SOURCE / fault.file
    sound = file.read_text()
    try:
        file.write_text(fault.planted(root))
        return fault, passed(root, fault.tests), time.perf_counter() - started
    finally:
        file.write_text(sound)
        roots.put(root)


def passed(root: Path, tests: tuple[str, ...], seconds: float | None = SECONDS) -> str:
    """CAUGHT if a test fails, SURVIVED if all pass, and otherwise what went wrong."""
    path = os.pathsep.join(str(root / part) for part in ("src", "tests"))
    # No file of compiled Python: one of a moment ago may be taken for that of a file with a fault.
    told = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        ran = subprocess.run(line, cwd=root, env=told, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return CAUGHT  # it hangs, and is noticed
    said = f"pytest ended with status {ran.returncode}: {ran.stdout[-300:]}{ran.stderr[-300:]}"
    return {0: SURVIVED, 1: CAUGHT}.get(ran.returncode, said)


def chosen(names: list[str], done: Path | None) -> list[Fault]:
    """All faults, or those whose names contain one of `names`, less those that an earlier run caught."""
    over = set(done.read_text().splitlines()) if done is not None and done.exists() else set()
    return [
        fault
        for fault in read_faults()
        if fault.name not in over and (not names or any(name in fault.name for name in names))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults and see that the tests catch them.")
    parser.add_argument("names", nargs="*", help="parts of the names of faults; all without")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in its own copy of the tree")
    parser.add_argument("--done", type=Path, help="a file of names: those in it are left out, caught ones are added")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    given = parser.parse_args()
    faults = chosen(given.names, given.done)
    if given.list:
        print("\n".join(f"{fault.name}: {fault.file}, {' '.join(fault.tests)}" for fault in faults))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        roots: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            roots.put(copied(Path(folder) / str(number)))
        if faults and not given.trust and (found := clean(roots, faults)) != SURVIVED:
            print(f"the tests fail without any fault: {found}")
            return 1
        missed = []
        for fault, outcome, seconds in pool.map(lambda fault: run(roots, fault), faults):
            print(f"{outcome:9}{seconds:6.0f} s  {fault.name}", flush=True)
            if outcome != CAUGHT:
                missed.append(fault)
            elif given.done is not None:
                with given.done.open("a") as file:
                    file.write(fault.name + "\n")
    print(f"{len(faults) - len(missed)} of {len(faults)} caught")
    for fault in missed:
        print(f"not caught: {fault.name}: {fault.why} ({fault.file}; {' '.join(fault.tests)})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
