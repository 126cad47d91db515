"""Refuse unknown keywords by name, with the reason, or with the nearest known names.

In: the keywords of `load`, `wrap` or `use` beyond their own parameters. Out: the options that go to the method. Without
this, a keyword of another library would be taken for an option of a method, and the error message would mislead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from foreword.core.drafter import Drafter
from foreword.drafters.spec import parse_spec
from foreword.errors import ForewordWarning, InputError
from foreword.methods import AUTO, NEAR, MethodLike, all_methods

_ONE_DEVICE = "a model runs on one device; choose it with device='cuda:1'"
_QUANTISED = (
    "on a CPU, `load(quantization=...)` runs quantised weights (docs/quantised.md); `load` reads no quantised folders; "
    "`wrap` takes models whose weights alone are quantised"
)

# Keywords of other libraries that Foreword does not support, and why.
UNSUPPORTED = {
    "trust_remote_code": "Foreword runs no code that comes with a model, only families that it knows (docs/models.md)",
    "tensor_parallel_size": f"tp=N divides a model over N devices (docs/tensor-parallel.md); without it {_ONE_DEVICE}",
    "pipeline_parallel_size": f"Foreword has tensor parallelism alone (tp=N); without it {_ONE_DEVICE}",
    "device_map": f"tp=N divides a model over N devices (docs/tensor-parallel.md); without it {_ONE_DEVICE}",
    "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "quantization_config": _QUANTISED,
    "attn_implementation": "a model that is loaded gets Foreword's own attention",
    "gpu_memory_utilization": "the cache takes what slots and max_context ask for",
    "cache_dir": "HF_HOME says where models of the hub are kept, FOREWORD_HOME where Foreword keeps its own",
    "local_files_only": "set HF_HUB_OFFLINE=1 to ask the hub for nothing",
}

# Keywords of other libraries, and what Foreword calls them.
OTHER_NAMES = {
    "torch_dtype": "dtype",
    "max_model_len": "max_context",
    "max_seq_len": "max_context",
    "max_num_seqs": "slots",
    "use_auth_token": "token",
    "speculative_model": "drafter",
    "assistant_model": "drafter",
}

# What other values of a flag mean in vLLM.
VALUES_OF_VLLM = {"generation_config": " (vLLM's 'auto' is True, its 'vllm' is False; another file is not read)"}

# Parameters by their names now, and their names in 0.1.
RENAMED = {"fused_layers": "compile", "cuda_graphs": "graph"}


def renamed(options: dict[str, Any], name: str, value: bool) -> bool:
    """Return the value of a parameter, which may have been given under its earlier name, among the options."""
    before = RENAMED[name]
    if before not in options:
        return value
    if not value:
        raise InputError(f"{name} and {before} are one parameter; give {name} alone")
    warnings.warn(f"{before} is called {name} now; the earlier name will go", ForewordWarning, stacklevel=3)
    return bool(options.pop(before))


def check_flags(**flags: object) -> None:
    """Refuse what is neither True nor False: a string would pass for True, whatever it says."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            hint = VALUES_OF_VLLM.get(name, "")
            raise InputError(f"{name} is {value!r}; it must be True or False{hint}")


def options_of_method(call: Callable[..., Any], method: MethodLike, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that are options of the method, and refuse all others."""
    name_of_method, known = _known_options(method) if given else ("", None)
    options = {name: value for name, value in given.items() if not _is_off(name, value)}
    for name, value in options.items():
        if name in UNSUPPORTED:
            raise InputError(f"{name}={value!r}: {UNSUPPORTED[name]}")
        if known is not None and name not in known:
            raise InputError(_unknown(call, name_of_method, known, name))
        if name_of_method == AUTO and not any(name in _options(one.load()) for one in all_methods().values()):
            raise InputError(_unknown(call, AUTO, None, name))
    return options


def _is_off(name: str, value: object) -> bool:
    """Return whether a keyword turns an unsupported feature off, so that it can be ignored."""
    one = name.endswith("_parallel_size") and value == 1
    return name in UNSUPPORTED and (value is None or value is False or one)


def _known_options(method: MethodLike) -> tuple[str, list[str] | None]:
    """Return the name of a method, and its options. They are None if they are checked elsewhere: for an unknown method, for
    the folder of a drafter, which names its method, and for a drafter object, which takes none."""
    if isinstance(method, type) and issubclass(method, Drafter):
        return method.__name__, _options(method)
    name = parse_spec(method).name if isinstance(method, str) else ""
    table = all_methods()
    return name, _options(table[name].load()) if name in table else None


def _options(kind: type[Drafter]) -> list[str]:
    return list(signature(kind).parameters)


def _unknown(call: Callable[..., Any], method: str, options: list[str] | None, name: str) -> str:
    own = [one.name for one in signature(call).parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
    known = list(dict.fromkeys([*own, *(options or ())]))
    meant = OTHER_NAMES.get(name)
    near = [meant] if meant in known else get_close_matches(name, known, n=2, cutoff=NEAR)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if options is None:
        message = f"{call.__name__} takes no {name!r}; {hint}it takes: "
    else:
        names = ", ".join(options)
        message = f"{method}: no option is called {name!r}; {hint}there are: {names}; {call.__name__} itself takes: "
    return message + ", ".join(own)
