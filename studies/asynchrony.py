"""Simulate `amusd`: when does it pay to draft while the target verifies? `python studies/asynchrony.py --help`.

In: the time of a pass of the target and of the draft model, and how often a draft token is right. `studies/overlap.py`
measures all three; without them a table of ratios is printed. Out: tokens per second relative to plain decoding, for
drafting and verifying in turns and at the same time. Draft tokens are right independently of one another; passes vary a
little; nothing else is random. Made results/asynchrony/simulated.json and results/asynchrony/paper.json.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Annotated

import typer

RATIOS = (0.02, 0.05, 0.1, 0.154, 0.2, 0.25, 0.3, 0.36, 0.4, 0.5, 0.7, 1.0)
TOKENS = 20_000  # of a simulated sequence


@dataclass(frozen=True)
class Times:
    """All in the same unit, usually milliseconds."""

    draft: float  # a pass of the draft model, one token
    target: float = 1.0  # a pass of the target over a draft
    plain: float = 1.0  # a pass of the target over one row
    hand_over: float = 0.0  # until a message reaches the other side
    right: float = 0.8  # how often a draft token is right if those before it were
    ahead: int = 16
    least: int = 1
    spread: float = 0.2  # relative variation of passes; without it, passes in lockstep would favour some ratios

    def pass_of(self, usual: float, rng: random.Random) -> float:
        return usual * rng.uniform(1 - self.spread, 1 + self.spread)


class SimulatedDraft:
    """A small model that keeps drafting: when each draft token is ready, and whether it is right."""

    def __init__(self, times: Times, rng: random.Random) -> None:
        self.times, self.rng = times, rng
        self.free = 0.0  # when its last pass ended
        self.ready: list[float] = []  # of tokens after the decided ones
        self.right: list[bool] = []

    def draft(self, until: float | None = None, count: int | None = None) -> None:
        """Draft until that time, or that many tokens; never more than `ahead`. A pass that began is finished."""
        while len(self.ready) < min(self.times.ahead, count or self.times.ahead) and (until is None or self.free < until):
            self.free += self.times.pass_of(self.times.draft, self.rng)
            self.ready.append(self.free)
            self.right.append(all(self.right[-1:]) and self.rng.random() < self.times.right)

    def decided(self, count: int, now: float) -> None:
        """Take in that the target decided `count` tokens at `now`. Draft tokens that agree with them stay."""
        idle = len(self.ready) >= self.times.ahead
        informed = now + self.times.hand_over
        agrees = len(self.right) >= count and self.right[count - 1]
        self.ready, self.right = (self.ready[count:], self.right[count:]) if agrees else ([], [])
        if idle or not agrees:
            self.free = max(self.free, informed)


def asynchronous(times: Times, seed: int = 0) -> float:
    """Return the time per token when drafting and verifying run at the same time."""
    rng = random.Random(seed)
    draft, now, decided = SimulatedDraft(times, rng), 0.0, 0
    while decided < TOKENS:
        if times.least:
            draft.draft(count=min(times.least, times.ahead))
            now = max(now, draft.ready[min(times.least, times.ahead) - 1] + times.hand_over)
        draft.draft(until=now)
        arrived = sum(ready + times.hand_over <= now for ready in draft.ready)
        now += times.pass_of(times.target, rng)
        draft.draft(until=now)  # drafting goes on during the pass
        kept = sum(draft.right[:arrived])
        draft.decided(kept + 1, now)
        decided += kept + 1
    return now / decided


def best_wait(times: Times) -> int:
    """Return how many draft tokens the target should wait for."""
    return min(range(min(times.ahead, 8) + 1), key=lambda least: asynchronous(replace(times, least=least)))


def in_turns(times: Times, look: int) -> float:
    """Return the time per token when `look` tokens are drafted and then verified."""
    return (look * times.draft + times.target) / tokens_per_round(times.right, look)


def tokens_per_round(right: float, look: int) -> float:
    return float(look + 1) if right == 1 else (1 - right ** (look + 1)) / (1 - right)


def best_in_turns(times: Times) -> tuple[float, int]:
    """Return the time per token with the best look-ahead, and that look-ahead."""
    return min((in_turns(times, look), look) for look in range(1, times.ahead + 1))


# The paper ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """Milliseconds per token with Llama 3.1 8B and Llama 3.2 1B, as the authors' repository lists them."""

    prompts: str
    plain: float
    turns: float  # a look-ahead of 5, both models on one GPU
    same_time: float  # on two

    @property
    def gain(self) -> float:
        return self.turns / self.same_time


PUBLISHED = (
    Published("HumanEval", 22.15, 17.88, 14.08),
    Published("MT-Bench", 21.89, 20.64, 16.75),
    Published("RefactorChat", 27.42, 19.18, 13.96),
)
BY_PARAMETERS, BY_LAYERS = 0.154, 0.5  # of the two models
LOOK = 5
UNBOUNDED = 64  # the authors' draft is not held back


def expected(one: Published, ratio: float) -> tuple[float, float]:
    """Return the acceptance rate that explains the published time of drafting in turns, and the simulated time per token
    of drafting at the same time with that rate. `ratio`: time of a draft pass over that of a target pass."""
    times = Times(ratio * one.plain, one.plain, one.plain, ahead=UNBOUNDED, least=2)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if in_turns(replace(times, right=middle), LOOK) > one.turns else (low, middle)
    return high, asynchronous(replace(times, right=high))


def mean_gain(ratio: float) -> float:
    """Return how much faster drafting at the same time is than in turns, averaged over the three sets of prompts."""
    return sum(one.turns / expected(one, ratio)[1] for one in PUBLISHED) / len(PUBLISHED)


# The command -------------------------------------------------------------------------------------------------------------

app = typer.Typer()


@app.command()
def asynchrony(
    draft_ms: Annotated[
        float | None, typer.Option(min=0, help="Milliseconds of a pass of the draft model. Without it: a table of ratios.")
    ] = None,
    target_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of a pass of the target over a draft.")] = 1.0,
    plain_ms: Annotated[float | None, typer.Option(min=0, help="Milliseconds of a pass of the target over one row.")] = None,
    hand_over_ms: Annotated[float, typer.Option(min=0, help="Milliseconds until a message reaches the other side.")] = 0.0,
    right: Annotated[float, typer.Option(min=0, max=1, help="How often a draft token is right.")] = 0.8,
    ahead: Annotated[int, typer.Option(min=1, help="Tokens that the draft model may run ahead.")] = 16,
    least: Annotated[int, typer.Option(min=0, help="Draft tokens that the target waits for.")] = 1,
    paper: Annotated[bool, typer.Option("--paper", help="Compare with the figures that the paper published.")] = False,
) -> None:
    """Simulate drafting and verifying in turns and at the same time."""
    if paper:
        return show_paper()
    drafts = [ratio * target_ms for ratio in RATIOS] if draft_ms is None else [draft_ms]
    print(f"a draft token is right {right:.2f} of the time; speed relative to plain decoding")
    print(f"{'draft/target':>12} {'in turns':>9} {'look-ahead':>11} {'same time':>10} {'gain':>6} {'best least':>11}")
    plain = target_ms if plain_ms is None else plain_ms
    for one in drafts:
        times = Times(one, target_ms, plain, hand_over_ms, right, ahead, least)
        (turns, look), same = best_in_turns(times), asynchronous(times)
        speeds = f"{plain / turns:9.2f} {look:11} {plain / same:10.2f} {turns / same:6.2f}"
        print(f"{one / target_ms:12.3f} {speeds} {best_wait(times):11}")


def show_paper() -> None:
    """Print the comparison for ratios from that of the models' parameters to that of their layers. A pass reads weights and
    launches layers, so the true ratio lies between the two."""
    print("milliseconds per token, Llama 3.1 8B with Llama 3.2 1B; in turns: a look-ahead of 5")
    print(f"published: {sum(one.gain for one in PUBLISHED) / len(PUBLISHED):.2f} times as fast at the same time as in turns")
    for ratio in (ratio for ratio in RATIOS if BY_PARAMETERS <= ratio <= BY_LAYERS):
        shown = []
        for one in PUBLISHED:
            right, same = expected(one, ratio)
            shown.append(f"{one.prompts} right {right:.2f}, {same:.2f} (was {one.same_time:.2f})")
        print(f"draft/target {ratio:.3f}: {mean_gain(ratio):.2f} expected; " + "; ".join(shown))


if __name__ == "__main__":
    app()
