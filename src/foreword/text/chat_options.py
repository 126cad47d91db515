"""PROMPT: options of the chat template, checked before anything is rendered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foreword.errors import InputError

# Arguments of transformers' `apply_chat_template` itself; they are no variables of a template.
RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


@dataclass(frozen=True)
class ChatOptions:
    """Options of one request for the chat template.

    `chat_template`: a Jinja template in place of the model's. `chat_template_kwargs`: variables that the template reads.
    `tools`: what the model may call, as JSON schemas or functions. `continue_final_message`: the last message is the
    beginning of the answer. `add_generation_prompt`: the prompt ends with the beginning of an answer.
    """

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        _require(self, "chat_template", str, "a Jinja template as a string")
        _require(self, "chat_template_kwargs", Mapping, "a dict of the template's variables")
        _require(self, "tools", (list, tuple), "a list of JSON schemas or functions")
        _require(self, "continue_final_message", bool, "True or False")
        _require(self, "add_generation_prompt", bool, "True or False")
        for tool in self.tools or ():
            if not (isinstance(tool, dict) or callable(tool)):
                raise InputError(f"tools holds {tool!r}; each tool is a JSON schema (a dict) or a function")
        for name in self.chat_template_kwargs or ():
            if not isinstance(name, str) or name in RESERVED:
                raise InputError(f"chat_template_kwargs holds {name!r}, which is no variable of a template; leave it out")

    @property
    def given(self) -> list[str]:
        """The names of the options that differ from their default."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of transformers' `apply_chat_template`."""
        given = {name: getattr(self, name) for name in self.given if name != "chat_template_kwargs"}
        begins = self.add_generation_prompt and not self.continue_final_message
        return {**(self.chat_template_kwargs or {}), **given, "add_generation_prompt": begins}


def _require(options: ChatOptions, name: str, types: Any, needed: str) -> None:
    value = getattr(options, name)
    if value is not None and not isinstance(value, types) or (value is None and types is bool):
        raise InputError(f"{name} is {value!r}; it must be {needed}")
