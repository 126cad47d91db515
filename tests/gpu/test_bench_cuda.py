"""On a CUDA device: the compiled baseline generates plain's tokens, sampled rounds are captured before the clock, and the
stages of a round are measured.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import foreword
from foreword.api import LLM
from foreword.bench import Benchmark, GenerationSettings, Task, Timing, contender, make_baselines
from foreword.bench.roofline import SPLIT_STAGES, roofline
from foreword.model.cache import SharedCacheMemory

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TASKS = [Task(str(i), tuple(range(20 + i, 60 + 3 * i)), i) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        eos_token_id=1,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(place)
    return place


@pytest.fixture
def load(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LLM]]:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    held: list[LLM] = []

    def of(dtype: str) -> LLM:
        held.append(foreword.load(folder, "plain", slots=1, device="cuda", dtype=dtype, max_context=512))
        return held[-1]

    yield of
    for llm in held:
        llm.close()


def test_the_compiled_baseline(load: Callable[[str], LLM], folder: Path) -> None:
    llm = load("float32")
    plain = contender(llm, "plain").write(TASKS, GenerationSettings(16))
    (other,) = make_baselines(["hf_static"], llm, folder, 512)
    other.capture(TASKS, GenerationSettings(16))
    found = other.write(TASKS, GenerationSettings(16))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(one.first_s and one.accepted == [1] * len(one.tokens) for one in found)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rounds_are_captured_before_the_clock(load: Callable[[str], LLM], temperature: float) -> None:
    llm = load("bfloat16")
    one = contender(llm, "token_recycling", max_context=512)
    settings = GenerationSettings(32, temperature)
    one.capture(TASKS, settings)
    one.forget()
    first, again = one.write(TASKS, settings), one.write(TASKS, settings)
    assert all(not answer.failed and answer.first_s for answer in first)
    assert sum(len(a.accepted) for a in again) <= sum(len(a.accepted) for a in first)  # it has learned
    one.forget()
    assert [answer.accepted for answer in one.write(TASKS, settings)] == [answer.accepted for answer in first]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_in_the_same_memory(load: Callable[[str], LLM], dtype: str) -> None:
    """Captured rounds hold the address of the cache; what other contenders leave there changes no output."""
    llm, cache_memory, settings = load(dtype), SharedCacheMemory(), GenerationSettings(24)
    names = ("plain", "prompt_lookup", "token_recycling")
    alone = [[answer.tokens for answer in contender(llm, name, 512, 2).write(TASKS, settings)] for name in names]
    together = [contender(llm, name, 512, 2, cache_memory=cache_memory) for name in names]
    for one in together:
        one.capture(TASKS, settings)
    for _ in range(2):
        for one, outputs in zip(together, alone, strict=True):
            assert [answer.tokens for answer in one.write(TASKS, settings)] == outputs
            assert cache_memory._numbers is not None
            cache_memory._numbers.fill_(float("nan"))


def test_the_roofline(load: Callable[[str], LLM]) -> None:
    llm = load("bfloat16")
    names = ("plain", "token_recycling")
    timings = tuple(Timing("0", "qa", n, 40, 20, 1.0, 0.0, 1, first_s=0.1, first_tokens=1, drafted=40) for n in names)
    found = roofline(llm, names, Benchmark(names, 32, timings), TASKS)
    assert 1e11 < found["bytes_per_second"] < 1e14 and found["operations_per_second"] > 1e12
    assert isinstance(found["passes"], list) and found["knee"]
    for name in names:
        assert set(found["split"][name]) == set(SPLIT_STAGES) and found["split"][name]["verify"] > 0
    assert found["split"]["token_recycling"]["draft"] > 0 == found["split"]["plain"]["draft"]
