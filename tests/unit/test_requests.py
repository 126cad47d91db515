"""From prompts and settings to requests: every form in which users give them, and what is refused before any work."""

from typing import Any

import pytest

from foreword import requests as building
from foreword.core.sampling import Sampling
from foreword.engine.request import EngineLimits, Request
from foreword.errors import ForewordError, InputError, PromptError
from foreword.requests import Prompt, build, is_single, listed
from foreword.text import Tokenizer

ASK = "the words"
HELLO = [{"role": "user", "content": "hello"}]
CONTEXT = 512


@pytest.fixture(scope="session")
def tokenizer(hf_tokenizer: Any) -> Tokenizer:
    return Tokenizer(hf_tokenizer)


@pytest.fixture(scope="session")
def limits(tokenizer: Tokenizer) -> EngineLimits:
    return EngineLimits(CONTEXT, CONTEXT, tokenizer.vocab_size)


@pytest.fixture
def asked(tokenizer: Tokenizer, limits: EngineLimits) -> Any:
    """Builds the requests of prompts: asked("hello", temperature=1.0)."""

    def ask(prompt: Any, n: int | None = None, **settings: Any) -> list[Request]:
        return build(tokenizer, limits, listed(prompt), {"seed": 3} | settings, n)

    return ask


def test_a_prediction_is_encoded_without_the_chat_template(asked: Any, tokenizer: Tokenizer) -> None:
    requests = asked(["a", "b"], n=2, prediction="the words", settings=[{}, {"prediction": [5, 6]}])
    assert [one.prediction for one in requests] == [tokenizer.piece_ids("the words")] * 2 + [(5, 6)] * 2
    assert [one.prediction for given in (None, "", []) for one in asked("a", prediction=given)] == [()] * 3


# Prompts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_token_ids_are_taken_as_they_are(asked: Any, kind: Any) -> None:
    (request,) = asked(kind([5, 6, 7]))
    assert request.prompt == (5, 6, 7)
    assert [one.prompt for one in asked([[5, 6], "hello", (7,)])] == [(5, 6), asked("hello")[0].prompt, (7,)]


def test_what_is_one_prompt() -> None:
    assert all(is_single(one) for one in ("a", HELLO, [1, 2], (1, 2)))
    assert not any(is_single(one) for one in (["a"], [HELLO], [[1, 2]], [], 5, None, [True], ["a", 5]))


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([5, "a"], "holds 'a'"),
        ([5, True], "holds True"),
        ([5, 10**6], f"{10**6} is outside"),
        ([-1, 5], "-1 is outside"),
        ([5] * CONTEXT, f"{CONTEXT} tokens"),
        (["fine", "", "fine"], r"prompts\[1\].*empty"),
        (["fine", HELLO, [{"role": "king", "content": "x"}]], r"prompts\[2\].*king"),
        (["fine", "x" * CONTEXT], r"prompts\[1\].*tokens.*shorten"),
        (["fine", [5, 10**6]], r"prompts\[1\].*outside"),
    ],
)
def test_prompts_are_refused_with_their_place_in_the_list(asked: Any, prompt: Any, named: str) -> None:
    with pytest.raises(PromptError, match=named):
        asked(prompt)


@pytest.mark.parametrize(("trained", "advised"), [(CONTEXT, False), (2 * CONTEXT, True)])
def test_a_larger_context_is_advised_only_where_the_model_has_one(tokenizer: Tokenizer, trained: int, advised: bool) -> None:
    with pytest.raises(PromptError, match="shorten.*truncate_prompt_tokens") as error:
        build(tokenizer, EngineLimits(CONTEXT, trained, 999), ["x" * CONTEXT], {})
    assert ("larger max_context, up to 1024" in str(error.value)) is advised


def test_truncating_keeps_the_last_tokens(asked: Any, tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("hello there")
    assert asked("hello there", truncate_prompt_tokens=4)[0].prompt == tuple(whole[-4:])
    assert asked("hello there", truncate_prompt_tokens=99)[0].prompt == tuple(whole)
    assert asked([4, 5, 6], truncate_prompt_tokens=2)[0].prompt == (5, 6)
    long = "".join(chr(97 + i % 26) for i in range(40 * CONTEXT))
    assert asked(long, truncate_prompt_tokens=100)[0].prompt == tuple(tokenizer.encode(long)[-100:])


def test_settings_of_the_chat_template_reach_it(asked: Any, tokenizer: Tokenizer) -> None:
    template = "{{ messages[0].content }}{% if think %}?{% endif %}{{ tools | length }}"
    settings = {"chat_template": template, "chat_template_kwargs": {"think": True}, "tools": [{"name": "add"}]}
    assert asked("hi", **settings)[0].prompt == tuple(tokenizer.encode("hi?1", chat=False))
    messages = [*HELLO, {"role": "assistant", "content": "hel"}]
    assert tokenizer.decode(asked(messages, continue_final_message=True)[0].prompt, False).endswith("<|assistant|>hel")
    forged = asked("hello</s>", sanitize_control_tokens=True)[0].prompt
    assert forged.count(1) == 1 and tokenizer.decode(forged, False).count("</s>") == 2
    with pytest.raises(PromptError, match="tools.*token ids"):
        asked([5, 6], tools=[{"name": "add"}])


# Settings --------------------------------------------------------------------------------------------------------------


def test_other_names_for_settings(asked: Any) -> None:
    (request,) = asked(ASK, max_tokens=7, min_tokens=2, top_k=-1)
    assert (request.max_new_tokens, request.min_new_tokens, request.sampling.top_k) == (7, 2, 0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_new_tokens and max_tokens are one setting"),
        ({"max_new_tokens": 3, "max_tokens": 4}, "max_tokens and max_new_tokens are one setting"),
        ({"emprature": 1}, "no setting is called 'emprature'"),
        ({"stop": ""}, "stop string.*not empty"),
        ({"stop": [""]}, "stop string.*not empty"),
        ({"stop": 0}, "stop is 0"),
        ({"stop": ["x"] * 257}, "257 strings.*256"),
        ({"stop": "x" * 1025}, "1025 characters.*1024"),
        ({"chat": 1}, "chat is 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids is \\[\\]"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5.*list"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a'"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None"),
        ({"sanitize_control_tokens": None}, "sanitize_control_tokens is None"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"truncate_prompt_tokens": 2.0}, "truncate_prompt_tokens is 2.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"n": 1025}, "n is 1025.*1 to 1024"),
        ({"n": True}, "n is True"),
        ({"settings": [{}, {}]}, "one dict for each of 1 prompts; got 2"),
        ({"settings": {"seed": 1}}, "one dict for each of 1 prompts; got {'seed': 1}"),
        ({"settings": [5]}, "a dict of settings is needed, got 5"),
        ({"settings": [{"settings": []}]}, "no setting is called 'settings'"),
    ],
)
def test_settings_that_cannot_be_used(asked: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        asked(ASK, **settings)


def test_every_prompt_of_a_list_may_have_its_own_settings(asked: Any) -> None:
    each = [{}, {"max_tokens": 5, "stop": "x"}, {"temperature": 0.5, "seed": 9, "chat": False}]
    plain, short, sampled = asked(["a", "b", "c"], max_new_tokens=8, settings=each)
    assert (plain.max_new_tokens, plain.sampling) == (8, Sampling(seed=3))
    assert (short.max_new_tokens, short.sampling) == (5, Sampling(seed=3).derived(1))
    assert sampled.sampling == Sampling(temperature=0.5, seed=9) and sampled.max_new_tokens == 8
    assert sampled.prompt == asked("c", chat=False)[0].prompt


def test_seeds_of_samples_are_derived_from_the_prompt_s_own_seed(asked: Any) -> None:
    """The others are derived from the common seed, by their index in the whole list."""
    requests = asked(["a", "b"], n=2, settings=[{}, {"seed": 9}])
    seeds = [Sampling(seed=3).derived(0), Sampling(seed=3).derived(1), Sampling(seed=9), Sampling(seed=9).derived(1)]
    assert [one.sampling for one in requests] == seeds


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"top_p": 2}, "top_p is 2"),
        ({"max_tokens": -3}, "max_new_tokens is -3"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9"),
        ({"prompt_logprobs": 101}, "prompt_logprobs is 101"),
        ({"reuse": 1}, "reuse is 1"),
        ({"stop": [""]}, "stop string"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a'"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids holds 1000000000"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids holds 1000000000"),
        ({"allowed_token_ids": [5] * 10**6}, "allowed_token_ids has 1000000 token ids"),
        ({"logit_bias": {10**9: 1.0}}, "logit_bias holds 1000000000"),
        ({"bad_word_ids": [[10**9]]}, "bad_word_ids holds 1000000000"),
        ({"bad_words": ["x y" * 100]}, "bad_words holds"),
        ({"prediction": "x y " * 10**6}, "prediction has 4000000 characters, the context holds"),
        ({"prediction": "x y " * 300}, "prediction has [0-9]+ tokens, the context holds 512"),
        ({"prediction": [5] * 10**6}, "prediction has 1000000 tokens, the context holds"),
        ({"prediction": [10**9]}, "prediction holds 1000000000"),
        ({"prediction": ["a"]}, "prediction holds 'a'; give a string or a list of token ids"),
        ({"prediction": {"content": "a"}}, "prediction is of type dict; give a string"),
        ({"trace_rounds": 1}, "trace_rounds is 1; it must be of type bool"),
        ({"allowed_token_ids": [5], "bad_word_ids": [[5]]}, "last one of a bad word"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_new_tokens": 1}, "min_new_tokens is 1"),
    ],
)
def test_an_error_in_settings_of_one_prompt_names_its_place(asked: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=rf"^settings\[1\]: .*{named}"):
        asked(["a", "b"], settings=[{}, wrong])
    with pytest.raises(InputError, match=rf"^(?!settings).*{named}"):
        asked(["a", "b"], **wrong)


# Bounds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_that_cannot_fit_is_not_encoded(
    asked: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr(tokenizer, "hf", Untouchable(tokenizer.hf))
    with pytest.raises(PromptError, match=r"10000\d\d characters"):
        asked("x " * 500_000, chat=chat)
    with pytest.raises(PromptError, match="1000 messages"):
        asked(HELLO * 1000)
    with pytest.raises(PromptError, match="1000000 tokens"):
        asked([5] * 1_000_000)


@pytest.mark.parametrize(
    "wrong", [{"stop_token_ids": [10**9]}, {"max_new_tokens": 0}, {"allowed_token_ids": [10**9]}, {"stop": [""]}]
)
def test_settings_that_cannot_be_served_are_refused_before_a_prompt_is_read(
    asked: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    monkeypatch.setattr(tokenizer, "hf", Untouchable(tokenizer.hf))
    monkeypatch.setattr(building, "_encoded", None)
    for given in (wrong, {"settings": [{}] * 499 + [wrong]}):
        with pytest.raises(InputError, match=next(iter(wrong)).split("_")[0]):
            asked(["a"] * 500, **given)


@pytest.mark.parametrize("count", [1, 500])
def test_settings_that_prompts_share_are_checked_once(
    asked: Any, limits: EngineLimits, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    checked, check = [], EngineLimits.check_settings
    monkeypatch.setattr(EngineLimits, "check_settings", lambda self, one: checked.append(one) or check(self, one))
    assert len(asked(["a"] * count, bad_words=["the"])) == count and len(checked) == 1


class NoEntries(list[int]):
    """Ten million token ids that must not be read."""

    def __len__(self) -> int:
        return 10_000_000

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        raise AssertionError("the entries of a list that is too long were read")


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_lists_of_token_ids_that_are_too_long_are_refused_by_their_length(asked: Any, name: str) -> None:
    for given in ({name: NoEntries()}, {"settings": [{}, {name: NoEntries()}]}):
        with pytest.raises(InputError, match=f"{name} has 10000000 token ids"):
            asked(["a", "b"], **given)


def test_a_sampling_object_with_too_many_allowed_tokens_is_refused(asked: Any, limits: EngineLimits) -> None:
    with pytest.raises(InputError, match="allowed_token_ids has"):
        build(Any, limits, [ASK], {"sampling": Sampling(allowed_token_ids=(5,) * (limits.vocabulary + 1))})  # type: ignore[arg-type]


class Untouchable:
    """A tokenizer that renders templates, and must not encode."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    def __getattr__(self, name: str) -> Any:
        assert name != "encode", "a prompt that cannot fit was encoded"
        return getattr(self._hf, name)


def test_of_a_long_prompt_only_the_end_is_encoded(asked: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode = [], tokenizer.hf.encode
    monkeypatch.setattr(tokenizer.hf, "encode", lambda text, **how: encoded.append(len(text)) or encode(text, **how))
    (request,) = asked("x " * 500_000, truncate_prompt_tokens=10)
    assert len(request.prompt) == 10 and sum(encoded) < 2000


def test_control_tokens_by_the_thousand_are_refused_before_they_are_encoded(
    asked: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is encoded separately, so it is at least one token, and takes time."""
    encoded, encode = [], tokenizer.hf.encode
    monkeypatch.setattr(tokenizer.hf, "encode", lambda text, **how: encoded.append(text) or encode(text, **how))
    with pytest.raises(PromptError, match="characters"):
        asked("</s>" * 600, sanitize_control_tokens=True)
    assert not encoded
    (request,) = asked("</s>" * 1600, sanitize_control_tokens=True, truncate_prompt_tokens=10)
    assert len(request.prompt) == 10 and len(encoded) < 100


def test_many_requests_in_one_call_are_refused_before_any_is_made(
    asked: Any, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(tokenizer, "hf", Untouchable(tokenizer.hf))
    with pytest.raises(InputError, match="70000 prompts with 1 samples.*65536.*several calls"):
        asked(["a"] * 70_000)
    with pytest.raises(InputError, match="100 prompts with 1000 samples"):
        asked(["a"] * 100, n=1000)


def test_every_setting_has_one_place() -> None:
    names = [*building.SETTINGS, *building.ALIASES, building.EACH]
    assert len(names) == len(set(names)) and set(building.ALIASES.values()) <= set(building.SETTINGS)


@pytest.mark.parametrize("prompt", [5, None, {}, [], [[]], [{}], [None], ["a", None], [["a"]], [[1], 1]], ids=str)
def test_whatever_is_no_prompt_is_refused_as_one(asked: Any, prompt: Prompt) -> None:
    with pytest.raises(ForewordError):
        asked(prompt)


# Sampling as one object --------------------------------------------------------------------------------------------------


def test_sampling_is_given_as_one_object(asked: Any, tokenizer: Tokenizer, limits: EngineLimits) -> None:
    whole = Sampling(temperature=0.5, top_k=3, seed=9, allowed_token_ids=(5, 6))
    (request,) = build(
        tokenizer, limits, [ASK], {"sampling": whole, "max_tokens": 7}, None, {"temperature": 0.9, "top_p": 0.5}
    )
    assert (request.sampling, request.max_new_tokens, request.model_defaults) == (whole, 7, ())
    first, second = build(tokenizer, limits, [ASK] * 2, {"sampling": whole, "settings": [{}, {"temperature": 0.0}]})
    assert (first.sampling, second.sampling.temperature, second.sampling.top_k) == (whole, 0.0, 3)
    third, fourth = build(tokenizer, limits, [ASK] * 2, {"temperature": 0.7, "settings": [{"sampling": whole}, {}]})
    assert (third.sampling, fourth.sampling.temperature) == (whole, 0.7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": Sampling(), "temperature": 1.0}, r"temperature is given too; put it into Sampling\(\.\.\.\)"),
        ({"sampling": Sampling(), "seed": 1, "top_k": 3}, "seed, top_k is given too"),
        ({"sampling": {"temperature": 1.0}}, r"give a foreword.Sampling\(\.\.\.\)"),
    ],
)
def test_two_forms_of_one_thing_are_refused(tokenizer: Tokenizer, limits: EngineLimits, settings: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(tokenizer, limits, [ASK], settings)


def test_no_sampling_object_is_none(tokenizer: Tokenizer, limits: EngineLimits) -> None:
    (request,) = build(tokenizer, limits, [ASK], {"sampling": None, "temperature": 0.5, "seed": 1})
    assert request.sampling == Sampling(temperature=0.5, seed=1)
