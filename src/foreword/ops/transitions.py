"""Candidates that depend on the candidate before them, as torch operations.

In: for every place of a block, its candidates and how likely each is after each candidate of the place before. Out: the
candidates after the live nodes of a tree. On CUDA, ops/drafting/transitions.py takes the place of `after_live_nodes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated


def transition_log_probs(log_probs: Tensor, changes: Tensor) -> Tensor:
    """Return the log-probabilities of candidates after each candidate of the place before: [.., P, K].

    log_probs [.., K]: without regard to the token before. changes [.., P, K]: what each of P tokens before adds to the
    scores. Tokens that are no candidates keep the share of the probability that they had.
    """
    changed = log_probs.unsqueeze(-2) + changes
    others = torch.log1p(-log_probs.exp().sum(-1).clamp(max=1 - 1e-6))
    return changed - torch.logaddexp(changed.logsumexp(-1), others.unsqueeze(-1)).unsqueeze(-1)


@accelerated("drafting.transitions:after_live_nodes")
def after_live_nodes(live: Tensor, before: Tensor, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidates after live nodes [b, w], and their log-probabilities: [b, w, k] twice.

    before [b, P]: candidates of the level that the nodes are of; each node's token is one of them. tokens, log_probs [b, P,
    k]: the candidates after each of them.
    """
    place = (live.unsqueeze(2) == before.unsqueeze(1)).to(torch.uint8).argmax(2)  # [b, w]
    index = place.unsqueeze(2).expand(-1, -1, tokens.shape[2])
    return tokens.gather(1, index), log_probs.gather(1, index)
