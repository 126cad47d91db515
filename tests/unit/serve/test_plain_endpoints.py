"""The endpoints that generate nothing: models, tokens, how the server is, its document, its methods."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch

import foreword
from foreword.api import LLM
from foreword.methods import all_methods
from foreword.serve.ready import made_of
from foreword.serve.service import fingerprint_of

SAY = [{"role": "user", "content": "hello"}]


def answers(serving: Any, ask: Callable[[Any], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with serving(**options) as client:
            return await ask(client)

    return asyncio.run(run())


def test_models_under_all_their_names(serving: Any, llm: LLM) -> None:
    async def ask(client: Any) -> list[Any]:
        found = [(await client.http.get(f"/v1/models{path}")) for path in ("", "/org/first", "/second", "/third")]
        return [*found, await client.chat(model="second", max_tokens=1)]

    listed, first, second, third, chat = answers(serving, ask, served_names=("org/first", "second"))
    assert [card["id"] for card in listed.json()["data"]] == ["org/first", "second"]
    assert first.json()["id"] == "org/first" and second.json()["max_model_len"] == llm.engine.max_context
    assert first.json()["foreword"]["method"] == llm.method
    assert third.status_code == 404 and third.json()["error"]["code"] == "model_not_found"
    assert chat["model"] == "org/first"


def test_the_fingerprint_says_what_it_is_made_of(serving: Any, llm: LLM, talking: Any, hf_tokenizer: Any) -> None:
    """Every answer has it. Equal models have the same one, and another dtype or method has another one."""

    async def ask(client: Any) -> Any:
        said = {"messages": SAY, "max_tokens": 1}
        bodies = {"/v1/chat/completions": said, "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "hello"}}
        found = [(await client.post(path, body)).json()["system_fingerprint"] for path, body in bodies.items()]
        return (await client.http.get("/version")).json(), {*found}

    about, found = answers(serving, ask)
    assert found == {about["system_fingerprint"]} and about["system_fingerprint"].startswith("fp_")
    made = about["made_of"]
    assert {"foreword": foreword.__version__, **made_of(llm)} == made and made["method"] == llm.method
    assert {"weights", "config", "kernels", "processor", "ranks", "threads", "torch"} < {*made}
    others = []
    for dtype in (torch.float32, torch.float32, torch.float64):
        with foreword.wrap(talking("llama").to(dtype), hf_tokenizer, "plain", slots=1) as other:
            others.append(made_of(other))
    assert others[0] == others[1]
    assert {name for name in made if name != "foreword" and others[0][name] != others[2][name]} == {"dtype"}
    assert len({fingerprint_of(one) for one in (*others, made)}) == 3


def test_tokens_there_and_back(serving: Any, llm: LLM) -> None:
    async def ask(client: Any) -> Any:
        text = (await client.post("/tokenize", {"prompt": "hello", "return_token_strs": True})).json()
        chat = (await client.post("/tokenize", {"messages": SAY})).json()
        bare = (await client.post("/tokenize", {"messages": SAY, "add_generation_prompt": False})).json()
        back = (await client.post("/detokenize", {"tokens": chat["tokens"]})).json()
        return text, chat, bare, back

    text, chat, bare, back = answers(serving, ask)
    assert text["tokens"] == llm.tokenizer.encode("hello", chat=False) and text["token_strs"] == [*"hello"]
    assert chat["tokens"] == llm.tokenizer.encode(SAY) and chat["count"] == len(chat["tokens"])
    assert bare["tokens"] == chat["tokens"][:-1]
    assert back["prompt"] == "<|user|>hello</s><|assistant|>"


def test_health_and_readiness(serving: Any) -> None:
    async def ask(client: Any) -> list[Any]:
        async def both() -> list[tuple[int, str]]:
            found = [await client.http.get(path) for path in ("/health", "/ready")]
            return [(one.status_code, one.json()["status"]) for one in found]

        ready = await both()
        await client.service.admission.drain(1)
        draining = await both()
        await client.service.llm.close()
        return [ready, draining, await both(), await client.error("/v1/completions", {"prompt": "x"})]

    ready, draining, dead, refusal = answers(serving, ask)
    assert ready == [(200, "ready")] * 2
    assert draining == [(200, "draining"), (503, "draining")]
    assert dead == [(503, "dead")] * 2
    assert refusal[0] == 503 and refusal[1]["code"] == "dead"


def test_the_document_describes_every_endpoint_and_field(serving: Any) -> None:
    async def ask(client: Any) -> Any:
        return (await client.http.get("/openapi.json")).json(), client.http._transport.app.routes

    document, routes = answers(serving, ask, page=False)
    assert {*document["paths"]} == {route.path.replace(":path", "") for route in routes}
    schemas = document["components"]["schemas"]
    assert {"messages", "temperature", "trace_rounds", "tools", "prediction"} < {*schemas["ChatFields"]["properties"]}
    assert schemas["ChatFields"]["required"] == ["messages"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"] and "200" in operation["responses"], path
            if method == "post":
                place = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert place.removeprefix("#/components/schemas/") in schemas


def test_methods_change_while_nothing_runs(serving: Any, talking: Any, hf_tokenizer: Any) -> None:
    async def ask(client: Any) -> list[Any]:
        before = (await client.http.get("/foreword/methods")).json()
        first = await client.chat(max_tokens=8, temperature=0)
        with client.service.admission.enter(object(), 1):
            busy = await client.error("/foreword/method", {"method": "plain"})
        after = (await client.post("/foreword/method", {"method": "plain"})).json()
        unknown = await client.error("/foreword/method", {"method": "nothing"})
        return [before, first, busy, after, unknown, await client.chat(max_tokens=8, temperature=0)]

    with foreword.wrap(talking("llama"), hf_tokenizer, "prompt_lookup", slots=1) as other:
        before, first, busy, after, unknown, second = answers(serving, ask, other=other, switch_methods=True)
    assert before == {"method": "prompt_lookup", "methods": [*all_methods()], "switchable": True}
    assert busy[0] == 409 and after["method"] == "plain" and unknown[0] == 400
    assert first["choices"] == second["choices"] and second["foreword"]["method"] == "plain"


def test_methods_are_fixed_by_default(serving: Any) -> None:
    async def ask(client: Any) -> Any:
        return await client.error("/foreword/method", {"method": "plain"}), (
            await client.http.get("/foreword/methods")
        ).json()

    (status, _), listed = answers(serving, ask)
    assert status == 403 and listed["switchable"] is False
