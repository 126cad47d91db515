"""What keeps a model of an unknown family from running here, as far as its config tells, and what running it would need.

In: the config of a transformers model. Out: sentences for the error that refuses it. A model without any of these may need
only a line in the table of families: `foreword try` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError


class Obstacle(NamedTuple):
    """A part of a model that the walk over the layers does not have."""

    what: str
    needs: str

    def __str__(self) -> str:
        return f"{self.what}; that needs {self.needs}"


class Sign(NamedTuple):
    """How a config shows an obstacle."""

    shows: Callable[[Any], bool]
    obstacle: Obstacle


def _has(*names: str) -> Callable[[Any], bool]:
    """Return whether a config sets one of these to more than zero or nothing."""
    return lambda config: any(bool(_read(config, name)) for name in names)


def _read(config: Any, name: str) -> Any:
    """Return a field of a config, or None. A config with values by layer refuses to tell one for all."""
    try:
        return getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return None


def _has_layers(*parts: str) -> Callable[[Any], bool]:
    """Return whether the type of a layer has one of these in its name."""

    def shows(config: Any) -> bool:
        listed = [*_listed(config, "layer_types"), *_listed(config, "layers_block_type"), *_listed(config, "block_types")]
        return any(part in str(kind) for kind in listed for part in parts)

    return shows


def _listed(config: Any, name: str) -> list[Any]:
    found = _read(config, name)
    return list(found) if isinstance(found, list | tuple) else []


_RECURRENT_LAYERS = ("linear", "mamba", "recurrent", "conv", "ssm", "kda")
_RECURRENT_FIELDS = (
    *("linear_num_key_heads", "mamba_d_state", "mamba_n_heads", "mamba_num_heads", "ssm_state_size", "conv_L_cache"),
    *("state_size", "lru_width", "rwkv_head_size", "attention_hidden_size"),
)


def _is_recurrent(config: Any) -> bool:
    return _has_layers(*_RECURRENT_LAYERS)(config) or _has(*_RECURRENT_FIELDS)(config)


_STATES = "a cache of states that a rejected draft can be taken back from"
_SIGNS = (
    Sign(_has("is_encoder_decoder"), Obstacle("it has an encoder and a decoder", "cross-attention to the encoder's rows")),
    Sign(
        _has("vision_config", "audio_config", "text_config"),
        Obstacle("it reads images or sound next to text", "a checkpoint of its text model alone"),
    ),
    Sign(_is_recurrent, Obstacle("some layers are recurrent (linear attention, state spaces or convolutions)", _STATES)),
    Sign(
        _has("kv_lora_rank"),
        Obstacle("its attention is latent (MLA, kv_lora_rank)", "a cache of latents, in which keys are wider than values"),
    ),
    Sign(_has("index_topk", "index_n_heads"), Obstacle("its rows choose the keys they read", "such a choice in trees")),
    Sign(
        _has_layers("chunked"),
        Obstacle("some layers attend within chunks (chunked_attention)", "masks by chunk of the position"),
    ),
    Sign(
        _has("is_heterogeneous", "num_global_key_value_heads", "global_head_dim", "block_configs"),
        Obstacle("its layers have different heads or widths", "a cache with a shape for each layer"),
    ),
    Sign(
        _has("num_kv_shared_layers", "num_kv_reuse_layers"),
        Obstacle("some layers share keys and values", "a cache that several layers read"),
    ),
    Sign(
        _has("hidden_size_per_layer_input", "altup_num_inputs"),
        Obstacle("its layers read inputs of their own besides the hidden rows", "these inputs in the walk"),
    ),
    Sign(_has("alibi"), Obstacle("scores depend on distance (ALiBi)", "that slope in attention")),
)


def generates(config: PreTrainedConfig) -> bool:
    """Return whether transformers has a causal language model of this type."""
    return type(config) in AutoModelForCausalLM._model_mapping


def obstacles(config: PreTrainedConfig) -> list[Obstacle]:
    """Return what a config shows that Foreword cannot run."""
    found = [sign.obstacle for sign in _SIGNS if sign.shows(config)]
    if not generates(config) and not found:
        found.append(Obstacle("transformers has no causal language model of this type", "one that generates text"))
    return found
