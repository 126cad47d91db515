"""Folders of training data, split into training and held-out sequences."""

from pathlib import Path

import pytest
import torch

from doubles import fresh
from foreword.errors import DataError
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model
from foreword.train import describe_data, held_out_share, open_data, split_data
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
    """Two folders with the same forty prompts, in many small shards."""
    return [
        folder(tmp_path / name, own, [([n, 1, 2, *range(3, 5 + n % 7)], (3, 5 + n % 7), f"q{n}") for n in range(40)])
        for name in ("one", "two")
    ]


def test_every_sequence_is_on_one_side_and_its_prompt_with_it(folders: list[Path], own: Fingerprint) -> None:
    train, held_out = split_data(open_data(folders, own), 0.3, max_length=64)
    sides = [[side[i] for i in range(len(side.lengths))] for side in (train, held_out)]
    prompts = [{int(tokens[0]) for tokens, _ in side} for side in sides]
    assert not prompts[0] & prompts[1] and prompts[0] | prompts[1] == set(range(40))
    assert [len(side) for side in sides] == [2 * len(some) for some in prompts]
    for side, sequences in ((train, sides[0]), (held_out, sides[1])):
        for length, (tokens, mask) in zip(side.lengths.tolist(), sequences, strict=True):
            n = int(tokens[0])
            assert tokens.tolist() == [n, 1, 2, *range(3, 5 + n % 7)] and length == len(tokens)
            assert mask.tolist() == [False] * 3 + [True] * (2 + n % 7)


@pytest.mark.parametrize(("prompts", "held_out"), [(20, 4), (8, 4), (7, 3), (2, 1)])
def test_at_least_a_few_prompts_are_held_out_by_default(
    tmp_path: Path, own: Fingerprint, prompts: int, held_out: int
) -> None:
    """One percent of twenty prompts is none. The second folder has half of them again, on the same side."""
    rows = [([n, 1, 2, 3, 4], (3, 5), f"q{n}") for n in range(prompts)]
    data = open_data([folder(tmp_path / "all", own, rows), folder(tmp_path / "half", own, rows[::2])], own)
    train, test = split_data(data, held_out_share(data), max_length=64)
    sides = [{int(side[i][0][0]) for i in range(len(side.lengths))} for side in (train, test)]
    assert [len(side) for side in sides] == [prompts - held_out, held_out] and not sides[0] & sides[1]


def test_one_percent_of_many_prompts_is_held_out(tmp_path: Path, own: Fingerprint) -> None:
    rows = [([n % 100, 1, 2, 3, 4], (3, 5), f"q{n}") for n in range(1000)]
    assert held_out_share(open_data([folder(tmp_path / "many", own, rows, shard_tokens=10_000)], own)) == 0.01
    single = open_data([folder(tmp_path / "single", own, rows[:1])], own)
    with pytest.raises(DataError, match="raise --held-out, or distil more"):
        split_data(single, held_out_share(single), 64)


def test_sequences_without_a_usable_token_are_left_out(tmp_path: Path, own: Fingerprint) -> None:
    """The target's tokens are beyond the maximum length, or before the first that a head predicts."""
    rows = [([7] * 9, (6, 9), "late"), ([8] * 9, (0, 2), "early"), *(([9] * 9, (2, 9), f"q{n}") for n in range(20))]
    train, held_out = split_data(open_data([folder(tmp_path, own, rows)], own), 0.3, max_length=6)
    assert {int(side[i][0][0]) for side in (train, held_out) for i in range(len(side.lengths))} == {9}


def test_refusals(tmp_path: Path, folders: list[Path], own: Fingerprint) -> None:
    with pytest.raises(DataError, match="holds no sequence yet"):
        open_data([*folders, folder(tmp_path / "empty", own, [])], own)
    with pytest.raises(DataError, match="was written by tiny .* the target here is other"):
        open_data(folders, Fingerprint.of(Model(fresh("llama", torch.float32, seed=1), "other")))
    with pytest.raises(DataError, match="none of 80 sequences is held out at 0; raise --held-out"):
        split_data(open_data(folders, own), 0, 64)


def test_the_description_has_a_hash_of_the_data(tmp_path: Path, folders: list[Path], own: Fingerprint) -> None:
    one, two = describe_data(open_data(folders, own))
    other = describe_data(open_data([folder(tmp_path / "three", own, [([1, 2, 3], (1, 3), "q")])], own))[0]
    assert one["sha256"] == two["sha256"] != other["sha256"]
