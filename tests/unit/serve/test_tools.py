"""Tools of a request: what the model is shown, when it must call, what is refused, and which format its template tells."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from doubles import TOOL_TEMPLATE, with_template
from foreword.errors import InputError
from foreword.serve.errors import Refusal
from foreword.serve.tool_formats import HERMES, LLAMA, format_of
from foreword.serve.tool_text import CallParser, NoTools, merged
from foreword.serve.tools import NO_PARAMETERS, ToolPlan, tool_plan
from foreword.text import Tokenizer
from foreword.text.grammar import GrammarCompiler, GrammarSpec

# As the template of this family writes tools and calls, shortened.
LLAMA_3 = """{%- if tools is not none %}Respond in the format {"name": function name, "parameters": dictionary of argument
name and its value}.{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}{{ m.content }}
{{- '{"name": "' + call.name + '", ' + '"parameters": ' if m.call }}{% endfor %}"""

ADD_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD_PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALL_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def reference(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def tokenizer_of(hf: PreTrainedTokenizerFast, template: Any = TOOL_TEMPLATE) -> Tokenizer:
    return Tokenizer(with_template(hf, template))


@pytest.fixture(scope="module")
def plan(hf_tokenizer: Any) -> Any:
    """Makes a plan: plan([ADD], "required", parallel=False, answer={...})."""
    hermes, llama = (tokenizer_of(hf_tokenizer, template) for template in (TOOL_TEMPLATE, LLAMA_3))

    def make(tools: Any, choice: Any = None, parallel: Any = None, answer: Any = None, is_llama: bool = False) -> ToolPlan:
        return tool_plan(llama if is_llama else hermes, tools, choice, parallel, answer or {})

    return make


@pytest.fixture(scope="module")
def allows(hf_tokenizer: Any) -> Any:
    """Tells whether the grammar of a plan allows a whole text."""
    tokenizer = Tokenizer(hf_tokenizer)
    compiler = GrammarCompiler(lambda: tokenizer.grammar_vocabulary(len(hf_tokenizer), frozenset({1})))

    def is_allowed(plan: ToolPlan, text: str) -> bool:
        spec = GrammarSpec.of(plan.settings)
        assert spec is not None
        matcher = compiler.matcher(spec)
        return bool(matcher.accept_string(text) and matcher.accept_token(1))

    return is_allowed


def test_a_free_choice_has_no_grammar(plan: Any) -> None:
    found = plan([ADD, NOW])
    assert found.settings == {"tools": [ADD, NOW]} and isinstance(found.parser(), CallParser)
    assert plan([STRICT]).settings["tools"] == [ADD]  # models were not trained with this key
    assert plan([ADD], "auto").settings == {"tools": [ADD]}


@pytest.mark.parametrize(("tools", "choice"), [([], None), (None, "auto"), (None, "none"), ([ADD], "none")])
def test_without_tools_or_with_none_of_them_text_is_text(plan: Any, tools: Any, choice: Any) -> None:
    found = plan(tools, choice, answer={"regex": "a"})
    assert found.settings == {"regex": "a"} and isinstance(found.parser(), NoTools)


def test_required_makes_the_model_call(plan: Any, allows: Any) -> None:
    found = plan([ADD, NOW], "required")
    assert all(allows(found, text) for text in (CALL_ADD, CALL_NOW, f"{CALL_ADD}\n{CALL_NOW}\n{CALL_ADD}"))
    wrong = ["", "no", f"so {CALL_NOW}", f"{CALL_NOW} so", CALL_NOW.replace("{}", '{"a": 1}'), CALL_ADD.replace("1", '"1"')]
    assert not any(allows(found, text) for text in [*wrong, CALL_NOW.replace("now", "add")])
    single = plan([ADD, NOW], "required", parallel=False)
    assert allows(single, CALL_ADD) and not allows(single, f"{CALL_ADD}\n{CALL_NOW}")


def test_a_named_tool_is_called_once(plan: Any, allows: Any) -> None:
    found = plan([ADD, NOW], reference("now"))
    assert found.settings["tools"] == [NOW]
    assert allows(found, CALL_NOW) and not any(allows(found, text) for text in (CALL_ADD, f"{CALL_NOW}\n{CALL_NOW}", ""))


def test_allowed_tools_are_the_only_ones(plan: Any, allows: Any) -> None:
    """The model is shown no others."""
    some: dict[str, Any] = {"tools": [reference("now")]}
    auto = plan([ADD, NOW], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", **some}})
    assert auto.settings == {"tools": [NOW]}
    required = plan([ADD, NOW], {"type": "allowed_tools", "allowed_tools": {"mode": "required", **some}})
    assert allows(required, f"{CALL_NOW}\n{CALL_NOW}") and not allows(required, CALL_ADD)


def test_a_strict_tool_is_called_rightly_or_not_at_all(plan: Any, allows: Any) -> None:
    found = plan([STRICT, NOW])
    assert all(allows(found, text) for text in ("", "free text", f"so {CALL_ADD} and {CALL_NOW}.", "<tool_ca", '{"a": 1}'))
    assert not any(allows(found, text) for text in (CALL_ADD.replace("1", '"1"'), "<tool_call>\nso", CALL_ADD[:-3]))
    single = plan([STRICT], parallel=False)
    assert allows(single, f"so {CALL_ADD}") and not allows(single, f"{CALL_ADD}{CALL_ADD}")


def test_an_answer_with_a_format_next_to_calls(plan: Any, allows: Any) -> None:
    for answer, text in (
        ({"json_schema": ADD_PARAMETERS}, '{"a": 5}'),
        ({"json_schema": True}, '{"x": 5}'),
        ({"regex": "x+"}, "xx"),
    ):
        found = plan([NOW], answer=answer)
        assert allows(found, text) and allows(found, CALL_NOW) and allows(found, f"{CALL_NOW}\n{CALL_NOW}")
        assert not any(allows(found, wrong) for wrong in ("", "no", f"{text}{CALL_NOW}"))
        assert not allows(plan([NOW], "required", answer=answer), text)


def test_the_format_of_llama(plan: Any, allows: Any) -> None:
    call = '{"name": "add", "parameters": {"a": 1}}'
    required = plan([ADD], "required", is_llama=True)
    assert allows(required, call) and not any(allows(required, text) for text in ("", f"{call};{call}", CALL_ADD))
    strict = plan([STRICT], is_llama=True)
    assert allows(strict, "free") and allows(strict, call) and not allows(strict, call.replace("1", '"1"'))


@pytest.mark.parametrize("is_llama", [False, True])
@pytest.mark.parametrize("name", ["add", 'a "quoted" name', "ü.x/y-z_1"])
def test_what_a_grammar_makes_a_model_write_is_found(plan: Any, allows: Any, is_llama: bool, name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": NO_PARAMETERS}}
    found = plan([tool], "required", is_llama=is_llama)
    form = LLAMA if is_llama else HERMES
    text = form.prefix + f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.key}": {{}}}}' + form.suffix
    assert allows(found, text)
    parser = found.parser()
    (call,) = merged([*parser.push(text), *parser.finish()])["tool_calls"]
    assert call["function"] == {"name": name, "arguments": "{}"}


@pytest.mark.parametrize(
    ("tools", "choice", "named", "message"),
    [
        ([{"type": "custom", "custom": {"name": "a"}}], None, "tools", r"tools\[0\] must be of type function"),
        ([{"name": "a"}], None, "tools", "of type function"),
        ([ADD, {"type": "function"}], None, "tools", r"tools\[1\] must have a function"),
        ([{"type": "function", "function": {}}], None, "tools", "needs a name"),
        ([reference("")], None, "tools", "needs a name"),
        ([reference("x" * 300)], None, "tools", "needs a name"),
        ([{"type": "function", "function": {"name": "a", "parameters": "{}"}}], None, "tools", "has parameters of a wrong"),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], None, "tools", "has strict of a wrong type"),
        ([ADD, ADD], None, "tools", "two tools are called 'add'"),
        ([ADD], "always", "tool_choice", 'tool_choice must be "none", "auto"'),
        ([ADD], {"type": "custom"}, "tool_choice", "tool_choice must be"),
        ([ADD], reference("sub"), "tool_choice", "'sub', which is none of the tools"),
        ([ADD], {"type": "function"}, "tool_choice", "names no tool"),
        ([ADD], {"type": "allowed_tools"}, "tool_choice", "must have a mode"),
        ([ADD], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice", "must have"),
        ([ADD], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}}, "tool_choice", "no tool"),
        (None, "required", "tool_choice", "no tools are given"),
        (None, reference("add"), "tool_choice", "none of the tools"),
    ],
    ids=str,
)
def test_what_is_refused(plan: Any, tools: Any, choice: Any, named: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        plan(tools, choice)
    assert caught.value.status == 400 and caught.value.param == named and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TOOL_TEMPLATE, HERMES),
        (LLAMA_3, LLAMA),
        ("{{ tools }}<|python_tag|>", LLAMA),
        ("{{ tools }} in a form of its own", HERMES),
    ],
)
def test_the_template_tells_the_format(template: str, expected: Any) -> None:
    assert format_of(template) is expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "does not show tools to the model"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show tools"),
        ("{{ tools }}[TOOL_CALLS]", "does not read: Mistral's"),
        ("{{ tools }}<tool_call><function=f>", "does not read: the XML of Qwen3-Coder"),
        ("{{ tools }}<|channel|>commentary", "does not read: harmony"),
    ],
)
def test_templates_that_cannot_serve_tools(template: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        format_of(template)


def test_a_template_of_several(hf_tokenizer: Any) -> None:
    tokenizer = tokenizer_of(hf_tokenizer, {"default": "{{ messages }}", "tool_use": TOOL_TEMPLATE})
    assert tokenizer.tool_template == TOOL_TEMPLATE
    assert tokenizer_of(hf_tokenizer, None).tool_template is None


def test_a_marker_that_is_a_special_token_is_shown(hf_tokenizer: Any) -> None:
    """The parser has to see it, though special tokens are left out of the text."""
    assert "skip_special_tokens" not in tool_plan(tokenizer_of(hf_tokenizer), [ADD], None, None, {}).settings
    with_marker = tokenizer_of(hf_tokenizer)
    with_marker.hf.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    assert tool_plan(with_marker, [ADD], None, None, {}).settings["skip_special_tokens"] is False
