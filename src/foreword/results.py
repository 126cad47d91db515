"""What a caller gets back: text, tokens, and what they cost. Every figure is counted here, once, for all methods.

rounds: passes of the target after the prompt. tokens_per_round counts the target's own token, so plain decoding is 1.0.
accepted_per_position is vLLM's count: of all rounds with a draft, the share in which the i-th drafted token was kept;
the conditional rate divides by the rounds in which the one before it was kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from foreword.core.sampling import OPTIONS, Sampling
from foreword.engine.request import FinishReason, Logprob, Running


@dataclass(frozen=True)
class Stats:
    new_tokens: int
    rounds: int
    tokens_per_round: float
    accepted_per_position: list[float]
    conditional_per_position: list[float]
    prefill_s: float
    decode_s: float
    tokens_per_second: float
    prompt_tokens: int
    reused_tokens: int
    spec_decode_num_drafts: int
    spec_decode_num_draft_tokens: int
    spec_decode_num_accepted_tokens: int
    spec_decode_num_accepted_tokens_per_pos: list[int]

    @staticmethod
    def of(runs: Running | Iterable[Running]) -> Stats:
        """Of one request, or pooled over the rounds of several."""
        runs = [runs] if isinstance(runs, Running) else list(runs)
        rounds = [pair for run in runs for pair in zip(run.accepted, run.drafted, strict=True)]
        drafts = [kept - 1 for kept, drafted in rounds if drafted > 0]
        per_position = [sum(kept >= place for kept in drafts) for place in range(1, max(drafts, default=0) + 1)]
        tokens, decode_s = sum(len(run.tokens) for run in runs), sum(run.decode_s for run in runs)
        before = [len(drafts), *per_position]
        return Stats(
            new_tokens=tokens,
            rounds=len(rounds),
            tokens_per_round=tokens / max(len(rounds), 1),
            accepted_per_position=[count / len(drafts) for count in per_position],
            conditional_per_position=[count / max(given, 1) for count, given in zip(per_position, before, strict=False)],
            prefill_s=sum(run.prefill_s for run in runs),
            decode_s=decode_s,
            tokens_per_second=tokens / decode_s if decode_s else 0.0,
            prompt_tokens=sum(len(run.request.prompt) for run in runs),
            reused_tokens=sum(run.reused for run in runs),
            spec_decode_num_drafts=len(drafts),
            spec_decode_num_draft_tokens=sum(drafted for _, drafted in rounds),
            spec_decode_num_accepted_tokens=sum(drafts),
            spec_decode_num_accepted_tokens_per_pos=per_position,
        )


LATER_OPTIONS = ("allowed_token_ids", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "bad_word_ids")
OPTIONAL = (
    "logprobs",
    "prompt_logprobs",
    "stop_reason",
    "model_defaults",
    "error",
)  # left out of `Result.to_dict` where there are none


@dataclass(frozen=True)
class Result:
    text: str
    tokens: list[int]
    finish_reason: FinishReason
    model: str
    method: str
    sampling: Sampling
    stats: Stats
    logprobs: list[Logprob] | None = None
    error: str | None = None  # why it was aborted, where the request itself failed
    stop_reason: str | int | None = None
    """What ended it: the stop string, or the id of the stop token; "context" where the context was full before
    `max_new_tokens` were written; None otherwise, also for an end token."""

    prompt_logprobs: list[Logprob | None] | None = None
    """Of each token of the prompt; the first has none before it, and is None."""

    model_defaults: list[str] | None = None
    """Settings in `sampling` that the request left to the model's generation config, if there are any."""

    @staticmethod
    def of(run: Running, model: str, method: str) -> Result:
        assert run.finish_reason is not None
        sampling = run.request.sampling
        logprobs = run.logprobs if sampling.logprobs is not None else None
        error = None if run.error is None else str(run.error)
        return Result(
            run.text,
            run.tokens,
            run.finish_reason,
            model,
            method,
            sampling,
            Stats.of(run),
            logprobs=logprobs,
            error=error,
            stop_reason=run.stop_reason,
            prompt_logprobs=None if run.request.prompt_logprobs is None else [None, *run.prompt_logprobs],
            model_defaults=list(run.request.model_defaults) or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The shape of `generate --json`."""
        found = {name: value for name, value in asdict(self).items() if value is not None or name not in OPTIONAL}
        found["sampling"] = _shown(self.sampling)
        return found


def _shown(sampling: Sampling) -> dict[str, Any]:
    """The sampling in JSON. Options that came after the first release appear where they are on."""
    found = asdict(sampling)
    for name in LATER_OPTIONS:
        if found[name] == OPTIONS[name].off:
            del found[name]
    if sampling.biases:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.biases}
    if sampling.bad_words:
        del found["bad_word_ids"]  # the tokenizer made them of the words
    return found


class Piece(str):
    """A stretch of streamed text, with the tokens that one round decided."""

    tokens: list[int]

    def __new__(cls, text: str, tokens: list[int]) -> Piece:
        piece = super().__new__(cls, text)
        piece.tokens = tokens
        return piece
