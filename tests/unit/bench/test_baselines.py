"""Baselines generate the same tokens, counted as ours are, and are refused early if they cannot run."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import foreword
from foreword.api import LLM
from foreword.bench import GenerationSettings, Task, check_baseline, contender, make_baselines
from foreword.bench import baselines as room
from foreword.bench.baselines import round_sizes, up_to_stop
from foreword.bench.widening import load_widened
from foreword.errors import DrafterError, InputError

PROMPT = "the words that come before the words that come before"


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], "plain", slots=1, device="cpu") as loaded:
        yield loaded


def asked(llm: LLM) -> list[Task]:
    return [Task("0", tuple(llm.tokenizer.encode(PROMPT)))]


@pytest.mark.parametrize("name", ["hf", "hf_lookup", "hf_assistant"])
def test_a_baseline_generates_the_tokens_of_plain(name: str, llm: LLM, folders: dict[str, Path]) -> None:
    spec = f"{name}={folders['llama']}" if name == "hf_assistant" else name
    (plain,) = contender(llm, "plain").write(asked(llm), GenerationSettings(40))
    (other,) = make_baselines([spec], llm, folders["llama"], 512)
    first, again = (other.write(asked(llm), GenerationSettings(40))[0] for _ in range(2))
    assert other.name == name and other.greedy_single and first.tokens == again.tokens == plain.tokens
    assert first.accepted == again.accepted and sum(first.accepted) == 40 and first.first_s is not None
    if name == "hf":
        assert first.accepted == [1] * 40
    if name == "hf_assistant":  # its draft model is the target itself
        assert len(first.accepted) <= 20


@pytest.mark.parametrize(("name", "expected"), [("hf", False), ("hf_lookup", False), ("hf_static", True)])
def test_baselines_with_a_growing_cache_do_not_use_cudnn(
    name: str, expected: bool, llm: LLM, folders: dict[str, Path], monkeypatch: Any
) -> None:
    seen, model = [], room.load_stock(folders["llama"], llm.model.device, llm.model.dtype)
    write = model.generate
    monkeypatch.setattr(
        model,
        "generate",
        lambda *given, **more: seen.append(torch.backends.cuda.cudnn_sdp_enabled()) or write(*given, **more),
    )
    room._generate(name, model, llm, {}).write(asked(llm), GenerationSettings(4))
    assert seen == [expected] and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", ["hf", "hf_lookup"])
def test_a_round_is_a_pass_of_the_target(name: str, llm: LLM, folders: dict[str, Path], monkeypatch: Any) -> None:
    """Drafting is not a round, although some versions of transformers call stopping criteria with draft tokens."""
    passes: list[int] = []
    load = room.load_stock

    def counting(*place: Any) -> Any:
        model = load(*place)
        model.register_forward_hook(lambda *_: passes.append(1))
        return model

    monkeypatch.setattr(room, "load_stock", counting)
    (other,) = make_baselines([name], llm, folders["llama"], 512)
    (answer,) = other.write(asked(llm), GenerationSettings(40))
    assert len(answer.accepted) == len(passes) and sum(answer.accepted) == 40
    assert name == "hf" or len(passes) < 40  # some draft tokens were accepted


def test_the_default_assistant_is_the_shipped_draft_model(
    llm: LLM, folders: dict[str, Path], trained: dict[str, Path], ship: Any, talking: Any
) -> None:
    """Also for a widened target: its assistant is not widened and drafts the same."""
    ship(trained["draft_model"])
    _, wide = load_widened(folders["llama"], 4, device="cpu", max_context=256)
    found = []
    for own in (llm, wide):
        (other,) = make_baselines([check_baseline("hf_assistant")], own, folders["llama"], 256)
        found += other.write(asked(own), GenerationSettings(40))
        assert other.name == "hf_assistant" and room._shipped_assistant(own).config.hidden_size == 32
    (plain,) = contender(llm, "plain").write(asked(llm), GenerationSettings(40))
    assert found[0].tokens == found[1].tokens == plain.tokens
    assert found[0].accepted == found[1].accepted and sum(found[0].accepted) == 40
    stranger = foreword.wrap(talking("llama", seed=1), llm.tokenizer.hf, "plain")
    message = f"no draft model ships for .* \\(there is one for {folders['llama'].name}\\).*hf_assistant=FOLDER"
    with stranger, pytest.raises(DrafterError, match=message):
        make_baselines(["hf_assistant"], stranger, folders["llama"], 256)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 3.0, "eos_token_id": 2}, {"do_sample": True}])
def test_the_generation_config_of_a_model_is_ignored(
    settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """A generation_config.json may hold a penalty, which would change the output of transformers alone; or no end token."""
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with foreword.load(folder, "plain", slots=1, device="cpu") as own:
        (plain,) = contender(own, "plain").write(asked(own), GenerationSettings(40))
        for other in make_baselines(["hf", "hf_lookup"], own, folder, 512):
            assert other.write(asked(own), GenerationSettings(40))[0].tokens == plain.tokens


def test_baselines_of_transformers_share_their_weights(llm: LLM, folders: dict[str, Path], monkeypatch: Any) -> None:
    loads: list[Path] = []
    load = room.load_stock
    monkeypatch.setattr(room, "load_stock", lambda folder, *more: loads.append(folder) or load(folder, *more))
    assert len(make_baselines(["hf", "hf_lookup"], llm, folders["llama"], 512)) == 2 and len(loads) == 1


def test_a_widened_target_has_widened_baselines(folders: dict[str, Path], own_home: Path) -> None:
    _, wide = load_widened(folders["llama"], 2, device="cpu", max_context=256)
    (plain,) = contender(wide, "plain").write(asked(wide), GenerationSettings(24))
    (other,) = make_baselines(["hf"], wide, folders["llama"], 256)
    assert other.write(asked(wide), GenerationSettings(24))[0].tokens == plain.tokens


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vllm", "'vllm'; choose from: hf, hf_static, hf_lookup, hf_assistant, llama_cpp"),
        ("hf=folder", "takes no path"),
        ("hf_assistant=", "needs the folder of a draft model"),
        ("hf_assistant=nowhere", "nowhere is not one"),
        ("llama_cpp", "needs a GGUF file"),
        ("llama_cpp=nowhere.gguf", "nowhere.gguf is not one"),
    ],
)
def test_a_baseline_that_cannot_run_is_refused_early(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_baseline(spec)


def test_without_a_shipped_draft_model_an_assistant_must_be_named(ship: Any) -> None:
    with pytest.raises(InputError, match="needs the folder of a draft model"):
        check_baseline("hf_assistant")


def test_a_gpu_and_the_same_vocabulary_are_required(
    llm: LLM, folders: dict[str, Path], talking: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="only on a GPU"):
        make_baselines(["hf_static"], llm, folders["llama"], 512)
    talking("llama", vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(DrafterError, match="has 300 tokens.*same vocabulary"):
        make_baselines([f"hf_assistant={tmp_path}"], llm, folders["llama"], 512)


def test_rounds_and_tokens_are_counted_as_ours_are() -> None:
    assert round_sizes([1, 3, 1], tokens=5) == [1, 3, 1]
    assert round_sizes([1, 3, 4, 2], tokens=5) == [1, 3, 1]  # tokens after the stop do not count
    settings = GenerationSettings(4)
    assert up_to_stop([5, 6, 1, 7], [1], settings) == [5, 6, 1] and up_to_stop([5, 6, 7, 8, 9], [1], settings) == [
        5,
        6,
        7,
        8,
    ]


class Llama:
    """The part of llama-cpp-python that is used: returns plain's tokens, and must be reset before each prompt."""

    answer: list[int] = []
    size = 0

    def __init__(self, model_path: str, **settings: Any) -> None:
        self.metadata, self.resets = {"general.file_type": "3"}, 0

    def n_vocab(self) -> int:
        return self.size

    def reset(self) -> None:
        self.resets += 1

    def generate(self, tokens: list[int], temp: float, **settings: Any) -> Iterator[int]:
        assert temp == 0 and self.resets
        yield from [*self.answer, 7, 7, 7]


def test_llama_cpp_is_labelled_by_its_quantisation(
    llm: LLM, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("llama_cpp")
    module.__spec__ = pytest.__spec__  # marks the module as installed
    module.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    (tmp_path / "m.gguf").touch()
    (plain,) = contender(llm, "plain").write(asked(llm), GenerationSettings(12))
    Llama.answer, Llama.size = plain.tokens, llm.model.vocab_size
    (other,) = make_baselines([f"llama_cpp={tmp_path / 'm.gguf'}"], llm, folders["llama"], 512)
    (found,) = other.write(asked(llm), GenerationSettings(12))
    assert other.name == "llama_cpp (Q4_1)" and found.tokens == plain.tokens and found.accepted == [1] * 12
    Llama.size = 99
    with pytest.raises(InputError, match="has 99 tokens"):
        make_baselines([f"llama_cpp={tmp_path / 'm.gguf'}"], llm, folders["llama"], 512)
