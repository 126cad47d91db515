"""Tiny random models of every supported family, in float64 where a test compares exactly.

Sizes and weights are chosen to show what a family does differently: sliding windows shorter than the sequences, factors
other than 1, a layer without positions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.gemma2 import modeling_gemma2

from foreword.model.model import Model
from foreword.model.widened_model import widen_model

VOCABULARY = 48
END = 2
CONTEXT = 64
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=END,
    bos_token_id=1,
    pad_token_id=0,
    # Large random weights: a tiny model at the usual scale answers almost the same logits everywhere.
    initializer_range=0.3,
)


# Settings that show how each family differs.
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": dict(tie_word_embeddings=True),
    "mistral": dict(sliding_window=6, head_dim=16),
    "qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=2, tie_word_embeddings=True),
    "qwen3": dict(head_dim=16, tie_word_embeddings=False),
    "smollm3": dict(use_sliding_window=True, sliding_window=6, no_rope_layers=[1, 0, 1, 0]),
    "phi3": dict(
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "granite": dict(
        embedding_multiplier=2.5, residual_multiplier=0.7, attention_multiplier=0.6, logits_scaling=0.4, attention_bias=True
    ),
    "olmo2": dict(tie_word_embeddings=False),
    "gemma2": dict(
        head_dim=16, sliding_window=5, query_pre_attn_scalar=3, attn_logit_softcapping=2.0, final_logit_softcapping=6.0
    ),
    "gemma3_text": dict(
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        query_pre_attn_scalar=3,
        final_logit_softcapping=9.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    ),
    "foreword_looped": dict(num_hidden_layers=6, repeats=3, tie_word_embeddings=True),
}
EVERY_FAMILY = tuple(_CHANGES)
"""Families that the tests of the walk run in every detail: among them they have all differences but those of `BY_LAW`."""

_EXPERTS: dict[str, Any] = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)
_LOCAL_EXPERTS: dict[str, Any] = dict(num_local_experts=6, num_experts_per_tok=2)
_PARTLY_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_BY_LAW: dict[str, dict[str, Any]] = {
    "olmo3": dict(
        sliding_window=5,
        layer_types=_ALTERNATING,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    ),
    "gemma": dict(head_dim=16),
    "glm": dict(head_dim=16, rope_parameters=_PARTLY_ROTATED, attention_bias=True),
    "glm4": dict(head_dim=16, rope_parameters=_PARTLY_ROTATED, attention_bias=True),
    "exaone4": dict(sliding_window=5, sliding_window_pattern=2),
    "cohere": dict(use_qk_norm=True, logit_scale=0.4),
    "ministral": dict(head_dim=16, sliding_window=6, layer_types=_ALTERNATING),
    "apertus": dict(),
    "cohere2": dict(sliding_window=5, layer_types=_ALTERNATING, logit_scale=0.4),
    "seed_oss": dict(head_dim=16),
    "hunyuan_v1_dense": dict(head_dim=16),
    "ernie4_5": dict(head_dim=16, use_bias=True),
    "arcee": dict(),
    "ministral3": dict(
        head_dim=16,
        sliding_window=6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.7,
        },
    ),
    "starcoder2": dict(sliding_window=6, use_bias=True),
    "phi": dict(rope_parameters=_PARTLY_ROTATED, qk_layernorm=True),
    "qwen2_moe": dict(
        _EXPERTS,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    ),
    "qwen3_moe": dict(
        _EXPERTS, head_dim=16, mlp_only_layers=[1], norm_topk_prob=True, use_sliding_window=True, sliding_window=6
    ),
    "mixtral": dict(_LOCAL_EXPERTS, sliding_window=6),
    "olmoe": dict(num_experts=6, num_experts_per_tok=2),
    "granitemoe": dict(
        _LOCAL_EXPERTS, embedding_multiplier=2.5, residual_multiplier=0.7, attention_multiplier=0.6, logits_scaling=0.4
    ),
    "glm4_moe": dict(
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        head_dim=16,
        rope_parameters=_PARTLY_ROTATED,
    ),
    "ernie4_5_moe": dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=48, moe_layer_start_index=1),
    "minimax_m2": dict(_LOCAL_EXPERTS, head_dim=16, rope_parameters=_PARTLY_ROTATED),
    "gpt_neox": dict(num_key_value_heads=None, rope_parameters=_PARTLY_ROTATED),
    "gpt2": dict(num_key_value_heads=None),
    "opt": dict(num_key_value_heads=None, ffn_dim=64, word_embed_proj_dim=32),
    "gpt_oss": dict(_LOCAL_EXPERTS, head_dim=16, sliding_window=5, layer_types=_ALTERNATING),
}
_SLOW: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
    ),
    "qwen3_next": dict(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "mamba2": dict(num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8),
    "stablelm": dict(),
}
SLOW_FAMILIES = tuple(_SLOW)
"""Families that Foreword does not support: latent attention, a hybrid of which copies of the cache are kept, one whose cache
cannot be continued by several rows, and a plain one."""
BY_LAW = tuple(_BY_LAW)
"""Families that are lines of the table, with no code of their own: the laws test them as a whole."""
RUN_ONCE = tuple(family for family in EVERY_FAMILY if family != "foreword_looped")
"""Families whose layers each run once in a pass: four different ones here."""
# sdpa has neither softcaps nor sinks, and mamba2 no attention
_EAGER = ("gemma2", "gpt_oss", "mamba2")
STOCK_ATTENTION = {family: "eager" if family in _EAGER else "sdpa" for family in (*EVERY_FAMILY, *BY_LAW, *SLOW_FAMILIES)}
FAMILIES = ("llama", "qwen3", "smollm3", "gemma2")
"""The families that most tests run: a plain one; norms on q and k; layers without positions, and windows; softcaps and four
norms per layer."""


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input. transformers' own rounds to float32, which would blur a float64 comparison."""

    weight: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        gemma = "eps" in self.__dict__  # Gemma stores the weight minus 1
        epsilon: Any = self.eps if gemma else self.variance_epsilon
        weight = 1 + self.weight if gemma else self.weight
        return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)


def exact_eager(module: nn.Module, *rows: Any, **options: Any) -> Any:
    """Run Gemma's eager attention, which has the softcap, without its rounding to float32."""
    rounded = functional.softmax
    functional.softmax = lambda scores, dim, dtype: rounded(scores, dim)
    try:
        return modeling_gemma2.eager_attention_forward(module, *rows, **options)
    finally:
        functional.softmax = rounded


AttentionInterface.register("exact_eager", exact_eager)
AttentionMaskInterface.register("exact_eager", eager_mask)


def fresh(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make a new random model of a family. The test may change it."""
    torch.manual_seed(seed)
    attention = changes.pop("attn_implementation", STOCK_ATTENTION[family])
    config = AutoConfig.for_model(family, **_SHAPE | (_CHANGES | _BY_LAW | _SLOW)[family] | changes)
    # transformers' faster ways to compute experts refuse float64
    experts = {"experts_implementation": "eager"} if family in BY_LAW and dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            nn.init.uniform_(module.weight, 0.5, 1.5)  # a lost norm of ones would go unnoticed
            if dtype == torch.float64 and "RMSNorm" in type(module).__name__:
                module.__class__ = ExactNorm
        elif getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.3)  # so would a lost bias of zeros
    if family == "gemma2" and dtype == torch.float64:
        model.config._attn_implementation = "exact_eager"
    return model.to(dtype).eval()


@lru_cache
def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Return the shared random model of a family. No test changes it."""
    return fresh(family, dtype, seed)


def target(family: str = "llama", dtype: torch.dtype = torch.float64) -> Model:
    """Wrap the shared tiny model as a Model with its own cache."""
    return Model(tiny(family, dtype), name=f"tiny-{family}")


WIDENABLE_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "a head of its own": ("llama", {"tie_word_embeddings": False}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a key head each": ("llama", {"num_key_value_heads": 4}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 16}),
    "a large epsilon": ("llama", {"rms_norm_eps": 0.3}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
}
"""Models that can be widened."""


def widened_pair(dtype: torch.dtype, times: int, kind: str = "tied") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a random model, and the same model `times` as wide."""
    family, changes = WIDENABLE_KINDS[kind]
    model = fresh(family, dtype, **changes).requires_grad_(False)
    wide = widen_model(model, times)
    if dtype == torch.float64:  # the widened model is new, and its norms round to float32
        for module in wide.modules():
            if "RMSNorm" in type(module).__name__:
                module.__class__ = type(model.model.norm)
    return model, wide


POISON = 7


def poisoned_model() -> PreTrainedModel:
    """Make a model in which one token's embedding is NaN: a request with it in its prompt gets NaN, and no other does."""
    hf = fresh("qwen3")
    with torch.no_grad():
        hf.model.embed_tokens.weight[POISON] = torch.nan
    return hf
