"""Usage: what a request cost, in the words of OpenAI, of llama.cpp and of Foreword."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.engine.request import Running
from foreword.results import Stats


def usage_of(runs: Sequence[Running], samples: int) -> dict[str, Any]:
    """Return OpenAI's `usage`. `samples`: outputs per prompt, which is counted once for all of them."""
    prompt = sum(len(run.request.prompt) for run in runs[::samples])
    completion = sum(len(run.tokens) for run in runs)
    accepted = sum(run.predicted for run in runs)
    predicted = sum(len(run.request.prediction) for run in runs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(run.reused for run in runs[::samples])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(predicted - accepted, 0),
        },
    }


def cost_of(runs: Sequence[Running], method: str) -> dict[str, Any]:
    """Return what speculation did, as `foreword`, and the times, as llama.cpp's `timings`."""
    stats = Stats.of(runs)
    drafted, accepted = stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens
    read = stats.prompt_tokens - stats.reused_tokens
    return {
        "foreword": {
            "method": method,
            "rounds": stats.rounds,
            "drafted": drafted,
            "accepted": accepted,
            "tokens_per_round": round(stats.tokens_per_round, 3),
        },
        "timings": {
            "cache_n": stats.reused_tokens,
            **_rates("prompt", read, stats.prefill_s),
            **_rates("predicted", stats.new_tokens, stats.decode_s),
            "draft_n": drafted,
            "draft_n_accepted": accepted,
        },
    }


def _rates(what: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{what}_n": count,
        f"{what}_ms": round(seconds * 1000, 3),
        f"{what}_per_token_ms": round(seconds * 1000 / max(count, 1), 3),
        f"{what}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }
