"""The k largest scores of a row against torch's stable sort, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.core.choosing import History, pick
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingTable
from foreword.ops import dispatch
from foreword.ops.noise import gumbel, noise_bits
from foreword.ops.round.top import Noise, top, top_with_chances
from foreword.ops.top import MOST, kernel_serves
from rounds import check_top, check_vocabulary, scores_with_ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "k"), [(1, 1, 1), (3, 8, 8), (2, 40, 3), (3, 1030, 8), (5, 300, 16), (2, 2048, 1), (3, 4100, 4)]
)
def test_it_is_the_stable_sort(rows: int, width: int, k: int, dtype: torch.dtype) -> None:
    """Also if ties, NaN or infinities cross from one stretch into the next, and if a stretch has fewer than k."""
    check_top(scores_with_ties(width + k, rows, width, dtype), k, "cpu")


def test_chances_of_scores_far_from_zero() -> None:
    """A stretch of probability zero next to one of very low scores."""
    scores = torch.full((1, 3000), -torch.inf)
    scores[0, 2500:] = -5000 + torch.rand(500, generator=torch.Generator().manual_seed(0))
    check_top(scores, 5, "cpu")
    check_top(scores + 9000, 5, "cpu")


def test_rows_keep_their_shape() -> None:
    scores = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    assert torch.equal(top(scores, 4), scores.topk(4).indices)
    assert torch.equal(top(scores[:, ::2, :50], 4), scores[:, ::2, :50].topk(4).indices)
    assert torch.equal(top(scores[..., :50], 4), scores[..., :50].topk(4).indices)  # reshape alone would leave a view
    assert top(scores[:0], 4).shape == (0, 3, 4)


def test_it_serves_no_more_than_it_finds() -> None:
    scores = torch.zeros(1, 1, 40)
    assert kernel_serves(scores, MOST) and not kernel_serves(scores, MOST + 1)
    assert not kernel_serves(scores.double(), 1)
    assert top(scores, MOST).shape == (1, 1, MOST)


def test_the_noise_equals_that_of_torch_operations() -> None:
    """Three requests, one of them greedy; ids beyond one stretch, positions beyond 16 bits."""
    key = torch.tensor([[0x9ABCDEF0, 0x12345678], [1, 0xFFFFFFFF], [7, 7]])
    position = torch.tensor([[3, 70_000], [1, 2], [0, 2**31 + 5]])
    temperature = torch.tensor([0.7, 0.0, 1.3])
    scores = torch.randn(3, 2, 2500, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    wide = scores.float() / torch.where(temperature > 0, temperature, 1).view(3, 1, 1)
    wide = (wide + gumbel(key, position, torch.arange(2500))).where(temperature.view(3, 1, 1) > 0, wide)
    places, chances = top_with_chances(scores, 6, Noise(key, position, temperature))
    assert torch.equal(places, wide.topk(6).indices)
    torch.testing.assert_close(chances, wide.log_softmax(-1).gather(-1, places), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_vocabulary_has_the_noise_of_its_tokens(dtype: torch.dtype) -> None:
    check_vocabulary(dtype, "cpu")


def test_noise_is_precise_over_all_its_range() -> None:
    """Against float64, from the rarest large noise to the smallest."""
    ids = torch.arange(1 << 17)
    bits = noise_bits(torch.tensor([[5, 6]]), torch.tensor([[9]]), ids)[0, 0].double()
    exact = -torch.log(-torch.log1p(-((bits + 0.5) * 2.0**-31)))
    zeros, order = torch.zeros(1, 1, 1 << 17), exact.argsort(descending=True)
    noise = Noise(torch.tensor([[5, 6]]), torch.tensor([[9]]), torch.ones(1))
    places, chances = top_with_chances(zeros, 16, noise)
    found = chances + exact.exp().sum().log().float()
    assert torch.equal(places[0, 0], order[:16])
    torch.testing.assert_close(found[0, 0].double(), exact[order[:16]], rtol=0, atol=2e-5)


KINDS = {
    "greedy": Sampling(seed=1),
    "sampled": Sampling(0.7, seed=2),
    "top_k": Sampling(1.3, top_k=5, seed=3),
    "top_p": Sampling(0.9, top_p=0.6, seed=4),
    "min_p": Sampling(0.8, min_p=0.2, seed=5),
    "penalty": Sampling(0.8, repetition_penalty=1.5, seed=6),
    "allowed": Sampling(0.9, seed=8, allowed_token_ids=tuple(range(5, 300, 11))),
    "allowed, filtered": Sampling(0.9, top_k=3, seed=9, allowed_token_ids=tuple(range(5, 300, 11))),
    "allowed, greedy": Sampling(seed=10, allowed_token_ids=(4, 8, 15)),
    "bias": Sampling(0.9, seed=11, logit_bias={5: 4.0, 6: -100, 250: 3.5}),
    "output penalties": Sampling(0.9, seed=12, presence_penalty=0.7, frequency_penalty=-0.4),
    "bad words": Sampling(0.9, seed=13, bad_word_ids=((6,), *((9, token) for token in range(0, 300, 2)))),
    "floor": Sampling(0.6, seed=7),
}


def picked(names: list[str], logits: torch.Tensor) -> torch.Tensor:
    """Pick at three positions of each request, none of which depends on other requests. The floor is at the second."""
    ids = tuple(list(KINDS).index(name) for name in names)
    table = SamplingTable.empty(len(KINDS), torch.tensor([3, 8]), logits.shape[2])
    for slot, name in zip(ids, names, strict=True):
        table.set(slot, KINDS[name], 41 * (name == "floor"))
    position, slots = torch.arange(40, 43).expand(len(ids), 3), torch.tensor(ids)
    seen = (torch.arange(logits.shape[2]) % 3 == 0).int().expand(len(ids), 3, -1)
    last = torch.tensor([[7, 8, 9], [8, 9, 10], [9, 10, 11]]).expand(len(ids), -1, -1)
    history = History(seen, seen * 2, last)
    return pick(logits[slots], position, table.at(slots, ids), history)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pick_by_the_kernel_equals_that_of_torch_operations(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a batch, with every option; some tokens have probability zero."""
    logits = 3 * torch.randn(len(KINDS), 3, 300, generator=torch.Generator().manual_seed(0))
    logits[:, :, ::7], logits[-1, :, 3] = -torch.inf, 30.0
    logits = logits.to(dtype)
    exact = picked(list(KINDS), logits)
    monkeypatch.setattr(dispatch, "on_cuda", lambda first: True)
    assert torch.equal(picked(list(KINDS), logits), exact)
    for index, name in enumerate(KINDS):
        assert torch.equal(picked([name], logits)[0], exact[index]), name
    assert [token == 3 for token in exact[-1].tolist()] == [False, True, True], "held back below the floor"
