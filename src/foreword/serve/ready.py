"""What a client needs to know of an engine: once when it is loaded, and after each step."""

from __future__ import annotations

from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.model.fingerprint import Fingerprint
from foreword.serve.messages import EngineLoad, Ready


def ready(llm: LLM) -> Ready:
    """Return what a client needs to know of a loaded model."""
    limits, model = llm.engine.limits, llm.model
    weights = Fingerprint.of(model)
    return Ready(
        model=model.name,
        method=llm.method,
        slots=llm.engine.slots.count,
        context=limits.context,
        trained=limits.trained,
        vocabulary=limits.vocabulary,
        ends=sorted(limits.ends),
        sampling_defaults=llm.sampling_defaults,
        fingerprint=f"{weights.weights}-{weights.dtype}-{model.device}",
        reuses=llm.reuses,
        cache_rows=model.cache.context * llm.engine.slots.count,
    )


def engine_load(engine: Engine) -> EngineLoad:
    """Return what an engine is busy with."""
    active = engine.slots.running.values()
    return EngineLoad(len(active), len(engine.waiting), sum(running.length for running in active))
