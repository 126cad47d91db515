"""The command line as a function, `run("generate", "hi")`, with a tiny model on disk and its own cache folder."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.rich_utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import foreword
from doubles import fresh
from foreword.api import load
from foreword.bench import profile, roofline
from foreword.cli.app import app
from foreword.cli.console import ProgressLines
from foreword.model import busy
from foreword.text import Prompt
from foreword.train import Recipe, distill

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the words that come before the book"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny(folder: Path, broken: bool = False, **changes: Any) -> Path:
    """Save a random Llama with a tokenizer. If `broken`, every answer is NaN."""
    tokenizer = _tokenizer()
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": 1, "max_position_embeddings": 512}
    model = fresh("llama", torch.float32, **sizes | changes)
    if broken:
        with torch.no_grad():
            model.model.norm.weight.fill_(torch.nan)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """Training data: the answers of the tiny model to thirty prompts."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [Prompt(f"q{i}", "prompts", [f"the book {i} that comes"]) for i in range(30)]
    with load(tiny_model, "plain", slots=8, max_context=128, device="cpu") as llm:
        distill(llm, prompts, folder, Recipe(max_new_tokens=24))
    return folder


@pytest.fixture(scope="session")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("broken"), broken=True))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Set up a machine without GPU and colours and with its own cache folder, and undo what commands set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for child processes
    monkeypatch.setattr(typer.rich_utils, "FORCE_TERMINAL", None)  # typer colours its help if CI is set
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FOREWORD_HOME", str(cache))
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(ProgressLines, "FIRST_S", 3600.0)  # no progress lines, however busy the machine is
    for room, name, small in ((roofline, "CPU_SQUARE", 128), (profile, "CPU_BUFFER", 8 * 10**6), (busy, "SAMPLE_S", 0.05)):
        monkeypatch.setattr(room, name, small)  # what this machine can do takes longer to measure than all the rest


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run a command in this process; stdin is a pipe with `input`."""
    runner = CliRunner()

    def invoke(*args: object, input: str | bytes | None = None) -> Result:
        result = runner.invoke(app, [str(arg) for arg in args], input=input, prog_name="foreword")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a separate process."""
    source = str(Path(foreword.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}

    def execute(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "foreword", *map(str, args)]
        options = {"capture_output": True, "text": True, "timeout": 120, "env": environment} | options
        return subprocess.run(line, check=False, **options)

    return execute
