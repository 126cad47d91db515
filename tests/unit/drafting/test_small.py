"""The first layers as a model that stands alone: what the target's own rows become there, saved and loaded again too."""

from pathlib import Path

import pytest
import torch

from doubles import EVERY_FAMILY, own_hidden, own_logits, prompts, target
from foreword.drafting.guesser import FirstLayers
from foreword.drafting.small import small_model
from foreword.model.loading import load_stock


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_its_logits_are_those_behind_the_first_layers(family: str, tmp_path: Path) -> None:
    model, text = target(family), prompts(3, longest=30)[2]
    stack = model.stack(1, 3, init=range(3))
    small = small_model(model, FirstLayers(model, stack.layers), model.device)
    with torch.no_grad():
        wanted = model.head(model.norm(own_hidden(model.hf, text)[3]))
    small.config._attn_implementation = model.hf.config._attn_implementation
    torch.testing.assert_close(own_logits(small, text), wanted.double(), atol=1e-4, rtol=1e-4)  # a norm's epsilon
    small.save_pretrained(tmp_path)
    again = load_stock(tmp_path, torch.device("cpu"), torch.float64)
    torch.testing.assert_close(own_logits(again, text), wanted.double(), atol=1e-3, rtol=1e-3)  # norms in float32


def test_it_does_not_follow_what_is_learned_later() -> None:
    model = target()
    module = FirstLayers(model, model.stack(1, 2, init=range(2)).layers)
    small = small_model(model, module, model.device)
    before = own_logits(small, [3, 4, 5])
    with torch.no_grad():
        for weight in module.parameters():
            weight += 1
    assert torch.equal(own_logits(small, [3, 4, 5]), before)
    assert small.model.embed_tokens is model.hf.model.embed_tokens  # shared, as is what is not packed
