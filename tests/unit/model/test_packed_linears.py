"""Packed linears compute what stock ones do, up to float32 rounding, and only linears that can be packed are."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from doubles import EVERY_FAMILY, FAMILIES, Liar, chain, engine, fresh, hf_logits, prefilled, requests, truth, written
from foreword.core.needs import Needs
from foreword.model import linears as linears_module
from foreword.model.busy import Waits
from foreword.model.linears import PackedLinear, max_stock_rows, pack, padded_row_count, select_outputs
from foreword.model.model import Model
from foreword.model.plain_linears import Buffer
from foreword.ops.device import has_packed_linears

TOKENS = [5, 9, 31, 8, 40, 7, 7, 12]

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("family", EVERY_FAMILY)
@torch.no_grad()
def test_a_packed_model_computes_the_same(family: str) -> None:
    stock, packed = fresh(family, torch.float32), fresh(family, torch.float32)
    pack(packed)
    assert not any(type(module) is nn.Linear for module in packed.modules())
    model = Model(packed)
    for rows in (1, 2, 5):  # few rows use the stock layout, many the packed one
        batch = prefilled(model, {0: TOKENS[:-rows]})
        found = model.score(batch, chain([TOKENS[-rows:]]), Needs()).require_logits()[0]
        torch.testing.assert_close(found.double(), hf_logits(stock, TOKENS)[-rows:], atol=1e-4, rtol=1e-4)


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_writes_the_same_output(family: str) -> None:
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
@pytest.mark.parametrize("stock_rows", [0, 1, 3])
@torch.no_grad()
def test_few_rows_use_the_layout_that_is_faster_here(
    stock_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake clock, on which a stock linear is faster for up to `stock_rows` rows."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))

    def seconds(product: Any, rows: torch.Tensor, weights: list[torch.Tensor]) -> float:
        return 2.0 if product is torch.nn.functional.linear and len(rows) > stock_rows else 1.0

    monkeypatch.setattr(linears_module, "_seconds", seconds)
    monkeypatch.setattr(Waits, "doubt", "")
    found = max_stock_rows.__wrapped__(2)
    assert found == stock_rows
    monkeypatch.setattr(linears_module, "max_stock_rows", lambda _: found)
    linear, used = PackedLinear(torch.randn(20, 48), None, keep_stock=True), []
    product = linears_module._packed_product
    monkeypatch.setattr(linears_module, "_packed_product", lambda *given: used.append("packed") or product(*given))
    for rows in range(1, 5):
        hidden, out = torch.randn(rows, 48), Buffer.of(rows, 20)
        torch.testing.assert_close(torch.tensor(linear.into(hidden, out)), linear(hidden))
        assert used == (["packed"] * 2 if rows > stock_rows else [])
        used.clear()


@needs_onednn
def test_a_busy_machine_packs_and_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock linear that was chosen on a busy machine made every pass of one row a third slower, for an hour."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(linears_module, "_measure_max_stock_rows", lambda: 2)
    monkeypatch.setattr(Waits, "doubt", "others held the cores")
    assert max_stock_rows.__wrapped__(2) == 0
    monkeypatch.setattr(Waits, "doubt", "")
    assert max_stock_rows.__wrapped__(2) == 2, "measured again, and kept"
    monkeypatch.setattr(linears_module, "_measure_max_stock_rows", lambda: pytest.fail("measured twice"))
    assert max_stock_rows.__wrapped__(2) == 2


@needs_onednn
def test_the_faster_layout_is_measured_once() -> None:
    assert 0 <= max_stock_rows(1) <= 3
    hits = max_stock_rows.cache_info().hits
    assert PackedLinear(torch.randn(20, 48), None, keep_stock=True).stock_rows == max_stock_rows(1)
    assert max_stock_rows.cache_info().hits == hits + 2


@needs_onednn
def test_a_tied_embedding_keeps_its_weights() -> None:
    hf = fresh("llama", torch.float32)
    before = hf.model.embed_tokens.weight.clone()
    pack(hf)
    assert torch.equal(hf.model.embed_tokens.weight, before)


@needs_onednn
@torch.no_grad()
def test_an_interrupted_pass_leaves_nothing_for_the_next() -> None:
    """An error came after one of three linears that share a product was called."""
    stock, packed = fresh("llama", torch.float32), fresh("llama", torch.float32)
    pack(packed)
    own, fused = (hf.model.layers[0].self_attn for hf in (stock, packed))
    interrupted, rows = torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    fused.q_proj(interrupted)
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(getattr(fused, name)(rows), getattr(own, name)(rows), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_packed() -> None:
    assert not has_packed_linears(torch.device("cuda"), torch.float32)
    assert not has_packed_linears(torch.device("cpu"), torch.bfloat16)
    assert not has_packed_linears(torch.device("cpu"), torch.float64)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["stock", "packed", "packed alone"])
def test_selected_outputs_are_a_copy_in_the_same_layout(kind: str, bias: bool) -> None:
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


def test_padded_row_counts_are_few_and_not_much_larger() -> None:
    sizes = [padded_row_count(rows) for rows in range(1, 1025)]
    assert sizes[:32] == list(range(1, 33)) and sizes[-1] == 1024
    assert all(rows <= size <= rows * 17 / 16 for rows, size in enumerate(sizes, start=1))
    assert len(set(sizes)) == 32 + 5 * 16
