"""What a drafter holds is written in place: a captured round knows the addresses, and a benchmark puts all of it back."""

import pytest
from torch import Tensor

from doubles import drafter, prompts, target
from foreword import methods
from foreword.engine.engine import Engine
from foreword.engine.request import Request


@pytest.mark.parametrize("method", methods.METHODS)
def test_a_round_leaves_the_buffers_where_they_are(method: str) -> None:
    model = target()
    made = drafter(method, model)
    engine = Engine(model, made, slots=2, max_context=64)
    before = {name: value.data_ptr() for name, value in vars(made).items() if isinstance(value, Tensor)}
    engine.generate([Request(prompt, max_new_tokens=8) for prompt in prompts(2)])
    after = {name: value for name, value in vars(made).items() if isinstance(value, Tensor)}
    assert {name: value.data_ptr() for name, value in after.items()} == before
    assert not any(value.is_inference() for value in after.values())
