"""The first layers as a standalone model: its logits, also after it was saved and loaded."""

from pathlib import Path

import pytest
import torch

from doubles import EVERY_FAMILY, hf_hidden, hf_logits, prompts, target
from foreword.drafting.small_model import FirstLayers
from foreword.drafting.standalone import standalone_model
from foreword.model.loading import load_stock


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_its_logits_are_those_after_the_first_layers(family: str, tmp_path: Path) -> None:
    model, sequence = target(family), prompts(3, longest=30)[2]
    stack = model.stack(1, 3, init=range(3))
    small = standalone_model(model, FirstLayers(model, stack.layers), model.device)
    with torch.no_grad():
        expected = model.head(model.norm(hf_hidden(model.hf, sequence)[3]))
    small.config._attn_implementation = model.hf.config._attn_implementation
    torch.testing.assert_close(hf_logits(small, sequence), expected.double(), atol=1e-4, rtol=1e-4)  # a norm's epsilon
    small.save_pretrained(tmp_path)
    again = load_stock(tmp_path, torch.device("cpu"), torch.float64)
    torch.testing.assert_close(hf_logits(again, sequence), expected.double(), atol=1e-3, rtol=1e-3)  # norms in float32


def test_later_training_does_not_change_it() -> None:
    model = target()
    module = FirstLayers(model, model.stack(1, 2, init=range(2)).layers)
    small = standalone_model(model, module, model.device)
    before = hf_logits(small, [3, 4, 5])
    with torch.no_grad():
        for weight in module.parameters():
            weight += 1
    assert torch.equal(hf_logits(small, [3, 4, 5]), before)
    assert small.model.embed_tokens is model.hf.model.embed_tokens  # shared, as is a head that is not packed
