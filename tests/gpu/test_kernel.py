"""The Triton kernel against torch's masked attention: any tree, any batch, slots in any order, lengths of their own."""

import pytest
import torch

from foreword.core.draft import Tree
from foreword.model.attention import attend, mask_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "rows", "width", "lengths"),
    [
        (9, 3, 1, 64, [512]),
        (9, 3, 64, 64, [700]),
        (32, 8, 64, 128, [300]),
        (4, 2, 9, 16, [0]),
        (4, 4, 5, 32, [0, 1, 63, 64, 65]),
        (9, 3, 17, 64, [0, 5, 130, 512]),
    ],
)
def test_the_kernel_is_masked_attention(
    heads: int, key_heads: int, rows: int, width: int, lengths: list[int], dtype: torch.dtype
) -> None:
    from foreword.model.kernels.tree_attention import attend_tree  # noqa: PLC0415  needs triton

    generator = torch.Generator("cuda").manual_seed(0)
    batch, slots, span = len(lengths), len(lengths) + 3, -(-max(lengths) // 256) * 256

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    keys, values = drawn(slots, key_heads, 1024, width), drawn(slots, key_heads, 1024, width)
    query = drawn(batch, rows, heads, width).transpose(1, 2)
    seats = torch.randperm(slots, generator=generator, device="cuda")[:batch]
    base = torch.tensor(lengths, device="cuda")
    chance = torch.rand(batch, rows, generator=generator, device="cuda")
    sees = Tree((chance * torch.arange(rows, device="cuda").clamp(min=1)).long()).ancestors

    found = attend_tree(query, keys, values, seats, base, sees, span, width**-0.5)
    mask = mask_of(base, sees, 1024, heads // key_heads, torch.float64)
    exact = attend(query.double(), keys[seats].double(), values[seats].double(), mask, width**-0.5)
    assert (found.double() - exact).abs().max() < {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
