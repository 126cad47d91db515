"""Other people's decoding: the same tokens, counted as ours are, and refused early where it cannot run."""

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
from foreword.bench import Manner, Task, check_baseline, contender, make_baselines
from foreword.bench import baselines as room
from foreword.bench.baselines import counted, per_round
from foreword.bench.widening import load_widened
from foreword.errors import DrafterError, InputError

WORDS = "the words that come before the words that come before"


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], "plain", slots=1, device="cpu") as loaded:
        yield loaded


def asked(llm: LLM) -> list[Task]:
    return [Task("0", tuple(llm.tokenizer.encode(WORDS)))]


@pytest.mark.parametrize("name", ["hf", "hf_lookup", "hf_assistant"])
def test_a_baseline_writes_the_tokens_of_plain(name: str, llm: LLM, folders: dict[str, Path]) -> None:
    words = f"{name}={folders['llama']}" if name == "hf_assistant" else name
    (plain,) = contender(llm, "plain").write(asked(llm), Manner(40))
    (other,) = make_baselines([words], llm, folders["llama"], 512)
    first, again = (other.write(asked(llm), Manner(40))[0] for _ in range(2))
    assert other.name == name and other.alone and first.tokens == again.tokens == plain.tokens
    assert first.accepted == again.accepted and sum(first.accepted) == 40 and first.first_s is not None
    if name == "hf":
        assert first.accepted == [1] * 40
    if name == "hf_assistant":  # its draft model is the target itself
        assert len(first.accepted) <= 20


@pytest.mark.parametrize(("name", "expected"), [("hf", False), ("hf_lookup", False), ("hf_static", True)])
def test_whose_cache_grows_does_without_plans_for_every_length(
    name: str, expected: bool, llm: LLM, folders: dict[str, Path], monkeypatch: Any
) -> None:
    seen, model = [], room.load_stock(folders["llama"], llm.model.device, llm.model.dtype)
    write = model.generate
    monkeypatch.setattr(
        model,
        "generate",
        lambda *given, **more: seen.append(torch.backends.cuda.cudnn_sdp_enabled()) or write(*given, **more),
    )
    room._generate(name, model, llm, {}).write(asked(llm), Manner(4))
    assert seen == [expected] and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", ["hf", "hf_lookup"])
def test_a_round_is_a_pass_of_the_target(name: str, llm: LLM, folders: dict[str, Path], monkeypatch: Any) -> None:
    """Guesses are not yet a round, although some versions of transformers ask stopping criteria of them."""
    passes: list[int] = []
    load = room.load_stock

    def counting(*place: Any) -> Any:
        model = load(*place)
        model.register_forward_hook(lambda *_: passes.append(1))
        return model

    monkeypatch.setattr(room, "load_stock", counting)
    (other,) = make_baselines([name], llm, folders["llama"], 512)
    (answer,) = other.write(asked(llm), Manner(40))
    assert len(answer.accepted) == len(passes) and sum(answer.accepted) == 40
    assert name == "hf" or len(passes) < 40  # some guesses were right


def test_the_assistant_is_the_draft_model_that_ships(
    llm: LLM, folders: dict[str, Path], trained: dict[str, Path], ship: Any, talking: Any
) -> None:
    """Also of a grown target, whose assistant does not grow: it guesses the same."""
    ship(trained["draft_model"])
    _, wide = load_widened(folders["llama"], 4, device="cpu", max_context=256)
    found = []
    for own in (llm, wide):
        (other,) = make_baselines([check_baseline("hf_assistant")], own, folders["llama"], 256)
        found += other.write(asked(own), Manner(40))
        assert other.name == "hf_assistant" and room._shipped_assistant(own).config.hidden_size == 32
    (plain,) = contender(llm, "plain").write(asked(llm), Manner(40))
    assert found[0].tokens == found[1].tokens == plain.tokens
    assert found[0].accepted == found[1].accepted and sum(found[0].accepted) == 40
    stranger = foreword.wrap(talking("llama", seed=1), llm.tokenizer.hf, "plain")
    said = f"no draft model ships for .* \\(there is one for {folders['llama'].name}\\).*hf_assistant=FOLDER"
    with stranger, pytest.raises(DrafterError, match=said):
        make_baselines(["hf_assistant"], stranger, folders["llama"], 256)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 3.0, "eos_token_id": 2}, {"do_sample": True}])
def test_what_a_model_recommends_is_asked_of_nobody(
    settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """A generation_config.json may hold a penalty, by which transformers alone would write another text; or no end."""
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with foreword.load(folder, "plain", slots=1, device="cpu") as own:
        (plain,) = contender(own, "plain").write(asked(own), Manner(40))
        for other in make_baselines(["hf", "hf_lookup"], own, folder, 512):
            assert other.write(asked(own), Manner(40))[0].tokens == plain.tokens


def test_those_of_transformers_share_their_weights(llm: LLM, folders: dict[str, Path], monkeypatch: Any) -> None:
    loads: list[Path] = []
    load = room.load_stock
    monkeypatch.setattr(room, "load_stock", lambda folder, *more: loads.append(folder) or load(folder, *more))
    assert len(make_baselines(["hf", "hf_lookup"], llm, folders["llama"], 512)) == 2 and len(loads) == 1


def test_a_grown_target_has_grown_baselines(folders: dict[str, Path], own_home: Path) -> None:
    _, wide = load_widened(folders["llama"], 2, device="cpu", max_context=256)
    (plain,) = contender(wide, "plain").write(asked(wide), Manner(24))
    (other,) = make_baselines(["hf"], wide, folders["llama"], 256)
    assert other.write(asked(wide), Manner(24))[0].tokens == plain.tokens


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("vllm", "'vllm'; there are: hf, hf_static, hf_lookup, hf_assistant, llama_cpp"),
        ("hf=folder", "takes nothing"),
        ("hf_assistant=", "needs the folder of a draft model"),
        ("hf_assistant=nowhere", "nowhere is none"),
        ("llama_cpp", "needs a GGUF file"),
        ("llama_cpp=nowhere.gguf", "nowhere.gguf is none"),
    ],
)
def test_what_cannot_run_is_refused_early(words: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_baseline(words)


def test_an_assistant_that_does_not_ship_is_missed_early(ship: Any) -> None:
    with pytest.raises(InputError, match="needs the folder of a draft model"):
        check_baseline("hf_assistant")


def test_what_needs_a_gpu_or_another_vocabulary(llm: LLM, folders: dict[str, Path], talking: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on a GPU only"):
        make_baselines(["hf_static"], llm, folders["llama"], 512)
    talking("llama", vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(DrafterError, match="has 300 tokens.*same vocabulary"):
        make_baselines([f"hf_assistant={tmp_path}"], llm, folders["llama"], 512)


def test_rounds_and_tokens_are_counted_by_us() -> None:
    assert per_round([1, 3, 1], tokens=5) == [1, 3, 1]
    assert per_round([1, 3, 4, 2], tokens=5) == [1, 3, 1]  # what was cut off
    manner = Manner(4)
    assert counted([5, 6, 1, 7], [1], manner) == [5, 6, 1] and counted([5, 6, 7, 8, 9], [1], manner) == [5, 6, 7, 8]


class Llama:
    """What llama-cpp-python has, as far as it is used: plain's tokens, and a memory of its own."""

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
    module.__spec__ = pytest.__spec__  # it is there
    module.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    (tmp_path / "m.gguf").touch()
    (plain,) = contender(llm, "plain").write(asked(llm), Manner(12))
    Llama.answer, Llama.size = plain.tokens, llm.model.vocab_size
    (other,) = make_baselines([f"llama_cpp={tmp_path / 'm.gguf'}"], llm, folders["llama"], 512)
    (found,) = other.write(asked(llm), Manner(12))
    assert other.name == "llama_cpp (Q4_1)" and found.tokens == plain.tokens and found.accepted == [1] * 12
    Llama.size = 99
    with pytest.raises(InputError, match="has 99 tokens"):
        make_baselines([f"llama_cpp={tmp_path / 'm.gguf'}"], llm, folders["llama"], 512)
