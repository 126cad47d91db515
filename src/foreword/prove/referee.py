"""The referee: where a method and plain decoding diverge, it tells a tie from a bug.

In: cases, each a position in a sequence and two tokens for it. transformers alone scores them again in float64. A case is a
tie if rounding as large as the run's own can flip the choice: the scores lie within twice the run's error at these two
tokens, the likelier one is within that margin of a filter's edge, or another choice of experts explains it (`routers.py`).
The error is the largest deviation from float64 of passes in the run's dtype: replays of the run, and transformers' own.
Deviations beyond twice the largest of transformers' do not count. A pass covers many sequences and scores all their cases.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foreword.core.choosing import History, judge
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import NO_TOKEN, SamplingStages, SamplingTable, SlotOptions
from foreword.core.state import Batch
from foreword.errors import ModelError, ModelNotFound, ModelUnsupported
from foreword.hub.resolve import is_adapter
from foreword.model.cache import SlotCache
from foreword.model.linears import unpacked
from foreword.model.loading import EXACT_EXPERTS, load_weights
from foreword.model.model import Model
from foreword.model.quantised_linears import is_quantised
from foreword.ops.device import prefill_chunk
from foreword.ops.sending import sent
from foreword.prove.report import Reason, Verdict
from foreword.prove.routers import turned_passes

PASS_ROWS = (1, 4, 16)
"""Rows of the passes that replay a sequence: plain decoding, a small draft and a large one."""

MOST_SEQUENCES = 64
MOST_ANSWERS = 2**24
"""Bounds of one batch: its sequences, and its logits (cases times vocabulary)."""

NUCLEUS_ROUNDING = 2.0**-20
"""The mass of the top-p nucleus is summed in float32, whatever the model computes in."""

Edge = Literal["top-k edge", "top-p edge", "min-p edge"]
Standing = Edge | Literal["kept", "dropped"]
Key = tuple[tuple[int, ...], int]
Filter = Callable[[Tensor, int, Sampling, float], bool]


@dataclass(frozen=True)
class Case:
    """Two tokens for one position of a sequence: plain's and a method's, after `sequence[:place]`.

    `sequence` is plain's whole sequence; its first `prompt` tokens are the prompt. The cases of a sequence share its passes.
    """

    sequence: tuple[int, ...]
    prompt: int
    place: int
    sampling: Sampling
    plain: int
    method: int

    @property
    def key(self) -> Key:
        return self.sequence, self.prompt


@dataclass(frozen=True)
class Ruling:
    plain_score: float | None
    method_score: float | None
    gap: float | None
    error: float | None
    verdict: Verdict
    reason: Reason


class Referee:
    """Judges cases. The float64 copy of the model is made at the first case, so a proof without differences has no cost."""

    def __init__(self, model: Model, folder: Path | None = None) -> None:
        """`folder`: where to read the weights again; for a widened model, those of its original."""
        self.model, self.folder = model, folder

    @cached_property
    def exact(self) -> Any:
        return exact_copy(self.model, self.folder)

    def judge(self, cases: Iterable[Case], wide: bool = False) -> Iterator[dict[Case, Ruling]]:
        """Yield the verdicts batch by batch. Methods often diverge at the same positions; equal cases are judged once.

        `wide`: the sequences came from passes whose shapes are not replayed, or from another decoder. The error at the two
        tokens is then at least the largest one of transformers at any token of that position.
        """
        for batch in batches(cases, self.model):
            yield dict(zip(batch.cases, self._rule(batch, wide), strict=True))

    @torch.inference_mode()
    def _rule(self, batch: CaseBatch, wide: bool) -> list[Ruling]:
        scoring = Scoring.of(batch.cases, self.model)
        logits = own_logits(self.exact, batch)
        scores, scaled = scoring.scores(logits), scoring.scaled(logits)
        pair = torch.tensor([(case.plain, case.method) for case in batch.cases], device=scores.device)
        own = (scoring.scores(own_logits(self.model.hf, batch)) - scores).abs()
        runs = [(scoring.scores(answer) - scores).abs() for answer in replays(self.model, batch)]
        error = torch.cat([off.gather(1, pair) for off in (own, *runs)], 1).amax(1)
        error = torch.maximum(error, own.amax(1)) if wide else error
        error = torch.minimum(error, 2 * own.amax(1))
        plain, method = scores.gather(1, pair).unbind(1)
        rulings = list(map(_ruling, batch.cases, plain.tolist(), method.tolist(), error.tolist(), scaled))
        return [self._with_routers(case, ruling) for case, ruling in zip(batch.cases, rulings, strict=True)]

    def _with_routers(self, case: Case, ruling: Ruling) -> Ruling:
        """Look for a near-tie of a router, if the model has any and the scores of the tokens explain nothing."""
        if (ruling.verdict, ruling.reason) != ("bug", "gap") or not hasattr(self.model.hf.config, "num_experts_per_tok"):
            return ruling
        assert ruling.error is not None and ruling.plain_score is not None and ruling.method_score is not None
        scoring, tokens = Scoring.of([case], self.model), sent([case.sequence[: case.place]], self.model.device)
        ahead = 1 if ruling.plain_score > ruling.method_score else -1
        for logits in turned_passes(self.exact, self.model.hf, tokens):
            scores = scoring.scores(logits.unsqueeze(0))[0]
            if ahead * float(scores[case.plain] - scores[case.method]) <= 2 * ruling.error:
                return replace(ruling, verdict="tie", reason="router")
        return ruling


def _ruling(case: Case, plain: float, method: float, error: float, scaled: Tensor) -> Ruling:
    higher, lower = (case.plain, case.method) if plain >= method else (case.method, case.plain)
    stands = [standing(scaled, token, case.sampling, 2 * error) for token in (higher, lower)]
    gap = abs(plain - method)
    return Ruling(plain, method, gap, error, *decide(gap, 2 * error, *stands))


def decide(gap: float, margin: float, higher: Standing, lower: Standing) -> tuple[Verdict, Reason]:
    """Decide a case. `higher`: whether the filters keep the token with the higher score; `lower`: the other token.

    Across a wide gap, the lower token can win only if a filter may or may not drop the higher one.
    """
    if higher == "dropped" or lower == "dropped":
        return "bug", "filter"
    if gap <= margin:
        return "tie", "gap"
    return ("bug", "gap") if higher == "kept" else ("tie", higher)


# Scores -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoring:
    """How the token of each case is chosen from its row of the logits [c, V]."""

    table: SamplingTable
    position: Tensor  # [c, 1]
    temperature: Tensor  # [c, 1] in float64; 1 where nothing is sampled
    history: History

    @staticmethod
    def of(cases: list[Case], model: Model) -> Scoring:
        table, rows = SamplingTable.empty(len(cases), model.ends, model.vocab_size), range(len(cases))
        table.set_all({i: SlotOptions(case.sampling) for i, case in enumerate(cases)}, sent(list(rows), model.device))
        temperature = torch.tensor([[case.sampling.temperature or 1.0] for case in cases], dtype=torch.float64)
        position = sent([case.place for case in cases], model.device).unsqueeze(1)
        history = _history(cases, table.kind(tuple(rows)), model)
        return Scoring(table, position, temperature.to(model.device), history)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores that `pick` compares, without the filters, in the precision of the logits.

        The noise does not depend on the logits, so two results differ by the error of the logits and by the rounding of the
        choice itself.
        """
        return self._judge(logits, lambda kind: replace(kind, top_k=0, top_p=False, min_p=False)).double()

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the scores that the filters see: after bias, penalties, masks, bad words and / T, without noise."""
        return self._judge(logits, lambda kind: replace(kind, noise=False)) / self.temperature

    def _judge(self, logits: Tensor, stages: Callable[[SamplingStages], SamplingStages]) -> Tensor:
        ids = range(len(logits))
        rows = self.table.at(sent(list(ids), logits.device), tuple(ids))
        return judge(logits.unsqueeze(1), self.position, replace(rows, kind=stages(rows.kind)), self.history).squeeze(1)


def _history(cases: list[Case], kind: SamplingStages, model: Model) -> History:
    """Return the tokens before the position of each case, as far as the sampling of any case needs them."""
    count, before = kind.bad_word_length - 1, [case.sequence[: case.place] for case in cases]
    output = [case.sequence[case.prompt : case.place] for case in cases]
    return History(
        seen=_counts(before, model) if kind.repetition else None,
        generated=_counts(output, model) if kind.generated else None,
        last=sent([((NO_TOKEN,) * count + tokens)[-count:] for tokens in before], model.device).unsqueeze(1)
        if kind.bad_words
        else None,
    )


def _counts(sequences: list[tuple[int, ...]], model: Model) -> Tensor:
    tokens = [torch.tensor(sequence, dtype=torch.long, device=model.device) for sequence in sequences]
    return torch.stack([one.bincount(minlength=model.vocab_size) for one in tokens]).unsqueeze(1)


def standing(scaled: Tensor, token: int, sampling: Sampling, margin: float) -> Standing:
    """Return whether the filters keep a token: "kept", "dropped", or the edge where rounding within the margin decides.

    Each filter is tried twice: with rounding in the token's favour, and against it.
    """
    if sampling.temperature == 0:
        return "kept"
    filters: dict[Edge, Filter] = {"top-k edge": _in_top_k, "top-p edge": _in_top_p, "min-p edge": _in_min_p}
    if not all(keeps(scaled, token, sampling, margin) for keeps in filters.values()):
        return "dropped"
    unsure = [edge for edge, keeps in filters.items() if not keeps(scaled, token, sampling, -margin)]
    return unsure[0] if unsure else "kept"


def _in_top_k(scaled: Tensor, token: int, sampling: Sampling, favour: float) -> bool:
    return sampling.top_k == 0 or int(_above(scaled, token, favour).sum()) < sampling.top_k


def _in_top_p(scaled: Tensor, token: int, sampling: Sampling, favour: float) -> bool:
    """A token is kept if the tokens above it hold less than top_p of the mass that top-k left."""
    if sampling.top_p == 1:
        return True
    weight = (scaled - scaled.max()).exp()
    if sampling.top_k > 0:
        floor = scaled.topk(min(sampling.top_k, len(scaled))).values[-1]
        weight = weight.where(scaled >= floor - favour, 0)
    above = _above(scaled, token, favour)
    # Errors shift mass between the two sides, which multiplies their odds.
    over, under = weight[above].sum() * math.exp(-favour), weight[~above].sum()
    return float(over / (over + under)) < sampling.top_p + math.copysign(NUCLEUS_ROUNDING, favour)


def _in_min_p(scaled: Tensor, token: int, sampling: Sampling, favour: float) -> bool:
    return sampling.min_p == 0 or float(scaled[token] + favour) >= float(scaled.max()) + math.log(sampling.min_p)


def _above(scaled: Tensor, token: int, favour: float) -> Tensor:
    """Return [V] bool: the tokens that rank above this one when its score is raised by `favour`."""
    above = scaled > scaled[token] + favour
    above[token] = False
    return above


# Batches ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseBatch:
    """Cases that are scored together; the cases of a sequence share its batch row."""

    sequences: list[tuple[int, ...]]  # each up to its last case
    roots: list[int]  # index of each prompt's last token, the first one that is not prefilled
    cases: list[Case]
    sequence_index: list[int]  # of each case: its sequence
    rows: list[int]  # of each case: the index of the token whose logits decide it

    @staticmethod
    def of(cases_by_sequence: list[list[Case]]) -> CaseBatch:
        cases = [case for of_sequence in cases_by_sequence for case in of_sequence]
        return CaseBatch(
            sequences=[of_sequence[0].sequence[: _length(of_sequence)] for of_sequence in cases_by_sequence],
            roots=[of_sequence[0].prompt - 1 for of_sequence in cases_by_sequence],
            cases=cases,
            sequence_index=[index for index, of_sequence in enumerate(cases_by_sequence) for _ in of_sequence],
            rows=[case.place - 1 for case in cases],
        )


def batches(cases: Iterable[Case], model: Model) -> Iterator[CaseBatch]:
    """Yield all cases in batches: those of a sequence together, sequences of similar length together, as memory allows."""
    by_sequence: dict[Key, list[Case]] = {}
    for case in dict.fromkeys(cases):
        by_sequence.setdefault(case.key, []).append(case)
    batch: list[list[Case]] = []
    for of_sequence in sorted(by_sequence.values(), key=_length):
        if batch and not _fit([*batch, of_sequence], model):
            yield CaseBatch.of(batch)
            batch = []
        batch.append(of_sequence)
    if batch:
        yield CaseBatch.of(batch)


def _fit(sequences: list[list[Case]], model: Model) -> bool:
    """Return whether sequences fit in one batch, the longest last; float64 attention holds all its weights at once."""
    weights = len(sequences) * _length(sequences[-1]) ** 2
    answers = sum(map(len, sequences)) * model.vocab_size
    most_weights = 2**24 if model.device.type == "cuda" else 2**22  # for each head
    return len(sequences) <= MOST_SEQUENCES and weights <= most_weights and answers <= MOST_ANSWERS


def _length(cases: list[Case]) -> int:
    return max(case.place for case in cases)


# Passes -----------------------------------------------------------------------------------------------------------------


def own_logits(hf: Any, batch: CaseBatch) -> Tensor:
    """Return [c, V]: the logits of transformers alone, in one pass without a cache and without our code.

    Padding comes after a sequence, where none of its rows attends. The head gets only the rows of the cases.
    """
    device = next(hf.parameters()).device
    index, rows = sent(batch.sequence_index, device), sent(batch.rows, device)
    picking = hf.get_output_embeddings().register_forward_pre_hook(lambda _, given: (given[0][index, rows].unsqueeze(1),))
    try:
        logits: Tensor = hf(input_ids=_padded(batch.sequences, device), use_cache=False).logits[:, 0]
    finally:
        picking.remove()
    return logits if logits.dtype == torch.float64 else logits.float()


def replays(model: Model, batch: CaseBatch) -> list[Tensor]:
    """Return the run's model's logits [c, V] for each replay: generated in passes of every shape, and prefilled in one.

    The history matters: in a narrow dtype, keys and values generated row by row differ from those of a prefill.
    """
    scratch = max(prefill_chunk(model.device), *PASS_ROWS)
    with model.temporary_cache(len(batch.sequences), max(map(len, batch.sequences)), scratch) as cache:
        replay = PassReplay(model, batch, cache)
        replay.prefill(batch.roots)
        generated = [replay.generate(rows) for rows in PASS_ROWS]
        replay.prefill([len(sequence) - 1 for sequence in batch.sequences])
        return [*generated, replay.score_single_rows()]


@dataclass(frozen=True)
class PassReplay:
    """Passes of the run's own model over the sequences of a batch, with their own cache."""

    model: Model
    batch: CaseBatch
    cache: SlotCache

    def prefill(self, stops: list[int]) -> None:
        """Prefill the sequences as prompts, up to `stops`."""
        longest = prefill_chunk(self.model.device)
        for start in range(0, max(stops), longest):
            chunks = [
                sequence[start : min(start + longest, stop)]
                for sequence, stop in zip(self.batch.sequences, stops, strict=True)
            ]
            self._pass([min(start, stop) for stop in stops], chunks, max(map(len, chunks)), asked=[])

    def generate(self, rows: int) -> Tensor:
        """Return [c, V]: the logits of consecutive chains of `rows` tokens, from the last token of each prompt on."""
        batch = self.batch
        offsets = [row - batch.roots[index] for row, index in zip(batch.rows, batch.sequence_index, strict=True)]
        found: dict[int, Tensor] = {}
        for step in range(max(offsets) // rows + 1):
            rooted = zip(batch.sequences, batch.roots, strict=True)
            starts = [min(root + step * rows, len(sequence)) for sequence, root in rooted]
            chunks = [sequence[start : start + rows] for sequence, start in zip(batch.sequences, starts, strict=True)]
            asked = [case for case, offset in enumerate(offsets) if offset // rows == step]
            found |= self._pass(starts, chunks, rows, asked)
        return self._in_order(found)

    def score_single_rows(self) -> Tensor:
        """Return [c, V]: the logits of single rows after a prefill; the last row of a sequence first, because a pass
        overwrites its row in the cache."""
        batch = self.batch
        places = set(zip(batch.sequence_index, batch.rows, strict=True))
        rows = [sorted((row for index, row in places if index == one), reverse=True) for one in range(len(batch.sequences))]
        found: dict[int, Tensor] = {}
        for turn in range(max(map(len, rows))):
            starts = [of_sequence[min(turn, len(of_sequence) - 1)] for of_sequence in rows]
            chunks = [sequence[start : start + 1] for sequence, start in zip(batch.sequences, starts, strict=True)]
            cases = enumerate(zip(batch.sequence_index, batch.rows, strict=True))
            found |= self._pass(starts, chunks, 1, [case for case, (index, row) in cases if row == starts[index]])
        return self._in_order(found)

    def _pass(self, starts: list[int], chunks: list[tuple[int, ...]], rows: int, asked: list[int]) -> dict[int, Tensor]:
        """Score a chain of `rows` tokens of each sequence; return the logits of the cases `asked`."""
        device = self.model.device
        self.cache.length.copy_(sent(starts, device))
        slots = Batch.of(list(range(len(chunks))), max(starts), device)
        draft = Draft(_padded(chunks, device, rows), Tree.chain(rows, device), sent([len(one) for one in chunks], device))
        scores = self.model.score(slots, draft, Needs(), logits="all" if asked else "none")
        if not asked:
            return {}
        of_case = [self.batch.sequence_index[case] for case in asked]
        row = [self.batch.rows[case] - starts[index] for case, index in zip(asked, of_case, strict=True)]
        answers = scores.require_logits()[sent(of_case, device), sent(row, device)]
        return dict(zip(asked, answers, strict=True))

    def _in_order(self, found: dict[int, Tensor]) -> Tensor:
        return torch.stack([found[case] for case in range(len(self.batch.cases))])


def _padded(sequences: list[tuple[int, ...]], device: torch.device, rows: int | None = None) -> Tensor:
    rows = max(map(len, sequences)) if rows is None else rows
    return sent([(*sequence, *(0,) * (rows - len(sequence))) for sequence in sequences], device)


# The float64 copy -------------------------------------------------------------------------------------------------------


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input; that of transformers always computes in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon)


def exact_copy(model: Model, folder: Path | None = None) -> Any:
    """Return a float64 copy with the model's own weights. Rotary angles stay in float32, as transformers makes them: they
    are the same in every pass, so they belong to the function and not to its rounding."""
    try:
        again = _is_rebuilt(model.hf) or (model.widened_from is not None and folder is not None)
        if is_quantised(model.hf):  # the folder may have other weights than the codes
            exact: Any = unpacked(model.hf).double()
        else:
            exact = _reloaded(model, folder) if again else copy.deepcopy(model.hf).double()
    except (RuntimeError, TypeError) as error:  # out of memory, or a module that cannot be copied
        raise ModelError(
            f"{model.name}: judging a difference needs the model a second time, in float64 on {model.device}, and that "
            f"failed ({error}); prove a smaller model, or one that transformers loaded unchanged"
        ) from error
    exact.config._experts_implementation = EXACT_EXPERTS
    if model.slow:  # it keeps its own attention, and norms in float32
        return exact.eval()
    # Only eager attention has caps and sinks. Its softmax is in float32, which rounds less than any run.
    exact.config._attn_implementation = model.family.stock_attention
    for name, module in list(exact.named_modules()):
        if "RMSNorm" in type(module).__name__:
            exact.set_submodule(name, _exact_norm(module))
    return exact.eval()


def _is_rebuilt(hf: nn.Module) -> bool:
    """Return whether linears were replaced for speed, so that the weights cannot be read back."""
    return any(type(module).__module__.startswith("foreword.") for module in hf.modules())


def _reloaded(model: Model, folder: Path | None) -> Any:
    folder = folder or Path(model.hf.config.name_or_path)
    if not ((folder / "config.json").is_file() or is_adapter(folder)):
        raise ModelNotFound(
            f"{model.name}: judging a difference needs the weights in float64, but they were repacked for speed and "
            f"{str(folder)!r} is not a folder to read them from again; load the model from a folder, or use foreword.wrap"
        )
    exact = load_weights(folder, model.device, torch.float64)
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(model.dtype).double()  # rounded as in the run
    return exact


def _exact_norm(norm: Any) -> ExactNorm:
    """Return the same norm in float64, checked on a row: a family may have a different norm."""
    gemma = hasattr(norm, "eps")  # its weights are added to one
    exact = ExactNorm(1 + norm.weight, norm.eps) if gemma else ExactNorm(norm.weight, norm.variance_epsilon)
    row = torch.linspace(-1, 2, norm.weight.numel(), dtype=torch.float64, device=norm.weight.device)
    if not torch.allclose(exact(row), norm(row), rtol=1e-4, atol=1e-5):
        raise ModelUnsupported(f"the referee has no float64 form of {type(norm).__name__}; use a model with an RMSNorm")
    return exact
