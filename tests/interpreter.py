"""Triton's interpreter without work that it repeats: most kernels then take two thirds of their time.

At every call of a device function it searches Triton's language for functions to replace. All are replaced at the first call
in a kernel, and put back at the kernel's end, so later calls of the same function search in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def search_once_per_kernel() -> None:
    """Let each function search at its first call in a kernel only. Another version of Triton may lack these names."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    searched: set[Callable[..., Any]] = set()
    search = interpreter._patch_lang

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """A kernel's replacements. The interpreter puts them back at its end, and forgets those of device functions."""

        def restore(self) -> None:
            searched.clear()
            super().restore()

    def search_at_first(function: Callable[..., Any]) -> Scope | None:
        if function in searched:
            return None
        searched.add(function)
        return search(function)

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, search_at_first
