"""A limit on the parameters of modules whose sizes come from a file: `with at_most_parameters(count): build()`.

Torch reports every module that is added to another one. Parameters are counted as they come, so that a config which asks
for a hundred thousand layers fails after as many as its weights could fill, whichever kind of module it builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook


class TooManyParameters(Exception):
    """Modules with more parameters than allowed are being built."""


@contextmanager
def at_most_parameters(limit: int) -> Iterator[None]:
    """Raise TooManyParameters as soon as the modules built in this thread have more than `limit` parameters together."""
    thread = get_ident()
    counted: dict[int, nn.Parameter] = {}  # kept alive, so that no id is used again
    left = limit

    def count(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        nonlocal left
        if module is None or get_ident() != thread:
            return
        for parameter in module.parameters():
            if id(parameter) not in counted:
                counted[id(parameter)] = parameter
                left -= parameter.numel()
        if left < 0:
            raise TooManyParameters(f"more than {limit} parameters")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
