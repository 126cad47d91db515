"""Looped models: a group of Llama layers that is applied several times. They are decoders that share parameters.

In: a config that says how often the group is applied (`repeats`), and the weights of the group. Out: a causal language model
of transformers. Importing this module registers it, so that `AutoModelForCausalLM` loads such a folder and its own
`generate` works. Every application of a layer has keys and values of its own, so a cache has `num_hidden_layers` layers: the
layers of the group times `repeats`.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from foreword.errors import InputError, ModelUnsupported
from foreword.model.linears import unpacked

LOOPED = "foreword_looped"
Start = Literal["average", "first", "spread"]
NOT_SHARED = ("model_type", "architectures", "transformers_version")  # entries of a config that name the class


class LoopedConfig(LlamaConfig):
    """The config of a Llama with one more number. `num_hidden_layers` is the depth, and `repeats` divides it."""

    model_type = LOOPED
    repeats: int = 1

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        if type(self.repeats) is not int or self.repeats < 1 or self.num_hidden_layers % self.repeats:
            raise ValueError(
                f"repeats is {self.repeats!r} and num_hidden_layers is {self.num_hidden_layers}; a looped model applies its "
                "layers a whole number of times: num_hidden_layers must be a multiple of repeats"
            )

    @property
    def group_layers(self) -> int:
        """How many layers the group has."""
        return self.num_hidden_layers // self.repeats


class RepeatCache:
    """The cache of transformers as one repeat of the group sees it: layer i is layer `first + i` of the cache."""

    def __init__(self, cache: Any, first: int) -> None:
        self.cache, self.first = cache, first

    def update(self, keys: Tensor, values: Tensor, layer: int, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys, values, self.first + layer, *options, **more)


class LoopedModel(LlamaPreTrainedModel):
    """Embedding, group and norm."""

    config_class = LoopedConfig

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(config.group_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            before = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + before).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        shared = options | {"attention_mask": mask, "position_ids": position_ids}
        shared["position_embeddings"] = self.rotary_emb(hidden, position_ids=position_ids)
        for repeat in range(self.config.repeats):
            first = repeat * len(self.layers)
            cache = None if past_key_values is None else RepeatCache(past_key_values, first)
            for layer in self.layers:
                hidden = layer(hidden, past_key_values=cache, **shared)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


class LoopedForCausalLM(LlamaForCausalLM):
    """The same with a head. Everything but the layers is that of a Llama."""

    config_class = LoopedConfig

    def __init__(self, config: LoopedConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # a Llama's own would build all layers, repeats included
        self.model = LoopedModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(LOOPED, LoopedConfig)
AutoModelForCausalLM.register(LoopedConfig, LoopedForCausalLM)


# Made from another model -------------------------------------------------------------------------------------------------


def check_loopable(config: Any, group: int, repeats: int) -> None:
    """Refuse a model that no looped model can be made from, and a group that does not fit it."""
    if config.model_type != "llama":
        raise ModelUnsupported(
            f"a looped model is made of the layers of a Llama, and this model is of type {config.model_type!r}; give one of "
            "type 'llama'"
        )
    if not 1 <= group <= config.num_hidden_layers:
        raise InputError(
            f"group is {group}, but the model has {config.num_hidden_layers} layers; choose from 1 to "
            f"{config.num_hidden_layers}"
        )
    if repeats < 1:
        raise InputError(f"repeats is {repeats}; the group is applied 1 or more times")


@torch.no_grad()
def group_of(layers: nn.ModuleList, group: int, start: Start) -> nn.ModuleList:
    """Return copies of layers that a group starts from and that can be trained: the first layers ("first"), layers at even
    distances from the first to the last ("spread"), or means of layers i, i + group, i + 2 * group, ... ("average")."""
    apart = (len(layers) - 1) / max(group - 1, 1) if start == "spread" else 1
    made = nn.ModuleList(unpacked(layers[round(apart * index)]) for index in range(group)).requires_grad_(True)
    if start != "average":
        return made
    for index, layer in enumerate(made):
        alike = layers[index::group]
        sums = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in layer.named_parameters()}
        for one in alike:
            for name, weight in unpacked(one).named_parameters():
                sums[name] += weight
        for name, weight in layer.named_parameters():
            weight.copy_(sums[name] / len(alike))
    return made


def looped_config(config: LlamaConfig, group: int, repeats: int) -> LoopedConfig:
    """Return the config of a looped model with the sizes of another model."""
    own = {name: value for name, value in config.to_dict().items() if name not in NOT_SHARED}
    return LoopedConfig(**own | {"num_hidden_layers": group * repeats, "repeats": repeats})


def looped_model(original: PreTrainedModel, layers: nn.ModuleList, norm: Tensor, head: Tensor, repeats: int) -> Any:
    """Return a looped model in the dtype of the original and with its embedding. `layers`: the group. `norm` [H]: the weight
    of the final norm. `head` [V, H]: the weight of the head."""
    config = looped_config(original.config, len(layers), repeats)
    with torch.device("meta"):  # without weights, which are set below
        made: Any = LoopedForCausalLM(config)
    dtype, device = original.dtype, original.device
    embedding = original.get_input_embeddings().weight.detach()
    state = {f"model.layers.{name}": weight.detach() for name, weight in layers.state_dict().items()}
    state |= {"model.embed_tokens.weight": embedding, "model.norm.weight": norm.detach(), "lm_head.weight": head.detach()}
    made.load_state_dict({name: weight.to(device, dtype) for name, weight in state.items()}, assign=True)
    made.model.rotary_emb = copy.deepcopy(original.model.rotary_emb)  # its angles are no part of the weights
    made.tie_weights()
    made.generation_config = copy.deepcopy(original.generation_config)
    return made.eval().requires_grad_(False)


def cut_after_first_repeat(model: Any) -> None:
    """Make a looped model the model that its first exit is: the group is applied once, then come norm and head."""
    model.config.update({"num_hidden_layers": model.config.group_layers, "repeats": 1})
