"""Where a method and plain decoding part, the referee says whether that was a tie or a bug.

In: a text, the sampling and two tokens to follow it. The target is asked again in float64, by transformers alone. It is a
tie if rounding as large as the run's own can turn the choice: the scores lie within twice the run's error at these two
tokens, or the likelier one sits on a filter's edge by that margin. The error is the largest deviation from float64 among
passes in the run's dtype, its own over the replayed text and transformers'. What the run's deviate beyond twice anything
that transformers' does is no rounding, and excuses nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foreword.core.draft import Draft, Tree
from foreword.core.needs import Needs
from foreword.core.sampling import Kind, Sampling, SamplingTable, judge
from foreword.core.state import Lanes
from foreword.engine.engine import prefill_chunk
from foreword.errors import ModelError, ModelNotFound, ModelUnsupported
from foreword.model.loading import load_weights
from foreword.model.model import Model
from foreword.prove.report import Reason, Verdict

PASS_ROWS = (1, 4, 16)
"""Rows of the passes that a text is replayed in: plain decoding's shape, a small draft's and a large one's."""

NUCLEUS_ROUNDING = 2.0**-20
"""The mass of the top-p nucleus is summed in float32, whatever the model computes in."""

Edge = Literal["top-k edge", "top-p edge", "min-p edge"]
Standing = Edge | Literal["kept", "dropped"]
Filter = Callable[[Tensor, int, Sampling, float], bool]


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

    def __init__(self, model: Model) -> None:
        self.model = model
        self._ruled: dict[tuple[object, ...], Ruling] = {}

    @cached_property
    def exact(self) -> Any:
        return exact_copy(self.model)

    def rule(self, prompt: Sequence[int], written: Sequence[int], sampling: Sampling, plain: int, method: int) -> Ruling:
        """The verdict on `plain` against `method` as the token after a text. Methods often part at the same places."""
        case = (tuple(prompt), tuple(written), sampling, plain, method)
        if case not in self._ruled:
            self._ruled[case] = self._rule(len(prompt), (*prompt, *written), sampling, plain, method)
        return self._ruled[case]

    @torch.inference_mode()
    def _rule(self, prompt: int, text: tuple[int, ...], sampling: Sampling, plain: int, method: int) -> Ruling:
        scoring = Scoring.of(text, sampling, self.model)
        logits = own_logits(self.exact, text)
        scores, scaled = scoring.scores(logits), scoring.scaled(logits)
        score = {token: float(scores[token]) for token in (plain, method)}
        ahead, behind = sorted(score, key=lambda token: score[token], reverse=True)
        own = scoring.scores(own_logits(self.model.hf, text)) - scores
        runs = [scoring.scores(answer) - scores for answer in self._replays(prompt, text)]
        error = max(float(off[[ahead, behind]].abs().max()) for off in (own, *runs))
        error = min(error, 2 * float(own.abs().max()))
        gap = score[ahead] - score[behind]
        stands = [standing(scaled, token, sampling, 2 * error) for token in (ahead, behind)]
        return Ruling(score[plain], score[method], gap, error, *decide(gap, 2 * error, *stands))

    def _replays(self, prompt: int, text: tuple[int, ...]) -> Iterator[Tensor]:
        """What the run's model answers after the text, written in passes of every shape, and read in one.

        The history counts: in a narrow dtype, keys and values that were written row by row are not those of a prompt.
        """
        yield replayed(self.model, text, len(text) - 1, 1)
        for rows in PASS_ROWS:
            yield replayed(self.model, text, max(min(prompt - 1, len(text) - rows), 0), rows)


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
    """How the token after a text is chosen, for one row of logits [V]."""

    table: SamplingTable
    position: Tensor  # [1, 1]
    seen: Tensor  # [1, 1, V]

    @staticmethod
    def of(text: Sequence[int], sampling: Sampling, model: Model) -> Scoring:
        table = SamplingTable.empty(1, model.ends)
        table.set(0, sampling)
        tokens = torch.tensor(text, device=model.device)
        seen = tokens.bincount(minlength=model.vocab_size).view(1, 1, -1)
        return Scoring(table, torch.tensor([[len(text)]], device=model.device), seen)

    def scores(self, logits: Tensor) -> Tensor:
        """What `pick` compares, filters left out, in the precision it is given.

        The noise is the same number whatever the logits, so two of these differ by the error of the logits and by the
        rounding of the choice itself.
        """
        return self._judge(logits, lambda kind: replace(kind, top_k=0, top_p=False, min_p=False)).double()

    def scaled(self, logits: Tensor) -> Tensor:
        """What the filters see: after penalties and / T, without noise."""
        penalised = self._judge(logits, lambda kind: Kind(penalties=kind.penalties))
        temperature = self.table.requests[0][0].temperature
        return penalised / temperature if temperature > 0 else penalised

    def _judge(self, logits: Tensor, stages: Callable[[Kind], Kind]) -> Tensor:
        rows = self.table.at(torch.zeros(1, dtype=torch.long, device=logits.device), (0,))
        return judge(logits.view(1, 1, -1), self.position, replace(rows, kind=stages(rows.kind)), self.seen).flatten()


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


# Passes -----------------------------------------------------------------------------------------------------------------


def own_logits(hf: nn.Module, text: Sequence[int]) -> Tensor:
    """[V]: what transformers answers after the text by itself, in one pass, no cache and no walk of ours."""
    ids = torch.tensor([list(text)], device=next(hf.parameters()).device)
    logits = hf(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits if logits.dtype == torch.float64 else logits.float()


def replayed(model: Model, text: Sequence[int], read: int, rows: int) -> Tensor:
    """[V]: what the run's own model answers after the text when the first `read` tokens go as a prompt and the others as
    chains of `rows` tokens, the last of them full."""
    longest = prefill_chunk(model.device)
    edges = [*range(0, read, longest), read, *reversed(range(len(text), read, -rows))]
    with model.aside(1, len(text), longest) as cache:
        for start, stop in pairwise(edges):
            chunk, lanes = _chain(text[start:stop], model), Lanes.of([0], start, model.device)
            is_last = stop == len(text)
            scores = model.score(lanes, chunk, Needs(), logits="all" if is_last else "none")
            cache.advance(lanes, chunk.size)
    return scores.require_logits()[0, -1]


def _chain(tokens: Sequence[int], model: Model) -> Draft:
    rows = torch.tensor([list(tokens)], device=model.device)
    return Draft(rows, Tree.chain(len(tokens), model.device), torch.tensor([len(tokens)], device=model.device))


# The float64 copy -------------------------------------------------------------------------------------------------------


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input; the one of transformers computes in float32 whatever it is given."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon)


def exact_copy(model: Model) -> Any:
    """The very weights of a model, computed with in float64. Rotary angles stay as transformers makes them, in float32:
    they are the same in every pass, so they are part of the function and not of its rounding."""
    try:
        exact = _reloaded(model) if _is_rebuilt(model.hf) else copy.deepcopy(model.hf).double()
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


def _reloaded(model: Model) -> Any:
    folder = Path(model.hf.config.name_or_path)
    if not (folder / "config.json").is_file():
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
