"""The answers of all endpoints, for /openapi.json: what a client may rely on. Tests compare real answers with it.

Answers are made by hand where they are written, since a stream makes thousands of them; nothing here takes part in that.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Object = dict[str, Any]


class PromptDetails(Struct):
    """Of a prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Struct):
    """Of the tokens of a prediction."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """What a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Speculation(Struct):
    """What speculation brought."""

    method: str
    rounds: int
    drafted: int
    accepted: int
    tokens_per_round: float


class TopLogprob(Struct):
    """A token that is among the likeliest at its position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of an output."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: str | None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[Object] | None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatDelta(Struct):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[Object] | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class TextChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class AnswerHead(Struct):
    """What all answers and chunks of generating endpoints begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(AnswerHead):
    """The answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    foreword: Speculation
    timings: dict[str, float]
    prompt_token_ids: list[int] | None = None


class ChatChunk(AnswerHead):
    """An event of a stream of POST /v1/chat/completions. After a failure an `Error` is the last one, else `[DONE]` is."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None
    foreword: Object | None = None
    timings: dict[str, float] | None = None


class CompletionAnswer(AnswerHead):
    """The answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    foreword: Speculation
    timings: dict[str, float]


class CompletionChunk(AnswerHead):
    """An event of a stream of POST /v1/completions. After a failure an `Error` is the last one, else `[DONE]` is."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None
    foreword: Object | None = None
    timings: dict[str, float] | None = None


class ResponseAnswer(Struct):
    """The answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[Object]
    error: Object | None
    incomplete_details: Object | None
    usage: Object | None
    system_fingerprint: str


class ResponseEvent(Struct):
    """An event of a stream of POST /v1/responses. `type` is its name, too."""

    type: str
    sequence_number: int


class ModelCard(Struct):
    """The model, under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    foreword: Object


class ModelCards(Struct):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Struct):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct):
    """The answer of POST /detokenize."""

    prompt: str


class Methods(Struct):
    """The drafting method, and which there are."""

    method: str
    methods: list[str]
    switchable: bool


class Status(Struct):
    """How the server is."""

    status: Literal["ready", "starting", "switching", "draining", "dead"]


class Version(Struct):
    """The version of Foreword, and what `system_fingerprint` is a hash of."""

    version: str
    system_fingerprint: str
    made_of: dict[str, str]


class ErrorContent(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """Every error. `param`: the field to blame."""

    error: ErrorContent
