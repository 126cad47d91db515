"""Packed linears answer what stock ones answer, as far as float32 goes; and only what can be packed is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from doubles import EVERY_FAMILY, FAMILIES, Liar, chain, engine, fresh, hf_logits, prefilled, requests, truth, written
from foreword.core.needs import Needs
from foreword.model import linears as pack_module
from foreword.model.linears import Buffer, PackedLinear, max_stock_rows, pack, padded_row_count, select_outputs
from foreword.model.model import Model
from foreword.ops.device import has_packed_linears

TEXT = [5, 9, 31, 8, 40, 7, 7, 12]

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("family", EVERY_FAMILY)
@torch.no_grad()
def test_a_packed_model_answers_the_same(family: str) -> None:
    stock, packed = fresh(family, torch.float32), fresh(family, torch.float32)
    pack(packed)
    assert not any(type(module) is nn.Linear for module in packed.modules())
    model = Model(packed)
    for rows in (1, 2, 5):  # few rows go another way than many
        batch = prefilled(model, {0: TEXT[:-rows]})
        found = model.score(batch, chain([TEXT[-rows:]]), Needs()).require_logits()[0]
        torch.testing.assert_close(found.double(), hf_logits(stock, TEXT)[-rows:], atol=1e-4, rtol=1e-4)


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_writes_the_same_text(family: str) -> None:
    stock, packed = fresh(family, torch.float32), fresh(family, torch.float32)
    pack(packed)
    asked = requests(4)
    assert written(engine(Liar(), Model(packed)), asked) == [truth(stock, request) for request in asked]


@needs_onednn
@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("init", [0, None])
@torch.no_grad()
def test_a_packed_model_gives_stacks_that_can_be_trained(init: int | None, family: str) -> None:
    stock, packed = fresh(family, torch.float32), fresh(family, torch.float32)
    pack(packed)
    model = Model(packed)
    model.allocate(1, 64, 4)
    (layer,) = model.stack(1, init=init).layers
    names = {name for name, _ in layer.named_parameters()}
    assert names == {name for name, _ in stock.model.layers[0].named_parameters()}


@needs_onednn
@pytest.mark.parametrize("rows", [1, 2, 16, 70])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_packed_linear_takes_any_number_of_rows(rows: int, bias: bool) -> None:
    stock = nn.Sequential(nn.Linear(48, 20, bias=bias))
    packed = copy.deepcopy(stock)
    pack(packed)
    hidden = torch.randn(2, rows, 48)
    assert type(packed[0]) is not nn.Linear
    torch.testing.assert_close(packed(hidden), stock(hidden), atol=1e-5, rtol=1e-5)


@needs_onednn
@pytest.mark.parametrize("quicker", [0, 1, 3])
@torch.no_grad()
def test_few_rows_go_the_way_that_is_quicker_here(quicker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own, on which a stock linear is as quick as it is on some machine."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))

    def seconds(product: Any, rows: torch.Tensor, weights: list[torch.Tensor]) -> float:
        return 2.0 if product is torch.nn.functional.linear and len(rows) > quicker else 1.0

    monkeypatch.setattr(pack_module, "_seconds", seconds)
    found = max_stock_rows.__wrapped__(2)
    assert found == quicker
    monkeypatch.setattr(pack_module, "max_stock_rows", lambda _: found)
    linear, ways = PackedLinear(torch.randn(20, 48), None, keep_stock=True), []
    product = pack_module._packed_product
    monkeypatch.setattr(pack_module, "_packed_product", lambda *given: ways.append("packed") or product(*given))
    for rows in range(1, 5):
        hidden, out = torch.randn(rows, 48), Buffer.of(rows, 20)
        torch.testing.assert_close(torch.tensor(linear.into(hidden, out)), linear(hidden))
        assert ways == (["packed"] * 2 if rows > quicker else [])
        ways.clear()


@needs_onednn
def test_which_way_is_quicker_is_measured_once() -> None:
    assert 0 <= max_stock_rows(1) <= 3
    held = max_stock_rows.cache_info().hits
    assert PackedLinear(torch.randn(20, 48), None, keep_stock=True).rows_stock == max_stock_rows(1)
    assert max_stock_rows.cache_info().hits == held + 2


@needs_onednn
def test_a_tied_embedding_keeps_its_weights() -> None:
    hf = fresh("llama", torch.float32)
    before = hf.model.embed_tokens.weight.clone()
    pack(hf)
    assert torch.equal(hf.model.embed_tokens.weight, before)


@needs_onednn
@torch.no_grad()
def test_a_pass_that_broke_off_leaves_nothing_to_the_next() -> None:
    """Of three linears that are one product, one had been asked when an error came."""
    stock, packed = fresh("llama", torch.float32), fresh("llama", torch.float32)
    pack(packed)
    own, fused = (hf.model.layers[0].self_attn for hf in (stock, packed))
    broken_off, rows = torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    fused.q_proj(broken_off)
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(getattr(fused, name)(rows), getattr(own, name)(rows), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_packed() -> None:
    assert not has_packed_linears(torch.device("cuda"), torch.float32)
    assert not has_packed_linears(torch.device("cpu"), torch.bfloat16)
    assert not has_packed_linears(torch.device("cpu"), torch.float64)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["stock", "packed", "packed alone"])
def test_some_outputs_are_a_copy_in_the_same_layout(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    stock, columns = nn.Linear(64, 96, bias), torch.tensor([3, 4, 40, 95])
    weight, own = stock.weight.detach().clone(), None if stock.bias is None else stock.bias.detach().clone()
    whole = stock if kind == "stock" else PackedLinear(weight, own, keep_stock=kind == "packed")
    some: Any = select_outputs(whole, columns)
    for rows in (torch.randn(1, 64), torch.randn(2, 8, 64)):
        torch.testing.assert_close(some(rows), stock(rows)[..., columns])
        assert not some(rows).requires_grad
    assert type(some) is type(whole) and (some.weight is None) == (whole.weight is None)
    before = some(torch.ones(1, 64))
    with torch.no_grad():
        stock.weight.zero_(), weight.zero_()
    assert torch.equal(some(torch.ones(1, 64)), before)


def test_numbers_of_rows_are_few_and_not_much_larger() -> None:
    sizes = [padded_row_count(rows) for rows in range(1, 1025)]
    assert sizes[:32] == list(range(1, 33)) and sizes[-1] == 1024
    assert all(rows <= size <= rows * 17 / 16 for rows, size in enumerate(sizes, start=1))
    assert len(set(sizes)) == 32 + 5 * 16
