"""Tiny models on disk, as `foreword.load` finds them: random weights beside a byte-level tokenizer with a chat template."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from doubles import FAMILIES, STOCK_ATTENTION, TRAINED, byte_tokenizer, talking_model, with_random_weights
from foreword.drafters import shipped
from foreword.drafters.saved import save
from foreword.model.model import Model


@pytest.fixture(scope="session")
def hf_tokenizer() -> PreTrainedTokenizerFast:
    """Single bytes and five special tokens; `</s>` (1) ends a text."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def talking() -> Any:
    """Makes a random float32 model whose vocabulary is the tokenizer's: talking("llama", num_hidden_layers=1)."""
    return talking_model


@pytest.fixture(scope="session")
def own_text(hf_tokenizer: PreTrainedTokenizerFast) -> Callable[..., list[int]]:
    """What a model's own `generate` answers, greedy; the prompt is padded, so that the model's own mask matters."""

    def write(model: Any, prompt: str, count: int = 14) -> list[int]:
        said = [{"role": "user", "content": prompt}]
        text = hf_tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        ids = hf_tokenizer.encode(text, add_special_tokens=False)
        batch = torch.tensor([[0, 0, 0, *ids], [*ids, *ids[:3]]])
        mask = torch.ones_like(batch)
        mask[0, :3] = 0
        out = model.generate(input_ids=batch, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=1)
        return out[0, batch.shape[1] :].tolist()

    return write


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, talking: Any, hf_tokenizer: Any) -> dict[str, Path]:
    """A model folder of each family."""
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        talking(family).save_pretrained(folder)
        hf_tokenizer.save_pretrained(folder)
    return found


@pytest.fixture(scope="session")
def stock(folders: dict[str, Path]) -> dict[str, PreTrainedModel]:
    """The same models as transformers loads them: whom the slow truth asks. No test changes them."""
    return {
        family: AutoModelForCausalLM.from_pretrained(folder, attn_implementation=STOCK_ATTENTION[family]).eval()
        for family, folder in folders.items()
    }


@pytest.fixture(scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for one test file, so that measured cost curves do not go where the user's are."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("FOREWORD_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def keep_drafter() -> Callable[..., Path]:
    """Saves a drafter with random weights for a model folder: keep_drafter("clover", model, folder, heads=2)."""

    def keep(method: str, model: str | Path, folder: Path, tokens_per_round: float = 2.5, **changes: Any) -> Path:
        options = TRAINED[method] | changes
        target = Model(AutoModelForCausalLM.from_pretrained(model), name=Path(model).name)
        save(with_random_weights(method, target, **options), folder, target)
        record = {
            "settings": {"rows": 64},
            "best": {"tokens_per_round": 9.9},
            "stored": {"tokens_per_round": tokens_per_round},
        }
        (folder / "record.json").write_text(json.dumps(record))
        return folder

    return keep


@pytest.fixture(scope="session")
def trained(folders: dict[str, Path], keep_drafter: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of every method with weights, for the tiny Llama. No test changes them."""
    home = tmp_path_factory.mktemp("drafters")
    return {method: keep_drafter(method, folders["llama"], home / method) for method in TRAINED}


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Puts a saved drafter where the shipped ones lie, which is a folder of the test's own."""
    monkeypatch.setattr(shipped, "WEIGHTS", tmp_path / "weights")

    def put(folder: Path) -> Path:
        method = json.loads((folder / "config.json").read_text())["method"]
        return Path(shutil.copytree(folder, tmp_path / "weights" / method))

    return put
