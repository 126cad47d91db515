"""What a proposer reads of vLLM's config: the length of drafts, the number of requests, and its own options.

The options stand in `additional_config` under "foreword". They are those of the method, and those that vLLM decides are
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreword.errors import InputError

KEY = "foreword"
DECIDED = {"rows": "num_speculative_tokens + 1", "tree": "chain", "table": "shared"}


@dataclass(frozen=True)
class ProposerSettings:
    """The settings of one proposer."""

    rows: int  # of a draft, the root included
    requests: int  # at most, in one step
    options: dict[str, Any]

    @staticmethod
    def of(vllm_config: Any) -> ProposerSettings:
        given = (vllm_config.additional_config or {}).get(KEY, {})
        if not isinstance(given, dict):
            raise InputError(f"additional_config[{KEY!r}] is {given!r}; give an object with the options of the method")
        if fixed := sorted(given.keys() & DECIDED.keys()):
            raise InputError(f"{fixed[0]} is {DECIDED[fixed[0]]} inside vLLM; leave it out of additional_config[{KEY!r}]")
        rows = vllm_config.speculative_config.num_speculative_tokens + 1
        return ProposerSettings(rows, vllm_config.scheduler_config.max_num_seqs, dict(given))


def refuse_parallel(vllm_config: Any, name: str) -> None:
    """Refuse a target that is split over several devices, where no process computes all logits or holds the whole head."""
    parallel = vllm_config.parallel_config
    for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, setting)) > 1:
            raise InputError(f"{name}: {setting} is {size}, but it needs the whole target in one process; use Lookup")
