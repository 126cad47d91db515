"""The model families that Foreword supports, and what is refused by name: other families, and parts it would get wrong.

In: the config of a transformers model. Out: its `Family`. A line of the table says all that the walk over the layers has to
know. `foreword models --families` and the table in docs/models.md are printed from it.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from foreword.errors import ModelUnsupported
from foreword.model.family import GLM4_NORM, PARALLEL, POST_NORM, SANDWICH_NORM, Family, Norms, Parts
from foreword.model.looped import LOOPED
from foreword.model.obstacles import generates, obstacles

_LISTED = (
    Family("llama", "Llama 2 and 3, SmolLM2, TinyLlama", fused=True),
    Family("mistral", "Mistral 7B", "a window over all layers, where the config has one", windows="all layers", fused=True),
    Family("qwen2", "Qwen2, Qwen2.5", "biases on q, k and v; windows by layer", windows="by type", fused=True),
    Family("qwen3", "Qwen3 (dense)", "norms on q and k; windows by layer", windows="by type", fused=True),
    Family(
        "smollm3",
        "SmolLM3",
        "layers without rotary positions; windows by layer",
        windows="by type",
    ),
    Family(
        "phi3",
        "Phi-3, Phi-4",
        "q, k, v and gate, up are one product each; part of a head is rotated; a window over all layers",
        windows="all layers",
    ),
    Family(
        "granite",
        "Granite 3 (dense)",
        "factors on embeddings, scores, both halves and logits",
        has_multipliers=True,
    ),
    Family("olmo2", "OLMo 2", "norms after the halves; norms over all heads of q and of k", norms=POST_NORM),
    Family(
        "olmo3",
        "OLMo 3",
        "norms after the halves; windows, with rotary angles of their own",
        norms=POST_NORM,
        windows="by type",
        rotary_by_type=True,
    ),
    Family("gemma", "Gemma", "embeddings are scaled; norms multiply by one plus the weight"),
    Family(
        "gemma2",
        "Gemma 2",
        "norms around both halves; caps on scores and on logits; windows on every other layer",
        norms=SANDWICH_NORM,
        windows="by type",
        caps_scores=True,
        caps_logits=True,
    ),
    Family(
        "gemma3_text",
        "Gemma 3 (text: 270M, 1B)",
        "norms around both halves and on q and k; windows, with rotary angles of their own",
        norms=SANDWICH_NORM,
        windows="by type",
        caps_logits=True,
        rotary_by_type=True,
    ),
    Family("glm", "GLM-4 9B", "part of a head is rotated"),
    Family("glm4", "GLM-4-0414", "norms around both halves; part of a head is rotated", norms=GLM4_NORM),
    Family(
        "exaone4",
        "EXAONE 4.0",
        "norms after the halves and on q and k; windows by layer; the other layers have no rotary positions",
        norms=POST_NORM,
        windows="by type",
    ),
    Family(
        "cohere",
        "Command R, Command R+",
        "both halves read the same rows; layer norms; a factor on logits",
        norms=PARALLEL,
        scales_logits=True,
    ),
    Family(
        "cohere2",
        "Command R7B, Command A, Aya",
        "both halves read the same rows; a factor on logits; windows by layer, the other layers have no rotary positions",
        norms=PARALLEL,
        windows="by type",
        scales_logits=True,
    ),
    Family("seed_oss", "Seed-OSS 36B", "biases on q, k and v"),
    Family("hunyuan_v1_dense", "Hunyuan 0.5B to 7B", "norms on q and k, after the rotation"),
    Family("ernie4_5", "ERNIE 4.5 0.3B", "pairs of neighbouring numbers are rotated"),
    Family("arcee", "AFM 4.5B", "an MLP without a gate"),
    Family("ministral", "Ministral 8B", "windows by layer", windows="by type"),
    Family(
        "apertus",
        "Apertus 8B, 70B",
        "norms on q and k; an MLP without a gate, with an activation of its own",
        norms=Norms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    ),
    Family(
        "ministral3",
        "Ministral 3 (text)",
        "queries grow with their position; a window over all layers, where the config has one",
        windows="all layers",
    ),
    Family(
        "starcoder2",
        "StarCoder2",
        "biases; layer norms; an MLP without a gate; a window over all layers",
        windows="all layers",
    ),
    Family(
        "phi",
        "Phi-1.5, Phi-2",
        "both halves read the same rows; layer norms; biases, also on the head; part of a head is rotated",
        norms=PARALLEL,
        final_norm="final_layernorm",
    ),
    Family(
        "qwen2_moe",
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        "experts, and one that all rows share; windows by layer",
        windows="by type",
        has_experts=True,
    ),
    Family(
        "qwen3_moe",
        "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        "experts; norms on q and k",
        windows="all layers",
        has_experts=True,
    ),
    Family(
        "mixtral",
        "Mixtral 8x7B, 8x22B",
        "experts; a window over all layers, where the config has one",
        windows="all layers",
        has_experts=True,
    ),
    Family("olmoe", "OLMoE 1B-7B", "experts; norms over all heads of q and of k", has_experts=True),
    Family(
        "granitemoe",
        "Granite 3 MoE",
        "experts; factors on embeddings, scores, both halves and logits",
        mlp="block_sparse_moe",
        has_experts=True,
        has_multipliers=True,
    ),
    Family(
        "glm4_moe",
        "GLM-4.5, GLM-4.5-Air, GLM-4.6",
        "experts, and one that all rows share; the first layers have none; part of a head is rotated",
        has_experts=True,
    ),
    Family(
        "ernie4_5_moe",
        "ERNIE 4.5 21B-A3B, 300B-A47B",
        "experts, and some that all rows share; pairs of neighbouring numbers are rotated",
        has_experts=True,
    ),
    Family(
        "minimax_m2",
        "MiniMax-M2",
        "experts; norms over all heads of q and of k; part of a head is rotated",
        has_experts=True,
    ),
    Family(
        "gpt_oss",
        "gpt-oss-20b, gpt-oss-120b (dequantised)",
        "experts; attention sinks; windows on every other layer",
        windows="by type",
        has_experts=True,
        has_sinks=True,
    ),
    Family(
        "gpt_neox",
        "Pythia, GPT-NeoX 20B, Dolly 2",
        "both halves read the same rows, each after a norm of its own; layer norms; biases; part of a head is rotated",
        parts=Parts("gpt_neox", embedding="embed_in", attention="attention"),
        final_norm="final_layer_norm",
    ),
    Family(
        "gpt2",
        "GPT-2, DistilGPT-2, Cerebras-GPT",
        "learned positions; layer norms; biases; q, k and v are one product",
        norms=Norms(before_attention="ln_1", before_mlp="ln_2"),
        parts=Parts("transformer", layers="h", embedding="wte", attention="attn", rotary="", positions="wpe"),
        final_norm="ln_f",
    ),
    Family(
        "opt",
        "OPT 125M, 1.3B to 66B",
        "learned positions; layer norms; biases; an MLP without a gate",
        norms=Norms(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm"),
        parts=Parts("model.decoder", rotary="", positions="embed_positions"),
        mlp="fc1 activation_fn fc2",
        final_norm="final_layer_norm",
    ),
    Family(
        LOOPED,
        "models that `foreword train looped` makes",
        "the layers of a Llama, applied several times ([speed](methods/speed.md))",
        loops=True,
        fused=True,
    ),
)
FAMILIES = {family.name: family for family in _LISTED}

SLOW = "slow=True (--slow) runs it by the forward pass of transformers alone, with the same outputs as plain decoding"

# Rotary frequencies that change with the length of the sequence would give a cached row another angle than a new one.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a model, or raise an error that says what is supported."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelUnsupported(f"Foreword does not support models of type {config.model_type!r}: {_why_not(config)}")
    _check_rotary(family, config)
    _check_layers(family, config)
    _check_parts(family, config)
    _check_experts(family, config)
    return family


def _why_not(config: PreTrainedConfig) -> str:
    """Say what stands in the way of an unknown family, and name those that are supported."""
    found = "; ".join(map(str, obstacles(config)))
    found = found or "its config shows no reason, and `foreword try FOLDER` says whether a line of the table would do"
    part = getattr(getattr(config, "text_config", None), "model_type", None)
    of_text = f" (its text model is {part!r}, which is supported)" if part in FAMILIES else ""
    slow = f"; {SLOW}" if generates(config) else ""
    return f"{found}{of_text}; supported: {', '.join(sorted(FAMILIES))}{slow}"


def _check_rotary(family: Family, config: PreTrainedConfig) -> None:
    found = getattr(config, "rope_parameters", None) or {}
    for table in found.values() if family.rotary_by_type else [found]:
        rope = (table or {}).get("rope_type", "default")
        if rope not in _FIXED_ROPE:
            raise ModelUnsupported(
                f"{family.name}: rotary scaling {rope!r} is not supported, a cached row must keep its angle while the "
                f"sequence grows; supported: {', '.join(_FIXED_ROPE)}"
            )


def _check_layers(family: Family, config: PreTrainedConfig) -> None:
    if config.is_heterogeneous:
        raise ModelUnsupported(
            f"{family.name}: its layers have different values of {', '.join(sorted(config.per_layer_attributes))}; Foreword "
            f"runs layers of one shape; {SLOW}"
        )
    kinds = set(getattr(config, "layer_types", None) or [])
    known = {"full_attention"} if family.windows == "none" else {"full_attention", "sliding_attention"}
    if kinds - known:
        raise ModelUnsupported(
            f"{family.name}: layers of type {', '.join(sorted(kinds - known))} are not supported; "
            f"supported: {', '.join(sorted(known))}; {SLOW}"
        )
    if family.windows == "by type" and "sliding_attention" in kinds and not config.sliding_window:
        raise ModelUnsupported(
            f"{family.name}: some layers are of type sliding_attention, but sliding_window is "
            f"{config.sliding_window!r}; set it to the number of positions that a row attends to"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelUnsupported(
            f"{family.name}: use_bidirectional_attention lets rows attend to later ones, so the model cannot generate; "
            "use a model with causal attention"
        )


def _check_parts(family: Family, config: Any) -> None:
    """Refuse variants of a family that have other parts."""
    inner = getattr(config, "word_embed_proj_dim", config.hidden_size)
    other = {
        f"its embeddings are {inner} wide and its rows {config.hidden_size}": inner != config.hidden_size,
        "its norms come after the halves (do_layer_norm_before is false)": not getattr(config, "do_layer_norm_before", True),
        "it has no last norm": getattr(config, "_remove_final_layer_norm", False),
        "its layers attend to an encoder too": getattr(config, "add_cross_attention", False),
    }
    if found := [what for what, shows in other.items() if shows]:
        raise ModelUnsupported(f"{family.name}: {'; '.join(found)}, unlike other models of the family; {SLOW}")


def _check_experts(family: Family, config: PreTrainedConfig) -> None:
    if not family.has_experts:
        return
    chosen, count, _ = experts_of(config)
    if not (isinstance(count, int) and isinstance(chosen, int) and 1 <= chosen <= count):
        raise ModelUnsupported(
            f"{family.name}: a row is to use {chosen!r} experts of {count!r}; correct num_experts_per_tok or the number of "
            "experts in config.json"
        )


def experts_of(config: Any) -> list[int | None]:
    """Return how many experts a row uses, of how many, and how wide they are."""
    # The classes of transformers name these differently, and map the first two names to their own.
    count = next((getattr(config, name) for name in ("num_experts", "num_local_experts") if hasattr(config, name)), None)
    return [config.num_experts_per_tok, count, getattr(config, "moe_intermediate_size", None)]
