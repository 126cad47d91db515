"""Cases: requests whose outputs are known, because the library has written them before the server is asked.

In: a model folder and a source of random numbers. Out: HTTP bodies, each with the `Result`s of plain decoding, alone on the
engine's library. `difference` compares a stream with them: text, tokens, reasons and log-probabilities of each output.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import foreword
from foreword.engine.request import Logprob
from foreword.requests import Prompt
from foreword.results import Result

CONTEXT = 256  # tokens of a sequence, prompt included
DTYPE = "float64"  # rounding then never decides which token is the likeliest
NEAR = 1e-6  # log-probabilities of passes with different numbers of rows
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["a", "b"]}, "is_old": {"type": "boolean"}},
    "required": ["kind", "is_old"],
    "additionalProperties": False,
}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WORDS = ("the", "a", "of", "to", "cell", "river", "stone", "window", "before", "after", "while", "under", "small", "paper")

Object = dict[str, Any]


@dataclass
class Case:
    """A request, and what the library writes for it."""

    path: str
    body: Object
    prompt: Prompt
    settings: Any  # of `LLM.generate`
    samples: int = 1
    expected: list[Result] = field(default_factory=list)


def cases(folder: Path, count: int, seed: int) -> list[Case]:
    """Return random requests with their expected outputs."""
    random = Random(seed)
    prefixes = [_words(random, 10) for _ in range(8)]
    found = [_case(random, prefixes) for _ in range(count)]
    by_samples = defaultdict[int, list[Case]](list)
    for one in found:
        by_samples[one.samples].append(one)
    with foreword.load(folder, "plain", slots=8, dtype=DTYPE, max_context=CONTEXT) as llm:
        for samples, some in by_samples.items():
            results = llm.generate([one.prompt for one in some], settings=[one.settings for one in some], n=samples)
            for place, one in enumerate(some):
                one.expected = results[place * samples : (place + 1) * samples]
    return found


def _words(random: Random, count: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(count))


def _case(random: Random, prefixes: list[str]) -> Case:
    """Return a request: a chat or a completion, greedy or sampled, some with more than that."""
    text = f"{random.choice(prefixes)} {_words(random, random.randint(1, 6))}"
    chat = random.random() < 0.5
    most, samples = random.randint(4, 32), random.choice([1] * 18 + [2, 3])
    common: Object = {"seed": random.randrange(2**40), "ignore_eos": random.random() < 0.5}
    if random.random() < 0.6:
        common |= {"temperature": random.choice([0.6, 0.9, 1.2]), "top_p": random.choice([0.8, 1.0])}
    else:
        common["temperature"] = 0.0
    if random.random() < 0.2:
        common["stop"] = random.sample(WORDS, 2) + ["".join(random.sample("aeiost ", 1))]
    body: Object = {**common, "max_tokens": most, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    settings: Object = {**common, "max_new_tokens": most, "chat": chat}
    if random.random() < 0.2:
        settings["logprobs"] = random.randint(0, 3)
        body |= {"logprobs": True, "top_logprobs": settings["logprobs"]} if chat else {"logprobs": settings["logprobs"]}
    if random.random() < 0.1:
        settings["ignore_eos"] = body["ignore_eos"] = False  # nothing else ends a value
        settings["json_schema"] = SCHEMA
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
    if samples > 1:
        body["n"] = samples
    messages = [{"role": "user", "content": text}]
    prompt: Prompt = messages if chat else text
    body |= {"messages": messages} if chat else {"prompt": text}
    return Case(CHAT if chat else COMPLETION, body, prompt, settings, samples)


# What a server answered ------------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """One output of a stream, its chunks put together."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def difference(case: Case, stream: bytes | bytearray) -> str | None:
    """Return how a complete stream differs from what the library writes; None if it does not."""
    events = [event for event in stream.decode().split("\n\n") if event and not event.startswith(":")]
    if not events or events[-1] != "data: [DONE]":
        return f"the stream ends with {events[-1:]!r}"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    if failed := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
        return f"the stream failed: {failed}"
    shown = _outputs(chunks, case.samples)
    for place, (one, expected) in enumerate(zip(shown, case.expected, strict=True)):
        for name in ("text", "tokens", "finish_reason"):
            if getattr(one, name) != getattr(expected, name):
                return f"{name} of output {place} is {getattr(one, name)!r}, expected {getattr(expected, name)!r}"
        if not _near(one.logprobs, expected.logprobs or []):
            return f"log-probabilities of output {place} are {one.logprobs!r}, expected {expected.logprobs!r}"
    written = sum(len(one.tokens) for one in case.expected)
    usage = chunks[-1]["usage"]["completion_tokens"]
    return None if usage == written else f"usage counts {usage} tokens, expected {written}"


def _outputs(chunks: Iterable[Object], samples: int) -> list[Shown]:
    found = [Shown() for _ in range(samples)]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = found[choice["index"]]
        one.text += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
        one.tokens += choice.get("token_ids") or []
        one.finish_reason = choice["finish_reason"] or one.finish_reason
        given = choice["logprobs"] or {}
        one.logprobs += [entry["logprob"] for entry in given.get("content") or ()] + given.get("token_logprobs", [])
    return found


def _near(found: list[float], expected: list[Logprob]) -> bool:
    return len(found) == len(expected) and all(
        abs(one - other.logprob) < NEAR for one, other in zip(found, expected, strict=True)
    )
