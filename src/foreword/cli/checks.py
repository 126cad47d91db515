"""The checks of `foreword doctor`, one function each: the machine, the cache folder, the model, and a real run.

Each check says what it found and, if something is wrong, what to do. Errors of Foreword are not raised here: a fault is a
finding. The default checks take seconds; with `full` they measure, try every method and read every byte.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from foreword.api import load
from foreword.bench.figures import noise_reason
from foreword.cli.console import waiting
from foreword.drafters.auto import Expected, choose, expectations, shipped_for
from foreword.drafters.shipped import model_of, shipped
from foreword.errors import ForewordError
from foreword.hub.checksums import verify_model
from foreword.hub.resolve import default_model, resolve
from foreword.hub.storage import home
from foreword.methods import METHODS
from foreword.model.busy import busy_message, others_at_work
from foreword.model.cores import cores
from foreword.model.cost import kept_curve
from foreword.model.loading import choose_device, choose_dtype
from foreword.ops.device import free_memory

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.cli.options import ModelOptions
    from foreword.results import Result

LEAST = {"torch": (2, 11), "transformers": (5, 17)}
ROOMY = 2 << 30  # bytes: the default model in float32, its packed copy and a cache
TRIED = ("prompt_lookup", "token_recycling")
TEST_PROMPTS = (
    "Write the numbers from one to twenty in words, separated by commas.",
    "Explain in two sentences why the sea is salty.",
)
TEST_TOKENS = 32
QUICK_ROWS, QUICK_PROMPTS = 8, 1  # a fixed number of rows, so that costs need not be measured
REMEASURE = "foreword doctor --remeasure measures it again; do it when the machine is quiet"
LEFT_OUT = "every method, the cost of rounds, the expectations of auto, and the files of the model"


@dataclass(frozen=True)
class Finding:
    check: str
    status: Literal["ok", "warn", "fail"]
    said: str
    do: str = ""


def examine(model: ModelOptions, fetch: bool, full: bool = True) -> Iterator[Finding]:
    """Run every check in turn, quick ones first."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield from (_package(name) for name in LEAST)
    yield from _device(model)
    yield _threads(model.threads)
    yield _onednn()
    yield _numba(model)
    yield _memory()
    yield _others()
    yield from _cache()
    yield _drafters()
    found = _model(model, fetch)
    yield found
    if found.status != "ok":
        yield Finding("self-test", "warn", "skipped: it needs the model", "")
        return
    if full:
        yield _bytes(model)
    yield from _self_test(model, full)
    if not full:
        yield Finding("left out", "ok", f"{LEFT_OUT}: foreword doctor --full")


def _package(name: str) -> Finding:
    found = version(name)
    least = ".".join(map(str, LEAST[name]))
    numbers = tuple(int(number) for number in found.split(".")[:2])
    if numbers < LEAST[name]:
        return Finding(name, "fail", f"{found}, {least} or later is needed", f"pip install --upgrade '{name}>={least}'")
    return Finding(name, "ok", found)


def _device(model: ModelOptions) -> Iterator[Finding]:
    try:
        device = choose_device(model.device)
        dtype = str(choose_dtype(model.dtype, device)).removeprefix("torch.")
    except ForewordError as error:
        yield Finding("device", "fail", str(error))
        return
    gpus = [
        f"{torch.cuda.get_device_name(i)} ({_size(torch.cuda.mem_get_info(i)[0])} free)"
        for i in range(torch.cuda.device_count())
    ]
    yield Finding("device", "ok", f"{device}; GPUs that torch sees: {', '.join(gpus) or 'none'}")
    exact = "outputs are equal token for token" if dtype in ("float32", "float64") else "outputs are equal up to near-ties"
    yield Finding("dtype", "ok", f"{dtype}: {exact}")


def _threads(given: int | None) -> Finding:
    threads, most = given or torch.get_num_threads(), cores()
    said = f"{threads}, on {most} cores"
    if threads > most:
        return Finding("threads", "warn", said, f"more threads than cores wait for each other: --threads {most}")
    return Finding("threads", "ok", said)


def _onednn() -> Finding:
    if torch.backends.mkldnn.is_available():
        return Finding("oneDNN", "ok", "available: draft tokens are cheap to verify on the CPU")
    return Finding(
        "oneDNN",
        "warn",
        "not in this torch: draft tokens are expensive to verify on the CPU",
        "install torch from its wheels",
    )


def _numba(model: ModelOptions) -> Finding:
    if find_spec("numba") is not None:
        return Finding("Numba", "ok", f"{version('numba')}: fused layers on the CPU")
    if (model.device or "cuda").startswith("cuda") and torch.cuda.is_available():
        return Finding("Numba", "ok", "not installed, and not needed on CUDA")
    return Finding("Numba", "warn", "not installed: slower layers on the CPU", "pip install numba")


def _memory() -> Finding:
    free = free_memory(torch.device("cpu"))
    if free is None:
        return Finding("memory", "ok", "this system does not say how much is free")
    if free < ROOMY:
        return Finding("memory", "warn", f"{_size(free)} free", "close something, or choose a smaller --max-context")
    return Finding("memory", "ok", f"{_size(free)} free")


def _others() -> Finding:
    """Check the load of other programs: figures of a busy machine mislead."""
    share = others_at_work()
    if message := busy_message(share):
        return Finding("other programs", "warn", message, "close what you can: figures of a busy machine mislead")
    return Finding("other programs", "ok", f"the machine is quiet: {share:.0%} of the cores are used")


def _cache() -> Iterator[Finding]:
    try:
        folder = home()
    except ForewordError as error:
        yield Finding("cache folder", "fail", str(error))
        return
    yield Finding("cache folder", "ok", f"{folder}, writable")
    kept = sorted([*folder.glob("models/*/"), *folder.glob("gguf/*/")])
    names = [f"{one.name} ({_size(sum(file.stat().st_size for file in one.iterdir()))})" for one in kept]
    costs = len([*folder.glob("costs/*.json")])
    yield Finding("in the cache", "ok", f"models: {', '.join(names) or 'none'}; measured cost curves: {costs}")


def _drafters() -> Finding:
    try:
        ships = [f"{name} (for {model_of(folder)})" for name, folder in shipped().items()]
    except ForewordError as error:
        return Finding("drafters", "fail", str(error))
    lacking = [name for name, method in METHODS.items() if method.trained and name not in shipped()]
    said = f"shipped: {', '.join(ships) or 'none'}"
    return Finding("drafters", "ok", said + (f"; must be trained: {', '.join(lacking)}" if lacking else ""))


def _model(model: ModelOptions, fetch: bool) -> Finding:
    if model.model is None and not (fetch or model.is_here()):
        said = f"{model.name}: not fetched yet (about 90 MB, once)"
        return Finding("model", "warn", said, "foreword doctor --fetch fetches it; so does the first request")
    try:
        stored = model.quantization == "stored"
        folder = default_model(stored=stored) if model.model is None else resolve(model.model, model.revision, stored=stored)
    except ForewordError as error:
        return Finding("model", "fail", str(error))
    return Finding("model", "ok", f"{model.name}, in {folder}")


def _bytes(model: ModelOptions) -> Finding:
    """Compare the files of a converted model with their checksums."""
    with waiting("comparing the model's files with their checksums"):
        wrong = verify_model(resolve(model.model, model.revision, stored=model.quantization == "stored"))
    if wrong:
        return Finding("model's files", "fail", "; ".join(wrong), "delete its folder: it is then fetched or converted again")
    said = "they match their checksums" if wrong is not None else "there are no checksums of them"
    return Finding("model's files", "ok", said)


def _self_test(model: ModelOptions, full: bool) -> Iterator[Finding]:
    """Compare the output and speed of some methods, or all, with plain decoding."""
    try:
        with waiting("self-test: plain"):
            llm = load(model.model, "plain", slots=1, **model.where())
            prompts = TEST_PROMPTS if full else TEST_PROMPTS[:QUICK_PROMPTS]
            _generate(llm, prompts)  # warms up
            plain = _generate(llm, prompts)
        for method in (*TRIED, *(shipped_for(llm.model) if full else ())):
            with waiting(f"self-test: {method}"):
                found = _generate(llm.use(method, None if full else QUICK_ROWS), prompts)
            yield _compare(method, plain, found, str(llm.model.dtype).removeprefix("torch."))
        yield from _costs(llm, full)
    except ForewordError as error:
        yield Finding("self-test", "fail", str(error))


def _costs(llm: LLM, full: bool) -> Iterator[Finding]:
    """Check the cost of rows, and what `auto` makes of it. Measure it if `full`, else use what is stored."""
    if not full:
        llm.model.use_costs(kept_curve(llm.model))
        yield _curve(llm)
        return
    with waiting("measuring what a round costs"):
        expected = expectations(llm.model)
    yield _curve(llm)
    yield from _choice(expected, choose(llm.model, expected).method)


def _choice(expected: list[Expected], chosen: str) -> Iterator[Finding]:
    """Say which method `auto` takes, and why."""
    for one in expected:
        figures = f"{one.tokens_per_round:.2f} tokens/round, a round costs {one.round_cost:.2f}x plain's"
        yield Finding(f"expected {one.method}", "ok", f"{figures}: {one.speedup:.2f}x its speed")
    kept = "" if chosen == expected[0].method else f", its earlier choice; {expected[0].method} is about as fast"
    said = f"takes {chosen} here{kept}; foreword bench measures on your prompts"
    if not all(one.steady for one in expected):
        yield Finding("auto", "warn", f"{said}; costs were measured while the machine was busy", REMEASURE)
    else:
        yield Finding("auto", "ok", said)


def _generate(llm: LLM, prompts: Sequence[str] = TEST_PROMPTS) -> list[Result]:
    return [llm.generate(prompt, max_new_tokens=TEST_TOKENS, ignore_eos=True, seed=0) for prompt in prompts]


def _compare(method: str, plain: list[Result], found: list[Result], dtype: str) -> Finding:
    check = f"self-test {method}"
    if [one.tokens for one in found] != [one.tokens for one in plain]:
        if dtype in ("float32", "float64"):
            return Finding(
                check, "fail", "another output than plain decoding", "foreword prove says where; please report it"
            )
        said = f"another output than plain decoding; in {dtype} near-ties may fall either way"
        return Finding(check, "warn", said, f"foreword prove --methods {method} tells ties from bugs")
    tokens, rounds = (sum(getattr(one.stats, name) for one in found) for name in ("new_tokens", "rounds"))
    ratio = sum(one.stats.decode_s for one in plain) / sum(one.stats.decode_s for one in found)
    said = f"same {tokens} tokens as plain; {tokens / rounds:.2f} tokens/round, {ratio:.2f}x its speed"
    if why := noise_reason(ratio, tokens / rounds):
        return Finding(check, "warn", f"{said}, which is {why}", "the machine is busy: try again when it is quiet")
    if ratio < 0.9:
        return Finding(
            check, "warn", said, "slower than plain: try again when the machine is quiet, and look at the row costs"
        )
    return Finding(check, "ok", said)


def _curve(llm: LLM) -> Finding:
    """Check that a pass over many rows costs little more than over one. A curve of a busy machine misleads."""
    curve = llm.model.curve
    if curve is None:
        return Finding(
            "row costs", "ok", "not measured yet: --full measures them, or the first load of a method that needs them"
        )
    costs = ", ".join(f"{rows} rows x{curve.relative(rows):.1f}" for rows in (4, 16, 64))
    said = f"1 row {1000 * curve.at(1):.0f} ms, {costs}"
    if not curve.steady:
        why = f" ({curve.suspect})" if curve.suspect else ""
        return Finding("row costs", "warn", f"{said}, measured while the machine was busy{why}", REMEASURE)
    if curve.relative(16) > 8:
        return Finding("row costs", "warn", f"{said}: speculation gains little here", f"if that is unexpected: {REMEASURE}")
    return Finding("row costs", "ok", said)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
