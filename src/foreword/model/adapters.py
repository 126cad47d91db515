"""Adapters that peft saved (LoRA and its relatives): load the base model and merge the adapter into it.

In: the folder of an adapter, as `hub.resolve` gives it. Out: the folders of its base model and its tokenizer, and a plain
transformers model with the adapter merged, as fast as any other. Weights are merged in float32, whatever the model's dtype,
so that the merged weights do not depend on it.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from foreword.errors import InputError, ModelCorrupt, ModelNotFound, ModelUnsupported
from foreword.files import BadJSON, read_json
from foreword.hub.resolve import ADAPTER, from_hub, is_adapter, resolve

BASE = "base_model_name_or_path"


def fetch_base(folder: Path, token: str | bool | None) -> None:
    """Fetch the base model of an adapter's folder. If it is on the hub, `token` may be needed once."""
    if is_adapter(folder):
        base_folder(folder, token)


def base_folder(folder: Path, token: str | bool | None = None) -> Path:
    """Return the folder of the model that an adapter was trained on. What was fetched before is not fetched again."""
    config = _config(folder)
    base, revision = config[BASE], config.get("revision")
    try:
        found = resolve(base) if os.path.exists(base) else _fetched(base, revision) or resolve(base, revision, token)
    except ModelNotFound as error:
        problem = f"{folder} is an adapter for {base}, which was not found ({error})"
        raise ModelNotFound(f"{problem}; put the right place into {BASE} of its {ADAPTER}") from error
    if is_adapter(found):
        raise ModelUnsupported(f"{folder} is an adapter for {base}, which is an adapter itself; merge that one first")
    return found


def _fetched(base: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the local hub cache, or None. It needs no token."""
    try:
        return from_hub(base, revision, local_files_only=True)
    except ModelNotFound:
        return None


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizer of a model folder: an adapter may have its own, or uses its base model's."""
    own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    return base_folder(folder) if is_adapter(folder) and not own else folder


def merged(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return the base model with the adapter merged into its weights."""
    peft = _peft(folder)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        refuse_virtual_tokens(str(folder), config)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # peft would fill them with zeros
            model = peft.PeftModel.from_pretrained(base, str(folder), config=config, is_trainable=False)
        whole: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    except ModelUnsupported:
        raise
    except Exception as error:  # peft, safetensors and torch each raise errors of their own for what does not fit
        first_lines = " ".join(str(error).split("\n")[:2])[:300]  # torch lists every tensor
        problem = f"the adapter in {folder} cannot be merged into {base.config.name_or_path}: {first_lines}"
        raise ModelCorrupt(
            f"{problem}; save it again, or load both with peft and hand the model to foreword.wrap"
        ) from error
    whole.config.name_or_path = str(folder)  # these are not the weights of the base
    return whole.eval().requires_grad_(False)


def refuse_virtual_tokens(name: str, adapter: Any) -> None:
    if getattr(adapter, "is_prompt_learning", False):
        raise ModelUnsupported(
            f"peft adapter {name!r} ({adapter.peft_type}) adds virtual tokens to the prompt, which Foreword does not "
            "support; use a weight adapter such as LoRA, or merge it"
        )


def _peft(folder: Path) -> Any:
    try:
        import peft  # noqa: PLC0415  optional
    except ImportError as error:
        raise InputError(f"{folder} is an adapter, which needs the package peft: pip install 'foreword[lora]'") from error
    return peft


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / ADAPTER)
        if not (isinstance(config[BASE], str) and config[BASE]):
            raise KeyError(BASE)
    except (OSError, BadJSON, LookupError, TypeError) as error:
        raise ModelCorrupt(
            f"{folder / ADAPTER} does not name a model in {BASE} ({error}); save the adapter again"
        ) from error
    return dict(config)
