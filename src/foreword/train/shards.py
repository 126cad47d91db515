"""Training data on disk: sequences of token ids, and a mask of those that the target generated.

A folder holds `manifest.json` and shards of four flat files each: `tokens` (uint16, or uint32 for a vocabulary above
65,536), `mask` (uint8: 1 where the target generated the token), `starts` (int64: where each sequence begins in the shard)
and `keys` (uint64: a hash of the prompt's id). The manifest is replaced atomically, after the bytes it describes are on
disk; readers ignore bytes beyond its counts. So the folder can be read, and the run resumed, after an interruption at any
time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock, Timeout

from foreword.errors import DataError, InputError, StorageError
from foreword.files import read_json
from foreword.model.fingerprint import Fingerprint

FORMAT = 1
MANIFEST = "manifest.json"
SHARD_BYTES = 16_000_000  # the largest file of a shard: under 16 MiB

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Shard:
    number: int
    sequences: int = 0
    tokens: int = 0
    sha256: dict[str, str] = field(default_factory=dict)

    def file(self, folder: Path, kind: str) -> Path:
        return folder / f"{kind}-{self.number:05d}.bin"

    def count(self, kind: str) -> int:
        return self.tokens if kind in ("tokens", "mask") else self.sequences


def kinds(vocab_size: int) -> dict[str, np.dtype[Any]]:
    """Return the kinds of files of a shard, and the dtype of each."""
    tokens = np.uint16 if vocab_size <= 65_536 else np.uint32
    return {name: np.dtype(kind) for name, kind in dict(tokens=tokens, mask="u1", starts="i8", keys="u8").items()}


def key_of(prompt: str) -> int:
    """Hash a prompt's id to 64 bits, which decide whether its answers are trained on or held out."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little")


# Reading ---------------------------------------------------------------------------------------------------------------


class Shards:
    """The sequences of a folder, memory-mapped: `tokens, mask = shards[i]`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[Shard]) -> None:
        self.folder, self.manifest = folder, manifest
        types = kinds(manifest["model"]["vocab_size"])
        self._maps: dict[str, list[Array]] = {
            kind: [np.memmap(one.file(folder, kind), dtype, "r", shape=(one.count(kind),)) for one in shards]
            for kind, dtype in types.items()
        }
        self.keys = np.concatenate([np.empty(0, types["keys"]), *self._maps["keys"]])
        ends = [np.diff(starts, append=one.tokens) for one, starts in zip(shards, self._maps["starts"], strict=True)]
        self.lengths = np.concatenate([np.empty(0, np.int64), *ends])  # [sequences]
        self._first = np.cumsum([0, *(one.sequences for one in shards)])

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True) -> Self:
        """Open a folder. `verify` checks the sha256 of every file; without it, only the sizes."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest is None:
            raise DataError(f"{folder} holds no {MANIFEST}; `foreword distill` makes such a folder")
        shards = [Shard(**one) for one in manifest["shards"]]
        for shard in shards:
            check_shard(folder, shard, manifest["model"]["vocab_size"], verify)
        return cls(folder, manifest, shards)

    @property
    def model(self) -> Fingerprint:
        return Fingerprint.from_dict(self.manifest["model"])

    @property
    def complete(self) -> bool:
        """Whether the run that wrote the folder finished."""
        return bool(self.manifest["complete"])

    @property
    def digest(self) -> str:
        """A hash of all data in the folder."""
        return hashlib.sha256(json.dumps([one["sha256"] for one in self.manifest["shards"]]).encode()).hexdigest()[:16]

    def check_model(self, model: Fingerprint) -> None:
        """Refuse data that another model generated: a drafter would learn to predict the wrong model."""
        if not self.model.matches(model):
            raise DataError(
                f"{self.folder} was written by {self.model}, the target here is {model}; "
                "distil with this target, or train for that one"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        """Token ids and mask of a sequence, as views into the files."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        start = int(self._maps["starts"][shard][index - self._first[shard]])
        span = slice(start, start + int(self.lengths[index]))
        return self._maps["tokens"][shard][span], self._maps["mask"][shard][span]

    def split(self, held_out: float = 0.01) -> tuple[Array, Array]:
        """Return indices to train on and held-out indices. All answers to a prompt are on the same side, in every folder."""
        if not 0 <= held_out < 1:
            raise InputError(f"held_out is {held_out}; it is a share, at least 0 and below 1")
        is_held_out = self.keys < np.uint64(int(held_out * 2**64))
        return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder, or None if it has none."""
    try:
        manifest = read_json(folder / MANIFEST, strict=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / MANIFEST} cannot be read ({error}); distil into another folder") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{folder / MANIFEST} is not of format {FORMAT}, the only one supported; distil into another folder")
    try:
        _check_manifest(manifest)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{folder / MANIFEST} is not what `foreword distill` writes ({error!r})"
        raise DataError(f"{problem}; copy the folder again, or distil into another one") from error
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise some error if an entry is missing or has the wrong type."""
    Fingerprint.from_dict(manifest["model"])
    types = {"settings": dict, "counts": dict, "shards": list, "complete": bool, "done": int}
    for name, expected in types.items():
        if type(manifest[name]) is not expected:
            raise TypeError(f"{name} is {type(manifest[name]).__name__}")
    if not {"command", "versions"} <= manifest.keys():
        raise KeyError("command or versions")
    for shard in (Shard(**one) for one in manifest["shards"]):
        counts = (shard.number, shard.sequences, shard.tokens)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"a shard has {counts}")
        if {type(shard.sha256[kind]) for kind in kinds(1)} != {str}:
            raise TypeError("sha256 holds something other than strings")


def check_shard(folder: Path, shard: Shard, vocab_size: int, verify: bool) -> None:
    for kind, dtype in kinds(vocab_size).items():
        file, size = shard.file(folder, kind), shard.count(kind) * dtype.itemsize
        there = file.stat().st_size if file.is_file() else 0
        if there < size:
            raise DataError(f"{file} has {there} of {size} bytes; copy the folder again, or distil into another one")
        if verify and hash_of(file, size).hexdigest() != shard.sha256[kind]:
            raise DataError(f"{file} is not what was written (its sha256 differs); copy the folder again, or distil again")


def hash_of(file: Path, size: int) -> Any:
    """Return the running sha256 of the first `size` bytes, to be continued."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(stream.read(size))
    return digest


# Writing ---------------------------------------------------------------------------------------------------------------


class ShardWriter:
    """Appends sequences to a folder. An interruption loses what `save` has not written yet; the next run makes it again.

    `about`: everything that decides the bytes (`model`, `settings`). A folder made with another `about` is refused.
    """

    def __init__(self, folder: Path, about: dict[str, Any], shard_tokens: int | None = None) -> None:
        self.folder, self.types = folder, kinds(about["model"]["vocab_size"])
        self.shard_tokens = shard_tokens or SHARD_BYTES // self.types["tokens"].itemsize
        self.manifest: dict[str, Any] = {"format": FORMAT, **about, "complete": False, "done": 0, "counts": {}}
        self.shards: list[Shard] = []
        self.digests: dict[str, Any] = {}
        self.pending: dict[str, list[Array]] = {kind: [] for kind in self.types}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(folder / ".lock", timeout=0)
            self.lock.acquire()
        except Timeout as error:
            raise StorageError(f"another run is writing to {folder}; wait for it, or name another folder") from error
        except OSError as error:
            raise StorageError(f"the folder {folder} cannot be made ({error.strerror}); name another") from error
        try:
            self._start_or_resume(about)
        except BaseException:
            self.close()
            raise

    def _start_or_resume(self, about: dict[str, Any]) -> None:
        """Continue where the last run was interrupted, or start."""
        found = read_manifest(self.folder)
        if found is None:
            if any(self.folder.glob("tokens-*.bin")):
                raise DataError(f"{self.folder} holds shards without a {MANIFEST}; name another folder")
            self.save()
            return
        _check_same(self.folder, found, about)
        self.manifest |= {name: found[name] for name in ("complete", "done", "counts", "command", "versions")}
        self.shards = [Shard(**one) for one in found["shards"]]
        for shard in self.shards:
            check_shard(self.folder, shard, about["model"]["vocab_size"], verify=True)
        if self.shards and not self.complete:
            self._reopen(self.shards[-1])

    def _reopen(self, shard: Shard) -> None:
        for kind, dtype in self.types.items():
            size = shard.count(kind) * dtype.itemsize
            os.truncate(shard.file(self.folder, kind), size)
            self.digests[kind] = hash_of(shard.file(self.folder, kind), size)

    @property
    def complete(self) -> bool:
        return bool(self.manifest["complete"])

    def add(self, tokens: Sequence[int], written: Sequence[tuple[int, int]], key: int) -> None:
        """Add a sequence. `written`: the spans [start, stop) that the target generated. `key`: its prompt's."""
        if not self.shards or self.shards[-1].tokens + len(tokens) > self.shard_tokens:
            self._next_shard()
        shard = self.shards[-1]
        mask = np.zeros(len(tokens), self.types["mask"])
        for start, stop in written:
            mask[start:stop] = 1
        for kind, values in dict(tokens=tokens, mask=mask, starts=[shard.tokens], keys=[key]).items():
            self.pending[kind].append(np.asarray(values, self.types[kind]))
        shard.sequences += 1
        shard.tokens += len(tokens)

    def _next_shard(self) -> None:
        if self.shards:
            self._append()
        self.shards.append(Shard(len(self.shards)))
        self.digests = {kind: hashlib.sha256() for kind in self.types}
        for kind in self.types:  # drop bytes that an interrupted run left there
            with self._storage_errors():
                _write(self.shards[-1].file(self.folder, kind), b"", "wb")

    def _append(self) -> None:
        """Append pending bytes to the files of the last shard."""
        shard = self.shards[-1]
        for kind, waiting in self.pending.items():
            data = b"".join(values.tobytes() for values in waiting)
            with self._storage_errors():
                _write(shard.file(self.folder, kind), data, "ab")
            self.digests[kind].update(data)
            shard.sha256[kind] = self.digests[kind].hexdigest()
            waiting.clear()

    def save(self) -> None:
        """Write everything that was added, and then the manifest."""
        if self.shards and self.pending["tokens"]:
            self._append()
        content = json.dumps(self.manifest | {"shards": [asdict(one) for one in self.shards]}, indent=1)
        partial = self.folder / f"{MANIFEST}.part"
        with self._storage_errors():
            _write(partial, f"{content}\n".encode(), "wb")
            partial.replace(self.folder / MANIFEST)

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot write to {self.folder} ({error.strerror}); what was saved before is intact: free some space, then "
                "run the same command again"
            ) from error

    def close(self) -> None:
        self.lock.release()


def _write(file: Path, data: bytes, mode: str) -> None:
    with file.open(mode) as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _check_same(folder: Path, found: dict[str, Any], about: dict[str, Any]) -> None:
    old, new = Fingerprint.from_dict(found["model"]), Fingerprint.from_dict(about["model"])
    if not old.matches(new):
        raise DataError(f"{folder} was started with {old}, the model here is {new}; name another folder")
    names = dict.fromkeys([*found["settings"], *about["settings"]])
    other = [
        f"{name} was {found['settings'].get(name)}, is {about['settings'].get(name)}"
        for name in names
        if found["settings"].get(name) != about["settings"].get(name)
    ]
    if other:
        raise DataError(f"{folder} was started with other settings ({'; '.join(other)}); use those, or name another folder")
