"""Models with peft adapters: adapters of weights apply, adapters that add tokens are refused by name. A folder of an adapter
is loaded with the model that it names."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import foreword
from doubles import WITHOUT_WEIGHTS
from foreword.errors import InputError, ModelCorrupt, ModelNotFound, ModelUnsupported
from foreword.model.adapters import tokenizer_folder
from foreword.model.loading import load_stock
from foreword.prove.referee import exact_copy

pytestmark = pytest.mark.usefixtures("own_home")

ASK = "the words that come before the words"

Maker = Callable[..., PreTrainedModel]
Own = Callable[..., list[int]]

peft = pytest.importorskip("peft")


@pytest.fixture
def lora(talking: Maker) -> Any:
    """A LoRA model whose adapters, on attention and on the MLP, change the output."""
    torch.manual_seed(1)
    places = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=places, init_lora_weights=False)
    return peft.get_peft_model(talking("llama"), config).eval()


@pytest.mark.parametrize("method", WITHOUT_WEIGHTS)
def test_a_lora_adapter_applies(method: str, lora: Any, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own) -> None:
    adapted = own_text(lora, ASK)
    with lora.disable_adapter():
        bare = own_text(lora, ASK)
    assert adapted != bare
    llm = foreword.wrap(lora, hf_tokenizer, method)
    assert llm.generate(ASK, max_new_tokens=14).tokens == adapted == own_text(lora, ASK)
    with lora.disable_adapter():
        assert llm.generate(ASK, max_new_tokens=14).tokens == bare
    llm.close()
    assert own_text(lora, ASK) == adapted


def test_an_adapter_that_transformers_added_applies(
    talking: Maker, hf_tokenizer: PreTrainedTokenizerFast, own_text: Own
) -> None:
    hf = talking("llama")
    bare = own_text(hf, ASK)
    hf.add_adapter(peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted = own_text(hf.eval(), ASK)
    assert foreword.wrap(hf, hf_tokenizer, "plain").generate(ASK, max_new_tokens=14).tokens == adapted != bare


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
    ],
)
def test_virtual_tokens_are_refused(config: Any, named: str, talking: Maker, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    model = peft.get_peft_model(talking("llama"), config)
    with pytest.raises(ModelUnsupported, match=f"'default'.*{named}.*virtual tokens.*LoRA"):
        foreword.wrap(model, hf_tokenizer)


# Folders -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["llama"], tmp_path / "base"))


@pytest.fixture
def saved(base: Path, tmp_path: Path) -> tuple[Any, Path]:
    """A LoRA adapter for the model in `base`: as peft's model in memory, and as the folder that peft saves."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    lora.save_pretrained(tmp_path / "adapter")
    return lora, tmp_path / "adapter"


def change(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("compile", [True, False])
def test_the_folder_of_an_adapter_is_loaded_with_its_model(
    compile: bool, saved: tuple[Any, Path], base: Path, own_text: Own
) -> None:
    lora, folder = saved
    llm = foreword.load(folder, "prompt_lookup", rows=3, device="cpu", fused_layers=compile)
    assert llm.generate(ASK, max_new_tokens=14).tokens == own_text(lora, ASK)
    plain = foreword.load(base, "plain", device="cpu", fused_layers=compile).generate(ASK, max_new_tokens=14)
    assert plain.tokens != own_text(lora, ASK) and llm.model.name == str(folder)


def test_an_adapter_is_merged_in_float32_whatever_it_runs_in(saved: tuple[Any, Path]) -> None:
    """So that the referee, which loads the weights again in float64, has the same ones."""
    weights = {
        dtype: load_stock(saved[1], torch.device("cpu"), dtype).model.layers[1].mlp.up_proj.weight
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }
    assert torch.equal(weights[torch.float64].float(), weights[torch.float32])
    assert torch.equal(weights[torch.float32].bfloat16(), weights[torch.bfloat16])


def test_the_referee_reads_the_merged_weights(saved: tuple[Any, Path]) -> None:
    llm = foreword.load(saved[1], "plain", device="cpu")
    exact = exact_copy(llm.model)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(exact(ids).logits.float(), saved[0](ids).logits, atol=1e-3, rtol=1e-3)


def test_an_adapter_may_have_a_tokenizer_of_its_own(
    saved: tuple[Any, Path], base: Path, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert tokenizer_folder(base) == base and tokenizer_folder(saved[1]) == base
    hf_tokenizer.save_pretrained(saved[1])
    assert tokenizer_folder(saved[1]) == saved[1]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"base_model_name_or_path": "nobody/nothing"}, ModelNotFound, "adapter for nobody/nothing, which was not found"),
        ({"base_model_name_or_path": None}, ModelCorrupt, "does not name a model in base_model_name_or_path"),
        ({"r": 8}, ModelCorrupt, "cannot be merged into .*size mismatch.*foreword.wrap"),
        ({"peft_type": "NO_SUCH"}, ModelCorrupt, "cannot be merged into"),
    ],
)
def test_adapters_that_cannot_be_loaded(
    fields: dict[str, Any], error: type[Exception], message: str, saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    change(saved[1], **fields)
    with pytest.raises(error, match=message):
        foreword.load(saved[1], "plain", device="cpu")


def test_a_hole_in_an_adapter_is_not_filled(saved: tuple[Any, Path]) -> None:
    file = saved[1] / "adapter_model.safetensors"
    weights = load_file(file)
    del weights[next(name for name in weights if "layers.1.mlp" in name)]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelCorrupt, match="cannot be merged into .*missing adapter keys.*layers.1.mlp"):
        foreword.load(saved[1], "plain", device="cpu")


def test_an_adapter_for_an_adapter_is_refused(saved: tuple[Any, Path], tmp_path: Path) -> None:
    second = Path(shutil.copytree(saved[1], tmp_path / "second"))
    change(second, base_model_name_or_path=str(saved[1]))
    with pytest.raises(ModelUnsupported, match="which is an adapter itself"):
        foreword.load(second, "plain", device="cpu")


def test_the_folder_of_virtual_tokens_is_refused(base: Path, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelUnsupported, match="PROMPT_TUNING.*virtual tokens.*LoRA"):
        foreword.load(tmp_path / "adapter", "plain", device="cpu")


def test_without_peft_the_error_says_what_to_install(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"is an adapter.*pip install 'foreword\[lora\]'"):
        foreword.load(saved[1], "plain", device="cpu")


def test_an_adapter_without_weights_is_refused(saved: tuple[Any, Path]) -> None:
    (saved[1] / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="no adapter_model.safetensors"):
        foreword.load(saved[1], "plain", device="cpu")


def test_a_model_of_the_hub_is_asked_for_once_with_the_token(
    saved: tuple[Any, Path], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later the fetched files are used, for which no token is needed."""
    change(saved[1], base_model_name_or_path="org/base", revision="v2")
    asked: list[dict[str, Any]] = []

    def download(name: str, **how: Any) -> str:
        asked.append({"name": name} | {key: how[key] for key in ("revision", "token", "local_files_only")})
        if how["local_files_only"] and len(asked) == 1:
            raise FileNotFoundError("not fetched yet")
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    foreword.load(saved[1], "plain", device="cpu", token="hf_secret")
    online = [one for one in asked if not one["local_files_only"]]
    assert online == [{"name": "org/base", "revision": "v2", "token": "hf_secret", "local_files_only": False}]
