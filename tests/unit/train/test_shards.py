"""Shards return what was written, memory-mapped, and refuse damaged or foreign data."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword.errors import DataError, InputError, StorageError
from foreword.model.fingerprint import Fingerprint
from foreword.train import Shards
from foreword.train.shards import ShardWriter, key_of, kinds

KINDS = tuple(kinds(1))
MODEL = Fingerprint("tiny", "c0ffee", 1000, "beef")


def about(vocabulary: int = 1000) -> dict:
    model = Fingerprint("tiny", "c0ffee", vocabulary, "beef").to_dict()
    return {"model": model, "settings": {"seed": 0}, "command": None, "versions": {}}


def random_sequences(count: int, seed: int = 0, vocabulary: int = 1000) -> list[tuple[list[int], tuple[int, int], str]]:
    """Return tokens, the span that the target generated, and the prompt's id."""
    generator = random.Random(seed)
    found = []
    for i in range(count):
        prompt, answer = generator.randint(1, 20), generator.randint(1, 30)
        tokens = [generator.randrange(vocabulary) for _ in range(prompt + answer)]
        found.append((tokens, (prompt, prompt + answer), f"p{i // 2}"))
    return found


def fill(folder: Path, sequences: list, shard_tokens: int = 200, vocabulary: int = 1000) -> Shards:
    writer = ShardWriter(folder, about(vocabulary), shard_tokens)
    for tokens, span, prompt in sequences:
        writer.add(tokens, [span], key_of(prompt))
    writer.save()
    writer.close()
    return Shards.open(folder)


@pytest.mark.parametrize(("vocabulary", "size"), [(1000, 2), (65_536, 2), (65_537, 4)])
def test_shards_return_what_was_written(tmp_path: Path, vocabulary: int, size: int) -> None:
    sequences = random_sequences(60, vocabulary=vocabulary)
    shards = fill(tmp_path, sequences, vocabulary=vocabulary)
    assert len(shards) == 60 and len(list(tmp_path.glob("tokens-*.bin"))) > 5
    for i, (tokens, (start, stop), _) in enumerate(sequences):
        ids, mask = shards[i]
        assert ids.tolist() == tokens and ids.dtype.itemsize == size and isinstance(ids.base, np.memmap)
        assert mask.tolist() == [int(start <= place < stop) for place in range(len(tokens))]
    assert all(file.stat().st_size <= 200 * size for file in tmp_path.glob("tokens-*.bin"))
    with pytest.raises(IndexError):
        shards[60]


def test_a_default_shard_is_under_16_mib(tmp_path: Path) -> None:
    for vocabulary in (1000, 100_000):
        writer = ShardWriter(tmp_path / str(vocabulary), about(vocabulary))
        assert writer.shard_tokens * writer.types["tokens"].itemsize < 16 * 2**20
        writer.close()


def test_all_answers_to_a_prompt_are_on_one_side(tmp_path: Path) -> None:
    shards = fill(tmp_path, random_sequences(2000), shard_tokens=100_000)
    train, held = shards.split(0.1)
    assert sorted([*train, *held]) == list(range(2000)) and 120 < len(held) < 280
    assert not {i // 2 for i in train.tolist()} & {i // 2 for i in held.tolist()}
    again = fill(tmp_path / "reversed", random_sequences(2000)[::-1], shard_tokens=100_000).split(0.1)[1]
    assert sorted(1999 - again) == held.tolist(), "in every folder"
    assert len(shards.split(0)[1]) == 0
    with pytest.raises(InputError, match="held_out is 1"):
        shards.split(1)


# What cannot be used ---------------------------------------------------------------------------------------------------


def test_bytes_beyond_the_counts_of_the_manifest_are_ignored(tmp_path: Path) -> None:
    sequences = random_sequences(10)
    before = fill(tmp_path, sequences, shard_tokens=10_000)
    with (tmp_path / "tokens-00000.bin").open("ab") as stream:
        stream.write(b"half a seq")
    assert len(Shards.open(tmp_path)) == len(before) == 10
    writer = ShardWriter(tmp_path, about(), 10_000)
    writer.add([1, 2, 3], [(1, 3)], 7)
    writer.save()
    writer.close()
    after = Shards.open(tmp_path)
    assert after[10][0].tolist() == [1, 2, 3] and after[9][0].tolist() == sequences[9][0]


@pytest.mark.parametrize("kind", ["tokens", "mask", "starts", "keys"])
def test_damaged_files_are_refused(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, random_sequences(10))
    file = tmp_path / f"{kind}-00000.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{kind}-00000.bin has {len(whole) - 1} of {len(whole)} bytes"):
        Shards.open(tmp_path)
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match="sha256 differs"):
        Shards.open(tmp_path)
    with pytest.raises(DataError, match="sha256 differs"):
        ShardWriter(tmp_path, about(), 200)
    Shards.open(tmp_path, verify=False)
    file.unlink()
    with pytest.raises(DataError, match="has 0 of"):
        Shards.open(tmp_path, verify=False)


def test_folders_without_valid_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no manifest.json"):
        Shards.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        Shards.open(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="not of format 1"):
        Shards.open(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "tokens-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match="shards without a manifest"):
        ShardWriter(tmp_path, about())


NESTED: list[object] = []
for _ in range(200):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": None},
        {"model": {"name": "x"}},
        {"settings": 5},
        {"complete": "yes"},
        {"done": None},
        {"shards": {}},
        {"shards": [5]},
        {"shards": [{}]},
        {"shards": [{"number": 0, "sequences": -1, "tokens": 5, "sha256": {}}]},
        {"shards": [{"number": "0", "sequences": 1, "tokens": 5, "sha256": {}}]},
        {"shards": [{"number": 0, "sequences": 1, "tokens": 10**30, "sha256": dict.fromkeys(KINDS, "x")}]},
        {"shards": [{"number": 0, "sequences": 1, "tokens": 5, "sha256": dict.fromkeys(KINDS, 5)}]},
        {"shards": NESTED},
    ],
    ids=lambda changed: str(changed)[:60],
)
def test_an_invalid_manifest_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, random_sequences(3))
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    for use in (lambda: Shards.open(tmp_path), lambda: ShardWriter(tmp_path, about())):
        with pytest.raises(DataError, match=r"distil|copy the folder again"):
            use()


def test_a_data_folder_of_another_model(tmp_path: Path) -> None:
    shards = fill(tmp_path, random_sequences(3))
    shards.check_model(Fingerprint("by another name", "c0ffee", 1000, "beef"))
    for other in (Fingerprint("tiny", "c0ffee", 1000, "dead"), Fingerprint("tiny", "c0ffee", 1001, "beef")):
        with pytest.raises(DataError, match="was written by tiny .*the target here is tiny"):
            shards.check_model(other)


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, about())
    with pytest.raises(StorageError, match="another run is writing"):
        ShardWriter(tmp_path, about())
    writer.close()
    ShardWriter(tmp_path, about()).close()


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be made"):
        ShardWriter(tmp_path / "file" / "data", about())


def test_an_empty_folder_can_be_opened(tmp_path: Path) -> None:
    shards = fill(tmp_path, [])
    assert len(shards) == 0 and not shards.complete


def test_leftovers_of_an_interrupted_run_are_ignored(tmp_path: Path) -> None:
    sequences = random_sequences(20)
    for kind in ("tokens", "mask", "starts", "keys"):
        (tmp_path / "left").mkdir(exist_ok=True)
        (tmp_path / "left" / f"{kind}-00001.bin").write_bytes(b"12345678")
    (tmp_path / "left" / "manifest.json").write_text(json.dumps(_started()))
    found, whole = fill(tmp_path / "left", sequences), fill(tmp_path / "whole", sequences)
    assert [found[i][0].tolist() for i in range(20)] == [whole[i][0].tolist() for i in range(20)]


def _started() -> dict:
    return {"format": 1, **about(), "complete": False, "done": 0, "counts": {}, "shards": []}
