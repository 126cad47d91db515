"""The formats in which models write tool calls, as data. A model's chat template tells which one it was trained on.

In: the template. Out: a `ToolFormat`: how to find a call (tool_text.py), and how a grammar writes it (tools.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from foreword.errors import InputError
from foreword.serve.fields import Object
from foreword.serve.structured import schema_part


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: `prefix`, {"name": ..., KEY: {...}}, `suffix`.

    `markers`: where a call may begin. `marks_calls`: they stand before calls only. `closing`: what may follow a call.
    `separator`: between calls; None if the model writes one call only."""

    key: str
    prefix: str
    suffix: str
    markers: tuple[str, ...]
    marks_calls: bool
    closing: str
    separator: str | None

    def tag(self, name: str, parameters: Object) -> Object:
        """Return the part of a structural tag that is a call of one tool."""
        begin = f'{self.prefix}{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.key}": '
        return {"type": "tag", "begin": begin, "content": schema_part(parameters), "end": f"}}{self.suffix}"}

    @property
    def trigger(self) -> str:
        """The text that only a call may begin with, where other text is allowed too."""
        return self.prefix or '{"name": "'


HERMES = ToolFormat(
    key="arguments",
    prefix="<tool_call>\n",
    suffix="\n</tool_call>",
    markers=("<tool_call>",),
    marks_calls=True,
    closing="</tool_call>",
    separator="\n",
)
LLAMA = ToolFormat(
    key="parameters",
    prefix="",
    suffix="",
    markers=("<|python_tag|>", "{"),
    marks_calls=False,
    closing=";",
    separator=None,
)

# What templates of formats that are not read here have in them. Qwen3-Coder has <tool_call> too, with XML inside.
OTHERS = {
    "<function=": "the XML of Qwen3-Coder",
    "<arg_key>": "the XML of GLM",
    "[TOOL_CALLS]": "Mistral's",
    "<|channel|>": "harmony, that of gpt-oss",
    "<｜tool▁calls▁begin｜>": "DeepSeek's",
}


def format_of(template: str | None) -> ToolFormat:
    """Return the format of a model, by its chat template. Refuse a template that does not show tools to the model."""
    if template is None or not re.search(r"\btools\b", template):
        raise InputError(
            "tools are given, but this model's chat template does not show tools to the model; "
            "use a model that was trained to call tools, or ask for JSON with response_format"
        )
    if other := next((name for mark, name in OTHERS.items() if mark in template), None):
        raise InputError(
            f"tools are given, but this model writes calls in a format that this server does not read: {other}; "
            "use a model with the format of Hermes (such as Qwen) or of Llama 3"
        )
    is_llama = "<tool_call>" not in template and ("<|python_tag|>" in template or re.search(r'"parameters\\?": ', template))
    return LLAMA if is_llama else HERMES
