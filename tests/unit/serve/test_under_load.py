"""A real server under load: the first seconds of `make load-test`, without its limits of time, which a busy machine misses.

Clients vanish at random points and send rubbish, while others read streams that must equal the library's output. Afterwards
neither process holds a slot, a descriptor, a task or a thread more than before.
"""

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import uvloop

from foreword.serve.metrics import Metrics
from load_test import left_behind, outputs, server_options
from real_server import RealServer
from under_load.cases import CHAT, cases
from under_load.client import ask, posted
from under_load.load import Findings, Load, Plan
from under_load.tiny_model import save_tiny_model

MOST_S = 240.0  # it takes seconds; a machine may be busy
MOST_GROWTH_MIB = 40.0
PLAN = Plan(requests=300, early=100, streams=60)


def loaded(load: Load) -> Findings:
    async def within() -> Findings:
        async with asyncio.timeout(MOST_S):
            return await load.run()

    return uvloop.run(within())


def test_a_server_under_load(tmp_path: Path, own_home: Path) -> None:
    save_tiny_model(tmp_path)
    known = cases(tmp_path, count=60, seed=0)
    with RealServer(tmp_path, *server_options(queued=40), slots=4) as server:
        found = loaded(Load(server, known, PLAN))
    assert found.before and found.early and found.after
    made = [*outputs(found, "".join(server.lines)), *left_behind(found.before, found.early, found.after)]
    assert [one for one in made if not one.passed] == [], found.differences
    for process, now in found.after.held.items():
        assert now.rss_mib - found.early.held[process].rss_mib < MOST_GROWTH_MIB
    assert len({kind for kind in found.kinds if kind.startswith("vanished")}) == 4 and found.kinds["rubbish"] > 9
    assert found.health and found.tokens


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "n": 2}, {"stream": True, "logprobs": True}])
def test_a_request_leaves_nothing_to_the_garbage_collector(
    listening: Any, until: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """With a thousand clients, one search of the collector stops all of their streams."""
    seen: list[weakref.ref[Any]] = []
    follow = Metrics.follow

    def noted(metrics: Metrics, runs: Any, since: float) -> Any:
        seen.extend(map(weakref.ref, runs))
        return follow(metrics, runs, since)

    monkeypatch.setattr(Metrics, "follow", noted)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}

    async def requests() -> None:
        async with listening() as (_, port):
            for _ in range(3):  # the engine's thread may hold the last one
                assert (await ask(("127.0.0.1", port), posted(CHAT, body))).status == 200
            await until(lambda: seen[0]() is None)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(requests())
    finally:
        gc.enable()
