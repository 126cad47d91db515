"""Parts of draft heads: blocks start as the identity, and attention is the one of the papers."""

import pytest
import torch

from doubles import EVERY_FAMILY, target
from foreword.drafting.heads import CosineAttention, ResBlock, near_identity, norm_like, remember
from foreword.ops.rows import counted


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_norm_starts_as_the_target_s(family: str) -> None:
    model = target(family)
    rows = 3 * torch.randn(2, 5, model.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(norm_like(model)(rows), model.norm(rows), rtol=1e-4, atol=1e-4)


def test_a_block_starts_as_the_identity() -> None:
    rows = torch.randn(3, 32, dtype=torch.float64)
    assert torch.equal(ResBlock(target())(rows), rows)


def test_attention_is_a_cosine_for_each_head() -> None:
    model = target()
    attention = CosineAttention(model, bias=True)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight)
    state, embedding = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 5, 32, dtype=torch.float64)
    out = attention(state, embedding)
    size = 32 // model.attention_heads
    normed = state / (state.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm.weight
    query, key, value = attention.query(normed), attention.key(embedding), attention.value(embedding)
    for head in range(model.attention_heads):
        columns = slice(head * size, (head + 1) * size)
        one, other = query[..., columns], key[..., columns]
        score = (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))
        torch.testing.assert_close(out[..., columns], score.unsqueeze(-1) * value[..., columns])


def test_near_identity_passes_the_first_inputs_through() -> None:
    weight = torch.empty(4, 8)
    near_identity(weight, torch.full((4, 8), 0.01))
    assert torch.allclose(weight - 0.01, torch.cat([torch.eye(4), torch.zeros(4, 4)], 1))


def test_rows_that_do_not_count() -> None:
    rows, count, held = torch.full((3, 4, 2), torch.nan), torch.tensor([2, 0, 4]), torch.full((4, 2), -1.0)
    for row, many in enumerate(count.tolist()):
        rows[row, :many] = torch.arange(1.0, many + 1).unsqueeze(1)
    assert not counted(rows, count).isnan().any()
    assert torch.equal(counted(rows, count).sum((1, 2)), torch.tensor([6.0, 0.0, 20.0]))
    remember(held, torch.tensor([3, 0, 1]), rows, count)
    assert held.tolist() == [[-1, -1], [4, 4], [-1, -1], [2, 2]]


def test_rows_along_a_path() -> None:
    rows, held = torch.arange(24.0).view(2, 4, 3), torch.zeros(3, 3)
    path, count = torch.tensor([[0, 2, 3], [1, 3, 0]]), torch.tensor([3, 1])
    found = counted(rows, count, path)
    assert torch.equal(found[0], rows[0, [0, 2, 3]]) and torch.equal(found[1, 0], rows[1, 1]) and not found[1, 1:].any()
    norm = torch.nn.RMSNorm(3, eps=1e-5)
    remember(held, torch.tensor([2, 0]), rows, count, path, norm)
    assert torch.equal(held, torch.stack([norm(rows[1, 1]), held.new_zeros(3), norm(rows[0, 3])]))
