"""Reuse: a prompt that begins with what a free slot still holds starts from there, and the output is the same."""

from dataclasses import replace

import pytest

from doubles import SAMPLINGS, Liar, Oracle, drafter, engine, full_sequence, prompts, requests, target, target_for, truth
from foreword.core.drafter import Drafter
from foreword.engine.request import Request
from foreword.methods import METHODS
from foreword.model.model import Model

FIRST = Request(prompts(3)[1], SAMPLINGS["T=0.8"], max_new_tokens=12, ignore_eos=True)
MORE = (9, 30, 12, 5)

NEXT = {
    "goes on": lambda text: (*text, *MORE),
    "only the root is new": lambda text: text,
    "diverges early": lambda text: (*text[:3], *MORE),
    "diverges in the answer": lambda text: (*text[: len(FIRST.prompt) + 2], *MORE),
    "is shorter": lambda text: text[:6],
    "is other": lambda text: ((text[0] + 1) % 48, *text[1:]),
    "is one token": lambda text: text[:1],
}


def drafter_of(kind: str, model: Model, sequences: list[list[int]]) -> Drafter:
    return {"liar": Liar(), "oracle": Oracle(sequences)}.get(kind) or drafter(kind, model)


@pytest.mark.parametrize("way", NEXT)
@pytest.mark.parametrize("kind", [*METHODS, "liar", "oracle"])
def test_a_second_turn_is_the_same_as_a_fresh_one(kind: str, way: str) -> None:
    model = target_for(kind)
    text = (*FIRST.prompt, *truth(model.hf, FIRST))
    turn = Request(NEXT[way](text), SAMPLINGS["T=0.8"], max_new_tokens=9, reuse=True)
    steps = engine(drafter_of(kind, model, [full_sequence(model.hf, r) for r in (FIRST, turn)]), model, slots=2)
    (first,) = steps.generate([FIRST])
    (run,) = steps.generate([turn])
    assert run.tokens == truth(model.hf, turn)
    kept = {"goes on": len(text) - 1, "only the root is new": len(text) - 1, "diverges early": 3, "is shorter": 5}
    kept |= {"diverges in the answer": len(FIRST.prompt) + 2, "is other": 0, "is one token": 0}
    # A drafter that reads the prompt is shown at least the row before the root.
    needs = steps.drafter.needs
    always_read = int(needs.prompt != "none")
    # One that keeps a row with the token after it is shown the last common row again: another token may follow.
    common = max(kept[way] - int(needs.follower), 0)
    # One that reads rows a round later is shown those of the last round.
    read = len(text) - 1 - (first.accepted[-1] if needs.deferred else 0)
    assert run.reused == min(common, read, max(len(turn.prompt) - 1 - always_read, 0))


def test_the_slot_that_helps_most_is_taken() -> None:
    model, asked = target(), [replace(request, reuse=True) for request in requests(3, seed=2)]
    steps = engine(Liar(), model, slots=3)
    earlier = steps.generate(asked)
    turn = Request((*asked[1].prompt, *earlier[1].tokens, 8, 9), SAMPLINGS["greedy"], 6, reuse=True)
    (run,) = steps.generate([turn])
    assert run.slot == earlier[1].slot and run.reused == len(asked[1].prompt) + len(earlier[1].tokens) - 1
    assert run.tokens == truth(model.hf, turn)


def test_without_reuse_a_prompt_is_read_from_the_start() -> None:
    model, turn = target(), replace(FIRST, prompt=(*FIRST.prompt, *truth(target().hf, FIRST), *MORE))
    steps = engine(Liar(), model, slots=1)
    steps.generate([FIRST])
    (run,) = steps.generate([turn])
    assert run.reused == 0 and run.tokens == truth(model.hf, turn)


def test_an_aborted_prompt_is_reused_as_far_as_it_was_read() -> None:
    model, long = target(), Request(tuple(range(3, 23)), SAMPLINGS["greedy"], max_new_tokens=6, reuse=True)
    steps = engine(Liar(), model, slots=1)
    gone = steps.add(long)
    steps.step()
    steps.step()
    steps.abort(gone)
    (run,) = steps.generate([long])
    assert run.reused == 10 and run.tokens == truth(model.hf, long)


@pytest.mark.parametrize("kind", ["plain", "oracle"])
def test_a_penalty_counts_reused_tokens_too(kind: str) -> None:
    model = target()
    text = (*FIRST.prompt, *truth(model.hf, FIRST))
    turn = Request((*text, *MORE), replace(SAMPLINGS["greedy"], repetition_penalty=2.0), max_new_tokens=9, reuse=True)
    steps = engine(drafter_of(kind, model, [full_sequence(model.hf, r) for r in (FIRST, turn)]), model, slots=2)
    steps.generate([FIRST])
    (run,) = steps.generate([turn])
    assert run.reused > 0 and run.tokens == truth(model.hf, turn)
