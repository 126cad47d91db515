"""Buffers that a recorded round reads are written in place, because a graph holds their addresses."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from torch import Tensor

from doubles import drafter, engine, prompts, requests, run_to_end, target_for
from foreword import methods
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request


def buffers_of(made: Drafter) -> dict[str, Tensor]:
    """Return the tensors of a drafter: its attributes, and the cache of its own stack."""
    held = {name: value for name, value in vars(made).items() if isinstance(value, Tensor)}
    stack = getattr(made, "stack", None) or getattr(getattr(made, "small_model", None), "stack", None)
    return held if stack is None else held | {"cache": stack.cache.held, "lengths": stack.cache.length}


def columns_of(steps: Engine) -> dict[str, Tensor]:
    """Return the tensors of the engine's slots: every column of `State` and of its sampling, and the cache."""
    state = {field.name: getattr(steps.state, field.name) for field in fields(steps.state)}
    columns = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    columns |= {f"table.{name}": value for name, value in steps.state.table.columns.items()}
    cache = steps.target.cache
    return columns | {"table.ends": steps.state.table.ends, "cache": cache.held, "cache.length": cache.length}


def addresses(held: dict[str, Tensor]) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in held.items()}


@pytest.mark.parametrize("method", methods.METHODS)
def test_a_round_does_not_move_the_buffers(method: str) -> None:
    model = target_for(method)
    made = drafter(method, model)
    engine = Engine(model, made, slots=2, max_context=64)
    before = addresses(buffers_of(made))
    engine.generate([Request(prompt, max_new_tokens=8) for prompt in prompts(2)])
    after = buffers_of(made)
    assert addresses(after) == before
    assert not any(value.is_inference() for value in after.values())


CHANGES: dict[str, Callable[[Request], Request]] = {
    "unchanged": lambda request: request,
    "sampled": lambda request: replace(request, sampling=Sampling(0.8, top_k=5, top_p=0.9, min_p=0.1, seed=1)),
    "a minimum length": lambda request: replace(request, min_new_tokens=3),
    "without drafts": lambda request: replace(request, speculate=False, ignore_eos=True),
    "logprobs": lambda request: replace(request, sampling=Sampling(seed=2, logprobs=3)),
    "reuse of a slot": lambda request: replace(request, reuse=True),
}


@pytest.mark.parametrize("method", methods.METHODS)
def test_requests_that_come_and_go_do_not_move_the_columns(method: str) -> None:
    """Requests of every kind, several at once, one aborted while it waits and one while it runs. Columns that few requests
    need, such as penalty counts and barred tokens, are made for the first such request and stay from then on."""
    model = target_for(method)
    made = drafter(method, model)
    steps = engine(made, model, slots=3)
    asked = [change(one) for one, change in zip(requests(6, max_new_tokens=5), CHANGES.values(), strict=True)]
    kept = columns_of(steps) | buffers_of(made)  # kept alive, so that nothing else gets their memory

    def nothing_moved() -> bool:
        return addresses(columns_of(steps) | buffers_of(made)) == addresses(kept)

    def run_all() -> None:
        runs = [steps.add(request) for request in asked]
        steps.abort(runs[4])
        for _ in range(3):
            steps.step()
            assert nothing_moved()
        steps.abort(runs[0])
        run_to_end(steps)
        assert nothing_moved()

    run_all()
    penalty = replace(asked[0], sampling=Sampling(repetition_penalty=1.5, seed=3))
    barred = replace(asked[0], sampling=Sampling(seed=3, allowed_token_ids=tuple(range(20))))
    counted = replace(asked[0], sampling=Sampling(seed=3, presence_penalty=0.5))
    biased = replace(asked[0], sampling=Sampling(seed=3, logit_bias={5: 2.0}))
    worded = replace(asked[0], sampling=Sampling(seed=3, bad_word_ids=((5, 6),)))
    made_late = {"seen": penalty, "table.barred": barred, "table.generated": counted}
    made_late |= {"table.logit_bias": biased, "table.bad_words": worded}
    for name, request in made_late.items():
        steps.generate([request, asked[1]])
        assert not nothing_moved()
        kept[name] = columns_of(steps)[name]
        assert nothing_moved()
        asked.append(request)
    run_all()
