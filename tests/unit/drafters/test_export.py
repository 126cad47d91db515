"""Exporting a drafter as a model: its logits, the files in the folder, which methods can use it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import foreword
from doubles import hf_logits
from foreword.drafters.export import export
from foreword.drafters.saved import as_model, restore
from foreword.errors import DrafterError, InputError, ModelNotFound, StorageError
from foreword.model.model import Model

pytestmark = pytest.mark.usefixtures("own_home")

TEXT = [5, 9, 17, 30, 41, 8]


@pytest.fixture(scope="module")
def exported(folders: dict[str, Path], trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")  # empty, and there
    export(out, trained["draft_model"], folders["llama"], "float32")
    return out


def test_it_has_the_logits_of_the_drafter(exported: Path, folders: dict[str, Path], trained: dict[str, Path]) -> None:
    target = Model(AutoModelForCausalLM.from_pretrained(folders["llama"]))
    drafter: Any = restore(trained["draft_model"], target)
    with torch.no_grad():
        expected = target.head(drafter.module.norm(drafter.small_model.over(torch.tensor([TEXT]))))[0]
    model = AutoModelForCausalLM.from_pretrained(exported)
    torch.testing.assert_close(hf_logits(model, TEXT), expected.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_lies_in_the_folder(dtype: str, folders: dict[str, Path], trained: dict[str, Path], tmp_path: Path) -> None:
    done = export(tmp_path / "new" / "small", trained["draft_model"], folders["llama"], dtype)
    folder = Path(done.out)
    assert [file.name for file in folder.parent.iterdir()] == ["small"]  # no temporary file is left next to it
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert {str(weight.dtype) for weight in weights.values()} == {f"torch.{dtype}"} and config["dtype"] == dtype
    assert (done.layers, config["num_hidden_layers"], done.target) == (2, 2, str(folders["llama"]))
    assert done.parameters == sum(weight.numel() for weight in weights.values()) and done.dtype == dtype
    assert done.bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert str(folders["llama"]) not in (folder / "config.json").read_text()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1]
    own, written = (AutoTokenizer.from_pretrained(one) for one in (folders["llama"], folder))
    assert own.get_vocab() == written.get_vocab() and own.chat_template == written.chat_template


def test_a_tied_head_stays_tied(talking: Any, hf_tokenizer: Any, keep_drafter: Any, tmp_path: Path) -> None:
    for tied in (True, False):
        folder, drafter, out = (tmp_path / f"{name}-{tied}" for name in ("model", "drafter", "small"))
        talking("llama", tie_word_embeddings=tied).save_pretrained(folder)
        hf_tokenizer.save_pretrained(folder)
        export(out, keep_drafter("draft_model", folder, drafter), folder)
        assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not tied
        model: Any = AutoModelForCausalLM.from_pretrained(out)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("method", ["draft_model", "gsd", "amusd"])
def test_it_drafts_as_the_drafter_does(
    method: str, exported: Path, folders: dict[str, Path], trained: dict[str, Path]
) -> None:
    options: dict[str, Any] = {"rows": 4, "least": 3, "patience": 60.0, "worker": "thread"} if method == "amusd" else {}
    rounds = []
    for drafter in (trained[method], exported):
        with foreword.load(folders["llama"], method, drafter=drafter, **{"rows": 8} | options, device="cpu") as llm:
            out = llm.generate("the words that come before", max_new_tokens=24)
            rounds.append((out.tokens, out.stats.rounds))
    assert rounds[0] == rounds[1]


def test_the_one_that_ships(folders: dict[str, Path], trained: dict[str, Path], ship: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreword.drafters.shipped.WEIGHTS", tmp_path / "nothing")
        with pytest.raises(DrafterError, match="no drafter of draft_model ships; name the folder"):
            export(tmp_path / "small", model=folders["llama"])
    ship(trained["draft_model"])
    assert export(tmp_path / "small", model=folders["llama"]).layers == 2


def test_what_is_refused_before_the_model_is_read(
    trained: dict[str, Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    own, other = trained["draft_model"], folders["llama"]
    for out, drafter, dtype, error, message in (
        ("full", own, "float32", InputError, "full is there already and is not empty; name a new or an empty folder"),
        ("full/file", own, "float32", InputError, "there already"),
        ("new", trained["medusa"], "float32", DrafterError, "a drafter of 'medusa'.*`foreword train draft_model`"),
        ("new", other, "float32", DrafterError, "holds a whole model already"),
        ("new", tmp_path / "none", "float32", DrafterError, "the folder .*none is missing"),
        ("new", own, "int8", InputError, "dtype is 'int8'"),
        ("new", own, "float32", ModelNotFound, "no such file or folder"),
    ):
        with pytest.raises(error, match=message):
            export(tmp_path / out, drafter, tmp_path / "no model", dtype)
    assert not (tmp_path / "new").exists() and [file.name for file in tmp_path.iterdir()] == ["full"]


def test_another_model_or_no_room(
    trained: dict[str, Path], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DrafterError, match="trained for .*, but the target is .*load the matching drafter or target"):
        export(tmp_path / "small", trained["draft_model"], folders["qwen3"])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(StorageError, match="small cannot be written .*No space left.*make room"):
        export(tmp_path / "small", trained["draft_model"], folders["llama"])
    assert list(tmp_path.iterdir()) == []


def test_only_a_draft_model_is_a_model(trained: dict[str, Path], folders: dict[str, Path]) -> None:
    target = Model(AutoModelForCausalLM.from_pretrained(folders["llama"]))
    with pytest.raises(DrafterError, match="'clover', which is no model by itself"):
        as_model(trained["clover"], target)
