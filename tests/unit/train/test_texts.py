"""Folders as texts to learn from and texts kept apart."""

from pathlib import Path

import pytest
import torch

from doubles import fresh
from foreword.errors import DataError
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model
from foreword.train import about_data, open_data, share_apart, split_data
from foreword.train.shards import ShardWriter, key_of


@pytest.fixture(scope="module")
def own() -> Fingerprint:
    return Fingerprint.of(Model(fresh("llama", torch.float32), "tiny"))


def folder(
    place: Path, own: Fingerprint, sequences: list[tuple[list[int], tuple[int, int], str]], shard_tokens: int = 40
) -> Path:
    about = {"model": own.to_dict(), "settings": {}, "command": None, "versions": {}}
    writer = ShardWriter(place, about, shard_tokens)
    for tokens, written, prompt in sequences:
        writer.add(tokens, [written], key_of(prompt))
    writer.save()
    writer.close()
    return place


@pytest.fixture
def folders(tmp_path: Path, own: Fingerprint) -> list[Path]:
    """The same forty prompts in both, answered otherwise; shards are small, so that there are many."""
    return [
        folder(tmp_path / name, own, [([n, 1, 2, *range(3, 5 + n % 7)], (3, 5 + n % 7), f"q{n}") for n in range(40)])
        for name in ("one", "two")
    ]


def test_every_sequence_is_on_one_side_and_its_prompt_with_it(folders: list[Path], own: Fingerprint) -> None:
    learn, apart = split_data(open_data(folders, own), 0.3, max_length=64)
    sides = [[side[i] for i in range(len(side.lengths))] for side in (learn, apart)]
    prompts = [{int(tokens[0]) for tokens, _ in side} for side in sides]
    assert not prompts[0] & prompts[1] and prompts[0] | prompts[1] == set(range(40))
    assert [len(side) for side in sides] == [2 * len(some) for some in prompts]
    for side, texts in ((learn, sides[0]), (apart, sides[1])):
        for length, (tokens, mask) in zip(side.lengths.tolist(), texts, strict=True):
            n = int(tokens[0])
            assert tokens.tolist() == [n, 1, 2, *range(3, 5 + n % 7)] and length == len(tokens)
            assert mask.tolist() == [False] * 3 + [True] * (2 + n % 7)


@pytest.mark.parametrize(("prompts", "apart"), [(20, 4), (8, 4), (7, 3), (2, 1)])
def test_of_few_prompts_some_are_kept_apart_by_themselves(
    tmp_path: Path, own: Fingerprint, prompts: int, apart: int
) -> None:
    """A hundredth of twenty prompts is none. The second folder holds half of them again, on the same side."""
    rows = [([n, 1, 2, 3, 4], (3, 5), f"q{n}") for n in range(prompts)]
    data = open_data([folder(tmp_path / "all", own, rows), folder(tmp_path / "half", own, rows[::2])], own)
    learn, held = split_data(data, share_apart(data), max_length=64)
    sides = [{int(side[i][0][0]) for i in range(len(side.lengths))} for side in (learn, held)]
    assert [len(side) for side in sides] == [prompts - apart, apart] and not sides[0] & sides[1]


def test_of_many_prompts_a_hundredth_is_kept_apart(tmp_path: Path, own: Fingerprint) -> None:
    rows = [([n % 100, 1, 2, 3, 4], (3, 5), f"q{n}") for n in range(1000)]
    assert share_apart(open_data([folder(tmp_path / "many", own, rows, shard_tokens=10_000)], own)) == 0.01
    single = open_data([folder(tmp_path / "single", own, rows[:1])], own)
    with pytest.raises(DataError, match="raise --held-out, or distil more"):
        split_data(single, share_apart(single), 64)


def test_what_teaches_nothing_is_left_out(tmp_path: Path, own: Fingerprint) -> None:
    """Nothing of the target's lies within reach, or only what no head guesses."""
    rows = [([7] * 9, (6, 9), "late"), ([8] * 9, (0, 2), "early"), *(([9] * 9, (2, 9), f"q{n}") for n in range(20))]
    learn, apart = split_data(open_data([folder(tmp_path, own, rows)], own), 0.3, max_length=6)
    assert {int(side[i][0][0]) for side in (learn, apart) for i in range(len(side.lengths))} == {9}


def test_refusals(tmp_path: Path, folders: list[Path], own: Fingerprint) -> None:
    with pytest.raises(DataError, match="holds no sequence yet"):
        open_data([*folders, folder(tmp_path / "empty", own, [])], own)
    with pytest.raises(DataError, match="was written by tiny .* the target here is other"):
        open_data(folders, Fingerprint.of(Model(fresh("llama", torch.float32, seed=1), "other")))
    with pytest.raises(DataError, match="none of 80 sequences is kept apart at 0; raise --held-out"):
        split_data(open_data(folders, own), 0, 64)


def test_the_record_knows_other_bytes_by_their_hash(tmp_path: Path, folders: list[Path], own: Fingerprint) -> None:
    one, two = about_data(open_data(folders, own))
    other = about_data(open_data([folder(tmp_path / "three", own, [([1, 2, 3], (1, 3), "q")])], own))[0]
    assert one["sha256"] == two["sha256"] != other["sha256"]
