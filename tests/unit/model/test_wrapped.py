"""A wrapped model still belongs to the user: its own `generate` is unchanged, and no Model disturbs another."""

import gc

import pytest
import torch
from transformers import PreTrainedModel

from doubles import SLOW_FAMILIES, STOCK_ATTENTION, Liar, engine, fresh, requests, target, truth, written
from foreword.model.model import Model

SHORT, LONG = [0, 0, 0, 9, 31], [5, 9, 31, 8, 40]


def hf_output(hf: PreTrainedModel) -> list[list[int]]:
    """Return what the model's `generate` writes for a padded batch, which needs the model's own mask."""
    ids = torch.tensor([SHORT, LONG])
    out = hf.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=12, do_sample=False, pad_token_id=0)
    return out.tolist()


FAST = {family: attention for family, attention in STOCK_ATTENTION.items() if family not in SLOW_FAMILIES}


@pytest.mark.parametrize(("family", "attention"), [*FAST.items(), ("llama", "eager"), ("smollm3", "eager")])
def test_its_own_generate_still_works(family: str, attention: str) -> None:
    hf = fresh(family, torch.float32, attn_implementation=attention)
    assert hf.config._attn_implementation == attention
    before = hf_output(hf)
    model = Model(hf)
    assert hf_output(hf) == before
    asked = requests(3)
    found = written(engine(Liar(), model), asked)
    assert hf_output(hf) == before
    model.release()
    assert hf.config._attn_implementation == attention and hf_output(hf) == before
    assert found == [truth(hf, request) for request in asked]


def test_a_model_may_be_wrapped_twice() -> None:
    """Two Models on one transformers model take turns: two caches, the same outputs."""
    one, other, asked = target(), target(), requests(3)
    first, second = engine(Liar(), one), engine(Liar(seed=1), other)
    runs = [steps.add(request) for steps in (first, second) for request in asked]
    while first.busy or second.busy:
        first.step()
        second.step()
    assert [run.tokens for run in runs] == 2 * [truth(one.hf, request) for request in asked]


def test_releasing_one_does_not_disturb_the_other() -> None:
    hf, asked = fresh("llama"), requests(3)
    one, other = Model(hf), Model(hf)
    steps = engine(Liar(), other)
    one.release()
    assert written(steps, asked) == [truth(hf, request) for request in asked]


def test_a_released_model_may_be_used_again() -> None:
    hf, asked = fresh("llama"), requests(2)
    Model(hf).release()
    assert written(engine(Liar(), Model(hf)), asked) == [truth(hf, request) for request in asked]


@pytest.mark.parametrize("training", [True, False])
def test_a_dropped_model_restores_the_transformers_model(training: bool) -> None:
    """Without a call of `release`, and without the garbage collector."""
    hf = fresh("llama").train(training)
    model = Model(hf)
    assert written(engine(Liar(), model), requests(2)) and not hf.training
    gc.disable()
    try:
        del model
        assert hf.config._attn_implementation == "sdpa" and hf.training == training
    finally:
        gc.enable()


def test_the_last_model_to_go_restores_the_transformers_model() -> None:
    """While another one still uses it, dropout must stay off."""
    hf = fresh("llama").train()
    one, other = Model(hf), Model(hf)
    one.release()
    one.release()
    assert not hf.training and hf.config._attn_implementation != "sdpa"
    other.release()
    assert hf.training and hf.config._attn_implementation == "sdpa"


def test_release_keeps_what_the_user_changed() -> None:
    hf = fresh("llama").eval()
    model = Model(hf)
    hf.train()
    model.release()
    assert hf.training
