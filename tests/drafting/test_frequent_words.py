"""Drafters that guess among some tokens: nothing else is drafted, the text is the truth, and a folder keeps the words."""

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
    grown_pair,
    requests,
    target,
    taught,
    truth,
    written,
)
from foreword.drafters import saved
from foreword.drafters.checkpoint import Stored
from foreword.drafting.draft_vocabulary import packed
from foreword.errors import DrafterError
from foreword.methods import trained_as, untrained
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model, WidenedFrom

WORDS = torch.arange(VOCABULARY) % 3 != 1
WITH_WORDS = [name for name in TRAINED if name not in ("amusd", "echo")]  # echo also repeats what is no word


def drafted(recorder: Recorder) -> set[int]:
    """All tokens that were proposed behind a root."""
    rows = [(seen.draft.tokens, seen.draft.size) for seen in recorder.proposed]
    return {token for tokens, size in rows for row, n in zip(tokens, size, strict=True) for token in row[1:n].tolist()}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", WITH_WORDS)
def test_only_words_are_drafted_and_the_text_is_the_truth(name: str, sampling: str) -> None:
    model, asked = target("qwen3"), requests(4, SAMPLINGS[sampling], ignore_eos=True)
    texts = [truth(model.hf, request) for request in asked]
    found = []
    for bits in (None, packed(WORDS)):
        one: Any = drafter(name, model)
        one.vocabulary.choose(bits)
        recorder = Recorder(one)
        assert written(engine(recorder, model), asked) == texts
        found.append(drafted(recorder))
    assert not WORDS[list(found[0])].all(), "without words others are drafted as well"
    assert found[1] and WORDS[list(found[1])].all()


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["medusa", "clover2", "draft_model"])
def test_a_folder_keeps_the_words(name: str, stored: Stored, tmp_path: Path) -> None:
    model = target()
    one = taught(name, model, **TRAINED[name])
    saved.save(one, tmp_path, model, stored)
    bare = load_file(tmp_path / saved.WEIGHTS)
    assert "words" not in saved.read_config(tmp_path) and saved.words_of(tmp_path) is None
    one.vocabulary.choose(packed(WORDS))
    saved.save(one, tmp_path, model, stored)
    held = load_file(tmp_path / saved.WEIGHTS)
    assert held.pop("words").tolist() == packed(WORDS).tolist() and saved.read_config(tmp_path)["words"] == WORDS.sum()
    again: Any = saved.restore(tmp_path, model)
    assert again.vocabulary.tokens.tolist() == WORDS.nonzero().flatten().tolist()
    saved.save(taught(name, model, **TRAINED[name]), tmp_path, model, stored)
    saved.load_into(again, tmp_path, model)
    assert again.vocabulary.tokens is None, "a folder without words is one of all"
    assert all(torch.equal(bare[tensor], held[tensor]) for tensor in bare) and bare.keys() == held.keys()


def test_words_are_put_beside_weights_that_stay_as_they_are(tmp_path: Path) -> None:
    model = target()
    saved.save(taught("medusa", model), tmp_path, model, "int8")
    before, config = load_file(tmp_path / saved.WEIGHTS), (tmp_path / saved.CONFIG).read_text()
    saved.put_words(tmp_path, packed(WORDS), 32)
    after = load_file(tmp_path / saved.WEIGHTS)
    assert after.pop("words").tolist() == packed(WORDS).tolist()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert saved.read_config(tmp_path) == json.loads(config) | {"words": 32}
    saved.put_words(tmp_path, None, VOCABULARY)
    assert (tmp_path / saved.CONFIG).read_text() == config and saved.words_of(tmp_path) is None


def test_a_folder_with_words_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model = target()
    saved.save(taught("medusa", model), tmp_path, model)
    saved.put_words(tmp_path, packed(torch.ones(VOCABULARY + 8)), VOCABULARY + 8)
    with pytest.raises(DrafterError, match="its words are 7 bytes of a bitmap, but tiny-llama has 48 tokens"):
        saved.restore(tmp_path, model)


@pytest.mark.parametrize("name", ["medusa", "clover2", "draft_model", "gsd", "amusd"])
def test_words_do_not_change_with_width(name: str, tmp_path: Path) -> None:
    """A target twice as wide drafts among the same words, also where the draft model stays small; amusd hears of none."""
    narrow, wide = grown_pair(torch.float64, 2)
    original = Model(narrow, "original")
    grown = Model(wide, "grown", grown=WidenedFrom(2, Fingerprint.of(original), 1))
    taught_as = trained_as(name)
    one = taught(taught_as, original, **TRAINED[taught_as])
    one.vocabulary.choose(packed(WORDS))
    saved.save(one, tmp_path, original)
    asked = requests(3, ignore_eos=True)
    found = []
    for model in (original, grown):
        recorder = Recorder(saved.restore(tmp_path, model, method=name, **_own(name)))
        assert written(engine(recorder, model), asked) == [truth(narrow, request) for request in asked]
        found.append(drafted(recorder))
    assert found[0] == found[1] and WORDS[list(found[0])].all() == (name != "amusd")


def _own(name: str) -> dict[str, Any]:
    kept = untrained(name, **TRAINED[name]).config  # type: ignore[attr-defined]
    return {option: value for option, value in TRAINED[name].items() if option not in kept}
