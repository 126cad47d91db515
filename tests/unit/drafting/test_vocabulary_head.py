"""The draft vocabulary: a bitmap there and back, what is refused, and candidates as if no other token existed."""

import math

import pytest
import torch

from doubles import END, VOCABULARY, target
from foreword.core.choosing import candidates
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingTable
from foreword.drafting.draft_vocabulary import VocabularyHead, packed, unpacked
from foreword.errors import DrafterError
from foreword.model.model import Model

SOME = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(4)) < 0.6
ROWS = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def bound(model: Model, chosen: torch.Tensor = SOME) -> VocabularyHead:
    vocabulary = VocabularyHead()
    vocabulary.choose(packed(chosen))
    vocabulary.bind(model)
    return vocabulary


@pytest.mark.parametrize("size", [1, 8, 47, 48, 49, 1001])
def test_a_bitmap_there_and_back(size: int) -> None:
    chosen = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    bits = packed(chosen)
    assert bits.dtype == torch.uint8 and bits.shape == (math.ceil(size / 8),)
    assert torch.equal(unpacked(bits, size, "it"), chosen)


def test_the_first_token_is_the_lowest_bit() -> None:
    assert packed(torch.tensor([True, False, True, *[False] * 6, True])).tolist() == [5, 2]


@pytest.mark.parametrize(
    "bits",
    [packed(torch.ones(VOCABULARY - 8)), packed(torch.ones(VOCABULARY + 8)), packed(SOME).int(), packed(SOME).view(2, 3)],
    ids=["fewer tokens", "more tokens", "no bytes", "no row"],
)
def test_a_bitmap_over_another_vocabulary_is_refused(bits: torch.Tensor) -> None:
    vocabulary = VocabularyHead()
    vocabulary.choose(bits)
    with pytest.raises(DrafterError, match="6 bytes|5 bytes|7 bytes") as refused:
        vocabulary.bind(target())
    assert "tiny-llama has 48 tokens; load the target that the drafter was trained for" in str(refused.value)


def test_a_token_after_the_last_is_refused() -> None:
    """45 tokens take as many bytes as 48."""
    assert unpacked(packed(torch.ones(45)), 45, "it").all()
    with pytest.raises(DrafterError, match="it has 45 tokens"):
        unpacked(packed(torch.ones(48)), 45, "it")


def test_too_few_are_refused() -> None:
    with pytest.raises(DrafterError, match="its draft vocabulary has 15 of the 48 tokens of tiny-llama, but 16 are needed"):
        bound(target(), torch.arange(VOCABULARY) < 15)
    assert bound(target(), torch.arange(VOCABULARY) < 16).count == 16


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite"])
def test_logits_are_those_of_the_whole_head(family: str) -> None:
    """Also if a family caps or scales them."""
    model = target(family)
    vocabulary = bound(model)
    norm = torch.nn.RMSNorm(32, dtype=torch.float64).requires_grad_(False)
    torch.testing.assert_close(vocabulary.head(ROWS), model.head(ROWS)[..., SOME])
    torch.testing.assert_close(vocabulary.head(ROWS, norm), model.head(norm(ROWS))[..., SOME])
    assert vocabulary.tokens is not None and vocabulary.tokens.tolist() == SOME.nonzero().flatten().tolist()
    assert vocabulary.count == int(SOME.sum()) and not vocabulary.head(ROWS).requires_grad


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_candidates_are_those_of_a_vocabulary_without_the_rest(temperature: float) -> None:
    """Tokens, order and log-probabilities, as if every other logit were minus infinity. Noise is the token's own."""
    model = target()
    vocabulary, table, slots = bound(model), SamplingTable.empty(3, torch.tensor([END])), torch.arange(3)
    for slot in range(3):
        table.set(slot, Sampling(temperature, seed=slot))
    rows, position = table.at(slots, (0, 1, 2)), torch.arange(40, 42).expand(3, 2)
    with torch.no_grad():
        found = vocabulary.candidates(ROWS, position, rows, 8)
        expected = candidates(model.head(ROWS).masked_fill(~SOME, -math.inf), position, rows, 8)
    assert torch.equal(found[0], expected[0]) and SOME[found[0]].all()
    torch.testing.assert_close(found[1], expected[1])


def test_without_a_choice_all_tokens_count() -> None:
    model, vocabulary = target(), VocabularyHead()
    vocabulary.bind(model)
    assert vocabulary.tokens is None and vocabulary.count == VOCABULARY
    assert torch.equal(vocabulary.head(ROWS), model.draft_head(ROWS))


def test_the_same_choice_moves_nothing_and_another_does() -> None:
    """Captured rounds read the tensors in place."""
    vocabulary = bound(target())
    before = vocabulary.tokens
    vocabulary.choose(packed(SOME))
    assert vocabulary.tokens is before
    vocabulary.choose(packed(~SOME))
    assert vocabulary.tokens is not None and vocabulary.tokens.tolist() == (~SOME).nonzero().flatten().tolist()
    vocabulary.choose(None)
    assert vocabulary.tokens is None and vocabulary.head(ROWS).shape[-1] == VOCABULARY
