"""What differs between model families. The walk itself is one; a family that is not listed is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from foreword.errors import ModelUnsupported


@dataclass(frozen=True)
class Family:
    """How to take a causal language model apart. All families so far are pre-norm, with two residual halves a layer."""

    name: str

    def embed(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        return model.model.embed_tokens(tokens)

    def positions(self, model: PreTrainedModel, hidden: Tensor, position: Tensor) -> Any:
        """What a layer wants to know of the positions [b, n]."""
        return model.model.rotary_emb(hidden, position)

    def norm(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        return model.model.norm(hidden)

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        return model.lm_head(hidden)

    def layers(self, model: PreTrainedModel) -> nn.ModuleList:
        return model.model.layers

    def attention_half(self, layer: Any, hidden: Tensor, **options: Any) -> Tensor:
        out, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden), attention_mask=None, **options)
        return hidden + out

    def mlp_half(self, layer: Any, hidden: Tensor) -> Tensor:
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


FAMILIES = {family.name: family for family in (Family("llama"), Family("qwen3"))}

# Rotary frequencies that change with the length of the text would give a cached row another angle than a fresh one.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model, or an error that says what is supported."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelUnsupported(
            f"Foreword does not walk models of type {config.model_type!r}; supported: {', '.join(sorted(FAMILIES))}"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in _FIXED_ROPE:
        raise ModelUnsupported(
            f"{config.model_type}: rotary scaling {rope!r} depends on the length of the text, which a cache cannot "
            f"follow; supported: {', '.join(_FIXED_ROPE)}"
        )
    windows = {kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"}
    if windows:
        raise ModelUnsupported(
            f"{config.model_type}: layers of type {', '.join(sorted(windows))} are not supported, full attention is"
        )
    return family
