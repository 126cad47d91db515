"""Results: the output of a request, and what it cost. Every figure is counted here, once, for all methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreword.core.sampling import OPTIONS, Sampling
from foreword.engine.request import FinishReason, Logprob, Running
from foreword.engine.round_trace import RoundTrace


@dataclass(frozen=True)
class Stats:
    """Counts and times of one request, or of several together. The `spec_decode_*` fields are vLLM's counters."""

    new_tokens: int
    """Tokens generated."""

    rounds: int
    """Passes of the target model after the prompt; with `speed`, passes of its group of layers."""

    tokens_per_round: float
    """New tokens / rounds, the target's own token included: plain decoding has 1.0. Also called mean acceptance length."""

    accepted_per_position: list[float]
    """Entry i: in which share of all rounds with a draft the first i + 1 draft tokens were accepted (vLLM's rate)."""

    conditional_per_position: list[float]
    """Entry i: the same, as a share of the rounds in which the first i draft tokens were accepted."""

    prefill_s: float
    """Seconds of reading the prompt."""

    decode_s: float
    """Seconds of the rounds that the request took part in."""

    tokens_per_second: float
    """New tokens / decode_s."""

    prompt_tokens: int
    """Tokens of the prompt."""

    reused_tokens: int
    """Prompt tokens that were still in the cache, so that they were not read again."""

    spec_decode_num_drafts: int
    """Rounds with a draft."""

    spec_decode_num_draft_tokens: int
    """Draft tokens verified."""

    spec_decode_num_accepted_tokens: int
    """Draft tokens accepted."""

    spec_decode_num_accepted_tokens_per_pos: list[int]
    """Entry i: the number of rounds in which the first i + 1 draft tokens were accepted."""

    accepted_prediction_tokens: int | None = None
    """Draft tokens from the prediction that were accepted; None without a prediction. OpenAI's field, as the next."""

    rejected_prediction_tokens: int | None = None
    """Tokens of the prediction that were not."""

    @staticmethod
    def of(runs: Running | Iterable[Running]) -> Stats:
        """Count for one request, or for the rounds of several together."""
        runs = [runs] if isinstance(runs, Running) else list(runs)
        rounds = [pair for run in runs for pair in zip(run.accepted, run.drafted, strict=True)]
        drafts = [kept - 1 for kept, drafted in rounds if drafted > 0]
        per_position = [sum(kept >= place for kept in drafts) for place in range(1, max(drafts, default=0) + 1)]
        tokens, decode_s = sum(len(run.tokens) for run in runs), sum(run.decode_s for run in runs)
        before = [len(drafts), *per_position]
        with_prediction = [run for run in runs if run.request.prediction]
        rejected = [max(len(run.request.prediction) - run.predicted, 0) for run in with_prediction]
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
            accepted_prediction_tokens=sum(run.predicted for run in with_prediction) if with_prediction else None,
            rejected_prediction_tokens=sum(rejected) if with_prediction else None,
        )


# Options that came after the first release; in JSON only if they are on.
LATER_OPTIONS = ("allowed_token_ids", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "bad_word_ids")
# Fields that `Result.to_dict` leaves out if they are None.
OPTIONAL = ("logprobs", "prompt_logprobs", "stop_reason", "model_defaults", "error")


@dataclass(frozen=True)
class Result:
    """The output of one request."""

    text: str
    """The generated text, without the prompt."""

    tokens: list[int]
    """The generated token ids, without the prompt."""

    finish_reason: FinishReason
    """"stop": an end token, stop string or stop token. "length": `max_new_tokens` or the context was reached. "abort": the
    request was aborted."""

    model: str
    """The name of the model."""

    method: str
    """The name of the drafting method."""

    sampling: Sampling
    """The sampling that applied, with its seed."""

    stats: Stats
    """Counts and times."""

    logprobs: list[Logprob] | None = None
    """One entry per generated token, if `logprobs` was set."""

    error: str | None = None
    """Why the request failed, if it did by itself."""

    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token, that ended it; "context" if the context was full before `max_new_tokens`
    were generated; None otherwise, also after an end token."""

    prompt_logprobs: list[Logprob | None] | None = None
    """One entry per prompt token, if `prompt_logprobs` was set. The first is None: nothing precedes it."""

    model_defaults: list[str] | None = None
    """The settings in `sampling` that came from the model's generation config; None if there are none."""

    @staticmethod
    def of(run: Running, model: str, method: str) -> Result:
        """Make the result of a finished request."""
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
        """Return the result as `foreword generate --json` prints it."""
        found = {name: value for name, value in asdict(self).items() if value is not None or name not in OPTIONAL}
        found["sampling"] = _shown(self.sampling)
        found["stats"] = {name: value for name, value in found["stats"].items() if value is not None}
        return found


def _shown(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling for JSON, without the `LATER_OPTIONS` that are off."""
    found = asdict(sampling)
    for name in LATER_OPTIONS:
        if found[name] == OPTIONS[name].off:
            del found[name]
    if sampling.biases:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.biases}
    if sampling.bad_words:
        del found["bad_word_ids"]  # made from `bad_words` by the tokenizer
    return found


class Piece(str):
    """A piece of streamed text: a string, with the tokens that one round decided."""

    tokens: list[int]
    """The token ids. The text may lag behind them while a character or a stop string is incomplete."""

    logprobs: Sequence[Logprob]
    """One entry per token, if `logprobs` was set."""

    draft: RoundTrace | None
    """The draft of the round, and what of it was accepted, if `trace_rounds` was set."""

    def __new__(
        cls, text: str, tokens: list[int], logprobs: Sequence[Logprob] = (), draft: RoundTrace | None = None
    ) -> Piece:
        piece = super().__new__(cls, text)
        piece.tokens, piece.logprobs, piece.draft = tokens, logprobs, draft
        return piece
