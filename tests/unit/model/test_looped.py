"""Looped models: the function is that of a Llama with the same layers again and again, in transformers and here."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from doubles import chain, fresh, hf_logits, prefilled, requests, target, truth
from foreword.core.needs import Needs
from foreword.core.state import Batch
from foreword.drafting.standalone import standalone_model
from foreword.engine.engine import Engine
from foreword.errors import InputError, ModelUnsupported
from foreword.methods import make, untrained
from foreword.model import stack
from foreword.model.group import LayerGroup
from foreword.model.linears import fuse
from foreword.model.loading import load_weights
from foreword.model.looped import LoopedConfig, check_loopable, group_of, looped_model
from foreword.model.model import Model

TOKENS = [5, 9, 31, 8, 40, 7, 7, 12, 30, 3, 22]


def unrolled(looped: PreTrainedModel) -> PreTrainedModel:
    """Return an ordinary Llama with a copy of each layer for each repeat."""
    config = looped.config.to_dict() | {"model_type": "llama"}
    config.pop("repeats")
    plain, count = LlamaForCausalLM(LlamaConfig(**config)).double().eval(), len(looped.model.layers)
    for index, layer in enumerate(plain.model.layers):
        layer.load_state_dict(looped.model.layers[index % count].state_dict())
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).__class__ = type(looped.model.norm)  # the doubles' norm does not round to float32
    plain.model.embed_tokens, plain.model.norm, plain.lm_head = looped.model.embed_tokens, looped.model.norm, looped.lm_head
    return plain


def test_it_is_a_llama_with_repeated_layers() -> None:
    looped = fresh("foreword_looped")
    assert len(looped.model.layers) == 2 and looped.config.num_hidden_layers == 6
    torch.testing.assert_close(hf_logits(looped, TOKENS), hf_logits(unrolled(looped), TOKENS), atol=1e-10, rtol=0)


def test_generate_of_transformers_is_the_referee() -> None:
    """With its cache, which has an entry for every application of a layer, and in a padded batch."""
    model = target("foreword_looped")
    asked = requests(3, max_new_tokens=10, ignore_eos=True)[1:]
    longest = max(len(one.prompt) for one in asked)
    ids = torch.tensor([(0,) * (longest - len(one.prompt)) + one.prompt for one in asked])
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in asked])
    out = model.hf.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    runs = Engine(model, make("speed"), slots=2, max_context=64).generate(asked)
    assert out[:, longest:].tolist() == [run.tokens for run in runs] == [truth(model.hf, one) for one in asked]


def test_a_folder_holds_the_weights_of_the_group_alone(tmp_path: Path) -> None:
    hf = fresh("foreword_looped", torch.float32)
    hf.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name.split(".")[2] for name in file.keys() if ".layers." in name} == {"0", "1"}  # noqa: SIM118
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(hf_logits(again, TOKENS), hf_logits(hf, TOKENS))
    packed = Model(load_weights(tmp_path, torch.device("cpu"), torch.float32))
    found = packed.score(prefilled(packed, {0: TOKENS[:5]}), chain([TOKENS[5:]]), Needs()).require_logits()[0]
    torch.testing.assert_close(found.double(), hf_logits(hf, TOKENS)[5:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("repeats", [0, 4, -3, 2.0, "3", None])
def test_repeats_that_do_not_fit_are_refused(repeats: Any, tmp_path: Path) -> None:
    fresh("foreword_looped", torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"repeats": repeats}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match=f"repeats is {repeats!r} and num_hidden_layers is 6"):
        load_weights(tmp_path, torch.device("cpu"), torch.float32)


# One repeat --------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_rows_at_different_repeats_in_one_call() -> None:
    """Tokens at positions 4 to 6 enter one after the other, in two slots out of order: after enough calls each has the state
    that a pass over its sequence gives it, and the cache of every repeat has its row."""
    model, sequences = target("foreword_looped"), {2: TOKENS, 0: TOKENS[::-1]}
    batch = replace(prefilled(model, {slot: tokens[:4] for slot, tokens in sequences.items()}, slots=3), span=6)
    group, tokens = LayerGroup(model), torch.tensor([sequences[slot][4:7] for slot in batch.ids])
    hidden, slots, done = model.embed(tokens), batch.slots.unsqueeze(1), {}
    for tick in range(5):
        rows = torch.arange(max(tick - 2, 0), min(tick, 2) + 1).expand(2, -1)  # those that have entered and are not through
        hidden[:, rows[0]] = group(batch, hidden[:, rows[0]], 4 + rows, slots + (tick - rows) * group.slots_per_repeat)
    for row, slot in enumerate(batch.ids):
        whole = model.read(torch.tensor([sequences[slot][:7]]), Needs(hidden=True)).require_hidden()
        torch.testing.assert_close(hidden[row], whole[0, 4:], atol=1e-10, rtol=0)
        done[slot] = [keys[slot, :, 4:7].clone() for keys in model.cache.keys]
    again = prefilled(model, sequences, slots=3)
    assert again.ids == batch.ids
    for slot, rows in done.items():
        for keys, row in zip(model.cache.keys, rows, strict=True):
            torch.testing.assert_close(row, keys[slot, :, 4:7], atol=1e-10, rtol=0)


@torch.inference_mode()
def test_a_call_on_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: fused layers, and the kernels that find positions and attend, with virtual slots."""
    pytest.importorskip("triton")
    hf, found = fresh("foreword_looped", torch.float32, head_dim=16, num_hidden_layers=4, repeats=2), []
    fused = copy.deepcopy(hf)
    fuse(fused)
    for one in (hf, fused):
        model = Model(one)
        cache, batch = model.allocate(3, 20, 2), Batch.of([2, 0], 4)
        cache.held.copy_(torch.randn(cache.size, generator=torch.Generator().manual_seed(0)))
        cache.length.copy_(torch.tensor([4, 0, 2]))
        group, rows = LayerGroup(model), torch.arange(2).expand(2, 2)
        assert (group.stack.fused is not None) == (one is fused)
        monkeypatch.setattr(stack, "has_kernel", lambda cache, own=one is fused: own)
        slots = batch.slots.unsqueeze(1) + torch.tensor([1, 0]) * group.slots_per_repeat
        position = cache.length[batch.slots].unsqueeze(1) + rows
        found.append(group(batch, model.embed(torch.tensor([[7, 8], [9, 10]])), position, slots))
        found.append(cache.held)
    for own, other in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(other, own, rtol=1e-4, atol=1e-4)


def test_the_cache_of_a_group_is_a_view() -> None:
    model = target("foreword_looped")
    cache = model.allocate(3, 20, 4)
    view, each = cache.of_group(2), 2 * 3
    for repeat in range(3):
        for layer in range(2):
            own = cache.layers[2 * repeat + layer]
            for part, whole in ((view.layers[layer].keys, own.keys), (view.layers[layer].values, own.values)):
                assert part[repeat * each + 1].data_ptr() == whole[1].data_ptr() and part.is_contiguous()
    assert Batch.of([1], 0).run == slice(1, 2) and len(view.layers) == 2


# Made from another model -------------------------------------------------------------------------------------------------


def test_a_group_of_all_layers_is_the_model_itself() -> None:
    hf = fresh("llama", torch.float32)
    layers = group_of(hf.model.layers, 4, "average")
    made = looped_model(hf, layers, hf.model.norm.weight, hf.lm_head.weight, 1)
    assert torch.equal(hf_logits(made, TOKENS), hf_logits(hf, TOKENS))
    assert made.generation_config.eos_token_id == hf.generation_config.eos_token_id


@pytest.mark.parametrize("start", ["average", "first", "spread"])
def test_a_group_starts_as_layers_of_the_model(start: Any) -> None:
    layers = fresh("llama", torch.float32, num_hidden_layers=5).model.layers
    made = group_of(layers, 2, start)
    parts: list[nn.ModuleList] = {
        "average": [layers[0::2], layers[1::2]],
        "first": [layers[:1], layers[1:2]],
        "spread": [layers[:1], layers[4:]],
    }[start]
    for layer, alike in zip(made, parts, strict=True):
        expected = sum(one.mlp.up_proj.weight for one in alike) / len(alike)
        torch.testing.assert_close(layer.mlp.up_proj.weight, expected)
        assert layer.mlp.up_proj.weight.requires_grad


def test_a_draft_model_of_its_first_layers_applies_each_once() -> None:
    """Three layers of a group of two: the third is the first again."""
    model, drafter, tokens = target("foreword_looped"), untrained("draft_model", layers=3), torch.tensor([TOKENS])
    drafter.prepare(model, 1)
    module = drafter.module  # type: ignore[attr-defined]
    small: Any = standalone_model(model, module, model.device)
    with torch.no_grad():
        own = model.head(module.norm(drafter.small_model.over(tokens)))[0]  # type: ignore[attr-defined]
    assert len(small.model.layers) == 3 and small.config.repeats == 1
    torch.testing.assert_close(hf_logits(small, TOKENS), own, atol=1e-4, rtol=0)


def test_what_cannot_be_looped_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="is of type 'qwen3'; give one of type 'llama'"):
        check_loopable(fresh("qwen3").config, 2, 2)
    with pytest.raises(InputError, match="group is 5, but the model has 4 layers"):
        check_loopable(fresh("llama").config, 5, 2)
    with pytest.raises(ValueError, match="must be a multiple"):
        LoopedConfig(num_hidden_layers=7, repeats=2)
