"""The target of vLLM, as far as a drafter needs it: sizes, and the rows of its head. It runs no passes here.

vLLM gives states after the final norm, so `norm` does nothing. Logits are those of the head alone, without the scale or the
cap of some families: these change no order of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.target import DraftHead
from foreword.errors import DrafterError


class HostTarget:
    """A target of which a drafter needs no weights. Sequences are on the host."""

    name = "the target"
    device = torch.device("cpu")


class ServedTarget:
    """A target that vLLM has loaded."""

    widened_from = None

    def __init__(self, vllm_config: Any, model: Any, compute_logits: Callable[[Tensor], Tensor]) -> None:
        config = vllm_config.model_config.hf_text_config
        self.name: str = vllm_config.model_config.model
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        weight = next(model.parameters())
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self._model, self._compute = model, compute_logits

    @property
    def embedding(self) -> Tensor:
        """[V, H]: the embedding of the tokens, without vLLM's padding."""
        weight: Tensor | None = getattr(getattr(getattr(self._model, "model", None), "embed_tokens", None), "weight", None)
        if weight is None:
            raise DrafterError(f"{self.name} has no weight model.embed_tokens in vLLM, which tells whose heads these are")
        return weight.detach()[: self.vocab_size]

    def norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def draft_head(self, hidden: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Return logits over all tokens, as vLLM computes them: [.., V]."""
        rows = (hidden if norm is None else norm(hidden)).flatten(0, -2)
        return self._compute(rows)[:, : self.vocab_size].unflatten(0, hidden.shape[:-1])

    def draft_head_of(self, tokens: Tensor) -> DraftHead:
        """Return the head for a draft vocabulary [W], with a copy of its rows."""
        head: Tensor | None = getattr(self._model.lm_head, "weight", None)
        if head is None or not head.is_floating_point():
            raise DrafterError(
                f"the head of {self.name} is quantised, so rows for a draft vocabulary cannot be copied; let "
                "`foreword draft-vocabulary FOLDER --cover 1` remove the draft vocabulary"
            )
        rows = head.detach()[tokens.to(head.device)].clone()
        return lambda hidden, norm=None: functional.linear(hidden if norm is None else norm(hidden), rows)
