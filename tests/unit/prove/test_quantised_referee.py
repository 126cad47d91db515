"""The referee of a quantised model computes with its dequantised weights, in float64, whatever the folder holds."""

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

import foreword
from foreword.core.needs import Needs
from foreword.prove.referee import exact_copy


@torch.no_grad()
def test_the_exact_copy_has_the_weights_that_ran(folders) -> None:
    tokens = torch.tensor([[5, 9, 31, 8, 40, 7]])
    with foreword.load(folders["llama"], "plain", device="cpu", quantization="q4", slots=1) as llm:
        found = llm.model.read(tokens, Needs(logits=True)).require_logits()
        exact = exact_copy(llm.model)
    assert {type(one) for one in exact.modules() if hasattr(one, "in_features")} == {nn.Linear}
    assert exact.dtype == torch.float64
    torch.testing.assert_close(found.double(), exact(tokens).logits, rtol=1e-4, atol=1e-4)
    with foreword.load(folders["llama"], "plain", device="cpu", slots=1) as llm:
        before = llm.model.read(tokens, Needs(logits=True)).require_logits()
    assert (before - found).abs().max() > 0.01, "four bits change the function"
