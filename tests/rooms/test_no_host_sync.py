"""Between prefill and emit nothing touches the host: read off the code, and checked while a round runs.

On a GPU every such question waits for all work before it, and a captured round cannot ask at all. `fit` and `emit` are
the two places that may.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from doubles import DRAFTING, VOCABULARY, Liar, Oracle, Recorder, drafter, engine, full_sequence, prompts, target
from foreword.core import choosing
from foreword.core.drafter import Drafter
from foreword.core.needs import Graft, Needs
from foreword.core.sampling import Sampling
from foreword.core.state import Batch
from foreword.engine.accept import accept
from foreword.engine.commit import commit
from foreword.engine.request import Request
from foreword.methods import METHODS
from foreword.ops.top import sampled_on_cuda

SOURCE = Path(__file__).parents[2] / "src" / "foreword"

# Read off the code ---------------------------------------------------------------------------------------------------

QUESTIONS = {"item", "tolist", "nonzero", "argwhere", "cpu", "numpy", "masked_select", "unique", "is_nonzero", "equal"}
CASTS = {"int", "float", "bool"}
WHOLE_FILES = [
    *(SOURCE / "engine" / f"{name}.py" for name in ("lockstep", "accept", "commit", "pipeline")),
    *(SOURCE / "model" / f"{name}.py" for name in ("attention", "stack")),
    SOURCE / "model" / "group.py",
    SOURCE / "ops" / "rounds.py",
    SOURCE / "ops" / "flights.py",
]
# In these files only what a round calls is hot.
ENTRIES = {
    SOURCE / "core" / "choosing.py": {"pick", "rank", "candidates"},
    SOURCE / "core" / "sampling_table.py": {"column", "temperature", "floor", "key"},
    SOURCE / "ops" / "noise.py": {"under", "gumbel", "column", "all_tokens"},
    SOURCE / "ops" / "filters.py": {"survivors", "lowest"},
    SOURCE / "ops" / "top.py": {
        "top",
        "top_with_chances",
        "first_largest",
        "first_largest_on_cuda",
        "sampled",
        "sampled_on_cuda",
        "race",
    },
    SOURCE / "drafting" / "trees" / "growth.py": {"draft", "choose"},
    SOURCE / "drafting" / "trees" / "beam.py": {"draft"},
    SOURCE / "drafting" / "early_rows.py": {"__init__", "read", "draft"},
    SOURCE / "drafting" / "level_rows.py": {"last", "add"},
    SOURCE / "drafting" / "trees" / "templates.py": {"draft", "filled", "tokens"},
    SOURCE / "drafting" / "graphs.py": {"add", "draft"},
    SOURCE / "drafting" / "joining.py": {"joined", "attach"},
    SOURCE / "drafting" / "heads.py": {"forward", "onto", "remember"},
    SOURCE / "drafting" / "blocks.py": {"as_slots", "kept", "easier"},
    SOURCE / "drafting" / "edges.py": {"of", "after"},
    SOURCE / "drafting" / "transfer.py": {"forward", "append_step", "steps_after"},
    SOURCE / "ops" / "growth.py": {"add", "chosen", "likeliest", "filled", "sureness"},
    SOURCE / "ops" / "candidate_graphs.py": {"add", "unrolled", "walks"},
    SOURCE / "ops" / "chains.py": {"with_chain", "attached"},
    SOURCE / "ops" / "rows.py": {
        "unit_rms",
        "rms_of",
        "carried",
        "carried_and_embedded",
        "unit_rms_embeddings",
        "counted",
        "remember",
        "add_cosine_attention",
        "cosine_attention",
        "along",
    },
    SOURCE / "ops" / "pseudo_rows.py": {"projected", "with_pseudo_rows"},
    SOURCE / "ops" / "transitions.py": {"likeliest_transitions", "after_live_nodes"},
    SOURCE / "ops" / "unread.py": {"unread"},
    SOURCE / "model" / "draft_linears.py": {"__call__", "onto"},
    SOURCE / "drafting" / "draft_vocabulary.py": {"head", "candidates"},
    SOURCE / "core" / "draft.py": {"ancestors", "depth", "head", "counts", "nothing", "overwrite"},
    SOURCE / "ops" / "trees.py": {"lineage", "next_level"},
    SOURCE / "ops" / "cached_rows.py": {"flat_places", "keep_rows", "advance"},
    SOURCE / "ops" / "norms.py": {"rms_normed"},
    SOURCE / "ops" / "embeddings.py": {"embedding_rows"},
    SOURCE / "engine" / "prefill.py": {"_score", "_show_drafter"},
    SOURCE / "model" / "cache.py": {"places", "write", "read", "keep", "advance", "rewind"},
    SOURCE / "drafting" / "small_model.py": {"root", "read", "embed", "norm", "candidates"},
    SOURCE / "drafting" / "skipped_target.py": {"root", "read", "run", "candidates", "confident_chain"},
    SOURCE / "model" / "model.py": {"score", "early", "onward", "embed", "norm", "head", "draft_head"},
    **{
        SOURCE / "methods" / f"{name}.py": {"read", "propose", "observe"}
        for name in METHODS
        if METHODS[name].load().captures == "round"
    },
}

# Taken on the CPU only, where asking costs nothing.
ON_THE_CPU = {"_sampled_among_best", "none_goes_on"}


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def called(function: ast.FunctionDef) -> Iterator[tuple[str, bool, int]]:
    """Names that are called, whether as an attribute, and where."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr, True, node.lineno
            elif isinstance(node.func, ast.Name):
                yield node.func.id, False, node.lineno


def reached(file: Path, entries: set[str]) -> set[str]:
    """Functions of the file that its entries lead to."""
    known, found = functions(file), set()
    waiting = [name for name in entries if name in known]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [other for other, _, _ in called(known[name]) if other in known]
    return found


def questions(file: Path, names: set[str]) -> list[str]:
    known = functions(file)
    return [
        f"{file.name}:{line} {name}"
        for function in names
        for name, attribute, line in called(known[function])
        if (attribute and name in QUESTIONS) or (not attribute and name in CASTS)
    ]


@pytest.mark.parametrize("file", [*WHOLE_FILES, *ENTRIES], ids=lambda file: f"{file.parent.name}/{file.name}")
def test_hot_code_asks_the_device_nothing(file: Path) -> None:
    names = (reached(file, ENTRIES[file]) if file in ENTRIES else set(functions(file))) - ON_THE_CPU
    assert names and not questions(file, names)


@pytest.mark.parametrize("file", WHOLE_FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_hot_code_sends_the_device_nothing(file: Path) -> None:
    """`torch.tensor(...)` of a list is a copy from the host, which a captured round cannot make."""
    sends = [f"{file.name}:{line}" for f in functions(file).values() for name, _, line in called(f) if name == "tensor"]
    assert not sends


# Checked while a round runs ------------------------------------------------------------------------------------------


class HostAsked(Exception):
    pass


class NoHost(TorchDispatchMode):
    """Raises where an operation hands a value, or a shape that depends on values, to the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero")

    def __torch_dispatch__(self, function: Any, types: Any, given: tuple = (), options: Any = None) -> Any:  # type: ignore[type-arg]
        name = str(function)
        if any(word in name for word in self.FORBIDDEN):
            raise HostAsked(name)
        if name.startswith(("aten.index.", "aten.index_put")) and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in given[1]
        ):
            raise HostAsked(f"{name} with a mask")
        return function(*given, **(options or {}))


SAMPLINGS = [
    Sampling(seed=1),
    Sampling(temperature=0.9, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3, seed=2, logprobs=3),
    Sampling(temperature=0.7, seed=3, presence_penalty=0.5, logit_bias={5: 2.0}, bad_word_ids=((4,), (5, 6, 7))),
]


def grafting(texts: list[list[int]]) -> Drafter:
    graft = Graft.of(2, (0, 1), (1, 1), lambda real, _: real[:, :2])
    return Recorder(Liar(), Needs(hidden=True, taps=(1,), grafts=(graft,)))


def drafters(kind: str, texts: list[list[int]]) -> Drafter:
    return {"oracle": Oracle(texts), "oracle chain": Oracle(texts, lies=0, as_chain=True), "grafts": grafting(texts)}[kind]


@pytest.mark.parametrize("kind", [*DRAFTING, "oracle", "oracle chain", "grafts"])
def test_a_round_asks_the_device_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round in the middle of three texts, stage by stage without `fit`: the doubles draft outside, methods inside."""
    monkeypatch.setattr(choosing, "sampled", sampled_on_cuda)
    model = target()
    asked = [
        Request(prompt, way, max_new_tokens=30, min_new_tokens=4) for prompt, way in zip(prompts(3), SAMPLINGS, strict=True)
    ]
    texts = [full_sequence(model.hf, request) for request in asked]
    steps = engine(drafter(kind, model) if kind in METHODS else drafters(kind, texts), model, slots=3)
    for request in asked:
        steps.add(request)
    while not all(run.ready for run in steps.slots.running.values()) or len(steps.slots.running) < 3:
        steps.step()
    chosen, state = steps.drafter, steps.state.at(Batch.of([0, 1, 2], max(r.length for r in steps.slots.running.values())))
    hot = NoHost if kind in METHODS and METHODS[kind].load().captures == "round" else torch.no_grad
    with torch.inference_mode():
        with hot():
            draft = chosen.propose(state)
        with NoHost():
            scores = model.score(state.batch, draft, chosen.needs)
            accepted, emission = accept(state, draft, scores, chosen.shape.depth)
            commit(state, model.cache, draft, accepted, emission)
        with hot():
            chosen.observe(state, draft, scores, accepted)
    assert (accepted.count > 0).any()


@pytest.mark.parametrize(
    "ask",
    [
        lambda values: int(values[0]),
        lambda values: bool((values > 0).all()),
        lambda values: values[values > 0],
        lambda values: values.nonzero(),
        lambda values: 1 if values.sum() > 0 else 0,
    ],
)
def test_the_check_itself_can_fail(ask: Any) -> None:
    with pytest.raises(HostAsked), NoHost():
        ask(torch.arange(VOCABULARY))
