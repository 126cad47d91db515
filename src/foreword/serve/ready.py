"""What a client needs to know of an engine: once when it is loaded, and after each step."""

from __future__ import annotations

import torch

from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.model.cores import cpu_name
from foreword.model.fingerprint import Fingerprint
from foreword.ops.device import host_computes, name_of
from foreword.serve.messages import EngineLoad, Ready


def ready(llm: LLM) -> Ready:
    """Return what a client needs to know of a loaded model."""
    limits, model = llm.engine.limits, llm.model
    return Ready(
        model=model.name,
        method=llm.method,
        slots=llm.engine.slots.count,
        context=limits.context,
        trained=limits.trained,
        vocabulary=limits.vocabulary,
        ends=sorted(limits.ends),
        sampling_defaults=llm.sampling_defaults,
        fingerprint=made_of(llm),
        reuses=llm.reuses,
        cache_rows=model.cache.context * llm.engine.slots.count,
    )


def made_of(llm: LLM) -> dict[str, str]:
    """Return what outputs depend on besides the request, and the method. Equal weights have the same hash in float32 and
    bfloat16, so the dtype is named too. Rounding depends on the kernels, on the processor, and on a CPU on the threads."""
    model, device = llm.model, llm.model.device
    weights = Fingerprint.of(model)
    ran = [model.hf] if model.slow else [*(model.layer_stack.fused or model.layer_stack.layers)]
    layers = type(ran[0]).__name__
    threads = {"threads": str(torch.get_num_threads())} if host_computes(device) else {}
    return {
        "weights": weights.weights,
        "config": weights.config,
        "dtype": weights.dtype,
        "method": llm.method,
        "kernels": f"{layers} on {device.type}",
        "ranks": str(model.ranks),
        "processor": name_of(device) or cpu_name(),
        **threads,
        "torch": str(torch.__version__),
    }


def engine_load(engine: Engine) -> EngineLoad:
    """Return what an engine is busy with."""
    active = engine.slots.running.values()
    return EngineLoad(len(active), len(engine.waiting), sum(running.length for running in active))
