"""Drafters with a draft vocabulary: they draft nothing else, the output is the truth, and a folder stores it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from doubles import (
    SAMPLINGS,
    TRAINED,
    VOCABULARY,
    Recorder,
    drafter,
    engine,
    requests,
    target,
    truth,
    widened_pair,
    with_random_weights,
    written,
)
from foreword.drafters import saved
from foreword.drafters.checkpoint import StoredDtype
from foreword.drafting.draft_vocabulary import packed
from foreword.errors import DrafterError
from foreword.methods import trained_as, untrained
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model, WidenedFrom

ALLOWED = torch.arange(VOCABULARY) % 3 != 1
WITH_VOCABULARY = [name for name in TRAINED if name not in ("amusd", "echo")]  # echo's chain repeats any token


def drafted(recorder: Recorder) -> set[int]:
    """Return all draft tokens that were proposed."""
    rows = [(seen.draft.tokens, seen.draft.size) for seen in recorder.proposed]
    return {token for tokens, size in rows for row, n in zip(tokens, size, strict=True) for token in row[1:n].tolist()}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", WITH_VOCABULARY)
def test_only_the_draft_vocabulary_is_drafted_and_the_output_is_the_truth(name: str, sampling: str) -> None:
    model, asked = target("qwen3"), requests(4, SAMPLINGS[sampling], ignore_eos=True)
    correct = [truth(model.hf, request) for request in asked]
    found = []
    for bits in (None, packed(ALLOWED)):
        one: Any = drafter(name, model)
        one.vocabulary.choose(bits)
        recorder = Recorder(one)
        assert written(engine(recorder, model), asked) == correct
        found.append(drafted(recorder))
    assert not ALLOWED[list(found[0])].all(), "without a draft vocabulary others are drafted too"
    assert found[1] and ALLOWED[list(found[1])].all()


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["medusa", "clover2", "draft_model"])
def test_a_folder_stores_the_draft_vocabulary(name: str, stored: StoredDtype, tmp_path: Path) -> None:
    model = target()
    one = with_random_weights(name, model, **TRAINED[name])
    saved.save(one, tmp_path, model, stored)
    bare = load_file(tmp_path / saved.WEIGHTS)
    assert "words" not in saved.read_config(tmp_path) and saved.read_draft_vocabulary(tmp_path) is None
    one.vocabulary.choose(packed(ALLOWED))
    saved.save(one, tmp_path, model, stored)
    held = load_file(tmp_path / saved.WEIGHTS)
    assert held.pop("words").tolist() == packed(ALLOWED).tolist() and saved.read_config(tmp_path)["words"] == ALLOWED.sum()
    again: Any = saved.restore(tmp_path, model)
    assert again.vocabulary.tokens.tolist() == ALLOWED.nonzero().flatten().tolist()
    saved.save(with_random_weights(name, model, **TRAINED[name]), tmp_path, model, stored)
    saved.load_into(again, tmp_path, model)
    assert again.vocabulary.tokens is None, "a folder without a draft vocabulary drafts all tokens"
    assert all(torch.equal(bare[tensor], held[tensor]) for tensor in bare) and bare.keys() == held.keys()


def test_writing_a_draft_vocabulary_does_not_change_the_weights(tmp_path: Path) -> None:
    model = target()
    saved.save(with_random_weights("medusa", model), tmp_path, model, "int8")
    before, config = load_file(tmp_path / saved.WEIGHTS), (tmp_path / saved.CONFIG).read_text()
    saved.write_draft_vocabulary(tmp_path, packed(ALLOWED), 32)
    after = load_file(tmp_path / saved.WEIGHTS)
    assert after.pop("words").tolist() == packed(ALLOWED).tolist()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert saved.read_config(tmp_path) == json.loads(config) | {"words": 32}
    saved.write_draft_vocabulary(tmp_path, None, VOCABULARY)
    assert (tmp_path / saved.CONFIG).read_text() == config and saved.read_draft_vocabulary(tmp_path) is None


def test_a_draft_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    model = target()
    saved.save(with_random_weights("medusa", model), tmp_path, model)
    saved.write_draft_vocabulary(tmp_path, packed(torch.ones(VOCABULARY + 8)), VOCABULARY + 8)
    with pytest.raises(DrafterError, match="its draft vocabulary is a bitmap of 7 bytes, but tiny-llama has 48 tokens"):
        saved.restore(tmp_path, model)


@pytest.mark.parametrize("name", ["medusa", "clover2", "masked", "draft_model", "gsd", "amusd"])
def test_widening_does_not_change_the_draft_vocabulary(name: str, tmp_path: Path) -> None:
    """A target twice as wide has the same draft vocabulary, even if the draft model stays small. amusd uses none."""
    narrow, wide = widened_pair(torch.float64, 2)
    original = Model(narrow, "original")
    widened = Model(wide, "widened", widened_from=WidenedFrom(2, Fingerprint.of(original), 1))
    method = trained_as(name)
    one = with_random_weights(method, original, **TRAINED[method])
    one.vocabulary.choose(packed(ALLOWED))
    saved.save(one, tmp_path, original)
    asked = requests(3, ignore_eos=True)
    found = []
    for model in (original, widened):
        recorder = Recorder(saved.restore(tmp_path, model, method=name, **_serving_options(name)))
        assert written(engine(recorder, model), asked) == [truth(narrow, request) for request in asked]
        found.append(drafted(recorder))
    assert found[0] == found[1] and ALLOWED[list(found[0])].all() == (name != "amusd")


def _serving_options(name: str) -> dict[str, Any]:
    """Return the options that a folder does not store."""
    kept = untrained(name, **TRAINED[name]).config  # type: ignore[attr-defined]
    return {option: value for option, value in TRAINED[name].items() if option not in kept}
