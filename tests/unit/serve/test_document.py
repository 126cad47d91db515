"""/openapi.json against a real server: answers and errors are those of the document, whatever is asked."""

import asyncio
from typing import Any

from foreword.serve.app import OPEN
from foreword.serve.options import digest
from fuzz_server import asked
from real_server import RealServer


def test_answers_are_those_of_the_document(real_server: RealServer) -> None:
    good, written = asked(real_server, examples=8, seed=1)
    assert good and "0 generated" not in written, written
    assert real_server.ask({"prompt": "hello", "max_tokens": 2}).status == 200
    assert not real_server.wrote("Traceback"), real_server.lines


def test_all_but_the_open_endpoints_are_documented_to_need_a_key(serving: Any) -> None:
    """And they do: each operation of the document is asked without one."""

    async def ask() -> None:
        async with serving(key_digests=(digest("key"),)) as client:
            document = (await client.http.get("/openapi.json", headers={"authorization": "Bearer key"})).json()
            assert document["security"] == [{"key": []}, {}]
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    answer = await client.http.request(method, path.replace("{model}", "x"))
                    is_open = operation.get("security") == []
                    assert is_open == (path in OPEN) == ("401" not in operation["responses"]), path
                    assert (answer.status_code == 401) is not is_open, path

    asyncio.run(ask())
