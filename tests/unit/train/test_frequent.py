"""Which tokens are written often: counted where the mask says so, enough of them, with the ends; and in training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from doubles import TextList, fresh, requests
from foreword.drafters.saved import read_config
from foreword.drafting.draft_vocabulary import unpacked
from foreword.engine.engine import Engine
from foreword.errors import DataError, ForewordWarning, InputError
from foreword.methods import untrained
from foreword.methods.plain import Plain
from foreword.model.model import Model
from foreword.train.evaluate import trials_of
from foreword.train.frequent import FEW, TOGETHER, counts_of, frequent, told_of_words, warn_of_few
from foreword.train.loop import Training
from foreword.train.schedule import TrainingSettings

SIZE = 1000
FALLING = (torch.arange(SIZE, 0, -1) ** 2).roll(300)  # token 300 is the most frequent
NONE = torch.tensor([], dtype=torch.long)


def words(counts: torch.Tensor, cover: float, ends: torch.Tensor = NONE) -> list[int]:
    bits = frequent(counts, ends, cover)
    return list(range(len(counts))) if bits is None else unpacked(bits, len(counts), "it").nonzero().flatten().tolist()


def test_only_what_the_target_wrote_is_counted() -> None:
    rows = [([5, 5, 7, 7, 7], [False, True, True, False, True]), ([5, 9], [True, False])]
    texts = TextList([(torch.tensor(tokens), torch.tensor(mask)) for tokens, mask in rows])
    assert counts_of(texts, 12).tolist() == [0, 0, 0, 0, 0, 2, 0, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("cover", [0.3, 0.7, 0.9, 0.99])
def test_the_most_frequent_ones_cover_as_much_as_is_asked_and_no_more_than_a_few_beyond(cover: float) -> None:
    chosen = words(FALLING, cover)
    assert len(chosen) % TOGETHER == 0 and chosen == sorted((300 + place) % SIZE for place in range(len(chosen)))
    share = float(FALLING[chosen].sum() / FALLING.sum())
    fewer = FALLING.sort(descending=True).values[: len(chosen) - TOGETHER].sum() / FALLING.sum()
    assert fewer < cover <= share
    told = told_of_words(frequent(FALLING, NONE, cover), FALLING)
    assert (told["count"], told["of"], told["covered"]) == (len(chosen), SIZE, pytest.approx(share, abs=1e-5))


def test_one_more_token_is_a_hundred_more_only_where_it_is_needed() -> None:
    even = torch.ones(SIZE, dtype=torch.long)
    assert len(words(even, TOGETHER / SIZE)) == TOGETHER and len(words(even, (TOGETHER + 1) / SIZE)) == 2 * TOGETHER


def test_ends_are_always_words() -> None:
    rare = torch.tensor([299, 298])  # the two least frequent
    assert not set(rare.tolist()) & set(words(FALLING, 0.3))
    assert set(rare.tolist()) < set(words(FALLING, 0.3, rare)) and len(words(FALLING, 0.3, rare)) % TOGETHER == 0
    never = FALLING.index_fill(0, rare, 0)
    assert set(rare.tolist()) < set(words(never, 0.3, rare))


def test_all_of_it_and_a_small_vocabulary_are_all_tokens() -> None:
    assert frequent(FALLING, NONE, 1.0) is None and frequent(FALLING[:TOGETHER], NONE, 0.1) is None
    assert frequent(FALLING, NONE, 0.9999) is None  # 1000 is no multiple of 128
    assert told_of_words(None, FALLING) == {"count": SIZE, "of": SIZE, "covered": 1.0}


@pytest.mark.parametrize(
    ("count", "of", "warned"),
    [(512, 49152, True), (FEW, 49152, False), (128, 280, False), (128, 640, True), (280, 280, False)],
)
def test_a_draft_vocabulary_of_a_few_hundred_tokens_is_told(
    count: int, of: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    warn_of_few({"count": count, "of": of, "covered": 0.98}, torch.tensor([1000, 2612]))
    said = [str(one.message) for one in recwarn if one.category is ForewordWarning]
    assert len(said) == warned
    assert not warned or said[0].startswith(f"the draft vocabulary has {count} of {of:,} tokens, chosen from 3,612 that the")
    assert not warned or "--cover 1" in said[0]


def test_refusals() -> None:
    for cover in (0.0, 1.5, float("nan")):
        with pytest.raises(InputError, match=f"cover is {cover}; it is a share of what the model writes"):
            frequent(FALLING, NONE, cover)
        with pytest.raises(InputError, match="cover is"):
            TrainingSettings(cover=cover)
    with pytest.raises(DataError, match="no token in these texts that the model wrote"):
        frequent(torch.zeros(SIZE, dtype=torch.long), NONE, 0.9)


def test_training_chooses_words_measures_with_them_and_keeps_them(tmp_path: Path) -> None:
    model = Model(fresh("llama", torch.float32, vocab_size=600), "tiny")
    runs = Engine(model, Plain(), slots=4, max_context=64).generate(requests(24, max_new_tokens=20, ignore_eos=True))
    whole = [(run.request.prompt, run.tokens) for run in runs]
    texts = TextList([(torch.tensor([*a, *b]), torch.tensor([False] * len(a) + [True] * len(b))) for a, b in whole])
    settings = TrainingSettings(
        batch=8, steps=4, evaluate_every=2, new_tokens=8, max_length=64, texts_apart=8, rows=8, cover=0.5
    )

    def make(**options: Any) -> Any:
        return untrained("medusa", rows=8, heads=2, **options)

    with pytest.warns(ForewordWarning, match="the draft vocabulary has 128 of 600 tokens, chosen from"):
        run = Training(model, make, texts, TextList(texts.texts[:6]), trials_of(texts, 3, 40), settings, tmp_path)
    assert run.measure.drafter.vocabulary is not None and run.measure.drafter.vocabulary.count == TOGETHER
    record = run.run()
    chosen = unpacked(load_file(tmp_path / "model.safetensors")["words"], 600, "tiny")
    counts = counts_of(texts, 600)
    assert chosen.sum() == TOGETHER and chosen[model.ends].all() and chosen[counts.argmax()]
    assert read_config(tmp_path)["words"] == TOGETHER == record["words"]["count"] and record["settings"]["cover"] == 0.5
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert "It guesses among 128 of the 600 tokens: those that were" in (tmp_path / "README.md").read_text()
