"""Clients that others wrote, against a server on a real port: huggingface_hub has a way of its own to ask over HTTP, and
LangChain its own use of OpenAI's client. LangChain is tested where it is installed: `make test-clients`."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from foreword.api import LLM

SAY: list[Any] = [{"role": "user", "content": "hello"}]
PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
PAGE_ADDRESS = "localhost:8000"
BLOCK = re.compile(r"^```(?:python)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = [code for code in BLOCK.findall(PAGE) if PAGE_ADDRESS in code]
MANNER: dict[str, Any] = {"temperature": 0.8, "seed": 4}


@pytest.fixture
def asked(listening: Any) -> Callable[[Callable[[str], Any]], Any]:
    """Gives what a function returns that asks a server at an address."""

    def ask(work: Callable[[str], Any], **options: Any) -> Any:
        async def serve() -> Any:
            async with listening(**options) as (_, port):
                return await asyncio.to_thread(work, f"http://127.0.0.1:{port}/v1")

        return asyncio.run(serve())

    return ask


# huggingface_hub ----------------------------------------------------------------------------------------------------------


def test_a_chat_of_huggingface_hub(asked: Any, llm: LLM) -> None:
    given: dict[str, Any] = {"max_tokens": 10, "logprobs": True, "top_logprobs": 1, **MANNER}

    def work(address: str) -> Any:
        client = InferenceClient(base_url=address, api_key="none")
        whole = client.chat_completion(SAY, model="llama", **given, stop=["never"])
        chunks = [*client.chat_completion(SAY, model="llama", **given, stream=True, stream_options={"include_usage": True})]
        return whole, chunks

    whole, chunks = asked(work)
    result = llm.generate(SAY, max_new_tokens=10, **MANNER)
    assert whole.choices[0].message.content == result.text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == result.text
    assert whole.choices[0].finish_reason == result.finish_reason
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == len(result.tokens)
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_an_error_of_huggingface_hub(asked: Any) -> None:
    def work(address: str) -> None:
        client = InferenceClient(base_url=address, api_key="none")
        with pytest.raises(HfHubHTTPError, match="'param': 'temperature'") as refusal:
            client.chat_completion(SAY, model="llama", temperature=-1)
        assert refusal.value.response.status_code == 400

    asked(work)


# LangChain ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat_model() -> Callable[..., Any]:
    """Makes LangChain's model of a server."""
    ChatOpenAI = pytest.importorskip("langchain_openai", reason="LangChain: run `make test-clients`").ChatOpenAI
    return lambda address, **given: ChatOpenAI(base_url=address, api_key="none", model="llama", max_retries=0, **given)


def test_a_chat_of_langchain(chat_model: Any, asked: Any, llm: LLM) -> None:
    def work(address: str) -> Any:
        model = chat_model(address, max_tokens=10, stream_usage=True, **MANNER)
        return model.invoke("hello"), [*model.stream("hello")], model.batch(["hello", "a"])

    whole, chunks, batch = asked(work)
    result = llm.generate(SAY, max_new_tokens=10, **MANNER)
    assert whole.content == result.text == "".join(chunk.content for chunk in chunks)
    assert [one.content for one in batch] == [result.text, llm.generate("a", max_new_tokens=10, **MANNER).text]
    usage = {"input_tokens": result.stats.prompt_tokens, "output_tokens": len(result.tokens)}
    for one in (whole, sum(chunks[1:], chunks[0])):
        assert usage.items() <= one.usage_metadata.items()
        assert one.response_metadata["finish_reason"] == result.finish_reason


def test_the_responses_of_langchain(chat_model: Any, asked: Any, llm: LLM) -> None:
    def work(address: str) -> Any:
        model = chat_model(address, max_tokens=10, use_responses_api=True, temperature=0)
        return model.invoke("hello"), [*model.stream("hello")]

    whole, chunks = asked(work)
    text = llm.generate(SAY, max_new_tokens=10, temperature=0).text
    assert whole.text == sum(chunks[1:], chunks[0]).text == text


# The page on serving ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_code_of_the_page_runs(code: str, asked: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """As it stands, except for the address."""
    if "langchain_openai" in code:
        pytest.importorskip("langchain_openai", reason="LangChain: run `make test-clients`")

    def work(address: str) -> None:
        here = code.replace(f"http://{PAGE_ADDRESS}", address.removesuffix("/v1")).replace(
            f"curl {PAGE_ADDRESS}", f"curl -sS {address.removesuffix('/v1')}"
        )
        command = ["bash", "-c", here] if here.startswith("curl") else [sys.executable, "-c", here]
        subprocess.run(command, check=True, timeout=60)

    asked(work, served_names=("SmolLM2-135M-Instruct",))
    assert capfd.readouterr().out.strip()
