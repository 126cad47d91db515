"""The options that commands share, in three groups, and `unfold`, which gives them to typer.

A command takes a group as one argument and asks it for what it needs: `model.load(method)`, `writing.settings()`. Ranges
that typer can check are refused before anything is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foreword.cli.console import waiting
from foreword.methods import AUTO, DEFAULT_METHOD, METHODS, find
from foreword.methods.words import read_value, read_word

if TYPE_CHECKING:
    from foreword.api import LLM

MODEL, METHOD, WRITING = "Model", "Method", "Writing"  # panels of --help
_of_model = partial(typer.Option, rich_help_panel=MODEL)
_of_method = partial(typer.Option, rich_help_panel=METHOD)
_of_writing = partial(typer.Option, rich_help_panel=WRITING)

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of text, for programs.")]
Slots = Annotated[int, _of_model(min=1, metavar="N", help="Texts written side by side.")]


def _known(method: str) -> str:
    """NAME, or NAME=FOLDER, perhaps with options behind it."""
    name = read_word(method).name
    if name != AUTO:
        find(name)
    return method


@dataclass(frozen=True)
class MethodOptions:
    """How tokens are guessed. Whatever is chosen here, the text stays the same; only the speed changes."""

    method: Annotated[
        str,
        _of_method(
            callback=_known,
            autocompletion=lambda: [AUTO, *METHODS],
            metavar="NAME",
            help="How tokens are guessed; `foreword methods` lists them. The text is the same with every method. Default: "
            "what is expected to be fastest on this machine.",
        ),
    ] = DEFAULT_METHOD
    drafter: Annotated[
        Path | None,
        _of_method(
            metavar="FOLDER",
            help="A trained drafter, which says itself of which method it is, or a small model to guess with. Default: the "
            "one that ships for the model.",
        ),
    ] = None
    rows: Annotated[
        int | None,
        _of_method(
            min=1,
            metavar="N",
            help="At most so many candidates in a pass. Default: as many as pay on this machine, which is measured once.",
        ),
    ] = None
    method_option: Annotated[
        list[str],
        _of_method(
            metavar="KEY=VALUE", help="An option of the method itself, such as table=reset or max_match=3; may be repeated."
        ),
    ] = field(default_factory=list)

    def own(self) -> dict[str, Any]:
        """The method's own options, with numbers and tuples read as such."""
        return dict(_pair(text) for text in self.method_option)


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--method-option")
    if key in _HAVE_OPTIONS:
        instead = key.replace("_", "-")
        raise typer.BadParameter(f"{key} has an option of its own: --{instead}", param_hint="--method-option")
    return key, read_value(value)


@dataclass(frozen=True)
class ModelOptions:
    """Which model writes, and on what."""

    model: Annotated[
        str | None,
        _of_model(
            metavar="FOLDER|FILE|ID",
            help="A model folder, a GGUF file, or a Hugging Face id (org/name). Default: SmolLM2-135M-Instruct.",
        ),
    ] = None
    device: Annotated[
        str | None, _of_model(metavar="NAME", help="cpu, cuda or cuda:N. Default: the GPU where there is one.")
    ] = None
    dtype: Annotated[
        str | None,
        _of_model(
            metavar="NAME",
            help="float32, float64, bfloat16 or float16. Default: float32 on a CPU, where texts are equal token for "
            "token; bfloat16 on a GPU.",
        ),
    ] = None
    threads: Annotated[
        int | None, _of_model(min=1, metavar="N", help="CPU threads. Default: one per core; more than that is slower.")
    ] = None
    max_context: Annotated[
        int | None,
        _of_model(
            min=1,
            metavar="N",
            help="Tokens a text may have, prompt included. Default: what the model was trained for, at most 4096.",
        ),
    ] = None
    no_compile: Annotated[
        bool, _of_model("--no-compile", metavar="", help="Layers as transformers wrote them, to compare: slower.")
    ] = False
    no_graph: Annotated[
        bool, _of_model("--no-graph", metavar="", help="On CUDA, rounds launched one by one, to compare: slower.")
    ] = False

    def load(self, method: MethodOptions, slots: int) -> LLM:
        own = method.own()
        # Fetching draws a bar of its own, and two live displays would overwrite each other.
        with waiting(f"loading {self.name}") if self.is_here() else nullcontext():
            from foreword.api import load  # noqa: PLC0415  imports torch: seconds that only loading commands pay

            return load(
                self.model, method.method, drafter=method.drafter, rows=method.rows, slots=slots, **self.where(), **own
            )

    def where(self) -> dict[str, Any]:
        """The arguments of `foreword.load` that these options are, but for the model itself."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "model"}
        return given | {"compile": not given.pop("no_compile"), "graph": not given.pop("no_graph")}

    @property
    def name(self) -> str:
        from foreword.model.hub import DEFAULT  # noqa: PLC0415  start-up time: numpy is below it

        return self.model or DEFAULT.name

    def is_here(self) -> bool:
        """Whether it lies on this disk for certain; a hub id may have to be fetched."""
        from foreword.model.storage import place  # noqa: PLC0415  beside `name`

        if self.model is None:
            return (place() / "models" / self.name).is_dir()
        return Path(self.model).expanduser().exists()


def _number(value: float) -> float:
    """Not NaN, which is in every range that a comparison checks: it must not cost the loading of a model first."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number to write with")
    return value


_of_number = partial(_of_writing, callback=_number)


@dataclass(frozen=True)
class WritingOptions:
    """How tokens are chosen and where a text ends."""

    max_new_tokens: Annotated[
        int | None, _of_writing(min=1, metavar="N", help="Stop after so many tokens. Default: 128; 512 in a chat.")
    ] = None
    min_new_tokens: Annotated[int, _of_writing(min=0, metavar="N", help="Do not end before so many tokens.")] = 0
    temperature: Annotated[
        float, _of_number(min=0, metavar="X", help="0 takes the likeliest token each time; higher is more varied.")
    ] = 0.0
    top_p: Annotated[
        float, _of_number(min=0, max=1, metavar="X", help="Draw from the likeliest tokens that hold this share.")
    ] = 1.0
    top_k: Annotated[int, _of_writing(min=0, metavar="N", help="Draw from the K likeliest tokens; 0 is off.")] = 0
    min_p: Annotated[
        float, _of_number(min=0, max=1, metavar="X", help="Drop tokens less likely than this share of the likeliest.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, _of_number(metavar="X", help="Above 1, tokens that are in the text already become less likely.")
    ] = 1.0
    seed: Annotated[
        int | None,
        _of_writing(
            metavar="N", help="The same seed draws the same text, with any method. Default: a new one; --json tells which."
        ),
    ] = None
    stop: Annotated[list[str], _of_writing(metavar="TEXT", help="End the text before this string; may be repeated.")] = (
        field(default_factory=list)
    )
    ignore_eos: Annotated[bool, _of_writing("--ignore-eos", metavar="", help="Write on past the model's own end.")] = False
    logprobs: Annotated[
        int | None,
        _of_writing(
            min=0, max=100, metavar="N", help="With --json: each token's log-probability, and the N likeliest beside it."
        ),
    ] = None
    no_speculation: Annotated[
        bool, _of_writing("--no-speculation", metavar="", help="Write token by token, to compare: same text, slower.")
    ] = False

    def settings(self, json: bool, max_new_tokens: int = 128) -> dict[str, Any]:
        """What `generate`, `stream` and `chat` of the Python API call these; `max_new_tokens` where none was given."""
        if self.logprobs is not None and not json:
            raise typer.BadParameter("log-probabilities are part of the JSON: add --json", param_hint="--logprobs")
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        given["max_new_tokens"] = self.max_new_tokens or max_new_tokens
        given["speculate"] = not given.pop("no_speculation")
        return given


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Such as `1,16` of an option."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers of 1 or more, such as 1,16", param_hint=option)
    return found


_HAVE_OPTIONS = {"slots"} | {one.name for group in (MethodOptions, ModelOptions) for one in fields(group)}


def unfold(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: where it takes a group of options, each of them as a parameter of its own."""
    asked = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in asked.items() if is_dataclass(one.annotation)}
    parameters: list[inspect.Parameter] = []
    for name, one in asked.items():
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
