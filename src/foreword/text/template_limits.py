"""Limits on the values that a chat template makes: `with limited_values(): ...`.

Chat templates are programs that come with a model or a request. Jinja's sandbox limits neither the size of a value nor the
memory of all of them, and one operation such as `'a' * 3000000000` is a single call into C that no time limit interrupts.
Inside the block, transformers compiles templates in a copy of its environment that computes the size of a result before it
makes it. Outside, and in other threads, transformers works as always.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from threading import Lock
from typing import Any

LONGEST_VALUE = 1 << 24  # characters, or entries of a list
LONGEST_OUTPUT = 1 << 26  # characters
MOST_ENTRIES = 1 << 18  # of all lists and dicts inside a value that is written as text
MOST_MADE = 1 << 29  # characters and entries that all operations of one rendering make together
MOST_BITS = 1 << 16  # of a whole number
MOST_INDENT = 64  # of JSON
SMALL = 1024  # characters and entries; smaller results are not added up

STRINGS, CONTAINERS = (str, bytes), (dict, list, tuple, set, frozenset)

Check = Callable[..., None]


class ValueTooLarge(Exception):
    """A chat template would make a value that is too large."""


_made: ContextVar[list[int] | None] = ContextVar("_made", default=None)  # so far, by the rendering that runs


@contextmanager
def limited_values() -> Iterator[None]:
    """Limit what the templates that transformers renders in this block make."""
    _install()
    token = _made.set([0])
    try:
        yield
    finally:
        _made.reset(token)


# Sizes -----------------------------------------------------------------------------------------------------------------


def _allow(size: int, most: int | None = None) -> None:
    """Refuse to make a value of this size, or count it."""
    if size > (LONGEST_VALUE if most is None else most):
        raise ValueTooLarge(f"a value of {size} characters or entries")
    made = _made.get()
    if size > SMALL and made is not None:
        made[0] += size
        if made[0] > MOST_MADE:
            raise ValueTooLarge(f"values of {made[0]} characters and entries in all")


def _allow_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise ValueTooLarge(f"a number of {bits} bits")


def _written_size(value: Any) -> int:
    """Return about how many characters `str(value)` has. A list may hold the same list many times, so counting ends as soon
    as there are too many entries."""
    size, entries, rest = 0, 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, STRINGS):
            size += len(one)
        elif isinstance(one, CONTAINERS):
            size += 2
            entries += len(one)
            if entries > MOST_ENTRIES:
                raise ValueTooLarge(f"text from a value with more than {MOST_ENTRIES} entries")
            rest.extend(one)
            rest.extend(one.values() if isinstance(one, dict) else ())
        else:
            size += 1
    return size


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _as_list(items: Any) -> Any:
    """Return what is to be joined as something that has a length."""
    return list(items) if isinstance(items, Iterable) and not isinstance(items, str | bytes | list | tuple) else items


# Operators -------------------------------------------------------------------------------------------------------------


def _check_product(left: Any, right: Any) -> None:
    for some, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(some, str | bytes | list | tuple):
            _allow(len(some) * times)
    if isinstance(left, int) and isinstance(right, int):
        _allow_bits(left.bit_length() + right.bit_length())


def _check_sum(left: Any, right: Any) -> None:
    _allow(_length(left) + _length(right))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        _allow_bits(left.bit_length() * right)


PLACEHOLDER = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")


def _check_percent(left: Any, right: Any) -> None:
    if isinstance(left, str):
        for width in (one for found in PLACEHOLDER.findall(left) for one in found if one):
            _allow(LONGEST_VALUE + 1 if width == "*" else int(width[:12]))
        _allow(len(left) + _written_size(right))


OPERATORS: dict[str, Check] = {"*": _check_product, "+": _check_sum, "**": _check_power, "%": _check_percent}


# Methods of strings and numbers ------------------------------------------------------------------------------------------


def _check_width(own: Any, *given: Any) -> None:
    _allow(max((one for one in given if isinstance(one, int)), default=0))


def _check_tabs(own: Any, *given: Any, tabsize: Any = 8) -> None:
    width = given[0] if given else tabsize
    _allow(len(own) * width if isinstance(width, int) else 0)


def _check_replace(own: Any, old: Any = "", new: Any = "", count: Any = -1) -> None:
    if isinstance(own, str) and isinstance(old, str) and isinstance(new, str):
        _allow(len(own) + own.count(old) * max(len(new) - len(old), 0))


def _check_join(own: Any, items: Any = ()) -> None:
    _allow(_length(own) * _length(items) + _written_size(items))


def _check_translate(own: Any, table: Any = None) -> None:
    values = table.values() if isinstance(table, dict) else ()
    _allow(len(own) * max(map(_length, values), default=0))


def _check_format(own: Any, *given: Any, **named: Any) -> None:
    fields = re.findall(r"\{[^{}]*[:.]([^{}]*)(\{)?", own)
    for width in (width for spec, nested in fields for width in (*re.findall(r"\d+", spec), *(["9" * 12] * bool(nested)))):
        _allow(int(width[:12]))
    _allow(len(own) + (1 + own.count("{")) * _written_size([*given, *named.values()]))


METHODS: dict[str, Check] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill", "to_bytes"), _check_width),
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "join": _check_join,
    "translate": _check_translate,
    "format": _check_format,
    "format_map": _check_format,
}


def _check_call(called: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Check a call of a method, and return its arguments: what `join` joins as a list, so that it can be measured."""
    method = getattr(called, "__wrapped__", called)
    own, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(own, str | bytes | int) and name in METHODS:
        if name == "join" and args:
            args = (_as_list(args[0]), *args[1:])
        METHODS[name](own, *args, **named)
    return args


# Filters -----------------------------------------------------------------------------------------------------------------


def _filter_center(value: Any, width: Any = 80) -> None:
    _check_width(value, width)


def _filter_indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    lines = s.count("\n") + 1 if isinstance(s, str) else 1
    _allow(_length(s) + lines * (width if isinstance(width, int) else _length(width)))


def _filter_batch(value: Any, linecount: Any, fill_with: Any = None) -> None:
    _check_width(value, linecount)


def _filter_wordwrap(
    s: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *more: Any, **_: Any
) -> None:
    _allow(_length(s) * max(_length(wrapstring), 1))


def _filter_json(x: Any, *given: Any, indent: Any = None, separators: Any = None, **_: Any) -> None:
    indent = given[1] if len(given) > 1 else indent
    separators = given[2] if len(given) > 2 else separators
    if max(indent if isinstance(indent, int) else _length(indent), *map(_length, separators or ()), 0) > MOST_INDENT:
        raise ValueTooLarge(f"JSON with an indent or separators of more than {MOST_INDENT} characters")
    _allow(_written_size(x))


def _filter_join(value: Any, d: Any = "", attribute: Any = None) -> None:
    _check_join(d, value)


def _filter_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replace(s, old, new)


def _filter_format(value: Any, *args: Any, **named: Any) -> None:
    _check_percent(value, [*args, *named.values()])


def _filter_whole(value: Any, *_: Any, **__: Any) -> None:
    _allow(_written_size(value))


FILTERS: dict[str, Check] = {
    **dict.fromkeys(
        ("string", "pprint", "sum", "list", "escape", "e", "forceescape", "urlencode", "xmlattr"), _filter_whole
    ),
    "center": _filter_center,
    "indent": _filter_indent,
    "batch": _filter_batch,
    "wordwrap": _filter_wordwrap,
    "tojson": _filter_json,
    "join": _filter_join,
    "replace": _filter_replace,
    "format": _filter_format,
}


def _limited(function: Callable[..., Any], check: Check) -> Callable[..., Any]:
    """Return a filter that checks its arguments. Some filters have the environment or the context before them."""
    skipped = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def limited(*args: Any, **named: Any) -> Any:
        before, given = args[:skipped], args[skipped:]
        if check is _filter_join and given:
            given = (_as_list(given[0]), *given[1:])
        check(*given, **named)
        return function(*before, *given, **named)

    return limited


# The environment -----------------------------------------------------------------------------------------------------------


def _joined(pieces: Iterable[str]) -> str:
    """Join what a template, a macro or a block writes."""
    found, size = [], 0
    for piece in pieces:
        size += len(piece)
        _allow(size if size > LONGEST_OUTPUT else 0, LONGEST_OUTPUT)
        found.append(piece)
    _allow(size, LONGEST_OUTPUT)
    return "".join(found)


def _joined_values(values: Iterable[Any]) -> str:
    """Join the operands of `~`."""
    values = list(values)
    _allow(_written_size(values))
    return "".join(map(str, values))


def _writable(value: Any) -> Any:
    """Check a value that `{{ ... }}` is about to write."""
    if not isinstance(value, str):
        _allow(_written_size(value))
    return value


@lru_cache
def _environment() -> Any:
    """Return a copy of the environment in which transformers compiles templates, with limits."""
    from jinja2 import Template  # noqa: PLC0415  only where a chat template is rendered
    from transformers.utils import chat_template_utils  # noqa: PLC0415

    stock = chat_template_utils._cached_compile_jinja_template("").environment

    class LimitedTemplate(Template):
        @classmethod
        def _from_namespace(cls, environment: Any, namespace: Any, globals: Any) -> Any:
            namespace["str_join"] = _joined_values
            return super()._from_namespace(environment, namespace, globals)

    class LimitedEnvironment(type(stock)):  # type: ignore[misc]
        intercepted_binops = frozenset(OPERATORS)
        template_class = LimitedTemplate
        concat = staticmethod(_joined)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            OPERATORS[operator](left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: N805  `self` may be a keyword
            args = _check_call(__obj, args, named)
            return super().call(__context, __obj, *args, **named)

    environment = stock.overlay(finalize=_writable)
    environment.__class__ = LimitedEnvironment
    own = {
        name: _limited(environment.filters[name], check) for name, check in FILTERS.items() if name in environment.filters
    }
    environment.filters = {**environment.filters, **own}
    return environment


@lru_cache
def _compiled(chat_template: str) -> Any:
    return _environment().from_string(chat_template)


_installing = Lock()


def _install() -> None:
    """Let transformers compile templates by `_compiled` inside `limited_values`."""
    from transformers.utils import chat_template_utils  # noqa: PLC0415

    with _installing:
        stock = getattr(chat_template_utils, "_compile_jinja_template", None)
        if stock is None or getattr(stock, "limits_values", False):
            return  # a transformers without that function renders with its own limits alone

        @wraps(stock)
        def compiled(chat_template: str) -> Any:
            return stock(chat_template) if _made.get() is None else _compiled(chat_template)

        compiled.limits_values = True  # type: ignore[attr-defined]
        chat_template_utils._compile_jinja_template = compiled
