"""The sections of a profile on a tiny model: figures add up, bytes match a hand count, and failures stay isolated."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from doubles import fresh
from foreword.bench import cold
from foreword.bench import profile as profile_module
from foreword.bench.pass_breakdown import GROUPS, TOP, assign_groups, busy_ms, group_of, summary
from foreword.bench.passes import Probe, bytes_of_pass
from foreword.bench.profile import GenerationTimer, Profile, ProfileSettings, Subject, attempt, failures, random_subject
from foreword.core.sampling_table import SamplingStages
from foreword.core.state import Batch
from foreword.engine.graph import GraphBucket, GraphedLoop
from foreword.engine.request import Request, Running
from foreword.errors import InputError
from foreword.model.linears import fuse, pack, read_bytes
from foreword.model.model import Model
from foreword.model.shapes import SHAPES, random_model

TINY = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
    vocab_size=100, tie_word_embeddings=True,
)  # fmt: skip
LINEARS = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)  # q, k and v, o; gate, up and down
HEAD = 32 * 100
SETTINGS = ProfileSettings(rows=(1, 5), contexts=(20, 40), context=24, tokens=16, repeats=6)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> Iterator[None]:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(profile_module, "CPU_BUFFER", 8 * 10**6)
    yield


def subject(slots: int = 1) -> Subject:
    return random_subject("tiny", slots, device="cpu", threads=1, max_context=128)


def test_every_section_has_its_figures() -> None:
    profile = Profile(subject(slots=2), SETTINGS)
    found = {name: attempt(section) for name, section in profile.sections.items()}
    assert list(found) == ["machine", "passes", "rounds", "parts"] and not failures(found)
    assert json.loads(json.dumps(found)) == found
    assert found["machine"]["weight_bytes"] == 4 * (LINEARS + HEAD)
    assert [(one["context"], one["rows"]) for one in found["passes"]] == [(20, 1), (20, 5), (40, 1), (40, 5)]
    for one in found["passes"]:
        assert one["ms"] > 0 and 0 < one["share"] < 1.5
        assert one["share"] == pytest.approx(one["bytes"] / one["ms"] * 1e3 / found["machine"]["bytes_per_second"])
    assert found["passes"][2]["over_one_row"] == 1 and found["passes"][3]["over_one_row"] > 0
    plain, recycling = found["rounds"]
    assert (plain["method"], plain["texts"], plain["context"], plain["tokens_per_round"]) == ("plain", 2, 24, 1.0)
    assert recycling["method"] == "token_recycling" and recycling["tokens_per_round"] >= 1
    for one in (plain, recycling):
        assert one["first_token_ms"] >= one["prefill_ms"] >= 0
        assert one["device_ms"] is one["host_share"] is one["kernels"] is None
    assert [one["rows"] for one in found["parts"]] == [1, 64]


def test_a_pass_is_the_sum_of_its_groups() -> None:
    (one, many) = Profile(subject(), SETTINGS).breakdown()
    for found in (one, many):
        assert set(found["groups"]) == set(GROUPS) and len(found["top"]) == TOP
        seen = sum(figures["ms"] for figures in found["groups"].values())
        assert seen + found["unseen_ms"] == pytest.approx(found["wall_ms"]) and found["unseen_ms"] > 0
        for group in ("products", "head", "attention", "sampling and accept"):
            assert found["groups"][group]["ms"] > 0 and found["groups"][group]["count"] >= 1
        assert found["groups"]["products"]["count"] == 8  # four fused products in each of two layers
        assert found["groups"]["attention"]["count"] == 2


def test_bytes_match_a_hand_count() -> None:
    model = Model(random_model("tiny", torch.device("cpu"), torch.float32))
    cached = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, float32
    assert bytes_of_pass(model, rows=3, context=50) == 4 * (LINEARS + HEAD) + cached * 53


def test_a_layer_reads_only_its_window() -> None:
    """smollm3: three of four layers use rotary positions, and all have a window of 6; see doubles/models.py."""
    model = Model(fresh("smollm3", torch.float32))
    windows = [spec.window for spec in model.layer_stack.attention_specs]
    assert any(windows)
    row = model.layer_stack.cache_shape().bytes_per_row // len(windows)
    expected = sum(row * ((min(window, 50) if window else 50) + 3) for window in windows)
    assert bytes_of_pass(model, 3, 50) - read_bytes(model.hf) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_rebuilt_models_read_as_much_as_stock_ones(tied: bool) -> None:
    """An embedding counts only as the head it is tied to; a bias is read as well."""
    stock = fresh("llama", torch.float32, tie_word_embeddings=tied, attention_bias=True)
    expected = sum(p.numel() for name, p in stock.named_parameters() if "norm" not in name and "embed" not in name)
    expected += stock.lm_head.weight.numel() if tied else 0
    packed, fused = copy.deepcopy(stock), copy.deepcopy(stock)
    pack(packed)
    fuse(fused)
    assert [read_bytes(model) for model in (stock, packed, fused)] == [4 * expected] * 3


def test_a_probe_scores_its_rows_and_keeps_the_cache_length() -> None:
    model = Model(random_model("tiny", torch.device("cpu"), torch.float32))
    probe = Probe(model, rows=7, context=33)
    assert probe.score().require_logits().shape == (1, 7, 100) and probe.walk().shape == (1, 7, 32)
    assert model.cache.length.tolist() == [33]
    assert probe.draft.tree.depth.tolist() == [[0, 1, 1, 2, 2, 2, 2]]


def test_contexts_are_cut_to_what_the_model_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = subject()
    tiny.model.max_context = 100
    found = Profile(tiny, ProfileSettings(rows=(4,), contexts=(20, 2048, 4096), repeats=6)).passes()
    assert [(one["context"], one["rows"]) for one in found] == [(20, 1), (20, 4), (96, 1), (96, 4)]
    tiny.model.max_context = 3
    assert "too few" in attempt(Profile(tiny, ProfileSettings(rows=(4,))).passes)["failed"]


def test_failures_stay_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        raise RuntimeError("no memory\n  to read")

    monkeypatch.setattr(profile_module, "bandwidth", broken)
    tiny = subject()
    score, method = (
        tiny.model.score,
        ProfileSettings(rows=(1, 5), contexts=(20,), methods=("no_such", "plain"), tokens=16, repeats=6),
    )

    def narrow(batch: Any, draft: Any, *rest: Any, **more: Any) -> Any:
        if draft.nodes == 64:
            raise ValueError("too wide")
        return score(batch, draft, *rest, **more)

    monkeypatch.setattr(tiny.model, "score", narrow)
    found = {name: attempt(section) for name, section in Profile(tiny, method).sections.items()}
    assert found["machine"] == {"failed": "RuntimeError: no memory to read"}
    assert [one["share"] for one in found["passes"]] == [None, None] and found["passes"][1]["ms"] > 0
    assert found["rounds"][0]["failed"].startswith("UnknownMethod") and found["rounds"][1]["wall_ms"] > 0
    assert found["parts"][0]["wall_ms"] > 0 and found["parts"][1]["failed"] == "ValueError: too wide"
    assert len(failures(found)) == 3


def test_a_pass_that_fails_leaves_the_other_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_one_row(self: Profile, rows: int, context: int) -> dict[str, float]:
        if rows == 1:
            raise ValueError("not alone")
        return {"ms": 2.0 * rows}

    monkeypatch.setattr(Profile, "_pass", no_one_row)
    alone, two, four = Profile(subject(), ProfileSettings(rows=(2, 4), contexts=(20,))).passes()
    assert alone == {"rows": 1, "context": 20, "failed": "ValueError: not alone"}
    assert (two["ms"], four["over_one_row"]) == (4.0, 2.0)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_one_row", "products"),
        ("_few_rows", "products"),
        ("_attend", "attention"),
        ("_turn", "rotary and store"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::index_elementwise_kernel<128, 4, index_copy_kernel_impl>", "rotary and store"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "norms"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "other"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::linear", "other"),
        ("aten::mm", "products"),
        ("aten::rms_norm", "norms"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
    ],
)
def test_the_name_of_a_kernel_gives_its_group(name: str, group: str) -> None:
    assert group_of(name) == group


def test_a_join_belongs_to_the_kernel_before_it_and_a_product_to_its_stage() -> None:
    ran = [(name, 1.0) for name in ("_few_rows", "_join", "_attend", "_join")]
    assert [seen.group for seen in assign_groups(ran, "layers")] == ["products", "products", "attention", "attention"]
    assert [seen.group for seen in assign_groups([("rms_norm", 1.0), ("nvjet", 1.0), ("copy", 1.0)], "head")] == [
        "norms", "head", "head",
    ]  # fmt: skip
    assert {seen.group for seen in assign_groups(ran, "accept")} == {"sampling and accept"}


def test_a_summary_covers_one_pass() -> None:
    ran = assign_groups([("_few_rows", 2.0), ("_join", 1.0), ("_attend", 3.0)] * 2, "layers")
    found = summary(ran, passes=2, wall_ms=7.0)
    assert found["groups"]["products"] == {"ms": 3.0, "count": 2} and found["unseen_ms"] == 1.0
    assert [one["name"] for one in found["top"]] == ["_attend", "_few_rows", "_join"]


def kernel(start: float, end: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    return SimpleNamespace(device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_overlapping_kernels_count_once_as_busy() -> None:
    ran = [kernel(5000, 6000), kernel(0, 2000), kernel(1000, 3000), kernel(1500, 1600), kernel(0, 9000, DeviceType.CPU)]
    assert busy_ms(SimpleNamespace(events=lambda: ran)) == 4.0
    with pytest.raises(RuntimeError, match="saw nothing"):
        busy_ms(SimpleNamespace(events=lambda: ran[-1:]))


def test_the_graph_of_a_round_is_the_one_the_next_round_replays() -> None:
    """It fits the number of requests and their length; a bucket that is not captured has no graph."""
    engine = subject(slots=2).engine("plain")
    loop = engine.loop = GraphedLoop(engine.loop)
    timer = GenerationTimer(engine, context=24, tokens=16)
    for count, span, graph in ((2, 16, "short"), (1, 32, "alone"), (2, 64, "long"), (2, 32, "right"), (2, 28, None)):
        batch = Batch.of(range(count), span)
        loop.buckets[count, span, SamplingStages(), 0] = GraphBucket(batch, graph)  # type: ignore[arg-type]
    runs = [Running(Request(tuple(range(25)))) for _ in range(2)]
    runs[0].prefilled = runs[1].prefilled = 24
    assert timer._captured(runs) == "right"
    engine.loop = loop.loop
    assert timer._captured(runs) is None


def test_quick_settings_are_a_subset() -> None:
    quick = ProfileSettings().quick()
    assert (quick.rows, quick.contexts, quick.tokens, quick.methods) == ((1, 64), (128,), 32, ProfileSettings().methods)
    assert ProfileSettings(rows=(8,), tokens=16).quick().rows == (8,) and ProfileSettings(tokens=16).quick().tokens == 16


def test_shapes_have_the_size_of_their_models() -> None:
    sizes = {}
    for name, shape in SHAPES.items():
        width = shape["num_attention_heads"] * shape["head_dim"] + 2 * shape["num_key_value_heads"] * shape["head_dim"]
        attention = shape["hidden_size"] * (width + shape["num_attention_heads"] * shape["head_dim"])
        layer = attention + 3 * shape["hidden_size"] * shape["intermediate_size"]
        sizes[name] = shape["num_hidden_layers"] * layer + shape["hidden_size"] * shape["vocab_size"]
    assert 134e6 < sizes["135m"] < 135e6 and 7.0e9 < sizes["7b"] < 7.2e9
    with pytest.raises(InputError, match="135m, 7b"):
        random_subject("70b", 1, device="cpu")


def test_a_cold_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "CHILD", "import sys; sys.exit('no model: ' + sys.argv[1])")
    with pytest.raises(RuntimeError, match=r"status 1: no model: .*plain"):
        cold.cold_start(None, None, "plain", {"device": "cpu"})
