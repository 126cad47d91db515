"""The law on quantised weights: with any method, the tokens are those of plain decoding with the same weights."""

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from doubles import DRAFTING, SAMPLINGS, Liar, chain, drafter, engine, fresh, prefilled, requests, truth, written
from doubles.methods import family_for
from foreword.core.needs import Needs
from foreword.methods import METHODS
from foreword.model.linears import rebuild, unpacked
from foreword.model.model import Model
from foreword.model.quantised_linears import quantise

CPU = torch.device("cpu")


@cache
def hf_quantised(family: str, bits: int) -> Any:
    model = fresh(family, torch.float32).requires_grad_(False)
    quantise(model, bits)
    rebuild(model, CPU, torch.float32)
    return model


def target(family: str = "llama", bits: int = 4) -> Model:
    return Model(hf_quantised(family, bits), name=f"tiny-{family}-q{bits}")


@cache
def plain_tokens(family: str, bits: int, sampling: str, slots: int) -> list[list[int]]:
    model = target(family, bits)
    return written(engine(drafter("plain", model), model, slots), requests(6, SAMPLINGS[sampling], max_new_tokens=10))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("sampling", ["greedy", "T=0.8"])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_writes_what_plain_decoding_does(name: str, sampling: str, slots: int) -> None:
    family = family_for(name)
    model = target(family)
    found = written(engine(drafter(name, model), model, slots), requests(6, SAMPLINGS[sampling], max_new_tokens=10))
    assert found == plain_tokens(family, 4, sampling, slots)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "gemma2"])
def test_lies_change_nothing(family: str, bits: int) -> None:
    model = target(family, bits)
    for sampling in ("greedy", "T=0.8"):
        asked = requests(6, SAMPLINGS[sampling], max_new_tokens=10)
        assert written(engine(Liar(), model, 3), asked) == plain_tokens(family, bits, sampling, 3)


def test_plain_decoding_writes_the_truth_of_the_dequantised_weights() -> None:
    model, asked = target(), requests(6, SAMPLINGS["greedy"], max_new_tokens=10)
    exact = unpacked(model.hf)
    assert plain_tokens("llama", 4, "greedy", 1) == [truth(exact, request) for request in asked]


def test_any_number_of_slots_writes_the_same() -> None:
    assert plain_tokens("llama", 4, "T=0.8", 1) == plain_tokens("llama", 4, "T=0.8", 3)


@torch.inference_mode()
def test_a_row_of_a_linear_has_the_same_bits_in_every_pass() -> None:
    hf = hf_quantised("qwen3", 4)
    rows = torch.randn(64, 32)
    for linear in (hf.lm_head, hf.model.layers[0].self_attn.q_proj.fusion.linear):
        whole = linear(rows)
        for count in (1, 2, 5, 8, 33):
            assert torch.equal(linear(rows[:count]), whole[:count])


@torch.inference_mode()
def test_a_pass_over_one_row_and_over_many_agree_closely() -> None:
    """Attention is torch's, whose sums depend on the number of rows; everything else has equal bits."""
    model = target("qwen3")
    tokens = [5, 9, 31, 8, 40, 7, 7, 12]
    batch = prefilled(model, {0: tokens[:-5]})
    many = model.score(batch, chain([tokens[-5:]]), Needs()).require_logits()[0]
    one = model.score(batch, chain([tokens[-5:-4]]), Needs()).require_logits()[0]
    torch.testing.assert_close(one[0], many[0], rtol=1e-5, atol=1e-5)


def test_most_methods_draft_here() -> None:
    """The law would also hold for drafters that never draft."""
    model = target()
    runs = engine(drafter("prompt_lookup", model), model).generate(requests(6, max_new_tokens=30, ignore_eos=True))
    assert sum(len(run.tokens) for run in runs) > 1.05 * sum(len(run.accepted) for run in runs)
    assert "prompt_lookup" in DRAFTING
