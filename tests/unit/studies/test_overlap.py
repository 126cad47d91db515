"""The figures of drafting during verification, on a tiny model."""

from pathlib import Path
from typing import Any

import pytest

from foreword.api import load
from overlap import measured


def test_figures(folders: dict[str, Path], trained: dict[str, Path], own_home: Path) -> None:
    with load(folders["llama"], "plain", slots=1, device="cpu", fused_layers=False) as llm:
        options: dict[str, Any] = dict(drafter=trained["draft_model"], worker="thread")
        found = measured(llm, ["hello there", "and again"], 24, **options)
    assert found.identical == found.texts == 2
    assert found.tokens_per_verify >= 1 and 0 <= found.right <= 1 and 0 <= found.overlap <= 1
    assert found.dropped_per_refusal >= 0 and found.rollback_ms >= 0 and 0 <= found.waited <= 1
    assert found.draft_ms > 0 and found.target_ms > 0 and found.plain_ms > 0 and found.speedup > 0
    assert f"--right {found.right:.3f}" in found.simulated


def test_the_worker_ends_with_the_model(folders: dict[str, Path], trained: dict[str, Path], own_home: Path) -> None:
    llm = load(folders["llama"], "amusd", drafter=trained["draft_model"], worker="thread", device="cpu", fused_layers=False)
    llm.generate("hello", max_new_tokens=4)
    drafter: Any = llm.engine.drafter
    worker = drafter.worker
    llm.use("plain")
    assert worker.channel.closed and drafter.worker is None
    llm.use("amusd", drafter=trained["draft_model"], worker="thread").generate("hello", max_new_tokens=4)
    worker = llm.engine.drafter.worker  # type: ignore[attr-defined]
    llm.close()
    assert worker.channel.closed
    with pytest.raises(ValueError, match="closed"):
        llm.generate("hello")
