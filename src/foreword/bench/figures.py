"""From runs of blocks to figures: timings, the median of the repeats, and table rows with their confidence.

Speeds are tokens over wall seconds, pooled over prompts. A speed-up is over the base on the same blocks, at the same batch
size and temperature. Its interval is a 95% bootstrap over the prompts. There is no speed-up if an output differs from the
base's for any reason but a tie. A speed-up that exceeds the tokens per round is noise. A block that the contender or the
base failed at is left out of their comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreword.bench.contenders import Answer
from foreword.bench.divergences import DIFFERENT, SAME, TIE, Verdicts
from foreword.bench.run import MIXED, BlockRun, base_of
from foreword.drafters.spec import parse_spec
from foreword.methods import AUTO, all_methods
from foreword.text import loop_share

RESAMPLES = 2000
INTERVAL = (2.5, 97.5)  # percentiles
FEWEST_SAMPLES = 6  # by chance alone, five samples lean to the same side in 6 of 100 cases, six in 3
NOISE = 1.05  # times the tokens per round; on a quiet machine, clocks err by less
LOOKUP_GROUPS = ("summarization", "rag", "translation")


@dataclass(frozen=True)
class Timing:
    """A contender's answers to a block of prompts."""

    prompt: str
    group: str
    contender: str
    tokens: int
    rounds: int
    seconds: float
    loop_share: float
    identical: int  # outputs equal to the base's
    texts: int = 1  # answers, failed ones included
    batch: int = 1
    suite: str = ""
    temperature: float = 0.0
    repeat: int = 0
    turn: int = 0
    block: int = 0
    ties: int = 0  # outputs that diverge from the base's at a near-tie of the model
    differing: int = 0  # outputs that diverge otherwise
    unjudged: str = ""  # why divergences could not be judged
    failed: int = 0
    failed_at: list[str] = field(default_factory=list)  # prompts
    why: str = ""
    first_s: float | None = None  # seconds until the first round's tokens
    first_tokens: int = 0
    drafted: int = 0
    kept: list[int] = field(default_factory=list)  # how many rounds with a draft accepted 0, 1, 2, ... of its tokens

    @property
    def answered(self) -> int:
        return self.texts - self.failed


def timings(block_runs: Iterable[BlockRun], verdicts: Verdicts) -> list[Timing]:
    return [_timing(block_run, name, verdicts.of(block_run, name)) for block_run in block_runs for name in block_run.answers]


def _timing(block_run: BlockRun, name: str, verdicts: list[str]) -> Timing:
    answers = block_run.answers[name]
    good = [answer for answer in answers if not answer.failed]
    said = [one for one, answer in zip(verdicts, answers, strict=True) if not answer.failed]
    tokens = sum(len(answer.tokens) for answer in good)
    looping = sum(loop_share(answer.tokens) * len(answer.tokens) for answer in good)
    place, alone = block_run.place, len(answers) == 1 and bool(good)
    return Timing(
        prompt=" ".join(task.prompt for task in block_run.tasks),
        group=block_run.group,
        contender=name,
        tokens=tokens,
        rounds=sum(len(answer.accepted) for answer in good),
        seconds=block_run.seconds[name],
        loop_share=looping / max(tokens, 1),
        identical=said.count(SAME),
        texts=len(answers),
        batch=place.batch,
        suite=block_run.suite,
        temperature=place.temperature,
        repeat=place.repeat,
        turn=place.turn,
        block=place.block,
        ties=said.count(TIE),
        differing=sum(one not in (SAME, TIE) for one in said),
        unjudged=next((one for one in said if one not in (SAME, TIE, DIFFERENT)), ""),
        failed=len(answers) - len(good),
        failed_at=[task.prompt for task, answer in zip(block_run.tasks, answers, strict=True) if answer.failed],
        why=next((answer.failed for answer in answers if answer.failed), ""),
        first_s=good[0].first_s if alone else None,  # in a batch, one request reads its prompt while others decode
        first_tokens=good[0].accepted[0] if alone and good[0].accepted else 0,
        drafted=sum(sum(answer.drafted) for answer in good),
        kept=_kept(good),
    )


def _kept(answers: Sequence[Answer]) -> list[int]:
    drafts = [
        max(kept - 1, 0)
        for answer in answers
        for kept, drafted in zip(answer.accepted, answer.drafted, strict=False)
        if drafted > 0
    ]
    return [drafts.count(count) for count in range(max(drafts, default=-1) + 1)]


@dataclass(frozen=True)
class Benchmark:
    """All contenders at one batch size and temperature; for each block the median repeat."""

    contenders: tuple[str, ...]
    max_new_tokens: int
    timings: tuple[Timing, ...]
    batch: int = 1
    warm_up_s: dict[str, float] = field(default_factory=dict)  # by contender: warm-up and capture, before the clock
    temperature: float = 0.0
    repeats: int = 1

    @property
    def base(self) -> str:
        return base_of(self.contenders)

    @property
    def groups(self) -> list[tuple[str, str]]:
        """The pairs of suite and group, in the order of the run."""
        return list(dict.fromkeys((timing.suite, timing.group) for timing in self.timings))

    def of(self, contender: str, groups: Sequence[tuple[str, str]] | None = None) -> list[Timing]:
        """Return a contender's timings, in all groups or in some."""
        return [t for t in self.timings if t.contender == contender and (groups is None or (t.suite, t.group) in groups)]


def benchmarks(found: Sequence[Timing], max_new_tokens: int, warm_up_s: dict[int, dict[str, float]]) -> list[Benchmark]:
    """Group the timings by temperature and batch size, in their order."""
    kinds = list(dict.fromkeys((timing.temperature, timing.batch) for timing in found))
    made = []
    for temperature, batch in sorted(kinds, key=lambda kind: [one[0] for one in kinds].index(kind[0])):
        some = [timing for timing in found if (timing.temperature, timing.batch) == (temperature, batch)]
        names = tuple(dict.fromkeys(timing.contender for timing in some))
        repeats = len({timing.repeat for timing in some})
        made.append(
            Benchmark(names, max_new_tokens, median_repeats(some), batch, warm_up_s.get(batch, {}), temperature, repeats)
        )
    return made


def median_repeats(some: Sequence[Timing]) -> tuple[Timing, ...]:
    """Return, for each block, the repeat with the median time, or one that failed if any did."""
    repeats: dict[tuple[str, int, int], list[Timing]] = {}
    for timing in some:
        repeats.setdefault((timing.contender, timing.turn, timing.block), []).append(timing)
    return tuple(_median_repeat(same) for same in repeats.values())


def _median_repeat(same: list[Timing]) -> Timing:
    """Return the median repeat with the divergences of the worst one: an output that differs in one repeat differs."""
    ordered = sorted(same, key=lambda timing: (-timing.failed, timing.seconds / max(timing.tokens, 1)))
    chosen = ordered[0] if ordered[0].failed else ordered[(len(ordered) - 1) // 2]
    worst = max(same, key=lambda timing: (bool(timing.unjudged), timing.differing, timing.ties))
    return replace(
        chosen,
        identical=max(chosen.answered - worst.ties - worst.differing, 0),
        ties=worst.ties,
        differing=worst.differing,
        unjudged=worst.unjudged,
    )


# Rows ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A contender over some prompts."""

    contender: str
    tokens: int
    tokens_per_second: float
    speedup: float | None  # None: refused
    tokens_per_round: float
    loop_share: float
    identical: int
    prompts: int  # answers that count
    low: float | None = None  # of the speed-up
    high: float | None = None
    refused: str = ""  # why there is no speed-up
    ties: int = 0
    differing: int = 0
    failed: int = 0
    first_token_s: float | None = None
    decode_tokens_per_second: float | None = None
    decode_speedup: float | None = None
    tokens_per_round_by_prompt: float = 0.0  # mean over prompts; `tokens_per_round` pools the rounds
    draft_tokens_per_round: float = 0.0
    acceptance: float | None = None
    accepted_per_position: list[float] = field(default_factory=list)
    conditional_per_position: list[float] = field(default_factory=list)
    noise: str = ""  # why the speed-up is impossible, if it is


def noise_reason(speedup: float, tokens_per_round: float) -> str:
    """Return why a speed-up over plain decoding is impossible, or an empty string. A round of a method costs at least as
    much as a round of plain decoding, so the speed-up is at most its tokens per round."""
    if speedup <= NOISE * tokens_per_round:
        return ""
    return f"noise: no more than {tokens_per_round:.2f} tokens per round"


def rows(benchmark: Benchmark, groups: Sequence[tuple[str, str]] | None = None) -> list[Row]:
    """Return a row per contender; the speed-up is over the benchmark's base."""
    base = benchmark.of(benchmark.base, groups)
    found = [_row(name, benchmark.of(name, groups), base) for name in benchmark.contenders]
    return [_with_noise(row) for row in found] if benchmark.base == "plain" else found


def _with_noise(row: Row) -> Row:
    """Mark noise. Only for our methods: a round of another decoder may cost less than one of plain decoding, and so may one
    of a pipeline."""
    whole_passes = {AUTO, *(name for name, method in all_methods().items() if not method.looped)}
    if row.speedup is None or parse_spec(row.contender).name not in whole_passes:
        return row
    return replace(row, noise=noise_reason(row.speedup, row.tokens_per_round))


def _row(name: str, own: list[Timing], base: list[Timing]) -> Row:
    pairs = _pairs(own, base)
    counted = [timing for timing, _ in pairs]
    tokens, rounds = sum(t.tokens for t in counted), sum(t.rounds for t in counted)
    refused = _refused(counted)
    low, high = (None, None) if refused else _interval(pairs)
    drafted = sum(t.drafted for t in counted)
    per_position, conditional, accepted = _positions(counted)
    by_prompt = [t.tokens / t.rounds for t in counted if t.rounds]
    return Row(
        contender=name,
        tokens=tokens,
        tokens_per_second=_speed(counted),
        speedup=None if refused else _speed(counted) / _speed([truth for _, truth in pairs]),
        tokens_per_round=tokens / max(rounds, 1),
        loop_share=sum(t.loop_share * t.tokens for t in counted) / max(tokens, 1),
        identical=sum(t.identical for t in counted),
        prompts=sum(t.answered for t in counted),
        low=low,
        high=high,
        refused=refused,
        ties=sum(t.ties for t in counted),
        differing=sum(t.differing for t in counted),
        failed=sum(t.failed for t in own),
        **_first_token_figures(pairs, bool(refused)),
        tokens_per_round_by_prompt=sum(by_prompt) / max(len(by_prompt), 1),
        draft_tokens_per_round=drafted / max(rounds, 1),
        acceptance=accepted / drafted if drafted else None,
        accepted_per_position=per_position,
        conditional_per_position=conditional,
    )


def _pairs(own: list[Timing], base: list[Timing]) -> list[tuple[Timing, Timing]]:
    """Return the blocks that count: contender and base answered the same prompts there, at least one."""
    truth = {(t.turn, t.block): t for t in base}
    pairs = [(t, truth[t.turn, t.block]) for t in own if (t.turn, t.block) in truth]
    return [(t, other) for t, other in pairs if t.answered == other.answered > 0 and t.failed_at == other.failed_at]


def _refused(counted: list[Timing]) -> str:
    if not counted:
        return "no answers"
    unjudged = next((t.unjudged for t in counted if t.unjudged), "")
    if unjudged:
        return f"outputs differ, and it could not be judged whether at ties: {unjudged}"
    return "other output" if any(t.differing for t in counted) else ""


def _speed(some: list[Timing]) -> float:
    seconds = sum(t.seconds for t in some)
    return sum(t.tokens for t in some) / seconds if seconds else 0.0


def _first_token_figures(pairs: list[tuple[Timing, Timing]], refused: bool) -> dict[str, Any]:
    """Return the time to the first token and the speed after it; known at batch 1 only."""
    both = [pair for pair in pairs if all(t.first_s is not None for t in pair)]
    if not both:
        return {}
    own, base = (_decode_speed([pair[side] for pair in both]) for side in (0, 1))
    return {
        "first_token_s": sum(t.first_s or 0.0 for t, _ in both) / len(both),
        "decode_tokens_per_second": own,
        "decode_speedup": own / base if own and base and not refused else None,
    }


def _decode_speed(some: list[Timing]) -> float | None:
    seconds = sum(t.seconds - (t.first_s or 0.0) for t in some)
    tokens = sum(t.tokens - t.first_tokens for t in some)
    return tokens / seconds if tokens and seconds > 0 else None


def _positions(counted: list[Timing]) -> tuple[list[float], list[float], int]:
    """Return acceptance per position, as vLLM counts it and given the position before, and the number of accepted tokens."""
    depth = max((len(t.kept) for t in counted), default=0)
    kept = [sum(t.kept[count] for t in counted if count < len(t.kept)) for count in range(depth)]
    reached = [sum(kept[place:]) for place in range(depth)]
    drafts, beyond = (reached[0], reached[1:]) if reached else (0, [])
    conditional = [count / max(before, 1) for count, before in zip(beyond, reached, strict=False)]
    return [count / drafts for count in beyond], conditional, sum(beyond)


def _interval(pairs: list[tuple[Timing, Timing]]) -> tuple[float | None, float | None]:
    """Bootstrap the speed-up. The turns of a prompt are one sample; in a batch, a block of prompts is."""
    by_prompt: dict[tuple[str, str], list[float]] = {}
    for own, base in pairs:
        sums = by_prompt.setdefault((own.suite, own.prompt), [0.0] * 4)
        for place, value in enumerate((own.tokens, own.seconds, base.tokens, base.seconds)):
            sums[place] += value
    return bootstrap_interval(list(by_prompt.values()))


def bootstrap_interval(samples: list[list[float]]) -> tuple[float | None, float | None]:
    """Return the 95% interval of the ratio of speeds from samples of (tokens, seconds, base tokens, base seconds); None if
    there are too few."""
    if len(samples) < FEWEST_SAMPLES:
        return None, None
    table = np.array(samples)
    chosen = np.random.default_rng(0).integers(0, len(table), (RESAMPLES, len(table)))
    tokens, seconds, other_tokens, other_seconds = table[chosen].sum(1).T
    low, high = np.percentile(tokens / seconds * other_seconds / other_tokens, INTERVAL)
    return float(low), float(high)


# Tables -------------------------------------------------------------------------------------------------------------------


def tables(benchmark: Benchmark) -> dict[str, list[Row]]:
    return {name: rows(benchmark, groups) for name, groups in table_groups(benchmark.groups).items()}


def table_groups(groups: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Return the (suite, group) pairs of each table by its name: overall, each prompt set, the groups whose answers copy
    from the prompt, and each group."""
    found = {"overall": list(groups)}
    suites = list(dict.fromkeys(suite for suite, _ in groups))
    if len(suites) > 1:
        found |= {name: [one for one in groups if one[0] == name] for name in suites}
    copied = [one for one in groups if one[1] in LOOKUP_GROUPS]
    if len(copied) > 1:
        found[" + ".join(dict.fromkeys(group for _, group in copied))] = copied
    if len(groups) > 1:
        named = [one for one in groups if MIXED not in one]
        found |= {f"{suite}: {group}" if len(suites) > 1 else group: [(suite, group)] for suite, group in named}
    return found


def stops_paying(batches: dict[int, list[Row]]) -> dict[str, int | None]:
    """Return, by contender, the smallest batch at and above which it never beats plain; None if it still wins at the
    largest. Contenders that were not timed at every batch, or are noise at one, are left out."""
    ahead: dict[str, dict[int, bool]] = {}
    for batch, table in sorted(batches.items()):
        for row in table:
            if row.speedup is not None and not row.noise:
                ahead.setdefault(row.contender, {})[batch] = row.speedup > 1
    return {name: _first_losing_batch(won) for name, won in ahead.items() if len(won) == len(batches)}


def _first_losing_batch(won: dict[int, bool]) -> int | None:
    last = max((batch for batch, ahead in won.items() if ahead), default=0)
    return min((batch for batch in won if batch > last), default=None)


def failures(found: Iterable[Timing]) -> list[dict[str, Any]]:
    """List every failure once: contender, prompt and reason."""
    failed = {(t.contender, t.batch, t.temperature, t.turn, *(t.failed_at or [t.prompt])): t for t in found if t.failed}
    return [
        {"contender": t.contender, "batch": t.batch, "temperature": t.temperature, "turn": t.turn}
        | {"prompt": " ".join(t.failed_at) or t.prompt, "texts": t.failed, "why": t.why}
        for t in failed.values()
    ]
