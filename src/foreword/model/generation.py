"""Sampling defaults from a model's generation_config.json, for options that a request does not set.

The rule is vLLM's: temperature, top_k, top_p, min_p and repetition_penalty are used if the file sets them. `do_sample:
false` is greedy, and `do_sample: true` without a temperature is a temperature of 1, as in transformers.
"""

from __future__ import annotations

import warnings
from typing import Any

from foreword.core.sampling import Sampling
from foreword.errors import ForewordWarning, InputError

USED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Options that would change the output and are not supported here, with the values that change nothing.
IGNORED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1, 0),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "watermarking_config": (),
}


def sampling_defaults(hf: Any) -> dict[str, Any]:
    """Return the defaults by the names of `Sampling`. Invalid and unsupported options are ignored with a warning."""
    config = getattr(hf, "generation_config", None)
    values = {name: getattr(config, name, None) for name in (*USED, *IGNORED, "do_sample")}
    ignored = {name: values[name] for name, neutral in IGNORED.items() if values[name] not in (None, *neutral)}
    found: dict[str, Any] = {}
    for name in USED:
        value: Any = 0 if name == "top_k" and values[name] == -1 else values[name]
        if value is None:
            continue
        try:
            Sampling(**{name: value})
            found[name] = value
        except InputError:
            ignored[name] = value
    if values["do_sample"] is False:
        found["temperature"] = 0.0
    elif values["do_sample"] is True:
        found.setdefault("temperature", 1.0)
    if ignored:
        options = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        warnings.warn(
            f"the model's generation_config.json asks for {options:.200}, which Foreword does not support: outputs may "
            "differ from transformers'",
            ForewordWarning,
            stacklevel=3,
        )
    return found
