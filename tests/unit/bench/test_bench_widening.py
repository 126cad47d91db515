"""Widening: drafters of a model, widened with it or left small, draft the same; a model loaded widened generates the same
output."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from doubles import SAMPLINGS, engine, fresh, requests, widened_pair, with_random_weights, written
from foreword.bench.widening import load_widened, times_for
from foreword.drafters import saved
from foreword.drafters.checkpoint import StoredDtype
from foreword.errors import DrafterError, InputError, ModelNotFound
from foreword.methods import METHODS, make, untrained
from foreword.model import linears as pack
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model, WidenedFrom
from foreword.model.widened_model import widen_model
from foreword.prove import compare
from foreword.prove.referee import exact_copy
from foreword.text import Prompt

TEXT = [5, 9, 17, 30, 41, 8, 8, 23, 3, 44, 12]

# Drafters ----------------------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"layers": 2}),
    "hydra": ("hydra", {}),
    "hydra, prefix": ("hydra", {"prefix": True, "layers": 2}),
    "chimera": ("chimera", {"taps": (1, 3)}),
    "clover": ("clover", {"tree": "best"}),
    "clover, no attention decoder": ("clover", {"attention": False, "tree": "best"}),
    "clover, no block": ("clover", {"block": "none", "tree": "best"}),
    "clover2": ("clover2", {}),
    "clover2, taps": ("clover2", {"taps": (1, 3)}),
    "clover2, fused by attention": ("clover2", {"fuse": "attention"}),
    "echo": ("echo", {"taps": (1, 3)}),
    "hidden_transfer": ("hidden_transfer", {}),
    "firp": ("firp", {}),
    "firp, low rank": ("firp", {"squeeze": 4}),
    "firp, rows as they are": ("firp", {"norm": False}),
    "masked": ("masked", {"layers": 2}),
    "masked, two passes": ("masked", {"layers": 1, "edges": 0, "steps": 2, "taps": ()}),
    "draft_model": ("draft_model", {}),
    "gsd": ("gsd", {"repeat": 0, "siblings": 0.0, "sure": 0.0}),
    "amusd": ("amusd", {"rows": 4, "least": 3, "patience": 60.0, "worker": "thread"}),
    "kangaroo": ("kangaroo", {"width": 3}),
    "kangaroo, a layer": ("kangaroo", {"width": 1, "rows": 4, "adapter": "layer"}),
}


class Diary:
    """Record what a drafter proposes, round by round."""

    def __init__(self, drafter: Any) -> None:
        self.drafts: list[tuple[list[Any], list[Any]]] = []
        propose = drafter.propose

        def noted(state: Any) -> Any:
            draft = propose(state)
            self.drafts.append((draft.tokens.tolist(), draft.tree.parent.tolist()))
            return draft

        drafter.propose = noted


def test_every_trained_method_is_here() -> None:
    assert {name for name, _ in FORMS.values()} == {name for name, method in METHODS.items() if method.trained}


@pytest.mark.parametrize(("times", "stored"), [(2, "bfloat16"), (4, "int4")])
@pytest.mark.parametrize("form", FORMS)
def test_a_widened_drafter_drafts_the_same(form: str, times: int, stored: StoredDtype, tmp_path: Path) -> None:
    """Loaded from its folder: the widened target counts as its original, and the drafter's weights are widened."""
    name, options = FORMS[form]
    depths = dict.fromkeys(("draft_model", "gsd", "kangaroo"), "depth")
    others = {"amusd": "ahead", "hidden_transfer": "steps", "firp": "steps", "masked": "block"}
    count = (depths | others).get(name, "heads")
    options = {"rows": 12, count: 3} | options
    narrow, wide = widened_pair(torch.float64, times)
    original = Model(narrow, "original")
    first = with_random_weights(name, original, **options)
    saved.save(first, tmp_path, original, stored)
    saved.load_into(first, tmp_path, original)  # rounded, as the other one reads them
    target = Model(wide, "widened", widened_from=WidenedFrom(times, Fingerprint.of(original), 1))
    other: Any = untrained(name, **options)
    other.prepare(target, 1)
    saved.load_into(other, tmp_path, target)
    diaries, outputs = [Diary(first), Diary(other)], []
    for drafter, model in ((first, original), (other, target)):
        outputs.append(written(engine(drafter, model), requests(3, SAMPLINGS["greedy"])))
    assert outputs[0] == outputs[1] and len(diaries[0].drafts) > 3
    assert diaries[0].drafts == diaries[1].drafts


SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model, tree": ("draft_model", {"depth": 3, "rows": 12}),
    "draft_model, chain": ("draft_model", {"depth": 3, "tree": "chain", "stop": 0.0}),
    "gsd": ("gsd", {"depth": 3, "rows": 12, "repeat": 0, "siblings": 0.0, "sure": 0.0}),
    "amusd": ("amusd", {"rows": 4, "ahead": 3, "least": 3, "patience": 60.0, "worker": "thread"}),
}


@pytest.mark.parametrize(
    ("kind", "times", "stored"), [("tied", 2, "bfloat16"), ("a head of its own", 4, "int4"), ("qwen2", 2, "int4")]
)
@pytest.mark.parametrize("form", SMALL)
def test_a_draft_model_stays_small_and_drafts_the_same(
    form: str, kind: str, times: int, stored: StoredDtype, tmp_path: Path
) -> None:
    """As a widened drafter does, which `load_into` makes, and as on the original model."""
    name, options = SMALL[form]
    narrow, wide = widened_pair(torch.float64, times, kind)
    original = Model(narrow, "original")
    first = with_random_weights(name, original, **options)
    saved.save(first, tmp_path, original, stored)
    saved.load_into(first, tmp_path, original)
    target = Model(wide, "widened", widened_from=WidenedFrom(times, Fingerprint.of(original), 1))
    widened: Any = untrained(name, **options)
    widened.prepare(target, 1)
    saved.load_into(widened, tmp_path, target)
    small: Any = saved.restore(tmp_path, target, method=name, **options)
    own = small.other if name == "amusd" else small.small_model.other
    assert (own.hidden_size, own.layers) == (32, 2) and widened.module.norm.weight.numel() == 32 * times
    outputs, diaries = [], [Diary(one) for one in (first, widened, small)]
    for drafter, model in ((first, original), (widened, target), (small, target)):
        outputs.append(written(engine(drafter, model), requests(3, SAMPLINGS["greedy"])))
    assert outputs[0] == outputs[1] == outputs[2] == written(engine(make("plain"), target), requests(3, SAMPLINGS["greedy"]))
    assert diaries[0].drafts == diaries[1].drafts == diaries[2].drafts and len(diaries[0].drafts) > 3


def test_a_draft_model_of_another_model_is_refused_by_a_widened_one(tmp_path: Path) -> None:
    stranger, (narrow, wide) = Model(fresh("llama", seed=1), "stranger"), widened_pair(torch.float64, 2)
    saved.save(with_random_weights("draft_model", stranger), tmp_path, stranger)
    target = Model(wide, "widened", widened_from=WidenedFrom(2, Fingerprint.of(Model(narrow, "original")), 1))
    with pytest.raises(DrafterError, match="trained for stranger.* but the target is original"):
        saved.restore(tmp_path, target, method="gsd")


def test_a_drafter_of_another_model_is_refused_by_a_widened_one_too(tmp_path: Path) -> None:
    stranger, (narrow, wide) = Model(fresh("llama", seed=1), "stranger"), widened_pair(torch.float64, 2)
    saved.save(with_random_weights("medusa", stranger), tmp_path, stranger)
    target = Model(wide, "widened", widened_from=WidenedFrom(2, Fingerprint.of(Model(narrow, "original")), 1))
    other: Any = untrained("medusa")
    other.prepare(target, 1)
    with pytest.raises(DrafterError, match="trained for stranger.* but the target is original"):
        saved.load_into(other, tmp_path, target)


def test_a_drafter_without_a_widening_rule_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = widened_pair(torch.float64, 2)
    original = Model(narrow, "original")
    saved.save(with_random_weights("medusa", original), tmp_path, original)
    target = Model(wide, "widened", widened_from=WidenedFrom(2, Fingerprint.of(original), 1))
    other: Any = untrained("medusa")
    other.prepare(target, 1)
    monkeypatch.setattr(type(other), "wide", {})
    with pytest.raises(InputError, match="no rule, or several, for widening .*linear.bias"):
        saved.load_into(other, tmp_path, target)


# Loading ------------------------------------------------------------------------------------------------------------------


def test_a_model_loaded_widened_generates_the_same_output(
    folders: dict[str, Path], stock: dict[str, Any], own_home: Path
) -> None:
    original, widened = load_widened(folders["llama"], 4, device="cpu", max_context=256)
    assert widened.model.name == f"{folders['llama']}, grown r=4" and widened.model.hidden_size == 128
    counted = sum(weight.numel() for weight in widen_model(stock["llama"], 4).parameters())
    assert widened.model.widened_from == WidenedFrom(4, Fingerprint.of(original.model), counted)
    assert widened.model.ends.tolist() == original.model.ends.tolist()
    asked = [Prompt(str(i), "qa", [text]) for i, text in enumerate(("hello", "the words that come before"))]
    found = compare(original, widened, asked, max_new_tokens=24)
    assert (found.prompts, found.identical, found.bugs) == (2, 2, 0) and found.tokens > 2


@pytest.mark.parametrize("method", ["draft_model", "gsd", "amusd"])
def test_a_model_loaded_widened_has_the_original_s_draft_model(
    method: str, folders: dict[str, Path], trained: dict[str, Path], own_home: Path
) -> None:
    """In float32, on rebuilt layers; the output is plain's."""
    original, widened = load_widened(folders["llama"], 4, device="cpu", max_context=256)
    options = {"worker": "thread", "rows": 4, "least": 3, "patience": 60.0} if method == "amusd" else {"rows": 8}
    found = {}
    with original, widened:
        for llm in (original, widened):
            llm.use(method, drafter=trained[method], **options)
            found[llm] = llm.generate("the words that come before", max_new_tokens=24)
        drafter: Any = widened.engine.drafter
        own = drafter.other if method == "amusd" else drafter.small_model.other
        assert own.hidden_size == 32 and type(own.hf.model.layers[0].mlp.down_proj) is pack.PackedLinear
        plain = widened.use("plain").generate("the words that come before", max_new_tokens=24)
    assert found[original].tokens == found[widened].tokens == plain.tokens
    assert found[original].stats.rounds == found[widened].stats.rounds


def test_another_output_is_a_bug(folders: dict[str, Path], own_home: Path) -> None:
    original, widened = load_widened(folders["llama"], 2, device="cpu", max_context=256)
    widened.model.hf.model.norm.weight.data[:8] *= -3
    assert compare(original, widened, [Prompt("1", "qa", ["hello"])], max_new_tokens=24).bugs > 0


def test_a_size_is_the_nearest_power_of_two() -> None:
    """The default model's shapes: 106 M weights widen in both dimensions, 28 M of the vocabulary in one."""
    shapes = AutoConfig.for_model(
        "llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(shapes)
    assert [times_for(size, hf) for size in ("1b", "7b", "27B", "0.5b", "8", 4)] == [4, 8, 16, 2, 8, 4]


def test_a_widened_model_is_judged_by_its_original(folders: dict[str, Path], own_home: Path) -> None:
    """Its own weights were repacked and cannot be read from a folder."""
    _, wide = load_widened(folders["llama"], 2, device="cpu", max_context=128)
    with pytest.raises(ModelNotFound, match="is not a folder to read them from again"):
        exact_copy(wide.model)
    exact = exact_copy(wide.model, folders["llama"])
    given = torch.tensor([TEXT])
    assert exact.dtype == torch.float64 and (exact(given).logits - wide.model.hf(given).logits).abs().max() < 1e-4
