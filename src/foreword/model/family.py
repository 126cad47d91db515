"""A model family: what comes before and after its layers, and the two halves of a layer, for passes that skip one of them.

In: a causal language model of transformers. Out: its parts (embedding, positions, half-layers, norm, head), and each
layer's `AttentionSpec`. Transformers computes whole layers. `families.py` lists the families.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from foreword.model.plain_linears import is_plain_tensor
from foreword.ops.embeddings import embedding_rows


class AttentionSpec(NamedTuple):
    """How a layer attends to the rows before it."""

    window: int = 0  # a row at position p attends to keys at positions > p - window; 0: to all of them
    softcap: float = 0.0  # scores are capped to lie between -softcap and softcap; 0: no cap
    rotary_table: str = ""  # the layer's rotary table, if the model has several
    sinks: bool = False  # each head has a learned score that takes part in the softmax and has no value


class Norms(NamedTuple):
    """The names of a layer's norms, around attention and around the MLP."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


PRE_NORM = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
PARALLEL = Norms(before_attention="input_layernorm", before_mlp="input_layernorm")  # both halves read the same rows
POST_NORM = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORM = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
GLM4_NORM = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

Windows = Literal["none", "all layers", "by type"]


class Parts(NamedTuple):
    """The names of a model's parts."""

    inner: str = "model"  # holds everything but the head
    layers: str = "layers"
    embedding: str = "embed_tokens"
    attention: str = "self_attn"
    rotary: str = "rotary_emb"
    positions: str = ""  # a table of learned positions, which are added to the rows that enter the first layer


def key_heads(config: Any) -> int:
    """Return how many heads the keys of a layer have."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def embedded(table: nn.Module, tokens: Tensor) -> Tensor:
    """Return rows of an embedding. A table that is not torch's own, has hooks or is being trained is called as a module."""
    if torch.is_grad_enabled() or type(table) is not nn.Embedding or table._forward_hooks:
        return table(tokens)
    if not is_plain_tensor(table.weight):
        return table(tokens)
    return embedding_rows(table.weight, tokens.flatten()).view(*tokens.shape, -1)


@dataclass(frozen=True)
class Family:
    """The parts of a causal language model. In all families a layer has two halves that each add to the residual stream."""

    name: str
    models: str = ""  # some that people run
    special: str = ""  # what differs from a Llama
    norms: Norms = PRE_NORM
    parts: Parts = Parts()
    mlp: str = "mlp"  # the name of a layer's second half, or the names of its modules in their order
    final_norm: str = "norm"
    windows: Windows = "none"
    has_experts: bool = False  # some second halves are mixtures of experts
    has_multipliers: bool = False  # embeddings, both halves and logits have a factor in the config
    scales_logits: bool = False  # only the logits have one
    has_sinks: bool = False
    caps_scores: bool = False
    caps_logits: bool = False
    rotary_by_type: bool = False  # layers with a window have rotary angles of their own
    loops: bool = False  # all layers are applied several times: `repeats` in the config
    fused: bool = False  # whether model/fused can compute these layers

    @property
    def layers_run_by(self) -> str:
        """What computes the layers of a model that `load` reads."""
        return "our kernels" if self.fused else "transformers, with our attention"

    @property
    def ties(self) -> str:
        """Where outputs in bfloat16 may differ from plain decoding. In float32 and float64 they are the same."""
        return "near-ties of tokens and of experts" if self.has_experts else "near-ties of tokens"

    def inner(self, model: PreTrainedModel) -> Any:
        """Return what holds the layers of a model and what is around them, but not its head."""
        return attrgetter(self.parts.inner)(model)

    def embed(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        rows = embedded(getattr(self.inner(model), self.parts.embedding), tokens)
        return rows * model.config.embedding_multiplier if self.has_multipliers else rows

    def positions(self, model: PreTrainedModel, hidden: Tensor, position: Tensor, table: str = "") -> Any:
        """Return the rotary angles of positions [b, n], as a layer takes them. Where nothing is rotated, they are zero."""
        if not self.parts.rotary:
            config: Any = model.config
            width = config.hidden_size // config.num_attention_heads
            none = hidden.new_zeros(*position.shape, width)
            return none + 1, none
        return getattr(self.inner(model), self.parts.rotary)(hidden, position, *([table] if self.rotary_by_type else []))

    def placed(self, model: PreTrainedModel, hidden: Tensor, position: Tensor) -> Tensor:
        """Add the learned positions [b, n] to rows that enter the first layer, in families that have them. Padding may lie
        beyond the last one."""
        if not self.parts.positions:
            return hidden
        table = getattr(self.inner(model), self.parts.positions)
        place = position + getattr(table, "offset", 0)
        return hidden + functional.embedding(place.clamp(max=table.num_embeddings - 1), table.weight)

    def norm(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        return getattr(self.inner(model), self.final_norm)(hidden)

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        return self.after_head(model, model.lm_head(hidden))

    def after_head(self, model: PreTrainedModel, logits: Tensor) -> Tensor:
        """Scale and cap the logits of the head, in families that do."""
        config = model.config
        if self.has_multipliers:
            logits = logits / config.logits_scaling
        if self.scales_logits:
            logits = logits * config.logit_scale
        if self.caps_logits and config.final_logit_softcapping is not None:
            logits = (logits / config.final_logit_softcapping).tanh() * config.final_logit_softcapping
        return logits

    def layers(self, model: PreTrainedModel) -> nn.ModuleList:
        """Return the layers in the order in which they are applied; a looped model's come several times."""
        own, repeats = getattr(self.inner(model), self.parts.layers), self.repeats(model.config)
        return own if repeats == 1 else nn.ModuleList([*own] * repeats)

    def repeats(self, config: PreTrainedConfig) -> int:
        """Return how often a model's layers are applied."""
        return config.repeats if self.loops else 1

    def attention_spec(self, layer: Any) -> AttentionSpec:
        """Return the attention of a layer. It depends on the index that the layer itself has: a drafter's stack may hold
        copies in another order."""
        attention = self.attention(layer)
        config, index = attention.config, attention.layer_idx
        kind = config.layer_types[index] if self.windows == "by type" else "full_attention"
        windowed = self.windows == "all layers" or kind == "sliding_attention"
        return AttentionSpec(
            window=(config.sliding_window or 0) if windowed else 0,
            softcap=(attention.attn_logit_softcapping or 0.0) if self.caps_scores else 0.0,
            rotary_table=kind if self.rotary_by_type else "",
            sinks=self.has_sinks,
        )

    def softcap(self, config: PreTrainedConfig) -> float:
        return (config.attn_logit_softcapping or 0.0) if self.caps_scores else 0.0

    @property
    def stock_attention(self) -> str:
        """The attention to load a model of this family with. Torch's own has neither caps nor sinks."""
        return "eager" if self.caps_scores or self.has_sinks else "sdpa"

    def attention(self, layer: Any) -> Any:
        return getattr(layer, self.parts.attention)

    def mlp_modules(self, layer: Any) -> list[nn.Module]:
        """Return the modules of a layer's second half in their order; none if it was dropped."""
        return [getattr(layer, name) for name in self.mlp.split() if hasattr(layer, name)]

    def attention_half(self, layer: Any, hidden: Tensor, **options: Any) -> Tensor:
        rows = _normed(layer, self.norms.before_attention, hidden)
        out, _ = self.attention(layer)(hidden_states=rows, attention_mask=None, **options)
        return self._add(layer, hidden, _normed(layer, self.norms.after_attention, out))

    def mlp_half(self, layer: Any, hidden: Tensor) -> Tensor:
        out: Any = _normed(layer, self.norms.before_mlp, hidden)
        for module in self.mlp_modules(layer):
            out = module(out)
        if isinstance(out, tuple):  # gpt_oss also returns the scores of its experts
            out = out[0]
        return self._add(layer, hidden, _normed(layer, self.norms.after_mlp, out))

    def drop_mlp(self, layer: Any) -> None:
        """Remove the MLP of a layer and the norms around it. Only its attention half can be run from then on."""
        for name in {*self.mlp.split(), self.norms.before_mlp, self.norms.after_mlp} - {self.norms.before_attention, ""}:
            delattr(layer, name)

    def _add(self, layer: Any, hidden: Tensor, out: Tensor) -> Tensor:
        """Add the output of a half-layer to the residual stream."""
        return hidden + (out * layer.residual_multiplier if self.has_multipliers else out)


def _normed(layer: Any, name: str, rows: Tensor) -> Tensor:
    return getattr(layer, name)(rows) if name else rows
