"""On a CUDA device: one thread owns the engine, captured rounds serve callers of any thread and any sampling."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from doubles import SAMPLINGS, drafter, prompts, tiny, truth
from foreword.core.sampling import Sampling
from foreword.engine.driver import Driver
from foreword.engine.engine import Engine
from foreword.engine.graph import GraphedLoop
from foreword.engine.request import Request
from foreword.model.model import Model
from tiers import slow

pytestmark = pytest.mark.gpu


WAYS = (
    SAMPLINGS["greedy"],
    SAMPLINGS["T=0.8"],
    Sampling(temperature=0.9, top_k=3, seed=5),
    Sampling(temperature=1.1, top_p=0.7, seed=6),
    Sampling(repetition_penalty=1.6, seed=7),
    Sampling(allowed_token_ids=(3, 4, 5, 9, 11, 20), seed=8),
    Sampling(temperature=0.7, allowed_token_ids=(2, 7, 8, 30), seed=9),
)


def captured(method: str) -> Engine:
    model = Model(copy.deepcopy(tiny("llama")).cuda())
    return Engine(model, drafter(method, model), slots=3, max_context=200, chunk=7)


@pytest.mark.parametrize("method", ["token_recycling", slow("plain"), slow("prompt_lookup")])
def test_threads_get_the_truth(method: str) -> None:
    engine = captured(method)
    driver = Driver(engine)
    asked = [
        Request(p, replace(WAYS[i % len(WAYS)], seed=i), max_new_tokens=20, min_new_tokens=i % 3 * 2)
        for i, p in enumerate(prompts(28))
    ]

    def write(request: Request) -> list[int]:
        (run,) = driver.run([engine.checked(request)])
        return run.tokens

    with ThreadPoolExecutor(6) as threads:
        found = [*threads.map(write, asked)]
    assert found == [truth(tiny("llama"), request) for request in asked]
    assert isinstance(engine.loop, GraphedLoop) and any(one.graph is not None for one in engine.loop.buckets.values())


@pytest.mark.slow
def test_numbers_that_users_choose_do_not_make_a_graph_each() -> None:
    engine = captured("plain")
    prompt = prompts(1)[0]
    for number in range(1, 41):
        ways = Sampling(temperature=0.8, top_k=number, seed=number), Sampling(logprobs=number, seed=1)
        asked = [Request(prompt, way, max_new_tokens=4) for way in ways]
        assert [run.tokens for run in engine.generate(asked[:1])] == [truth(tiny("llama"), asked[0])]
        (run,) = engine.generate(asked[1:])
        assert [len(one.top) for one in run.logprobs] == [number] * len(run.tokens)
    assert isinstance(engine.loop, GraphedLoop) and len(engine.loop.buckets) <= 8
