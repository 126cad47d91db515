"""/metrics: counts that equal those of results, names that dashboards use, and what ended requests."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import foreword
from doubles import POISON, poisoned_model, tokenizer
from foreword.api import LLM

SAY = [{"role": "user", "content": "the words that come before the words"}]
GRAFANA = Path(__file__).parents[3] / "examples" / "grafana.json"
VLLM = "vllm:spec_decode_num_"


@pytest.fixture
def llm(knowing: LLM) -> LLM:
    return knowing


def samples(text: str) -> dict[str, float]:
    """Return every sample by its name and its labels other than the model's name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_counts_are_those_of_results(serving: Any, expect: Any, stream: bool) -> None:
    result = expect(SAY, max_new_tokens=24, temperature=0)

    async def ask() -> tuple[dict[str, float], Any]:
        async with serving() as client:
            answer = await client.post("/v1/chat/completions", {"messages": SAY, "max_tokens": 24, "stream": stream})
            assert answer.status_code == 200
            return samples((await client.http.get("/metrics")).text), answer.text

    found, answer = asyncio.run(ask())
    tokens, read = found["foreword:generation_tokens_total"], found["foreword:prompt_tokens_total"]
    assert (tokens, read) == (24, result.stats.prompt_tokens)
    rounds, drafts = found["foreword:rounds_total"], found[f"{VLLM}drafts_total"]
    accepted, drafted = found[f"{VLLM}accepted_tokens_total"], found[f"{VLLM}draft_tokens_total"]
    assert rounds + accepted == 24 and 0 < accepted < drafted and drafts <= rounds
    assert found["foreword:rows_checked_total"] == drafted + rounds
    by_position = [found[f"{VLLM}accepted_tokens_per_pos_total {place}"] for place in range(8)]
    assert sum(by_position) == accepted and by_position == sorted(by_position, reverse=True)
    assert found["foreword:tokens_per_round_sum"] == 24 and found["foreword:tokens_per_round_count"] == rounds
    assert found["foreword:time_to_first_token_seconds_count"] == found["foreword:e2e_request_latency_seconds_count"] == 1
    assert found["foreword:inter_token_seconds_count"] >= 1
    assert found["foreword:outputs_total length"] == 1
    assert found["foreword:responses_total /v1/chat/completions 200"] == 1
    if not stream:
        cost = json.loads(answer)["foreword"]
        assert (cost["rounds"], cost["drafted"], cost["accepted"]) == (rounds, drafted, accepted)


def test_the_load_of_the_engine(serving: Any, llm: LLM) -> None:
    async def ask() -> dict[str, float]:
        async with serving() as client:
            return samples((await client.http.get("/metrics")).text)

    found = asyncio.run(ask())
    assert found["foreword:cache_rows"] == llm.engine.max_context * 2
    assert found["foreword:requests_running"] == found["foreword:requests_waiting"] == 0 and found["foreword:ready"] == 1


def test_a_refused_request_is_counted_by_its_path(serving: Any) -> None:
    """A path that is not ours is no label."""

    async def ask() -> dict[str, float]:
        async with serving() as client:
            await client.post("/v1/completions", {})
            await client.http.get("/made/up")
            return samples((await client.http.get("/metrics")).text)

    found = asyncio.run(ask())
    assert found["foreword:responses_total /v1/completions 400"] == 1
    assert found["foreword:responses_total other 404"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_nan_is_counted_and_told(serving: Any, stream: bool) -> None:
    async def ask(other: LLM) -> tuple[Any, dict[str, float]]:
        async with serving(other) as client:
            answer = await client.post("/v1/completions", {"prompt": [3, POISON, 4], "stream": stream})
            return answer, samples((await client.http.get("/metrics")).text)

    with foreword.wrap(poisoned_model(), tokenizer().hf, "plain", slots=1) as other:
        answer, found = asyncio.run(ask(other))
    assert answer.status_code == (200 if stream else 500) and '"numerics_error"' in answer.text
    assert found["foreword:nan_rounds_total"] == found["foreword:aborts_total nan"] == 1


def test_the_dashboard_names_metrics_that_exist(serving: Any) -> None:
    async def ask() -> set[str]:
        async with serving() as client:
            await client.chat(max_tokens=2)
            return {name.partition(" ")[0] for name in samples((await client.http.get("/metrics")).text)}

    names, dashboard = asyncio.run(ask()), json.loads(GRAFANA.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name for one in expressions for name in re.findall(r"\b(?:foreword|vllm):\w+", one)}
    assert len(expressions) >= 12 and used - names == set()
    assert {name for name in names if name.startswith("vllm:") and name.endswith("_total")} <= used
