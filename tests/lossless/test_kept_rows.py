"""After every round the cache holds, for every slot, exactly what the transformers model caches for the same sequence."""

import pytest
import torch

from doubles import (
    DRAFTING,
    FAMILIES,
    SAMPLINGS,
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    hf_cache,
    requests,
    target,
)
from foreword.core.drafter import Drafter
from foreword.core.state import Batch
from foreword.engine.engine import Engine
from foreword.engine.lockstep import Lockstep
from foreword.methods import METHODS
from foreword.model.model import Model

KINDS = [(kind, family) for kind in ["liar", "oracle", "oracle chain", *DRAFTING] for family in FAMILIES]
KINDS += [(name, "foreword_looped") for name in METHODS if name not in DRAFTING]


def drafter_of(kind: str, sequences: list[list[int]], model: Model) -> Drafter:
    oracles = {"oracle": Oracle(sequences), "oracle chain": Oracle(sequences, lies=0, as_chain=True)}
    return {"liar": Liar(), **oracles}.get(kind) or drafter(kind, model)


def cached_sequences(steps: Engine) -> dict[int, list[int]]:
    """The tokens that each slot's cache must hold."""
    inside = {s: [*run.request.prompt, *run.tokens][: run.length] for s, run in steps.slots.running.items()}
    return inside | {slot: list(text) for slot, text in steps.slots.free.items()}


@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_the_cache_equals_a_fresh_prefill(kind: str, family: str) -> None:
    """For running and free slots: a later prompt may start from a free one."""
    model, asked = target(family), requests(4, SAMPLINGS["T=0.8"], max_new_tokens=9)
    steps = engine(drafter_of(kind, [full_sequence(model.hf, request) for request in asked], model), model, slots=3)
    for request in asked:
        steps.add(request)
    while steps.busy:
        steps.step()
        for slot, text in cached_sequences(steps).items():
            if slot in steps.slots.running:
                assert model.cache.length[slot] == len(text)
            for layer, (keys, values) in enumerate(hf_cache(model.hf, text) if text else []):
                torch.testing.assert_close(model.cache.keys[layer][slot, :, : len(text)], keys, atol=1e-10, rtol=0)
                torch.testing.assert_close(model.cache.values[layer][slot, :, : len(text)], values, atol=1e-10, rtol=0)


def snapshot(steps: Engine, slot: int) -> list[torch.Tensor]:
    """Everything that is stored for a slot."""
    cache, state = steps.target.cache, steps.state
    columns = [cache.length, state.roots, state.tokens[:, :-1], state.alive_slots]
    return [tensor[slot].clone() for tensor in (*cache.keys, *cache.values, *columns)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["liar", "oracle", "oracle chain", "plain"])
def test_a_slot_that_is_not_in_the_round_is_not_touched(kind: str) -> None:
    """Slot 1 is freed early; what it held stays, bit for bit, while other slots generate."""
    model, asked = target(), requests(3, max_new_tokens=30, ignore_eos=True)
    steps = engine(drafter_of(kind, [full_sequence(model.hf, request) for request in asked], model), model, slots=3)
    runs = [steps.add(request) for request in asked]
    for _ in range(3):
        steps.step()
    steps.abort(runs[1])
    before = snapshot(steps, runs[1].slot)
    steps.step()
    assert steps.busy and same(before, snapshot(steps, runs[1].slot))


@pytest.mark.parametrize("kind", ["liar", "oracle", "oracle chain", "plain"])
def test_a_frozen_slot_commits_nothing(kind: str) -> None:
    """A slot that is in the round but no longer alive keeps its length, root, tokens and committed rows."""
    model, asked = target(), requests(3, max_new_tokens=30, ignore_eos=True)
    chosen = drafter_of(kind, [full_sequence(model.hf, request) for request in asked], model)
    steps = engine(chosen, model, slots=3)
    runs = [steps.add(request) for request in asked]
    while not all(run.ready and run.tokens for run in runs):
        steps.step()
    steps.state.alive_slots[1] = False
    length = int(model.cache.length[1])
    before = snapshot(steps, 1)
    batch = Batch.of([0, 1, 2], int(model.cache.length.max()))
    with torch.inference_mode():
        emission = Lockstep(model, chosen).round(steps.state.at(batch))
    assert emission.count[1] == 0 and not emission.ended[1] and emission.drafted[1] == 0
    assert emission.count[0] > 0 and emission.count[2] > 0
    for one, other in zip(before, snapshot(steps, 1), strict=True):
        # Rows past the length are scratch, for a frozen slot too.
        assert torch.equal(one[:, :length], other[:, :length]) if one.ndim == 3 else torch.equal(one, other)


def test_the_sequence_in_the_state_is_the_one_that_was_generated() -> None:
    model, asked = target(), requests(4, SAMPLINGS["T=0.8"])
    steps = engine(Oracle([full_sequence(model.hf, request) for request in asked]), model, slots=2)
    for request in asked:
        steps.add(request)
    while steps.busy:
        steps.step()
        for slot, run in steps.slots.running.items():
            text = [*run.request.prompt, *run.tokens]
            assert steps.state.tokens[slot, : len(text)].tolist() == text
            if run.ready:
                assert int(steps.state.roots[slot]) == text[-1]
