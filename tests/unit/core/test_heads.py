"""Parts of draft heads: they start as nothing, and look at a token as the papers say."""

import pytest
import torch

from doubles import EVERY_FAMILY, target
from foreword.core.heads import CosineAttention, ResBlock, counted, last_of, near_identity, norm_like


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_norm_starts_as_the_target_s(family: str) -> None:
    model = target(family)
    rows = 3 * torch.randn(2, 5, model.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(norm_like(model)(rows), model.norm(rows), rtol=1e-4, atol=1e-4)


def test_a_block_starts_as_nothing() -> None:
    rows = torch.randn(3, 32, dtype=torch.float64)
    assert torch.equal(ResBlock(target())(rows), rows)


def test_attention_is_a_cosine_for_each_head() -> None:
    model = target()
    look = CosineAttention(model, bias=True)
    for weight in look.parameters():
        torch.nn.init.normal_(weight)
    state, embedding = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 5, 32, dtype=torch.float64)
    out = look(state, embedding)
    size = 32 // model.attention_heads
    normed = state / (state.square().mean(-1, keepdim=True) + 1e-5).sqrt() * look.norm.weight
    query, key, value = look.query(normed), look.key(embedding), look.value(embedding)
    for head in range(model.attention_heads):
        part = slice(head * size, (head + 1) * size)
        one, other = query[..., part], key[..., part]
        score = (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))
        torch.testing.assert_close(out[..., part], score.unsqueeze(-1) * value[..., part])


def test_near_identity_passes_the_first_part_through() -> None:
    weight = torch.empty(4, 8)
    near_identity(weight, torch.full((4, 8), 0.01))
    assert torch.allclose(weight - 0.01, torch.cat([torch.eye(4), torch.zeros(4, 4)], 1))


def test_rows_that_do_not_count() -> None:
    rows, count, before = torch.full((3, 4, 2), torch.nan), torch.tensor([2, 0, 4]), torch.full((3, 2), -1.0)
    for lane, many in enumerate(count.tolist()):
        rows[lane, :many] = torch.arange(1.0, many + 1).unsqueeze(1)
    assert not counted(rows, count).isnan().any()
    assert torch.equal(counted(rows, count).sum((1, 2)), torch.tensor([6.0, 0.0, 20.0]))
    assert last_of(rows, count, before).tolist() == [[2, 2], [-1, -1], [4, 4]]
