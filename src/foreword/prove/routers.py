"""Near-ties of routers: whether another choice of experts, as likely as rounding makes it, explains a difference.

In: a case that the scores of its tokens do not explain, and the model in float64 and as it ran. A router takes the experts
with the largest scores. It nearly ties where the last expert that it takes and the first that it leaves lie within twice the
run's error at these two. Each such choice is turned in a float64 pass, one by one and all together. If that brings the two
tokens level, or puts the other one first, the difference is a tie of the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foreword.model.families import experts_of

MOST_TURNED = 16  # choices that are turned one by one: those that lie closest
TOPK = (torch.topk, Tensor.topk)

Choice = tuple[int, int]  # which router of a pass, and which row


class Routers(TorchFunctionMode):
    """Inside this block: see the scores of every router, and let some rows take the next expert in place of their last."""

    def __init__(self, config: Any, turned: frozenset[Choice] = frozenset()) -> None:
        super().__init__()
        self.taken, self.experts = _sizes(config)
        self.turned = turned
        self.scores: list[Tensor] = []  # of each router: [n, E]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        # A router sees all rows as one list. What else takes the largest of some scores keeps groups of experts apart.
        if func in TOPK and args[0].dim() == 2 and args[0].shape[1] == self.experts:
            return func(self._seen(args[0]), *args[1:], **options)
        return func(*args, **options)

    def _seen(self, scores: Tensor) -> Tensor:
        router = len(self.scores)
        self.scores.append(scores.double())
        rows = [row for one, row in self.turned if one == router]
        if not rows:
            return scores
        last, _ = _at_the_edge(self.scores[-1], self.taken)
        turned = scores.clone()
        turned[rows, last[rows]] = -torch.inf
        return turned


def _sizes(config: Any) -> tuple[int, int]:
    """Return how many experts a row takes, and of how many."""
    taken, experts, _ = experts_of(config)
    assert taken is not None and experts is not None
    return taken, experts


def _at_the_edge(scores: Tensor, taken: int) -> tuple[Tensor, Tensor]:
    """Return the last expert that each row takes, and the first that it leaves: [n] each."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[:, taken - 1], order[:, taken]


def near_ties(config: Any, exact: list[Tensor], run: list[Tensor]) -> list[Choice]:
    """Return the choices of a pass that rounding may turn, the closest first. `exact`, `run`: the scores of each router in
    float64, and in the run's dtype."""
    taken, experts = _sizes(config)
    if taken == experts:
        return []
    found: dict[Choice, float] = {}
    for router, (scores, own) in enumerate(zip(exact, run, strict=True)):
        off = (own - scores).nan_to_num(0.0).abs()  # experts outside the chosen groups have no score
        edge = torch.stack(_at_the_edge(scores, taken), 1)
        error = off.gather(1, edge).amax(1).clamp(max=2 * float(off.amax(1).median()))  # more comes from an earlier choice
        last, following = scores.gather(1, edge).unbind(1)
        ratio = (last - following) / (2 * error)
        found |= {(router, row): float(ratio[row]) for row in (ratio <= 1).nonzero().flatten().tolist()}
    return sorted(found, key=lambda choice: found[choice])


def turned_passes(exact: Any, run: Any, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the float64 logits [V] after tokens [1, n] for other choices that rounding may make."""
    with Routers(exact.config) as ours:
        exact(input_ids=tokens, use_cache=False)
    with Routers(run.config) as theirs:
        run(input_ids=tokens, use_cache=False)
    choices = near_ties(exact.config, ours.scores, theirs.scores)
    several = [frozenset(choices)] if len(choices) > 1 else []
    for turned in (*(frozenset([choice]) for choice in choices[:MOST_TURNED]), *several):
        with Routers(exact.config, turned):
            logits: Tensor = exact(input_ids=tokens, use_cache=False).logits[0, -1]
        yield logits
