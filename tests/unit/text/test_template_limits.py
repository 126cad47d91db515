"""Limits on what a chat template makes: large values are refused before they are made, and everything else is the same."""

import time
from typing import Any

import pytest

from foreword.errors import PromptError
from foreword.text import template_limits
from foreword.text.chat_options import ChatOptions
from foreword.text.tokenizer import Tokenizer

ASK = [{"role": "user", "content": "the cat"}]
HUGE = 3_000_000_000

LISTS = "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
TOO_LARGE = {
    "product": f"{{% set x = 'a' * {HUGE} %}}",
    "product of a list": f"{{% set x = {HUGE} * [1] %}}",
    "product of a variable": f"{{% set x = messages[0].content * {HUGE} %}}",
    "product in a loop": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "sum": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "sum of lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "concatenation": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "block": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = m(n.x) %}{% endfor %}",
    "many values": "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + ['a' * 9999999] %}{% endfor %}",
    "output": "{% set x = 'a' * 9999999 %}" + "{{ x }}" * 20,
    "power": "{{ 10 ** (10 ** 10) }}",
    "product of numbers": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "percent": f"{{{{ '%{HUGE}d' % 1 }}}}",
    "percent with a star": f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
    "percent with a precision": f"{{{{ '%.{HUGE}f' % 1 }}}}",
    "format filter": f"{{{{ '%{HUGE}d' | format(1) }}}}",
    "format method": f"{{{{ '{{:{HUGE}}}'.format(1) }}}}",
    "nested format": f"{{{{ '{{:{{}}}}'.format(1, {HUGE}) }}}}",
    "format_map": f"{{{{ '{{a:{HUGE}}}'.format_map(dict(a=1)) }}}}",
    "ljust": f"{{{{ 'a'.ljust({HUGE}) }}}}",
    "zfill": f"{{{{ 'a'.zfill({HUGE}) }}}}",
    "attr": f"{{{{ ('a' | attr('center'))({HUGE}) }}}}",
    "expandtabs": f"{{{{ '\\t'.expandtabs({HUGE}) }}}}",
    "to_bytes": f"{{{{ (1).to_bytes({HUGE}, 'big') }}}}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 999999).join('b' * 99999) }}",
    "join filter": "{{ range(99999) | join('b' * 99999) }}",
    "join of a map": "{{ range(9999) | map('string') | join('b' * 99999) }}",
    "join of large values": "{% set x = 'a' * 999999 %}{{ ([x] * 9999) | join }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "center": f"{{{{ 'a' | center({HUGE}) }}}}",
    "center in a map": f"{{{{ ['a'] | map('center', {HUGE}) | list }}}}",
    "indent": f"{{{{ 'a\\nb' | indent({HUGE}) }}}}",
    "batch": f"{{{{ [1] | batch({HUGE}, 0) | list }}}}",
    "json": f"{{{{ [1] | tojson(indent={HUGE}) }}}}",
    "wordwrap": "{{ ('a ' * 99999) | wordwrap(1, wrapstring='b' * 99999) }}",
    "lists of lists": "{% set n = namespace(x=[1]) %}" + LISTS + "{{ n.x }}",
    "lists of lists as JSON": "{% set n = namespace(x=[1]) %}" + LISTS + "{{ n.x | tojson }}",
    "lists of lists, joined": "{% set n = namespace(x=[1]) %}" + LISTS + "{{ n.x ~ 'a' }}",
}


def rendered(tokenizer: Tokenizer, template: str) -> str:
    (text,) = tokenizer.rendered(ASK, options=ChatOptions(chat_template=template)).pieces
    return text


@pytest.mark.parametrize("template", TOO_LARGE)
def test_a_large_value_is_refused_before_it_is_made(tokenizer: Tokenizer, template: str) -> None:
    began = time.monotonic()
    with pytest.raises(PromptError, match="the chat template would make .*too much; .*another chat_template"):
        rendered(tokenizer, TOO_LARGE[template])
    assert time.monotonic() - began < 5


USUAL = [
    "{{ 'a' * 3 }}{{ [1, 2] * 2 }}{{ 2 * 3.5 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 7 % 4 }}",
    "{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 1 + 2.5 }}",
    "{{ '%5d|%-4s|%.2f%%' % (3, 'a', 2.5) }}{{ '%s' | format('x') }}{{ '{:>5}|{a:.2f}|{}'.format(1, 2, a=3.0) }}",
    "{{ '%(a)s' % {'a': 1} }}{{ '{a}'.format_map({'a': 1}) }}{{ '{{}}'.format() }}",
    "{{ 'a' ~ 1 ~ none ~ missing ~ [1, 'b'] }}{{ missing }}{{ none }}{{ true }}{{ {'a': [1, {'b': 2}]} }}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(false, 4) }}{{ messages | string }}",
    "{{ 'a-b'.split('-') | join(', ') }}{{ ','.join(['a', 'b']) }}",
    "{{ ['a', 'b'] | map('upper') | join }}{{ 'abc' | join('.') }}{{ range(3) | join }}",
    "{{ 'a\nb' | indent }}{{ 'a\nb' | indent(2, true) }}{{ 'a b c' | wordwrap(2) }}{{ 'abc' | center(9) }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | sum }}{{ [[1], [2]] | sum(start=[]) }}",
    "{{ 'aa' | replace('a', 'b') }}{{ 'aXa'.replace('a', '', 1) }}",
    "{{ 'a'.ljust(4) }}|{{ '7'.zfill(3) }}{{ '\t'.expandtabs(2) }}{{ 'abc'.translate({97: 'xy'}) }}",
    "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}{% set y %}{{ m(2) }}{% endset %}{{ y | trim | upper }}",
    "{% for m in messages %}{{ loop.index }}{{ m.role }}{% if loop.first %}!{% endif %}{% endfor %}",
    "{% generation %}x{{ messages[0].content }}{% endgeneration %}",
    "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}",
    "{{ bos_token }}{{ add_generation_prompt }}{{ strftime_now('%Y') }}{{ dict(a=1) }}{{ range(3) | list }}",
]


@pytest.mark.parametrize("template", USUAL)
def test_everything_else_is_as_transformers_renders_it(tokenizer: Tokenizer, template: str) -> None:
    try:
        stock = tokenizer.hf.apply_chat_template(ASK, tokenize=False, chat_template=template, add_generation_prompt=True)
    except TypeError as error:  # a filter that refuses its argument, with limits and without
        with pytest.raises(PromptError, match=str(error)[:20]):
            rendered(tokenizer, template)
    else:
        assert rendered(tokenizer, template) == stock


def test_transformers_itself_has_no_limits(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "LONGEST_VALUE", 10)
    template: dict[str, Any] = {"chat_template": "{{ 'a' * 11 }}"}
    with pytest.raises(PromptError, match="a value of 11 characters"):
        rendered(tokenizer, template["chat_template"])
    assert tokenizer.hf.apply_chat_template(ASK, tokenize=False, **template) == "a" * 11


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", r"^chat_template is no valid Jinja template: .*\(line 1\); correct it"),
        ("a\n{% nothing %}", r"^chat_template is no valid Jinja template: .*nothing.*\(line 2\); correct it"),
        ("{{ 1 / 0 }}", "^the chat_template that was given refuses the messages: .*zero; change it or them"),
        ("{{ raise_exception('no cats') }}", "^the chat_template that was given refuses the messages: no cats"),
    ],
)
def test_a_template_of_the_caller_is_not_called_the_models(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        rendered(tokenizer, template)
    with pytest.raises(PromptError, match=message):
        tokenizer.apply_chat_template(ASK, chat_template=template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", r"^this model's chat template is no valid Jinja template: .*give another as chat_template"),
        ("{{ raise_exception('no cats') }}", "^this model's chat template refuses the messages: no cats; change them"),
    ],
)
def test_a_template_of_the_model_is(
    tokenizer: Tokenizer, template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer.hf, "chat_template", template)
    with pytest.raises(PromptError, match=message):
        tokenizer.encode("the cat")
