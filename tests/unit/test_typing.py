"""py.typed: a type checker knows every keyword of the public calls, and what they return."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import foreword
from foreword.requests import ALIASES, ALL_SAMPLING, SETTINGS, Settings

PROGRAM = """
from typing import assert_type

import foreword
from foreword import Chat, Draft, Drafter, LLM, Needs, Piece, Result, Sampling, Settings, State, Stream


class Nothing(Drafter):
    needs = Needs(prompt="last")

    def propose(self, state: State) -> Draft:
        return Draft.nothing(state.root)


foreword.register("nothing", Nothing)
llm = foreword.load("folder", Nothing(), slots=2)
assert_type(llm, LLM)
assert_type(LLM("folder", "plain", rows=3), LLM)
assert_type(llm.generate("a", sampling=Sampling(temperature=0.5), max_new_tokens=3), Result)
assert_type(llm.generate([{"role": "user", "content": "a"}], temperature=0.5, stop=["x"]), Result)
assert_type(llm.generate([1, 2], max_tokens=3, stop_token_ids=[2], min_tokens=1), Result)
assert_type(llm.generate("a", n=2), list[Result])
each: list[Settings] = [{"temperature": 0.5}, {"seed": 1}]
assert_type(llm.generate(["a", "b"], settings=each), list[Result])
stream = llm.stream("a", top_k=3)
assert_type(stream, Stream)
for piece in stream:
    assert_type(piece, Piece)
chat = llm.chat("Be brief.", logprobs=2)
assert_type(chat, Chat)
assert_type(chat.send("a", seed=None), Result)


async def later() -> None:
    assert_type(await llm.agenerate("a", max_new_tokens=3), Result)
    assert_type(await llm.agenerate(["a", "b"]), list[Result])
    written = llm.astream("a", seed=1)
    async for part in written:
        assert_type(part, Piece)
    assert_type(await written.result(), Result)


llm.generate("a", tempature=1.0)  # type: ignore[call-overload]
llm.generate("a", temperature="hot")  # type: ignore[call-overload]
llm.stream("a", settings=each)  # type: ignore[call-arg]
llm.stream("a", max_new_tokens=1.5)  # type: ignore[arg-type]
llm.chat(seed="x")  # type: ignore[arg-type]
chat.send("a", sampling={})  # type: ignore[arg-type]
foreword.load("folder", 3)  # type: ignore[arg-type]
foreword.load("folder", slots="x")  # type: ignore[arg-type]
"""
LARGE = "torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "jinja2"  # slow to check
CONFIG = "[mypy]\nstrict = True\nfollow_imports = silent\n" + "".join(
    f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in LARGE
)


def test_a_users_program_is_checked_to_the_last_parameter(tmp_path: Path) -> None:
    """Each `type: ignore` covers a mistake; an unused one is an error too."""
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    line = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"]
    path = {"MYPYPATH": str(Path(foreword.__file__).parents[1])}
    done = subprocess.run(line, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_types_are_those_of_the_table() -> None:
    assert set(Settings.__annotations__) == {*SETTINGS, *ALIASES, ALL_SAMPLING}
