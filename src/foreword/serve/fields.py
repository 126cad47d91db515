"""The fields of requests: the body of a request -> checked fields, and what of them are settings of `generate`.

The structs list every field that is read; /openapi.json is made from them. A field that is known but not supported is
refused by name, unless it has a value that changes nothing. A field that nobody knows is ignored, and counted. Null counts
as not given.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from foreword.files import BadJSON, parse_json
from foreword.serve.errors import Refusal
from foreword.text.grammar import KINDS as GRAMMARS

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Likeliest = Annotated[int, Meta(ge=0, le=100)]
Samples = Annotated[int, Meta(ge=1, le=1024)]
Object = dict[str, Any]


class StreamOptions(Struct):
    """What a stream tells in addition to its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """The fields of every request that generates."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    seed: Annotated[
        Seed | None,
        Meta(description="The same seed gives the same output, with every method; in half precision up to near-ties."),
    ] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Count | None = None
    reuse: Annotated[
        bool | None, Meta(description="Start from cached tokens. The default is true unless the model has half precision.")
    ] = None
    cache_salt: str | None = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Requests with the same key are parts of one session: its cached tokens are kept.")
    ] = None
    structured_outputs: Annotated[
        Object | None, Meta(description="The format of the output, as in vLLM: one of json, regex, choice, grammar, ...")
    ] = None
    guided_json: Annotated[str | Object | None, Meta(description="vLLM's earlier name of structured_outputs.json.")] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculate: Annotated[
        bool | None,
        Meta(description="false: decode without drafts. The output is the same; in half precision up to near-ties."),
    ] = None


Traces = Annotated[bool | None, Meta(description="Each chunk of a stream is a round, and tells what was drafted in it.")]


class ChatFields(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Object]
    max_tokens: Annotated[Count | None, Meta(description="The earlier name of max_completion_tokens, which wins.")] = None
    max_completion_tokens: Count | None = None
    n: Samples | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    stream_options: StreamOptions | None = None
    response_format: Object | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    prediction: Annotated[Object | None, Meta(description="OpenAI's Predicted Outputs: text that is used as a draft.")] = (
        None
    )
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    trace_rounds: Traces = None
    return_token_ids: bool | None = None


class CompletionFields(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, token ids, or a list of texts or of lists of token ids."),
    ]
    max_tokens: Count | None = None
    n: Samples | None = None
    logprobs: Likeliest | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Object | None = None
    prediction: Object | None = None
    trace_rounds: Traces = None
    return_token_ids: bool | None = None


class ResponseFields(GenerationFields, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[Object]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Likeliest | None = None
    include: list[str] | None = None
    text: Object | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Object | None = None
    chat_template_kwargs: Object | None = None
    metadata: Object | None = None


class TokenizeFields(Struct, kw_only=True):
    """The body of POST /tokenize: a text or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Object] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Object] | None = None
    chat_template_kwargs: Object | None = None


class DetokenizeFields(Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[Natural]
    model: str | None = None


class MethodFields(Struct, kw_only=True):
    """The body of POST /foreword/method."""

    method: str


Fields = TypeVar("Fields", bound=Struct)

# Fields that are the grammar of an output, or a part of it.
GUIDES = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
GRAMMAR_FIELDS = ("response_format", "text", *GUIDES, "tools")

# Fields that are settings of `generate`, under the name that they have there.
SETTING_OF = {
    name: {"prompt_cache_key": "session", "min_tokens": "min_new_tokens"}.get(name, name)
    for name in GenerationFields.__struct_fields__
    if name not in ("model", "stream", *GUIDES)
}
SETTING_OF |= {name: "max_new_tokens" for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")}
SETTING_OF |= {
    name: name for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "trace_rounds")
}

ONLY_TEXT = "this server reads and writes text only"
STATELESS = "this server keeps no answers; send the whole conversation"
# name: (values that change nothing, why others are refused)
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), ONLY_TEXT),
    "modalities": ((["text"],), ONLY_TEXT),
    "web_search_options": ((), "this server searches nothing"),
    "functions": (([],), "it was replaced by tools"),
    "function_call": (("none",), "it was replaced by tool_choice"),
    "store": ((False,), STATELESS),
    "previous_response_id": ((), STATELESS),
    "conversation": ((), STATELESS),
    "background": ((False,), STATELESS),
    "prompt_template": ((), STATELESS),
    "truncation": (("disabled",), "shorten the input, or keep only its end with truncate_prompt_tokens"),
    "max_tool_calls": ((), "this server runs no tools"),
    "suffix": (("",), "only text after the prompt is generated"),
    "best_of": ((1,), "ask for n outputs and choose among them"),
    "use_beam_search": ((False,), "outputs are sampled"),
    "chat_template": ((), "templates are programs, and this server runs only the model's own"),
    "priority": ((0,), "requests are served in the order they come"),
    "prompt_logprobs": ((), "use echo with logprobs at /v1/completions"),
}
OF_CHOICES = (False,), "/v1/chat/completions and /v1/completions have it"
ELSEWHERE = dict.fromkeys(("trace_rounds", "return_token_ids"), OF_CHOICES)  # what only some endpoints read
IGNORED = {"user", "safety_identifier", "metadata", "service_tier", "verbosity", "prompt_cache_retention"}


def read_object(body: bytes) -> Object:
    """Parse the body of a request."""
    try:
        found = parse_json(body)
    except BadJSON as error:
        raise Refusal(400, f"the body is not JSON that can be read: {error}", code="bad_json") from error
    if not isinstance(found, dict):
        raise Refusal(400, "the body must be a JSON object", code="bad_json")
    return found


def checked(given: Object, kind: type[Fields]) -> tuple[Fields, int]:
    """Return the fields of a request, and how many others it has that nobody knows."""
    names = {*kind.__struct_fields__}
    others, refused = given.keys() - names, UNSUPPORTED | ELSEWHERE
    for name in sorted(others & refused.keys()):
        harmless, why = refused[name]
        if given[name] is not None and given[name] not in harmless:
            raise Refusal(400, f"{name} is not supported: {why}", param=name, code="unsupported_field")
    try:
        return msgspec.convert(given, kind), len(others - refused.keys() - IGNORED)
    except msgspec.ValidationError as error:
        raise Refusal(400, f"the body cannot be used: {error}", param=_place(str(error))) from error


def _place(message: str) -> str | None:
    """Return the field that a validation error names: "... - at `$.top_p`", or "... field `messages`"."""
    found = re.search(r"at `(?:key in )?\$\.?\.?\.?(\w+)|field `(\w+)`$", message)
    return (found[1] or found[2]) if found else None


def settings_of(fields: GenerationFields, session: str | None = None) -> Object:
    """Return the settings of `generate` among some fields. `session`: that of a header, which a field overrides."""
    found: Object = {} if session is None else {"session": session}
    for name in fields.__struct_fields__:
        if name in SETTING_OF and (value := getattr(fields, name)) is not None:
            found[SETTING_OF[name]] = value
    return found


def names_of(fields: GenerationFields) -> dict[str, str]:
    """Return the fields that a client gave, by the names of their settings. Errors blame them."""
    given = [name for name in fields.__struct_fields__ if name != "model" and getattr(fields, name) is not None]
    grammar = next((name for name in GRAMMAR_FIELDS if name in given), None)
    found = {} if grammar is None else dict.fromkeys(GRAMMARS, grammar)
    return found | {SETTING_OF.get(name, name): name for name in given}
