"""The words of a drafter: a bitmap there and back, what is refused, and guesses as if no other token had a chance."""

import math

import pytest
import torch

from doubles import END, VOCABULARY, target
from foreword.core.choosing import guesses
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingTable
from foreword.drafting.draft_vocabulary import VocabularyHead, packed, unpacked
from foreword.errors import DrafterError
from foreword.model.model import Model

SOME = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(4)) < 0.6
ROWS = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def bound(model: Model, chosen: torch.Tensor = SOME) -> VocabularyHead:
    words = VocabularyHead()
    words.choose(packed(chosen))
    words.bind(model)
    return words


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
def test_words_of_another_vocabulary_are_refused(bits: torch.Tensor) -> None:
    words = VocabularyHead()
    words.choose(bits)
    with pytest.raises(DrafterError, match="6 bytes|5 bytes|7 bytes") as refused:
        words.bind(target())
    assert "tiny-llama has 48 tokens; load the target that the drafter was trained for" in str(refused.value)


def test_a_token_behind_the_last_is_refused() -> None:
    """45 tokens are as many bytes as 48."""
    assert unpacked(packed(torch.ones(45)), 45, "it").all()
    with pytest.raises(DrafterError, match="it has 45 tokens"):
        unpacked(packed(torch.ones(48)), 45, "it")


def test_too_few_are_refused() -> None:
    with pytest.raises(DrafterError, match="its words are 15 of the 48 tokens of tiny-llama; 16 are needed"):
        bound(target(), torch.arange(VOCABULARY) < 15)
    assert bound(target(), torch.arange(VOCABULARY) < 16).count == 16


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite"])
def test_logits_are_those_of_the_whole_head(family: str) -> None:
    """Also where a family does something to them: caps, or a factor."""
    model = target(family)
    words = bound(model)
    norm = torch.nn.RMSNorm(32, dtype=torch.float64).requires_grad_(False)
    torch.testing.assert_close(words.head(ROWS), model.head(ROWS)[..., SOME])
    torch.testing.assert_close(words.head(ROWS, norm), model.head(norm(ROWS))[..., SOME])
    assert words.tokens is not None and words.tokens.tolist() == SOME.nonzero().flatten().tolist()
    assert words.count == int(SOME.sum()) and not words.head(ROWS).requires_grad


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_guesses_are_those_of_a_vocabulary_without_the_rest(heat: float) -> None:
    """Tokens, order and chances: as if every other token's logit were minus infinity. Noise is the token's own."""
    model = target()
    words, table, slots = bound(model), SamplingTable.empty(3, torch.tensor([END])), torch.arange(3)
    for slot in range(3):
        table.set(slot, Sampling(heat, seed=slot))
    rows, position = table.at(slots, (0, 1, 2)), torch.arange(40, 42).expand(3, 2)
    with torch.no_grad():
        found = words.guesses(ROWS, position, rows, 8)
        wanted = guesses(model.head(ROWS).masked_fill(~SOME, -math.inf), position, rows, 8)
    assert torch.equal(found[0], wanted[0]) and SOME[found[0]].all()
    torch.testing.assert_close(found[1], wanted[1])


def test_without_a_choice_all_tokens_are_words() -> None:
    model, words = target(), VocabularyHead()
    words.bind(model)
    assert words.tokens is None and words.count == VOCABULARY
    assert torch.equal(words.head(ROWS), model.draft_head(ROWS))


def test_the_same_choice_moves_nothing_and_another_does() -> None:
    """A captured round reads where they lie."""
    words = bound(target())
    before = words.tokens
    words.choose(packed(SOME))
    assert words.tokens is before
    words.choose(packed(~SOME))
    assert words.tokens is not None and words.tokens.tolist() == (~SOME).nonzero().flatten().tolist()
    words.choose(None)
    assert words.tokens is None and words.head(ROWS).shape[-1] == VOCABULARY
