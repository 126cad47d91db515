"""The draft vocabulary: counted where the mask is set, large enough, with the end tokens; and in training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from doubles import SequenceList, fresh, requests
from foreword.drafters.saved import read_config
from foreword.drafting.draft_vocabulary import unpacked
from foreword.engine.engine import Engine
from foreword.errors import DataError, ForewordWarning, InputError
from foreword.methods import untrained
from foreword.methods.plain import Plain
from foreword.model.model import Model
from foreword.train.evaluate import held_out_prompts
from foreword.train.frequent_tokens import FEW, MULTIPLE, counts_of, describe_draft_vocabulary, frequent, warn_of_few
from foreword.train.loop import Training
from foreword.train.schedule import TrainingSettings

SIZE = 1000
FALLING = (torch.arange(SIZE, 0, -1) ** 2).roll(300)  # token 300 is the most frequent
NONE = torch.tensor([], dtype=torch.long)


def chosen_ids(counts: torch.Tensor, cover: float, ends: torch.Tensor = NONE) -> list[int]:
    bits = frequent(counts, ends, cover)
    return list(range(len(counts))) if bits is None else unpacked(bits, len(counts), "it").nonzero().flatten().tolist()


def test_only_generated_tokens_are_counted() -> None:
    rows = [([5, 5, 7, 7, 7], [False, True, True, False, True]), ([5, 9], [True, False])]
    data = SequenceList([(torch.tensor(tokens), torch.tensor(mask)) for tokens, mask in rows])
    assert counts_of(data, 12).tolist() == [0, 0, 0, 0, 0, 2, 0, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("cover", [0.3, 0.7, 0.9, 0.99])
def test_the_most_frequent_tokens_cover_the_share_with_few_to_spare(cover: float) -> None:
    chosen = chosen_ids(FALLING, cover)
    assert len(chosen) % MULTIPLE == 0 and chosen == sorted((300 + place) % SIZE for place in range(len(chosen)))
    share = float(FALLING[chosen].sum() / FALLING.sum())
    fewer = FALLING.sort(descending=True).values[: len(chosen) - MULTIPLE].sum() / FALLING.sum()
    assert fewer < cover <= share
    described = describe_draft_vocabulary(frequent(FALLING, NONE, cover), FALLING)
    assert (described["count"], described["of"], described["covered"]) == (len(chosen), SIZE, pytest.approx(share, abs=1e-5))


def test_the_size_is_rounded_up_to_a_multiple() -> None:
    even = torch.ones(SIZE, dtype=torch.long)
    assert (
        len(chosen_ids(even, MULTIPLE / SIZE)) == MULTIPLE and len(chosen_ids(even, (MULTIPLE + 1) / SIZE)) == 2 * MULTIPLE
    )


def test_end_tokens_are_always_included() -> None:
    rare = torch.tensor([299, 298])  # the two least frequent
    assert not set(rare.tolist()) & set(chosen_ids(FALLING, 0.3))
    assert set(rare.tolist()) < set(chosen_ids(FALLING, 0.3, rare)) and len(chosen_ids(FALLING, 0.3, rare)) % MULTIPLE == 0
    never = FALLING.index_fill(0, rare, 0)
    assert set(rare.tolist()) < set(chosen_ids(never, 0.3, rare))


def test_full_cover_or_a_small_vocabulary_takes_all_tokens() -> None:
    assert frequent(FALLING, NONE, 1.0) is None and frequent(FALLING[:MULTIPLE], NONE, 0.1) is None
    assert frequent(FALLING, NONE, 0.9999) is None  # 1000 is no multiple of 128
    assert describe_draft_vocabulary(None, FALLING) == {"count": SIZE, "of": SIZE, "covered": 1.0}


@pytest.mark.parametrize(
    ("count", "of", "warned"),
    [(512, 49152, True), (FEW, 49152, False), (128, 280, False), (128, 640, True), (280, 280, False)],
)
def test_a_very_small_draft_vocabulary_gives_a_warning(
    count: int, of: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    warn_of_few({"count": count, "of": of, "covered": 0.98}, torch.tensor([1000, 2612]))
    messages = [str(one.message) for one in recwarn if one.category is ForewordWarning]
    assert len(messages) == warned
    assert not warned or messages[0].startswith(f"the draft vocabulary has {count} of {of:,} tokens, chosen from the 3,612 ")
    assert not warned or "--cover 1" in messages[0]


def test_refusals() -> None:
    for cover in (0.0, 1.5, float("nan")):
        with pytest.raises(InputError, match=f"cover is {cover}; it is a share of what the model generates"):
            frequent(FALLING, NONE, cover)
        with pytest.raises(InputError, match="cover is"):
            TrainingSettings(cover=cover)
    with pytest.raises(DataError, match="the data has no token that the model generated"):
        frequent(torch.zeros(SIZE, dtype=torch.long), NONE, 0.9)


def test_training_chooses_a_draft_vocabulary_and_saves_it(tmp_path: Path) -> None:
    model = Model(fresh("llama", torch.float32, vocab_size=600), "tiny")
    runs = Engine(model, Plain(), slots=4, max_context=64).generate(requests(24, max_new_tokens=20, ignore_eos=True))
    whole = [(run.request.prompt, run.tokens) for run in runs]
    data = SequenceList([(torch.tensor([*a, *b]), torch.tensor([False] * len(a) + [True] * len(b))) for a, b in whole])
    settings = TrainingSettings(
        batch=8, steps=4, evaluate_every=2, new_tokens=8, max_length=64, texts_apart=8, rows=8, cover=0.5
    )

    def make(**options: Any) -> Any:
        return untrained("medusa", rows=8, heads=2, **options)

    with pytest.warns(ForewordWarning, match="the draft vocabulary has 128 of 600 tokens, chosen from"):
        run = Training(
            model, make, data, SequenceList(data.sequences[:6]), held_out_prompts(data, 3, 40), settings, tmp_path
        )
    assert run.evaluator.drafter.vocabulary is not None and run.evaluator.drafter.vocabulary.count == MULTIPLE
    record = run.run()
    chosen = unpacked(load_file(tmp_path / "model.safetensors")["words"], 600, "tiny")
    counts = counts_of(data, 600)
    assert chosen.sum() == MULTIPLE and chosen[model.ends].all() and chosen[counts.argmax()]
    assert read_config(tmp_path)["words"] == MULTIPLE == record["words"]["count"] and record["settings"]["cover"] == 0.5
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert "Its draft vocabulary has 128 of the 600 tokens, which make up" in (tmp_path / "README.md").read_text()
