"""What differs between model families. The walk itself is one; a family that is not listed is refused by name.

In: a causal language model of transformers, or its config. Out: how to take it apart (embedding, positions, half-layers,
norm, head), and each layer's `Sight`. What a whole layer does is left to transformers; here stands what lies around the
layers, and the two halves of one, for passes that skip the other half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from foreword.errors import ModelUnsupported
from foreword.model.plain_linears import is_plain_tensor
from foreword.ops.embeddings import embedding_rows


class Sight(NamedTuple):
    """How a layer's attention looks at the rows before it."""

    window: int = 0  # a row at position p sees keys at positions > p - window; 0: all of them
    softcap: float = 0.0  # scores are bent to stay between -softcap and softcap; 0: they are not
    table: str = ""  # which rotary table turns the layer, where the model has several


class Norms(NamedTuple):
    """The names of a layer's norms, around attention and around the MLP."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


BEFORE = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
AFTER = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
AROUND = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def embedded(table: nn.Module, tokens: Tensor) -> Tensor:
    """Rows of an embedding. One that is not torch's own, is hooked or learns is called as it stands."""
    if torch.is_grad_enabled() or type(table) is not nn.Embedding or table._forward_hooks:
        return table(tokens)
    if not is_plain_tensor(table.weight):
        return table(tokens)
    return embedding_rows(table.weight, tokens.flatten()).view(*tokens.shape, -1)


@dataclass(frozen=True)
class Family:
    """How to take a causal language model apart. In all of them a layer has two halves that add to the rows."""

    name: str
    norms: Norms = BEFORE
    windows: Literal["none", "all layers", "by type"] = "none"
    multiplied: bool = False  # embeddings, both halves and logits have a factor in the config
    caps_scores: bool = False
    caps_logits: bool = False
    table_by_type: bool = False  # layers with a window have rotary angles of their own
    fused: bool = False  # whether model/fused computes just these layers

    def embed(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        rows = embedded(model.model.embed_tokens, tokens)
        return rows * model.config.embedding_multiplier if self.multiplied else rows

    def positions(self, model: PreTrainedModel, hidden: Tensor, position: Tensor, table: str = "") -> Any:
        """What a layer wants to know of the positions [b, n]."""
        return model.model.rotary_emb(hidden, position, *([table] if self.table_by_type else []))

    def norm(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        return model.model.norm(hidden)

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        return self.after_head(model, model.lm_head(hidden))

    def after_head(self, model: PreTrainedModel, logits: Tensor) -> Tensor:
        """What some families do to the head's product."""
        config = model.config
        if self.multiplied:
            logits = logits / config.logits_scaling
        if self.caps_logits and config.final_logit_softcapping is not None:
            logits = (logits / config.final_logit_softcapping).tanh() * config.final_logit_softcapping
        return logits

    def layers(self, model: PreTrainedModel) -> nn.ModuleList:
        return model.model.layers

    def sight(self, layer: Any) -> Sight:
        """Asked of the layer, which knows its place in the model: a drafter's stack may hold copies in another order."""
        config, place = layer.self_attn.config, layer.self_attn.layer_idx
        kind = config.layer_types[place] if self.windows == "by type" else "full_attention"
        windowed = self.windows == "all layers" or kind == "sliding_attention"
        return Sight(
            window=(config.sliding_window or 0) if windowed else 0,
            softcap=(layer.self_attn.attn_logit_softcapping or 0.0) if self.caps_scores else 0.0,
            table=kind if self.table_by_type else "",
        )

    def softcap(self, config: PreTrainedConfig) -> float:
        return (config.attn_logit_softcapping or 0.0) if self.caps_scores else 0.0

    @property
    def stock_attention(self) -> str:
        """The attention that transformers offers for this family. Torch's own has no cap, so a family with caps lacks it."""
        return "eager" if self.caps_scores else "sdpa"

    def attention_half(self, layer: Any, hidden: Tensor, **options: Any) -> Tensor:
        rows = _normed(layer, self.norms.before_attention, hidden)
        out, _ = layer.self_attn(hidden_states=rows, attention_mask=None, **options)
        return self._joined(layer, hidden, _normed(layer, self.norms.after_attention, out))

    def mlp_half(self, layer: Any, hidden: Tensor) -> Tensor:
        out = layer.mlp(_normed(layer, self.norms.before_mlp, hidden))
        return self._joined(layer, hidden, _normed(layer, self.norms.after_mlp, out))

    def _joined(self, layer: Any, hidden: Tensor, out: Tensor) -> Tensor:
        return hidden + (out * layer.residual_multiplier if self.multiplied else out)


def _normed(layer: Any, name: str, rows: Tensor) -> Tensor:
    return getattr(layer, name)(rows) if name else rows


_LISTED = (
    Family("llama", fused=True),
    Family("mistral", windows="all layers", fused=True),
    Family("qwen2", windows="by type", fused=True),
    Family("qwen3", windows="by type", fused=True),
    Family("smollm3", windows="by type"),
    Family("phi3", windows="all layers"),
    Family("granite", multiplied=True),
    Family("olmo2", norms=AFTER),
    Family("gemma2", norms=AROUND, windows="by type", caps_scores=True, caps_logits=True),
    Family("gemma3_text", norms=AROUND, windows="by type", caps_logits=True, table_by_type=True),
)
FAMILIES = {family.name: family for family in _LISTED}

# Rotary frequencies that change with the length of the text would give a cached row another angle than a fresh one.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model, or an error that says what is supported."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelUnsupported(
            f"Foreword does not support models of type {config.model_type!r}; supported: {', '.join(sorted(FAMILIES))}"
        )
    _check_rotary(family, config)
    _check_layers(family, config)
    return family


def _check_rotary(family: Family, config: PreTrainedConfig) -> None:
    found = config.rope_parameters or {}
    for table in found.values() if family.table_by_type else [found]:
        rope = (table or {}).get("rope_type", "default")
        if rope not in _FIXED_ROPE:
            raise ModelUnsupported(
                f"{family.name}: rotary scaling {rope!r} is not supported, a cached row must keep its angle while the "
                f"text grows; supported: {', '.join(_FIXED_ROPE)}"
            )


def _check_layers(family: Family, config: PreTrainedConfig) -> None:
    kinds = set(getattr(config, "layer_types", None) or [])
    known = {"full_attention"} if family.windows == "none" else {"full_attention", "sliding_attention"}
    if kinds - known:
        raise ModelUnsupported(
            f"{family.name}: layers of type {', '.join(sorted(kinds - known))} are not supported; "
            f"supported: {', '.join(sorted(known))}"
        )
    if family.windows == "by type" and "sliding_attention" in kinds and not config.sliding_window:
        raise ModelUnsupported(
            f"{family.name}: some layers are of type sliding_attention, but sliding_window is "
            f"{config.sliding_window!r}; set it to the number of positions that a row sees"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelUnsupported(
            f"{family.name}: use_bidirectional_attention lets rows see later ones, so no text can be written with it; "
            "use a model with causal attention"
        )
