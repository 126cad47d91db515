"""A bound on what modules are built of, for those whose sizes a file decides: `with at_most(numbers): build()`.

Torch reports every module that becomes part of another one. What those hold is counted as they come, so that a config which
asks for a hundred thousand layers ends after as many as its weights could fill, whichever kind of module it builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook


class TooMuchBuilt(Exception):
    """More is being built than was allowed."""


@contextmanager
def at_most(numbers: int) -> Iterator[None]:
    """Refuse modules whose parameters have more than `numbers` numbers together, as soon as they do; in this thread."""
    thread = get_ident()
    counted: dict[int, nn.Parameter] = {}  # held, so that none takes the place of another in memory
    left = numbers

    def count(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        nonlocal left
        if module is None or get_ident() != thread:
            return
        for parameter in module.parameters():
            if id(parameter) not in counted:
                counted[id(parameter)] = parameter
                left -= parameter.numel()
        if left < 0:
            raise TooMuchBuilt(f"more than {numbers} numbers")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
