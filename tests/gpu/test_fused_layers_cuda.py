"""Fused layers on CUDA in half precision: as accurate as the layers of transformers, and the same in captured rounds."""

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from doubles import drafter, fresh, random_tree
from foreword import methods
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Needs
from foreword.core.state import Batch
from foreword.engine.engine import Engine
from foreword.engine.graph import FEWEST_ROWS
from foreword.engine.request import Request
from foreword.model.fused import cuda as fused_cuda
from foreword.model.fused.cuda import CudaLayer
from foreword.model.linears import fuse
from foreword.model.looped import LoopedConfig
from foreword.model.model import Model
from tiers import slow

pytestmark = pytest.mark.gpu


SHAPE = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
SHAPE |= dict(num_hidden_layers=4, vocab_size=5000, initializer_range=0.04)


def llama_135m() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).double().eval()


def looped_135m() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LoopedConfig(**SHAPE, repeats=2)).double().eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama of real width": llama_135m,
    "a looped one": looped_135m,
    "llama with biases": lambda: fresh("llama", torch.float32, head_dim=16, attention_bias=True, mlp_bias=True),
    "mistral": lambda: fresh("mistral", torch.float32, head_dim=16),
    "qwen2": lambda: fresh("qwen2", torch.float32, head_dim=16),
    "qwen3": lambda: fresh("qwen3", torch.float32, head_dim=16),
}


QUICK = {("llama of real width", torch.bfloat16, False), ("qwen3", torch.float16, True)}
CASES = [
    (pytest.param if (name, dtype, large) in QUICK else slow)(
        name, dtype, large, id=f"{name}-{dtype}{'-as if large' * large}"
    )
    for name in MODELS
    for dtype in (torch.bfloat16, torch.float16)
    for large in (False, True)
]
# Quick: no heads, a tree, int8 heads, grafts, rows that attend to later ones, a pipeline.
CAPTURED = ("plain", "token_recycling", "clover2", "hidden_transfer", "masked", "speed")

PROMPT = 150  # rows of each of two sequences: together more than our own products take


def logits_of_passes(hf: PreTrainedModel, dtype: torch.dtype, fused: bool) -> list[torch.Tensor]:
    """Return the logits of passes after one another: a prompt of many rows, trees of some rows, and one row."""
    hf = copy.deepcopy(hf).to(dtype).cuda()
    if fused:
        fuse(hf)
    model = Model(hf)
    model.allocate(3, 300, 200)
    assert {type(layer) for layer in model.layer_stack.fused or ()} == ({CudaLayer} if fused else set())
    generator = torch.Generator().manual_seed(1)
    batch = Batch.of([2, 0], 250, "cuda")
    found = []
    for rows in (PROMPT, 33, 1, 9):
        tokens = torch.randint(3, 40, (2, rows), generator=generator)
        tree = Tree.chain(rows) if rows == PROMPT else random_tree(2, rows, generator)
        draft = Draft(tokens.cuda(), Tree(tree.parent.cuda(), tree.is_chain), torch.full((2,), rows, device="cuda"))
        found.append(model.score(batch, draft, Needs()).require_logits().double())
        model.cache.advance(batch, torch.tensor([rows if rows == PROMPT else 1] * 2, device="cuda"))
    return found


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype", "large"), CASES)
def test_fused_layers_are_as_accurate_as_those_of_transformers(
    name: str, dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(fused_cuda, "LARGE", 0)
    hf = MODELS[name]()
    exact = logits_of_passes(hf, torch.float64, False)
    stock, fused = logits_of_passes(hf, dtype, False), logits_of_passes(hf, dtype, True)
    for truth, one, other in zip(exact, stock, fused, strict=True):
        own, theirs = ((found - truth).norm() / truth.norm() for found in (other, one))
        assert own < 1.5 * theirs + 1e-3


@pytest.mark.parametrize("method", [*CAPTURED, *(slow(name) for name in methods.METHODS if name not in CAPTURED)])
def test_captured_rounds_equal_eager_rounds(method: str) -> None:
    """In half precision, too: the same kernels on the same numbers give the same bits, captured or not.

    Two requests at a time, with prompts as long as captured passes: the row count of a product decides how it rounds. A
    captured pass is padded, and a captured round is read one round late, so that the next request would enter a round later.
    """
    hf = (looped_135m if methods.METHODS[method].looped else llama_135m)().to(torch.bfloat16).cuda()
    fuse(hf)
    prompts = torch.randint(0, 5000, (4, FEWEST_ROWS + 1), generator=torch.Generator().manual_seed(0)).tolist()
    asked = [Request(tuple(prompt), max_new_tokens=30, ignore_eos=True) for prompt in prompts]
    found = []
    for graph in (False, True):
        model = Model(hf)
        steps = Engine(model, drafter(method, model), slots=2, max_context=200, graph=graph)
        runs = [*steps.generate(asked[:2]), *steps.generate(asked[2:])]
        found.append([(run.tokens, run.accepted, run.drafted) for run in runs])
    assert found[0] == found[1]
