"""The noise: pinned to the bit, independent of the shape it is computed in, uniform, and Gumbel."""

import math

import pytest
import torch
from torch import Tensor

from foreword.core.choosing import pick
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingTable
from foreword.ops.noise import gumbel, noise_bits


def key_of(seed: int) -> Tensor:
    table = SamplingTable.empty(1, torch.tensor([], dtype=torch.long))
    table.set(0, Sampling(seed=seed))
    return table.columns["key"]


def bits(seed: int, position: int, token: int) -> int:
    return int(noise_bits(key_of(seed), torch.tensor([[position]]), torch.tensor([token])))


# Every later version must reproduce today's output of a seed, on every device.
GOLDEN = {
    (0, 0, 0): 761739980,
    (0, 1, 2): 1021242083,
    (7, 5, 47): 717156155,
    (-1, 63, 1): 1469245246,
    (2**62, 4095, 49151): 1346133084,
    (12345, 8191, 151935): 864698568,
}


@pytest.mark.parametrize(("key", "value"), GOLDEN.items())
def test_the_noise_never_changes(key: tuple[int, int, int], value: int) -> None:
    assert bits(*key) == value


def slow_bits(seed: int, position: int, token: int) -> int:
    """The same with Python integers in place of tensors: 32-bit words that wrap."""
    word = 0xFFFFFFFF

    def mix64(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    def mix32(value: int) -> int:
        for _ in range(2):
            value = (value ^ value >> 16) * 0x45D9F3B & word
        return value ^ value >> 16

    mixed = mix64(seed)
    first = mix32(mixed & word ^ mix32(position * 0x6C62272E & word))
    second = mix32((mixed >> 32) + first & word)
    value = token * 0x9E3779B1 & word ^ first
    value = (value ^ value >> 16) * 0x85EBCA6B + second & word
    value = (value ^ value >> 13) * 0xC2B2AE35 & word
    return (value ^ value >> 16) >> 1


@pytest.mark.parametrize("seed", [0, 1, -1, 7, 2**31, 2**63 - 1, 2**64 + 3])
def test_the_noise_is_this_hash(seed: int) -> None:
    for position in (0, 1, 63, 8191, 2**20):
        for token in (0, 1, 47, 49151, 151935):
            assert bits(seed, position, token) == slow_bits(seed, position, token)


def test_it_does_not_depend_on_the_shape_it_is_computed_in() -> None:
    key = torch.cat([key_of(3), key_of(4)])
    position = torch.tensor([[5, 6, 7], [6, 5, 9]])
    whole = noise_bits(key, position, torch.arange(40))
    tokens = torch.randint(0, 40, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise_bits(key, position, tokens), whole.gather(2, tokens.long()).to(torch.int32))
    assert torch.equal(noise_bits(key[1:], position[1:, 2:], torch.arange(40)), whole[1:, 2:])


def test_every_part_of_the_key_matters() -> None:
    base = (3, 100, 9)
    near = [(4, 100, 9), (3, 101, 9), (3, 100, 10), (3, 9, 100), (100, 3, 9)]
    assert len({bits(*key) for key in (base, *near)}) == 6


def sample(count: int = 1 << 17) -> Tensor:
    """Uniform numbers for few seeds, many positions and many tokens."""
    position = torch.arange(64).view(1, -1)
    tokens = torch.arange(count // (64 * 4))
    parts = [noise_bits(key_of(seed), position, tokens) for seed in range(4)]
    return torch.cat(parts).double() * 2.0**-31


def test_bits_are_uniform() -> None:
    """Chi-square over 256 bins: mean 255, standard deviation 22.6. Five of those on either side."""
    values = sample().flatten()
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values, bins=256, min=0, max=1)
    expected = len(values) / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert 255 - 5 * 22.6 < chi < 255 + 5 * 22.6


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
def test_neighbours_are_not_correlated(axis: int) -> None:
    values = sample()
    count = values.shape[axis] - 1
    one, other = values.narrow(axis, 0, count).flatten(), values.narrow(axis, 1, count).flatten()
    correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(len(one))


def test_noise_is_gumbel() -> None:
    """Its distribution function is exp(-exp(-x)); the largest gap to it stays within Kolmogorov's bound."""
    noise = gumbel(key_of(1), torch.arange(256).view(1, -1), torch.arange(256)).flatten().double().sort().values
    assert noise.isfinite().all()
    function = torch.exp(-torch.exp(-noise))
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (function - steps).abs().max() < 1.95 / math.sqrt(len(noise))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_are_as_frequent_as_the_softmax_says(temperature: float) -> None:
    """Chi-square of 40 000 samples of one distribution over 8 tokens at as many positions: 7 degrees, 24.3 is p = 0.001."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, 2.0, 0.2, -2.0]).double()
    table = SamplingTable.empty(1, torch.tensor([], dtype=torch.long))
    table.set(0, Sampling(temperature=temperature, seed=12))
    position = torch.arange(40_000).view(1, -1)
    sampled = pick(logits.expand(1, 40_000, 8), position, table.at(torch.tensor([0]), (0,)))
    expected = 40_000 * (logits / temperature).softmax(-1)
    counts = sampled.flatten().bincount(minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_samples_over_seeds_are_as_frequent_too() -> None:
    """The same position under 4 000 seeds: requests are independent of one another."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5]).double()
    table = SamplingTable.empty(4000, torch.tensor([], dtype=torch.long))
    for seed in range(4000):
        table.set(seed, Sampling(temperature=1.0, seed=seed))
    rows = table.at(torch.arange(4000), tuple(range(4000)))
    counts = pick(logits.expand(4000, 1, 4), torch.full((4000, 1), 9), rows).flatten().bincount(minlength=4)
    expected = 4000 * logits.softmax(-1)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees, p = 0.001
