"""Where a method and plain decoding diverge, the referee says whether that was a tie or a bug.

In: cases, each a place in a text and two tokens for it. The target is asked again in float64, by transformers alone. It is
a tie if rounding as large as the run's own can turn the choice: the scores lie within twice the run's error at these two
tokens, or the likelier one sits on a filter's edge by that margin. The error is the largest deviation from float64 among
passes in the run's dtype, its own over the replayed text and transformers'. What the run's deviate beyond twice anything
that transformers' does is no rounding, and excuses nothing. Each pass goes over many texts and answers all their places.
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
from foreword.core.sampling_table import NO_TOKEN, SamplingStages, SamplingTable
from foreword.core.state import Batch
from foreword.errors import ModelError, ModelNotFound, ModelUnsupported
from foreword.hub.resolve import is_adapter
from foreword.model.cache import SlotCache
from foreword.model.loading import load_weights
from foreword.model.model import Model
from foreword.ops.device import prefill_chunk
from foreword.ops.sending import sent
from foreword.prove.report import Reason, Verdict

PASS_ROWS = (1, 4, 16)
"""Rows of the passes that a text is replayed in: plain decoding's shape, a small draft's and a large one's."""

MOST_LANES = 64
MOST_ANSWERS = 2**24
"""Of one batch: texts, and numbers in its answers, which are its cases times the vocabulary."""

NUCLEUS_ROUNDING = 2.0**-20
"""The mass of the top-p nucleus is summed in float32, whatever the model computes in."""

Edge = Literal["top-k edge", "top-p edge", "min-p edge"]
Standing = Edge | Literal["kept", "dropped"]
Key = tuple[tuple[int, ...], int]
Filter = Callable[[Tensor, int, Sampling, float], bool]


@dataclass(frozen=True)
class Case:
    """Two tokens for one place of a text: plain's and a method's, after `text[:place]`.

    `text` is the whole of what plain has, its first `prompt` tokens given: the cases of a text share the passes over it.
    """

    text: tuple[int, ...]
    prompt: int
    place: int
    sampling: Sampling
    plain: int
    method: int

    @property
    def key(self) -> Key:
        return self.text, self.prompt


@dataclass(frozen=True)
class Ruling:
    plain_score: float | None
    method_score: float | None
    gap: float | None
    error: float | None
    verdict: Verdict
    reason: Reason


class Referee:
    """The float64 copy of the model is made when the first difference appears: a proof without any costs nothing."""

    def __init__(self, model: Model, folder: Path | None = None) -> None:
        """`folder` is where the weights can be read again, for a widened model those of its original."""
        self.model, self.folder = model, folder

    @cached_property
    def exact(self) -> Any:
        return exact_copy(self.model, self.folder)

    def judge(self, cases: Iterable[Case], wide: bool = False) -> Iterator[dict[Case, Ruling]]:
        """The verdicts, batch by batch. Methods often diverge at the same places: equal cases are judged once.

        `wide`: the passes that wrote the texts had shapes that are not replayed, or were not ours. Their error at two tokens
        is then taken to be as large as the largest of transformers' own at any token of that place.
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
        return list(map(_ruling, batch.cases, plain.tolist(), method.tolist(), error.tolist(), scaled))


def _ruling(case: Case, plain: float, method: float, error: float, scaled: Tensor) -> Ruling:
    ahead, behind = (case.plain, case.method) if plain >= method else (case.method, case.plain)
    stands = [standing(scaled, token, case.sampling, 2 * error) for token in (ahead, behind)]
    gap = abs(plain - method)
    return Ruling(plain, method, gap, error, *decide(gap, 2 * error, *stands))


def decide(gap: float, margin: float, ahead: Standing, behind: Standing) -> tuple[Verdict, Reason]:
    """`ahead` is how the token of the higher score stands with the filters, `behind` the other one.

    Only a filter that may or may not drop the token ahead lets the other one win across a wide gap.
    """
    if ahead == "dropped" or behind == "dropped":
        return "bug", "filter"
    if gap <= margin:
        return "tie", "gap"
    return ("bug", "gap") if ahead == "kept" else ("tie", ahead)


# Scores -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoring:
    """How the tokens of cases are chosen, each by its row of logits [c, V]."""

    table: SamplingTable
    position: Tensor  # [c, 1]
    temperature: Tensor  # [c, 1] in float64; 1 where nothing is sampled
    history: History

    @staticmethod
    def of(cases: list[Case], model: Model) -> Scoring:
        table, rows = SamplingTable.empty(len(cases), model.ends, model.vocab_size), range(len(cases))
        table.set_all({i: (case.sampling, 0) for i, case in enumerate(cases)}, sent(list(rows), model.device))
        temperature = torch.tensor([[case.sampling.temperature or 1.0] for case in cases], dtype=torch.float64)
        position = sent([case.place for case in cases], model.device).unsqueeze(1)
        history = _history(cases, table.kind(tuple(rows)), model)
        return Scoring(table, position, temperature.to(model.device), history)

    def scores(self, logits: Tensor) -> Tensor:
        """What `pick` compares, filters left out, in the precision it is given.

        The noise is the same number whatever the logits, so two of these differ by the error of the logits and by the
        rounding of the choice itself.
        """
        return self._judge(logits, lambda kind: replace(kind, top_k=0, top_p=False, min_p=False)).double()

    def scaled(self, logits: Tensor) -> Tensor:
        """What the filters see: after bias, penalties, masks, bad words and / T, without noise."""
        return self._judge(logits, lambda kind: replace(kind, noise=False)) / self.temperature

    def _judge(self, logits: Tensor, stages: Callable[[SamplingStages], SamplingStages]) -> Tensor:
        ids = range(len(logits))
        rows = self.table.at(sent(list(ids), logits.device), tuple(ids))
        return judge(logits.unsqueeze(1), self.position, replace(rows, kind=stages(rows.kind)), self.history).squeeze(1)


def _history(cases: list[Case], kind: SamplingStages, model: Model) -> History:
    """What stands before the place of each case, as far as any of them asks for it."""
    count, before = kind.bad_word_length - 1, [case.text[: case.place] for case in cases]
    output = [case.text[case.prompt : case.place] for case in cases]
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
    """Whether the filters keep a token: surely, surely not, or depending on rounding within the margin.

    Each filter is asked twice: with everything in the token's favour, and with everything against it.
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
    """A token is in while those above it hold less than top_p, of what top-k left."""
    if sampling.top_p == 1:
        return True
    weight = (scaled - scaled.max()).exp()
    if sampling.top_k > 0:
        floor = scaled.topk(min(sampling.top_k, len(scaled))).values[-1]
        weight = weight.where(scaled >= floor - favour, 0)
    above = _above(scaled, token, favour)
    # Errors move the two masses against each other, which multiplies their odds.
    over, under = weight[above].sum() * math.exp(-favour), weight[~above].sum()
    return float(over / (over + under)) < sampling.top_p + math.copysign(NUCLEUS_ROUNDING, favour)


def _in_min_p(scaled: Tensor, token: int, sampling: Sampling, favour: float) -> bool:
    return sampling.min_p == 0 or float(scaled[token] + favour) >= float(scaled.max()) + math.log(sampling.min_p)


def _above(scaled: Tensor, token: int, favour: float) -> Tensor:
    """[V] bool: the tokens that stand above this one when it is moved up by `favour`."""
    above = scaled > scaled[token] + favour
    above[token] = False
    return above


# Batches ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseBatch:
    """Cases whose texts are asked about together, a lane for each text."""

    texts: list[tuple[int, ...]]  # each up to the last place that is asked about
    roots: list[int]  # where the last token of each prompt stands, the first that is not read with the others
    cases: list[Case]
    lanes: list[int]  # of each case
    rows: list[int]  # of each case: the token of its text that answers it

    @staticmethod
    def of(texts: list[list[Case]]) -> CaseBatch:
        cases = [case for of_text in texts for case in of_text]
        return CaseBatch(
            texts=[of_text[0].text[: _length(of_text)] for of_text in texts],
            roots=[of_text[0].prompt - 1 for of_text in texts],
            cases=cases,
            lanes=[lane for lane, of_text in enumerate(texts) for _ in of_text],
            rows=[case.place - 1 for case in cases],
        )


def batches(cases: Iterable[Case], model: Model) -> Iterator[CaseBatch]:
    """All cases, those of a text together and texts of like length side by side, as many as the memory allows."""
    texts: dict[Key, list[Case]] = {}
    for case in dict.fromkeys(cases):
        texts.setdefault(case.key, []).append(case)
    batch: list[list[Case]] = []
    for of_text in sorted(texts.values(), key=_length):
        if batch and not _fit([*batch, of_text], model):
            yield CaseBatch.of(batch)
            batch = []
        batch.append(of_text)
    if batch:
        yield CaseBatch.of(batch)


def _fit(texts: list[list[Case]], model: Model) -> bool:
    """Whether texts, the longest of them last, can go side by side; in float64, attention weighs all tokens at once."""
    weights = len(texts) * _length(texts[-1]) ** 2
    answers = sum(map(len, texts)) * model.vocab_size
    most_weights = 2**24 if model.device.type == "cuda" else 2**22  # for each head
    return len(texts) <= MOST_LANES and weights <= most_weights and answers <= MOST_ANSWERS


def _length(cases: list[Case]) -> int:
    return max(case.place for case in cases)


# Passes -----------------------------------------------------------------------------------------------------------------


def own_logits(hf: Any, batch: CaseBatch) -> Tensor:
    """[c, V]: what transformers answers by itself, in one pass, no cache and no walk of ours.

    Padding stands behind a text, where no row of it looks. The head is given the rows that are asked about, no others.
    """
    device = next(hf.parameters()).device
    lanes, rows = sent(batch.lanes, device), sent(batch.rows, device)
    picking = hf.lm_head.register_forward_pre_hook(lambda _, given: (given[0][lanes, rows].unsqueeze(1),))
    try:
        logits: Tensor = hf(input_ids=_padded(batch.texts, device), use_cache=False).logits[:, 0]
    finally:
        picking.remove()
    return logits if logits.dtype == torch.float64 else logits.float()


def replays(model: Model, batch: CaseBatch) -> list[Tensor]:
    """What the run's model answers, each [c, V]: the texts written in passes of every shape, and read in one.

    The history counts: in a narrow dtype, keys and values that were written row by row are not those of a prompt.
    """
    scratch = max(prefill_chunk(model.device), *PASS_ROWS)
    with model.temporary_cache(len(batch.texts), max(map(len, batch.texts)), scratch) as cache:
        replay = PassReplay(model, batch, cache)
        replay.read(batch.roots)
        written = [replay.write(rows) for rows in PASS_ROWS]
        replay.read([len(text) - 1 for text in batch.texts])
        return [*written, replay.look_back()]


@dataclass(frozen=True)
class PassReplay:
    """Passes of the run's own model over the texts of a batch, in a cache of their own."""

    model: Model
    batch: CaseBatch
    cache: SlotCache

    def read(self, stops: list[int]) -> None:
        """Read the texts as prompts, up to `stops`."""
        longest = prefill_chunk(self.model.device)
        for start in range(0, max(stops), longest):
            parts = [text[start : min(start + longest, stop)] for text, stop in zip(self.batch.texts, stops, strict=True)]
            self._pass([min(start, stop) for stop in stops], parts, max(map(len, parts)), asked=[])

    def write(self, rows: int) -> Tensor:
        """[c, V]: what chains of `rows` tokens answer, one behind the other from the last token of each prompt."""
        behind = [row - self.batch.roots[lane] for row, lane in zip(self.batch.rows, self.batch.lanes, strict=True)]
        found: dict[int, Tensor] = {}
        for step in range(max(behind) // rows + 1):
            lanes = zip(self.batch.texts, self.batch.roots, strict=True)
            starts = [min(root + step * rows, len(text)) for text, root in lanes]
            parts = [text[start : start + rows] for text, start in zip(self.batch.texts, starts, strict=True)]
            asked = [case for case, far in enumerate(behind) if far // rows == step]
            found |= self._pass(starts, parts, rows, asked)
        return self._in_order(found)

    def look_back(self) -> Tensor:
        """[c, V]: what single rows answer behind texts that were read; the last of each first, for it overwrites a row."""
        places = set(zip(self.batch.lanes, self.batch.rows, strict=True))
        rows = [sorted((row for lane, row in places if lane == one), reverse=True) for one in range(len(self.batch.texts))]
        found: dict[int, Tensor] = {}
        for turn in range(max(map(len, rows))):
            starts = [of_text[min(turn, len(of_text) - 1)] for of_text in rows]
            parts = [text[start : start + 1] for text, start in zip(self.batch.texts, starts, strict=True)]
            lanes = enumerate(zip(self.batch.lanes, self.batch.rows, strict=True))
            found |= self._pass(starts, parts, 1, [case for case, (lane, row) in lanes if row == starts[lane]])
        return self._in_order(found)

    def _pass(self, starts: list[int], parts: list[tuple[int, ...]], rows: int, asked: list[int]) -> dict[int, Tensor]:
        """One chain of `rows` tokens in each lane; the answers to those cases whose rows are `asked` about."""
        device = self.model.device
        self.cache.length.copy_(sent(starts, device))
        lanes = Batch.of(list(range(len(parts))), max(starts), device)
        draft = Draft(_padded(parts, device, rows), Tree.chain(rows, device), sent([len(part) for part in parts], device))
        scores = self.model.score(lanes, draft, Needs(), logits="all" if asked else "none")
        if not asked:
            return {}
        of_case = [self.batch.lanes[case] for case in asked]
        row = [self.batch.rows[case] - starts[lane] for case, lane in zip(asked, of_case, strict=True)]
        answers = scores.require_logits()[sent(of_case, device), sent(row, device)]
        return dict(zip(asked, answers, strict=True))

    def _in_order(self, found: dict[int, Tensor]) -> Tensor:
        return torch.stack([found[case] for case in range(len(self.batch.cases))])


def _padded(texts: list[tuple[int, ...]], device: torch.device, rows: int | None = None) -> Tensor:
    rows = max(map(len, texts)) if rows is None else rows
    return sent([(*text, *(0,) * (rows - len(text))) for text in texts], device)


# The float64 copy -------------------------------------------------------------------------------------------------------


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input; the one of transformers computes in float32 whatever it is given."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon)


def exact_copy(model: Model, folder: Path | None = None) -> Any:
    """The very weights of a model, computed with in float64. Rotary angles stay as transformers makes them, in float32:
    they are the same in every pass, so they are part of the function and not of its rounding."""
    try:
        again = _is_rebuilt(model.hf) or (model.widened_from is not None and folder is not None)
        exact = _reloaded(model, folder) if again else copy.deepcopy(model.hf).double()
    except (RuntimeError, TypeError) as error:  # out of memory, or something in the model that cannot be copied
        raise ModelError(
            f"{model.name}: judging a difference needs the model a second time, in float64 on {model.device}, and that "
            f"failed ({error}); prove a smaller model, or one that transformers loaded unchanged"
        ) from error
    # Eager attention takes its softmax in float32, whose rounding is below that of any run; only it caps scores.
    exact.config._attn_implementation = "eager" if model.family.softcap(model.hf.config) else "sdpa"
    for name, module in list(exact.named_modules()):
        if "RMSNorm" in type(module).__name__:
            exact.set_submodule(name, _exact_norm(module))
    return exact.eval()


def _is_rebuilt(hf: nn.Module) -> bool:
    """Whether linears were replaced for speed, after which the weights cannot be read back."""
    return any(type(module).__module__.startswith("foreword.") for module in hf.modules())


def _reloaded(model: Model, folder: Path | None) -> Any:
    folder = folder or Path(model.hf.config.name_or_path)
    if not ((folder / "config.json").is_file() or is_adapter(folder)):
        raise ModelNotFound(
            f"{model.name}: judging a difference needs the weights in float64, but they were repacked for speed and "
            f"{str(folder)!r} is no folder to read them from again; load the model from a folder, or give it to wrap"
        )
    exact = load_weights(folder, model.device, torch.float64)
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(model.dtype).double()  # the run may have read them rounded
    return exact


def _exact_norm(norm: Any) -> ExactNorm:
    """The same norm in float64, checked on a row: a family may have a norm of another form."""
    gemma = hasattr(norm, "eps")  # whose weights are what is added to one
    exact = ExactNorm(1 + norm.weight, norm.eps) if gemma else ExactNorm(norm.weight, norm.variance_epsilon)
    row = torch.linspace(-1, 2, norm.weight.numel(), dtype=torch.float64, device=norm.weight.device)
    if not torch.allclose(exact(row), norm(row), rtol=1e-4, atol=1e-5):
        raise ModelUnsupported(f"the referee has no float64 form of {type(norm).__name__}; use a model with an RMSNorm")
    return exact
