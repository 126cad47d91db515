"""Checksums: files compared with what was written, by size and by every byte."""

from pathlib import Path

import pytest

from foreword.hub.checksums import check_sizes, verify_model, write_checksums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text(f"what {name} holds")
    write_checksums(tmp_path)
    return tmp_path


def test_unchanged_files_have_no_faults(folder: Path) -> None:
    assert check_sizes(folder) == verify_model(folder) == []


def test_a_flipped_bit_is_found_by_the_hash_alone(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[3] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert check_sizes(folder) == []
    assert verify_model(folder) == ["model.safetensors holds other bytes than were written (its sha256 differs)"]


def test_every_file_that_is_wrong_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_text("short")
    (folder / "config.json").unlink()
    wrong = ["config.json is missing", "model.safetensors has 5 bytes, 28 were written"]
    assert check_sizes(folder) == verify_model(folder) == wrong


def test_a_folder_without_checksums_is_not_compared(tmp_path: Path) -> None:
    assert verify_model(tmp_path) is None and check_sizes(tmp_path) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"config.json": 3}', '{"config.json": {}}', "[" * 10_000])
def test_damaged_checksums(folder: Path, content: str) -> None:
    (folder / "checksums.json").write_text(content)
    assert [one.startswith("checksums.json cannot be read") for one in verify_model(folder) or []] == [True]
