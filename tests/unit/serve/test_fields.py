"""Fields of requests: what is refused by name, what is ignored and counted, and how errors look."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from foreword.errors import EngineError, InputError, NumericsError, QueueFull
from foreword.requests import SETTINGS
from foreword.serve.errors import LONGEST_MESSAGE, refused
from foreword.serve.fields import (
    SETTING_OF,
    UNSUPPORTED,
    ChatFields,
    CompletionFields,
    ResponseFields,
    checked,
    names_of,
    read_object,
    settings_of,
)

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAY = [{"role": "user", "content": "hello"}]


def errors(serving: Any, asked: list[tuple[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    async def ask() -> list[tuple[int, dict[str, Any]]]:
        async with serving() as client:
            return [await client.error(path, body) for path, body in asked]

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", [ChatFields, CompletionFields, ResponseFields])
def test_no_field_is_both_read_and_refused(kind: type[msgspec.Struct]) -> None:
    assert not {*kind.__struct_fields__} & UNSUPPORTED.keys()


def test_every_setting_that_a_field_stands_for_exists() -> None:
    assert {*SETTING_OF.values()} <= {*SETTINGS}


def test_an_unsupported_field_is_refused_by_name(serving: Any) -> None:
    asked = [(CHAT, {"messages": SAY, name: {"some": "value"}}) for name in UNSUPPORTED]
    for name, (status, error) in zip(UNSUPPORTED, errors(serving, asked), strict=True):
        assert status == 400 and error["param"] == name and error["code"] == "unsupported_field"
        assert error["message"].startswith(f"{name} is not supported: ")


def test_values_that_change_nothing_are_accepted() -> None:
    given = {name: (harmless[0] if harmless else None) for name, (harmless, _) in UNSUPPORTED.items()}
    fields, unknown = checked({"messages": SAY, **given}, ChatFields)
    assert unknown == 0 and fields.messages == SAY


def test_unknown_fields_are_ignored_and_counted(serving: Any) -> None:
    async def ask() -> Any:
        async with serving() as client:
            await client.chat(max_tokens=1, made_up=1, also_made_up={}, user="me", safety_identifier="x")
            return client.service.metrics.unknown_fields._value.get()

    assert asyncio.run(ask()) == 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": 5}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        (CHAT, {"messages": SAY, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": SAY, "temperature": -1}, "temperature"),
        (CHAT, {"messages": SAY, "temperature": 1e7}, "temperature"),
        (CHAT, {"messages": SAY, "top_p": 0}, "top_p"),
        (CHAT, {"messages": SAY, "n": 0}, "n"),
        (CHAT, {"messages": SAY, "n": 1000}, "n"),
        (CHAT, {"messages": SAY, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": SAY, "max_tokens": True}, "max_tokens"),
        (CHAT, {"messages": SAY, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": SAY, "logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"messages": SAY, "logit_bias": {"3": 101}}, "logit_bias"),
        (CHAT, {"messages": SAY, "stop": [""]}, "stop"),
        (CHAT, {"messages": SAY, "stop": ["x"] * 1000}, "stop"),
        (CHAT, {"messages": SAY, "stop_token_ids": [10**9]}, "stop_token_ids"),
        (CHAT, {"messages": SAY, "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        (CHAT, {"messages": SAY, "seed": 2**64}, "seed"),
        (CHAT, {"messages": SAY, "prediction": {"type": "content"}}, "prediction"),
        (CHAT, {"messages": SAY, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        (TEXT, {"prompt": ["a", 1]}, "prompt"),
        (TEXT, {"prompt": []}, None),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [10**9]}, None),
        (TEXT, {"prompt": "a" * 100_000}, "prompt"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        (RESPONSES, {"input": "x", "store": True}, "store"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_used_is_refused(serving: Any, path: str, body: Any, param: str | None) -> None:
    ((status, error),) = errors(serving, [(path, body)])
    assert status == 400 and error["type"] == "invalid_request_error", error
    assert error["param"] == param, error
    assert 10 < len(error["message"]) <= LONGEST_MESSAGE


@pytest.mark.parametrize("stream", [False, True])
def test_another_model_is_not_found(serving: Any, stream: bool) -> None:
    ((status, error),) = errors(serving, [(CHAT, {"messages": SAY, "model": "gpt", "stream": stream})])
    assert status == 404 and (error["param"], error["code"]) == ("model", "model_not_found")


BODIES = (
    b"",
    b"{",
    b"[]",
    b"3",
    b"\xff",
    b'{"a": NaN}',
    b"[" * 100_000,
    b'{"messages": "\\ud800"}',
    b'{"n": ' + b"9" * 5000 + b"}",
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
def test_a_body_that_is_no_json_object(serving: Any, body: bytes) -> None:
    ((status, error),) = errors(serving, [(CHAT, body)])
    assert status == 400 and error["message"].startswith("the body "), error


def test_an_error_does_not_return_the_body(serving: Any) -> None:
    """However large the value is that cannot be used."""
    secret = "secret" * 1000
    asked: list[tuple[str, Any]] = [
        (CHAT, {"messages": SAY, "temperature": secret}),
        (CHAT, {"messages": [secret]}),
        (CHAT, {"messages": SAY, "stop": {secret: secret}}),
        (CHAT, {"messages": SAY, "model": secret}),
        (TEXT, {"prompt": {secret: 1}}),
    ]
    for _, error in errors(serving, asked):
        assert len(json.dumps(error)) < LONGEST_MESSAGE + 200


def test_null_is_not_given() -> None:
    given = {name: None for name in ChatFields.__struct_fields__}
    fields, unknown = checked({**given, "messages": SAY}, ChatFields)
    assert settings_of(fields) == {} and unknown == 0


def test_fields_become_settings() -> None:
    body = {"messages": SAY, "max_tokens": 3, "max_completion_tokens": 5, "min_tokens": 1, "prompt_cache_key": "mine"}
    fields, _ = checked({**body, "stop": "x", "temperature": 1}, ChatFields)
    assert settings_of(fields, "header") == {
        "max_new_tokens": 5,
        "min_new_tokens": 1,
        "session": "mine",
        "stop": "x",
        "temperature": 1.0,
    }
    assert settings_of(checked({"messages": SAY}, ChatFields)[0], "header") == {"session": "header"}
    assert names_of(fields)["max_new_tokens"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InputError("x"), 400, None),
        (QueueFull("x"), 429, "queue_full"),
        (NumericsError("x"), 500, "numerics_error"),
        (EngineError("x"), 503, "engine_error"),
        (ZeroDivisionError("a secret"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_becomes_an_answer(error: Exception, status: int, code: str | None) -> None:
    refusal = refused(error)
    assert (refusal.status, refusal.code) == (status, code)
    assert "secret" not in str(refusal.content())


def test_a_long_message_is_cut() -> None:
    assert len(refused(InputError("x" * 10_000)).content()["error"]["message"]) == LONGEST_MESSAGE


def test_a_body_is_read_once() -> None:
    assert read_object(b'{"a": [1]}') == {"a": [1]}
