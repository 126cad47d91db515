"""Chooses between torch code and a kernel of ours, for functions of `ops`: torch on the CPU, the kernel for CUDA tensors.

A function of `ops` is written in torch. That body is the reference: it defines the result, runs on the CPU, and tests
compare the kernel with it. `@accelerated("module:function")` names the kernel that takes its place for CUDA tensors, with
the same parameters. The kernel's module is imported at its first use, so Triton is needed only where CUDA is. For fused
layers, tree attention, int8 draft linears and quantised linears, `model` chooses, and gets the kernels by `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Dispatch:
    """A function with two bodies: its torch reference, and the kernel for CUDA tensors."""

    reference: Callable[..., Any]
    place: str  # "module:function" of the kernel, relative to foreword.ops

    @property
    def name(self) -> str:
        return f"{self.reference.__module__.removeprefix('foreword.ops.')}:{self.reference.__name__}"

    def kernel(self) -> Callable[..., Any]:
        return _imported(self.place)


DISPATCHES: list[Dispatch] = []
"""Every function with a kernel, in the order of import. Tests compare the two bodies of each."""


def accelerated(
    place: str, when: Callable[..., bool] | None = None
) -> Callable[[Callable[Parameters, Answer]], Callable[Parameters, Answer]]:
    """Send calls with CUDA tensors to the kernel `place`, "module:function" relative to `foreword.ops`.

    The first argument decides: a tensor, a tuple that starts with one, or an object whose `slots` is one. `place` may also
    name a class, whose constructor takes the arguments. `when` gets the same arguments and may refuse a call, for example
    one in a precision that the kernel does not support; the torch body then runs on CUDA too.
    """

    def decorate(reference: Callable[Parameters, Answer]) -> Callable[Parameters, Answer]:
        dispatch = Dispatch(reference, place)
        DISPATCHES.append(dispatch)

        @wraps(reference)
        def dispatched(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
            if on_cuda(args[0]) and (when is None or when(*args, **kwargs)):
                return dispatch.kernel()(*args, **kwargs)
            return reference(*args, **kwargs)

        return dispatched

    return decorate


def on_cuda(first: Any) -> bool:
    """Return whether a tensor, the first of a tuple, or the `slots` of an object is on a CUDA device."""
    first = first[0] if isinstance(first, tuple) else first
    tensor: Tensor = first if isinstance(first, Tensor) else first.slots
    return tensor.is_cuda


@cache
def kernels(module: str) -> ModuleType:
    """Return a module of kernels by its name relative to `foreword.ops`, for code that runs only where they do: fused
    layers, tree attention, int8 draft and quantised linears. The first call imports it: Triton and Numba are needed only
    there."""
    return import_module(f"foreword.ops.{module}")


@cache
def _imported(place: str) -> Callable[..., Any]:
    module, name = place.split(":")
    found: Callable[..., Any] = getattr(kernels(module), name)
    return found
