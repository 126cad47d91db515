"""Growing: a model r times as wide answers the same logits, and its drafters, widened by the same rule, draft the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from doubles import SAMPLINGS, engine, fresh, own_hidden, own_logits, requests, taught, written
from foreword.bench.grow import GROWS, grow, load_grown, times_for
from foreword.errors import DrafterError, InputError, ModelNotFound, ModelUnsupported
from foreword.methods import METHODS, saved, untrained
from foreword.model import pack
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Grown, Model
from foreword.prove import compare
from foreword.prove.referee import exact_copy
from foreword.text import Prompt

TEXT = [5, 9, 17, 30, 41, 8, 8, 23, 3, 44, 12]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "a head of its own": ("llama", {"tie_word_embeddings": False}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a key head each": ("llama", {"num_key_value_heads": 4}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 16}),
    "a large epsilon": ("llama", {"rms_norm_eps": 0.3}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
}


def pair(dtype: torch.dtype, times: int, kind: str = "tied") -> tuple[PreTrainedModel, PreTrainedModel]:
    family, changes = KINDS[kind]
    model = fresh(family, dtype, **changes).requires_grad_(False)
    wide = grow(model, times)
    if dtype == torch.float64:  # the grown model is made anew, with norms that round to float32
        for module in wide.modules():
            if "RMSNorm" in type(module).__name__:
                module.__class__ = type(model.model.norm)
    return model, wide


@pytest.mark.parametrize("times", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_original(kind: str, times: int) -> None:
    model, wide = pair(torch.float64, times, kind)
    torch.testing.assert_close(own_logits(wide, TEXT), own_logits(model, TEXT), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("times", [2, 8])
def test_logits_in_single_precision(times: int) -> None:
    model, wide = pair(torch.float32, times)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(own_logits(wide, TEXT), own_logits(model, TEXT), rtol=1e-4, atol=1e-4)


def test_sizes_grow_and_a_tie_stays_one() -> None:
    model, wide = pair(torch.float64, 4)
    assert wide.lm_head.weight is wide.model.embed_tokens.weight
    assert tuple(wide.lm_head.weight.shape) == (48, 4 * 32)
    assert wide.config.num_attention_heads == 16 and model.config.num_attention_heads == 4
    linears = [name for name, _ in model.named_parameters() if "proj" in name]
    sizes = {name: weight.numel() for name, weight in wide.named_parameters()}
    assert linears and all(sizes[name] == 16 * dict(model.named_parameters())[name].numel() for name in linears)


def test_rows_before_the_last_norm_are_copies_divided() -> None:
    model, wide = pair(torch.float64, 4)
    for narrow, grown in zip(own_hidden(model, TEXT), own_hidden(wide, TEXT), strict=True):
        torch.testing.assert_close(grown, (narrow / 4).repeat(1, 4))


def test_half_precision_rounds_no_weight() -> None:
    model = fresh("llama", torch.bfloat16).requires_grad_(False)
    exact, wide = grow(model.double(), 8), grow(model.to(torch.bfloat16), 8)
    for (name, one), other in zip(wide.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(one.double(), other), name


def test_a_grown_model_is_rebuilt_like_any_other() -> None:
    model, wide = pair(torch.float32, 2)
    before = own_logits(wide, TEXT)
    pack.fuse(wide)
    torch.testing.assert_close(own_logits(wide, TEXT), before, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelUnsupported, match="grow it before it is rebuilt"):
        grow(wide, 2)


def test_what_cannot_grow() -> None:
    for times in (0, 3, 6, -2, 2.0):
        with pytest.raises(InputError, match="power of two"):
            grow(fresh("llama"), times)  # type: ignore[arg-type]
    for family in ("qwen3", "gemma2", "olmo2", "granite"):
        with pytest.raises(ModelUnsupported, match=f"'{family}' cannot be grown; those of {', '.join(GROWS)}"):
            grow(fresh(family), 2)


# Drafters ----------------------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"layers": 2}),
    "hydra": ("hydra", {}),
    "hydra, prefix": ("hydra", {"prefix": True, "layers": 2}),
    "clover": ("clover", {"tree": "best"}),
    "clover, no attention decoder": ("clover", {"attention": False, "tree": "best"}),
    "clover, no block": ("clover", {"block": "none", "tree": "best"}),
    "clover2": ("clover2", {}),
    "clover2, taps": ("clover2", {"taps": (1, 3)}),
    "clover2, fused by attention": ("clover2", {"fuse": "attention"}),
    "hidden_transfer": ("hidden_transfer", {}),
    "firp": ("firp", {}),
    "firp, low rank": ("firp", {"squeeze": 4}),
    "firp, rows as they are": ("firp", {"norm": False}),
    "draft_model": ("draft_model", {}),
    "gsd": ("gsd", {"repeat": 0, "siblings": 0.0, "sure": 0.0}),
    "amusd": ("amusd", {"rows": 4, "least": 3, "patience": 60.0, "worker": "thread"}),
}


class Diary:
    """What a drafter proposed, round by round."""

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


@pytest.mark.parametrize("times", [2, 8])
@pytest.mark.parametrize("form", FORMS)
def test_a_widened_drafter_drafts_the_same(form: str, times: int, tmp_path: Path) -> None:
    """Through the folder that it is kept in: the grown target is taken for its original, and the weights are widened."""
    name, options = FORMS[form]
    count = {"draft_model": "depth", "gsd": "depth", "amusd": "ahead", "hidden_transfer": "steps", "firp": "steps"}.get(
        name, "heads"
    )
    options = {"rows": 12, count: 3} | options
    narrow, wide = pair(torch.float64, times)
    original = Model(narrow, "original")
    taught_one = taught(name, original, **options)
    saved.save(taught_one, tmp_path, original)
    saved.load_into(taught_one, tmp_path, original)  # rounded, as the other one reads them
    target = Model(wide, "grown", grown=Grown(times, Fingerprint.of(original), 1))
    other: Any = untrained(name, **options)
    other.bind(target, 1)
    saved.load_into(other, tmp_path, target)
    diaries, texts = [Diary(taught_one), Diary(other)], []
    for drafter, model in ((taught_one, original), (other, target)):
        texts.append(written(engine(drafter, model), requests(3, SAMPLINGS["greedy"])))
    assert texts[0] == texts[1] and len(diaries[0].drafts) > 3
    assert diaries[0].drafts == diaries[1].drafts


def test_a_drafter_of_another_model_is_refused_by_a_grown_one_too(tmp_path: Path) -> None:
    stranger, (narrow, wide) = Model(fresh("llama", seed=1), "stranger"), pair(torch.float64, 2)
    saved.save(taught("medusa", stranger), tmp_path, stranger)
    target = Model(wide, "grown", grown=Grown(2, Fingerprint.of(Model(narrow, "original")), 1))
    other: Any = untrained("medusa")
    other.bind(target, 1)
    with pytest.raises(DrafterError, match="trained for stranger.* but the target is original"):
        saved.load_into(other, tmp_path, target)


def test_what_nothing_says_how_to_widen_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = pair(torch.float64, 2)
    original = Model(narrow, "original")
    saved.save(taught("medusa", original), tmp_path, original)
    target = Model(wide, "grown", grown=Grown(2, Fingerprint.of(original), 1))
    other: Any = untrained("medusa")
    other.bind(target, 1)
    monkeypatch.setattr(type(other), "wide", {})
    with pytest.raises(InputError, match="nothing says how .*linear.bias widens"):
        saved.load_into(other, tmp_path, target)


# Loading ------------------------------------------------------------------------------------------------------------------


def test_loaded_grown_it_writes_the_same_text(folders: dict[str, Path], stock: dict[str, Any], own_home: Path) -> None:
    original, grown = load_grown(folders["llama"], 4, device="cpu", max_context=256)
    assert grown.model.name == f"{folders['llama']}, grown r=4" and grown.model.hidden_size == 128
    counted = sum(weight.numel() for weight in grow(stock["llama"], 4).parameters())
    assert grown.model.grown == Grown(4, Fingerprint.of(original.model), counted)
    assert grown.model.ends.tolist() == original.model.ends.tolist()
    asked = [Prompt(str(i), "qa", [text]) for i, text in enumerate(("hello", "the words that come before"))]
    found = compare(original, grown, asked, max_new_tokens=24)
    assert (found.prompts, found.identical, found.bugs) == (2, 2, 0) and found.tokens > 2


def test_another_text_is_a_bug(folders: dict[str, Path], own_home: Path) -> None:
    original, grown = load_grown(folders["llama"], 2, device="cpu", max_context=256)
    grown.model.hf.model.norm.weight.data[:8] *= -3
    assert compare(original, grown, [Prompt("1", "qa", ["hello"])], max_new_tokens=24).bugs > 0


def test_a_size_is_the_nearest_power_of_two() -> None:
    """Of the default model's shapes: 106 M weights that grow both ways, 28 M of the vocabulary that grow one way."""
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


def test_a_grown_model_is_judged_by_its_original(folders: dict[str, Path], own_home: Path) -> None:
    """Its own weights were repacked, and cannot be read from any folder."""
    _, wide = load_grown(folders["llama"], 2, device="cpu", max_context=128)
    with pytest.raises(ModelNotFound, match="is no folder to read them from again"):
        exact_copy(wide.model)
    exact = exact_copy(wide.model, folders["llama"])
    given = torch.tensor([TEXT])
    assert exact.dtype == torch.float64 and (exact(given).logits - wide.model.hf(given).logits).abs().max() < 1e-4
