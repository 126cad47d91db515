"""Candidates that depend on the candidate before them, as torch operations.

In: the candidates of every place of a block, and how each candidate of the place before changes their scores. Out: the
likeliest candidates after each candidate, and those after the live nodes of a tree. On CUDA, ops/drafting/transitions.py
takes the place of the decorated functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated

MOST = 32  # candidates that the kernel compares
FULL = 1 - 1e-6  # a sum of probabilities that is rounded up leaves this little to other tokens


def transition_log_probs(log_probs: Tensor, changes: Tensor) -> Tensor:
    """Return the log-probabilities of candidates after each candidate of the place before: [.., P, K].

    log_probs [.., K]: without regard to the token before. changes [.., P, K]: what each of P tokens before adds to the
    scores. Tokens that are no candidates keep the share of the probability that they had.
    """
    changed = log_probs.unsqueeze(-2) + changes
    others = torch.log1p(-log_probs.exp().sum(-1).clamp(max=FULL))
    return changed - torch.logaddexp(changed.logsumexp(-1), others.unsqueeze(-1)).unsqueeze(-1)


def kernel_serves(changes: Tensor, *others: Tensor | int | None) -> bool:
    """Return whether the kernel can run: it computes in float32, and compares at most MOST candidates with each other."""
    return changes.dtype != torch.float64 and changes.shape[-1] <= MOST


@accelerated("drafting.transitions:likeliest_transitions", when=kernel_serves)
def likeliest_transitions(
    changes: Tensor, candidates: Tensor, log_probs: Tensor, temperature: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest candidates after each candidate of the place before, and their log-probabilities, best first:
    [b, B - 1, K, k] twice. Of equal ones the first comes first, and NaN comes last.

    changes [b, B - 1, K, K]: see `transition_log_probs`; they are divided by the temperature [b] where that is above 0.
    candidates, log_probs [b, B, K].
    """
    if temperature is not None:
        heat = temperature.view(-1, 1, 1, 1).to(changes.dtype)
        changes = changes / torch.where(heat > 0, heat, 1)
    found = transition_log_probs(log_probs[:, 1:], changes)
    found = found.where(found == found, -math.inf)
    values, order = found.sort(dim=-1, descending=True, stable=True)
    tokens = candidates[:, 1:].unsqueeze(2).expand(-1, -1, candidates.shape[2], -1)
    return tokens.gather(3, order[..., :k]), values[..., :k]


@accelerated("drafting.transitions:after_live_nodes")
def after_live_nodes(live: Tensor, before: Tensor, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidates after live nodes [b, w], and their log-probabilities: [b, w, k] twice.

    before [b, P]: candidates of the level that the nodes are of; each node's token is one of them. tokens, log_probs [b, P,
    k]: the candidates after each of them.
    """
    place = (live.unsqueeze(2) == before.unsqueeze(1)).to(torch.uint8).argmax(2)  # [b, w]
    index = place.unsqueeze(2).expand(-1, -1, tokens.shape[2])
    return tokens.gather(1, index), log_probs.gather(1, index)
