"""Chunks of a stream, whatever the rounds are: every division of an output into rounds gives the same text and tokens.

Characters of several tokens, a stop string across tokens, and text that is held back until the end are cut everywhere.
"""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from foreword.api import LLM
from foreword.engine.emit import append, publish
from foreword.engine.request import Finish, Running
from foreword.serve.app import app_of
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.chat import ChatExchange
from foreword.serve.completions import CompletionExchange
from foreword.serve.fields import ChatFields, CompletionFields, ResponseFields
from foreword.serve.flow import News, Output
from foreword.serve.options import ServeOptions
from foreword.serve.responses import ResponseExchange
from foreword.serve.service import Service

TEXTS = ("a€b", "né😀", "stop it", "xSTO")  # the last is held back: it may become STOP
STOP = ("STOP", "p i")
EXCHANGES = {
    "chat": (ChatExchange, lambda: ChatFields(messages=[], return_token_ids=True)),
    "completions": (CompletionExchange, lambda: CompletionFields(prompt="a", return_token_ids=True)),
    "responses": (ResponseExchange, lambda: ResponseFields(input="a")),
}


@pytest.fixture(scope="module")
def service(llm: LLM) -> Service:
    found: Service = app_of(AsyncLLM.of(llm), ServeOptions()).state.service
    return found


def divisions(tokens: list[int]) -> Iterator[list[list[int]]]:
    """Yield every way to divide tokens into rounds."""
    for cuts in product((False, True), repeat=len(tokens) - 1):
        rounds = [[tokens[0]]]
        for token, cut in zip(tokens[1:], cuts, strict=True):
            if cut:
                rounds.append([token])
            else:
                rounds[-1].append(token)
        yield rounds


def streamed(service: Service, kind: str, rounds: list[list[int]]) -> tuple[str, list[int], Running]:
    """Return the text and the token ids of a stream with these rounds."""
    make, fields = EXCHANGES[kind]
    exchange: Any = make(service, fields(), None)
    (run,) = service.llm.checked(["a"], {"stop": STOP, "max_new_tokens": 64}, 1)
    exchange.settings()
    exchange.begin([run])
    output, written = Output(0, run), exchange.opening()
    for number, tokens in enumerate(rounds):
        publish(append(run, tokens, Finish("length") if number == len(rounds) - 1 else None))
        written += exchange.chunk(News(output, output.fresh(), run.done))
        if run.done:
            break
    events = [json.loads(line[6:]) for line in (written + exchange.closing()).decode().splitlines() if "{" in line]
    if kind == "responses":
        return "".join(one["delta"] for one in events if one["type"].endswith("text.delta")), run.tokens, run
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(one["delta"].get("content", "") if kind == "chat" else one["text"] for one in choices)
    return text, [token for one in choices for token in one.get("token_ids", [])], run


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("text", TEXTS)
def test_the_division_into_rounds_does_not_show(service: Service, kind: str, text: str) -> None:
    tokens = list(service.llm.tokenizer.piece_ids(text))
    shown = text.partition("p i")[0]
    found = [streamed(service, kind, rounds) for rounds in divisions(tokens)]
    assert len(found) == 2 ** (len(tokens) - 1)
    assert {one[0] for one in found} == {shown}
    assert {tuple(one[1]) for one in found} == {tuple(found[0][2].tokens)}
    assert {one[2].finish_reason for one in found} == {"stop" if shown != text else "length"}
