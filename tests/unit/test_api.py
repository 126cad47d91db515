"""The Python API on tiny models from disk: what a user may give, what comes back, and that it equals plain decoding."""

import gc
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import foreword
from doubles import FAMILIES, WITHOUT_WEIGHTS, truth
from foreword.api import LLM
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.errors import CapacityError, ForewordWarning, InputError, PromptError, StorageError, UnknownMethod
from foreword.model import cache
from foreword.text import Tokenizer

pytestmark = pytest.mark.usefixtures("own_home")

ASK = "the words that come before the words"
HELLO = [{"role": "user", "content": "hello"}]
CONTEXT = 512
END = 1


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    """Drafts in every round: `rows=4` fixes the number of rows, whatever they cost on this machine."""
    with foreword.load(folders["llama"], "token_recycling", rows=4, slots=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def own(folders: dict[str, Path]) -> LLM:
    """An LLM for tests of errors; plain, so that nothing is measured."""
    return foreword.load(folders["llama"], "plain", slots=2)


def expected(hf: PreTrainedModel, tokenizer: Tokenizer, prompt: Any = ASK, ends: tuple[int, ...] = (END,), **settings: Any):  # type: ignore[no-untyped-def]
    """The output of the slow reference for a prompt and settings of `generate`."""
    ids = tokenizer.encode(prompt, chat=settings.pop("chat", True))
    limits = {key: settings.pop(key) for key in ("max_new_tokens", "min_new_tokens", "ignore_eos") if key in settings}
    return truth(hf, Request(tuple(ids), Sampling(**{"seed": 0} | settings), **limits), CONTEXT, ends)


# Loading -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", WITHOUT_WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_folder_writes_the_truth(
    family: str, method: str, folders: dict[str, Path], stock: dict[str, PreTrainedModel]
) -> None:
    with foreword.load(folders[family], method) as llm:
        assert (llm.method, llm.model.name) == (method, str(folders[family]))
        for settings in ({"seed": 0}, {"temperature": 0.8, "seed": 5}):
            out = llm.generate(ASK, max_new_tokens=16, **settings)
            assert out.tokens == expected(stock[family], llm.tokenizer, max_new_tokens=16, **settings)
            assert (out.method, out.model, out.sampling) == (method, str(folders[family]), Sampling(**settings))


@pytest.mark.parametrize("kind", [str, os.fspath, Path])
def test_a_folder_may_be_a_string_or_a_path(kind: Callable[[Path], Any], folders: dict[str, Path]) -> None:
    assert foreword.load(kind(folders["llama"]), "plain").generate("hi", max_new_tokens=2).stats.new_tokens == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"threads": 0}, "threads is 0.*1 or more"),
        ({"device": "gpu"}, "device is 'gpu'.*'cpu'"),
        ({"device": "meta"}, "device is 'meta'.*'cpu' and 'cuda'"),
        ({"dtype": "fp32"}, "dtype is 'fp32'.*float32"),
        ({"dtype": torch.int8}, "dtype is torch.int8.*bfloat16"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": "2"}, "slots is '2'.*whole number"),
        ({"max_context": 64.0}, "max_context is 64.0.*whole number"),
        ({"max_context": 0}, "max_context is 0"),
        ({"max_context": CONTEXT + 1}, f"max_context is {CONTEXT + 1}.*{CONTEXT} positions"),
        ({"rows": 0}, "rows is 0.*at least 1"),
        ({"table": "none"}, "plain.*table"),
    ],
)
def test_options_of_load_that_are_refused(options: dict[str, Any], named: str, folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=named):
        foreword.load(folders["llama"], "plain", **options)


@pytest.mark.parametrize("name", ["generation_config", "fused_layers", "cuda_graphs", "remeasure", "warm_up"])
@pytest.mark.parametrize("value", ["vllm", "no", 1, None])
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    """Refused before the model is looked for: a string would pass for True."""
    with pytest.raises(InputError, match=f"{name} is {value!r}; it must be True or False"):
        foreword.load("no/such/model", "plain", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "meant"), [("tokn_recycling", "'token_recycling'"), ("lookup", "'prompt_lookup'")])
def test_an_unknown_method_is_answered_with_the_nearest(given: str, meant: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UnknownMethod, match=f"{given}.*did you mean {meant}.*plain, prompt_lookup"):
        foreword.load(folders["llama"], given)


def test_a_method_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UnknownMethod):
        foreword.load("no/such/model", "nonsense")


def test_threads_are_set(folders: dict[str, Path]) -> None:
    before = torch.get_num_threads()
    try:
        foreword.load(folders["llama"], "plain", threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float16", "torch.float64", torch.float64])
def test_the_dtype_is_the_one_asked_for(dtype: Any, folders: dict[str, Path]) -> None:
    llm = foreword.load(folders["llama"], "plain", dtype=dtype, device="cpu")
    assert str(llm.model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    assert llm.generate("hi", max_new_tokens=3, ignore_eos=True).stats.new_tokens == 3


# Settings ----------------------------------------------------------------------------------------------------------------

SAMPLED = {"temperature": 1.5, "seed": 3}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_new_tokens": ({}, {"max_new_tokens": 5}),
    "temperature": ({"seed": 3}, {"temperature": 1.5}),
    "seed": (SAMPLED, {"seed": 4}),
    "top_k": (SAMPLED, {"top_k": 2}),
    "top_p": (SAMPLED, {"top_p": 0.3}),
    "min_p": (SAMPLED, {"min_p": 0.5}),
    "repetition_penalty": ({}, {"repetition_penalty": 5.0}),
    "chat": ({}, {"chat": False}),
}


@pytest.mark.parametrize(("others", "setting"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_does_what_it_says(
    others: dict[str, Any], setting: dict[str, Any], llm: LLM, stock: dict[str, PreTrainedModel]
) -> None:
    """And has an effect: without it the output differs."""
    base = {"max_new_tokens": 20, "ignore_eos": True} | others
    found = llm.generate(ASK, **base | setting).tokens
    assert found == expected(stock["llama"], llm.tokenizer, **base | setting)
    assert found != llm.generate(ASK, **base).tokens


@pytest.fixture
def ending(folders: dict[str, Path]) -> tuple[LLM, int]:
    """A model for which the fifth token of its answer to ASK is an end token too, and that token."""
    hf = AutoModelForCausalLM.from_pretrained(folders["llama"])
    tokenizer = Tokenizer.load(folders["llama"])
    tokens = expected(hf, tokenizer, max_new_tokens=9, ignore_eos=True)
    end = tokens[4]
    assert end not in tokens[:4]
    hf.generation_config.eos_token_id = [END, end]
    return foreword.wrap(hf, tokenizer.hf, "prompt_lookup", rows=3), end


@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 4}, {"min_new_tokens": 5}, {"ignore_eos": True}], ids=str)
def test_where_an_output_ends(settings: dict[str, Any], ending: tuple[LLM, int]) -> None:
    llm, end = ending
    out = llm.generate(ASK, max_new_tokens=9, **settings)
    assert out.tokens == expected(llm.model.hf, llm.tokenizer, ends=(END, end), max_new_tokens=9, **settings)
    assert out.finish_reason == ("stop" if out.tokens[-1] == end else "length")
    assert (len(out.tokens) == 5) == (settings in ({}, {"min_new_tokens": 4}))


@pytest.mark.parametrize("several", [False, True])
def test_the_text_ends_before_a_stop_string(several: bool, llm: LLM) -> None:
    whole = llm.generate(ASK, max_new_tokens=40, ignore_eos=True)
    place = next(i for i, letter in enumerate(whole.text) if letter.isascii() and letter.isalnum())
    stop = whole.text[place]
    out = llm.generate(ASK, max_new_tokens=40, ignore_eos=True, stop=["never said", stop] if several else stop)
    assert out.text == whole.text[:place] and out.finish_reason == "stop"
    assert out.tokens == whole.tokens[: len(out.tokens)] and stop in llm.tokenizer.decode(out.tokens)


def test_without_speculation_the_output_is_the_same(llm: LLM) -> None:
    fast, slow = (llm.generate(ASK, max_new_tokens=12, speculate=speculate) for speculate in (True, False))
    assert fast.tokens == slow.tokens and slow.stats.tokens_per_round == 1.0
    assert fast.stats.spec_decode_num_drafts > 0 == slow.stats.spec_decode_num_drafts


def test_a_prediction_saves_rounds_and_changes_no_output(folders: dict[str, Path]) -> None:
    with foreword.load(folders["llama"], "prompt_lookup", rows=6) as llm:
        plain = llm.generate(ASK, max_new_tokens=24, ignore_eos=True)
        (out,) = llm.generate([ASK], max_new_tokens=24, ignore_eos=True, prediction=plain.tokens)
        text = llm.generate(ASK, max_new_tokens=24, ignore_eos=True, prediction=plain.text)
    assert out.tokens == text.tokens == plain.tokens
    assert out.stats.rounds == 4 < plain.stats.rounds and text.stats.accepted_prediction_tokens
    stats = out.to_dict()["stats"]
    assert (stats["accepted_prediction_tokens"], stats["rejected_prediction_tokens"]) == (20, 4)
    assert "accepted_prediction_tokens" not in plain.to_dict()["stats"]


def test_pieces_of_a_stream_carry_the_draft_of_their_round(llm: LLM) -> None:
    stream = llm.stream(ASK, max_new_tokens=12, ignore_eos=True, trace_rounds=True)
    pieces = [*stream]
    for piece in pieces:
        trace = piece.draft
        assert trace is not None and trace.texts == [*map(llm.tokenizer.token_text, trace.tokens)]
        assert [*(trace.tokens[row] for row in trace.path[1:]), trace.next] == piece.tokens
        shown = json.loads(json.dumps(trace.to_dict()))
        assert shown["origins"] == ["root", *["drafter"] * (len(trace.tokens) - 1)]
        assert shown["next_text"] == llm.tokenizer.token_text(trace.next)
    assert any(len(piece.draft.tokens) > 1 for piece in pieces)
    assert all(piece.draft is None for piece in llm.stream(ASK, max_new_tokens=3))


def test_logprobs_are_the_model_s_own(llm: LLM, stock: dict[str, PreTrainedModel]) -> None:
    out = llm.generate(ASK, max_new_tokens=6, logprobs=2, temperature=1.0, seed=1)
    text = [*llm.tokenizer.encode(ASK), *out.tokens]
    with torch.no_grad():
        chances = stock["llama"](torch.tensor([text])).logits[0].log_softmax(-1)[-7:-1]
    assert out.logprobs is not None and [one.token for one in out.logprobs] == out.tokens
    for one, row in zip(out.logprobs, chances, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == row.topk(2).indices.tolist()


def test_logprobs_have_the_text_of_their_tokens(llm: LLM) -> None:
    out = llm.generate(ASK, max_new_tokens=6, logprobs=2)
    assert out.logprobs is not None
    for one in out.logprobs:
        assert one.text == llm.tokenizer.token_text(one.token) and len(one.top_texts) == 2
        assert list(one.top_texts) == [llm.tokenizer.token_text(token) for token, _ in one.top]


def test_a_result_says_what_ended_it(llm: LLM) -> None:
    whole = llm.generate(ASK, max_new_tokens=12, ignore_eos=True)
    letter = next(letter for letter in whole.text if letter.isascii() and letter.isalnum())
    by_string = llm.generate(ASK, max_new_tokens=12, ignore_eos=True, stop=["never said", letter])
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", letter)
    by_token = llm.generate(ASK, max_new_tokens=12, ignore_eos=True, stop_token_ids=[whole.tokens[5]])
    place = whole.tokens.index(whole.tokens[5])
    assert by_token.tokens == whole.tokens[: place + 1] and by_token.stop_reason == whole.tokens[5]
    assert by_token.text == llm.tokenizer.decode(whole.tokens[:place])
    full = llm.generate("x" * (CONTEXT - 35), max_new_tokens=99, ignore_eos=True)
    assert (full.finish_reason, full.stop_reason) == ("length", "context")
    assert (whole.finish_reason, whole.stop_reason, "stop_reason" in whole.to_dict()) == ("length", None, False)
    assert by_token.to_dict()["stop_reason"] == whole.tokens[5]


@pytest.mark.parametrize("method", ["plain", "token_recycling"])
def test_stop_strings_and_special_tokens_can_be_kept(method: str, folders: dict[str, Path]) -> None:
    """In the text, which leaves them out by default."""
    with foreword.load(folders["llama"], method, rows=None if method == "plain" else 4) as llm:
        limits = {"max_new_tokens": 120, "ignore_eos": True, "temperature": 100.0, "seed": 6}
        whole = llm.generate(ASK, **limits)
        special = llm.generate(ASK, skip_special_tokens=False, **limits)
        assert special.tokens == whole.tokens and special.text == llm.tokenizer.decode(whole.tokens, False) != whole.text
        stop = next(letter for letter in whole.text if letter.isascii() and letter.isalnum())
        kept = llm.generate(ASK, stop=stop, include_stop_str_in_output=True, **limits)
        assert kept.text == whole.text[: whole.text.index(stop) + 1] and kept.stop_reason == stop


def test_a_result_names_its_random_seed(llm: LLM) -> None:
    first = llm.generate(ASK, max_new_tokens=8, temperature=1.5)
    assert first.sampling.seed is not None
    again = llm.generate(ASK, max_new_tokens=8, temperature=1.5, seed=first.sampling.seed)
    other = llm.generate(ASK, max_new_tokens=8, temperature=1.5)
    assert again.tokens == first.tokens != other.tokens


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temprature": 1}, "'temprature'.*temperature, top_k"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"min_p": 1}, "min_p is 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9.*max_new_tokens"),
        ({"stop": [""]}, "stop string"),
        ({"stop": ["a", 3]}, "stop string.*3"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], named: str, llm: LLM) -> None:
    with pytest.raises(InputError, match=named):
        llm.generate(ASK, **settings)
    assert not llm.engine.busy


@pytest.mark.parametrize(
    "settings", [{"max_new_tokens": "3"}, {"stop": 5}, {"n": 1.5}, {"n": "2"}, {"speculate": None}], ids=str
)
def test_settings_of_a_wrong_type_are_named(settings: dict[str, Any], own: LLM) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        own.generate(ASK, **settings)


# The model's own defaults ------------------------------------------------------------------------------------------------

OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.3}
COUNTS = {name: value for name, value in OWN.items() if name != "do_sample"}


@pytest.fixture(scope="module")
def sampling_folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(folders["llama"], tmp_path_factory.mktemp("sampling") / "llama"))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | OWN))
    return folder


@pytest.fixture(params=["load", "wrap"])
def opened(request: pytest.FixtureRequest, sampling_folder: Path) -> Callable[..., LLM]:
    """Makes an LLM of a model with its own defaults: opened("plain", generation_config=False)."""

    def make(method: str, **options: Any) -> LLM:
        if request.param == "load":
            return foreword.load(sampling_folder, method, slots=2, **options)
        hf = AutoModelForCausalLM.from_pretrained(sampling_folder).eval()
        return foreword.wrap(hf, Tokenizer.load(sampling_folder).hf, method, slots=2, **options)

    return make


@pytest.mark.parametrize("method", ["plain", "token_recycling"])
def test_the_model_s_defaults_apply_to_settings_that_are_not_given(
    method: str, opened: Callable[..., LLM], stock: dict[str, PreTrainedModel]
) -> None:
    with opened(method) as llm:
        out = llm.generate(ASK, max_new_tokens=20, seed=2)
        assert out.sampling == Sampling(**COUNTS, seed=2) and out.model_defaults == list(COUNTS)
        assert out.tokens == expected(stock["llama"], llm.tokenizer, max_new_tokens=20, **COUNTS, seed=2)
        assert json.loads(json.dumps(out.to_dict()))["model_defaults"] == list(COUNTS)
        some = llm.generate(ASK, max_new_tokens=20, seed=2, temperature=0, repetition_penalty=1.0)
        assert some.tokens == expected(stock["llama"], llm.tokenizer, max_new_tokens=20)
        assert some.sampling.top_p == 0.95 and some.model_defaults == ["top_p"]
        all_given = llm.generate(ASK, max_new_tokens=2, temperature=0, repetition_penalty=1.0, top_p=1)
        assert all_given.model_defaults is None and "model_defaults" not in all_given.to_dict()


def test_streams_chats_and_lists_have_the_model_s_defaults_too(sampling_folder: Path) -> None:
    with foreword.load(sampling_folder, "plain", slots=2) as llm:
        own, given = llm.generate([ASK, ASK], max_new_tokens=3, seed=1, settings=[{}, {"top_p": 0.5}])
        assert (own.model_defaults, given.model_defaults) == (list(COUNTS), ["temperature", "repetition_penalty"])
        assert given.sampling.top_p == 0.5 and own.sampling.top_p == 0.95
        assert llm.stream(ASK, max_new_tokens=3, seed=1).result.sampling == own.sampling
        assert llm.chat(max_new_tokens=3).send("hello").sampling.temperature == 0.6


@pytest.mark.parametrize("opened", ["load", "wrap"], indirect=True)
def test_the_model_s_defaults_can_be_switched_off(opened: Callable[..., LLM], stock: dict[str, PreTrainedModel]) -> None:
    with opened("plain", generation_config=False) as llm:
        out = llm.generate(ASK, max_new_tokens=20)
        assert out.sampling == Sampling(seed=out.sampling.seed) and out.model_defaults is None
        assert out.tokens == expected(stock["llama"], llm.tokenizer, max_new_tokens=20)


# Prompts -----------------------------------------------------------------------------------------------------------------


def test_a_string_is_one_message_of_the_user(llm: LLM) -> None:
    one, other = llm.generate("hello", max_new_tokens=8), llm.generate(HELLO, max_new_tokens=8)
    assert one.tokens == other.tokens and one.stats.prompt_tokens == other.stats.prompt_tokens


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_prompts_are_answered_in_their_order(kind: Callable[[Any], Any], llm: LLM) -> None:
    """Five prompts for two slots, strings and conversations mixed."""
    system = [{"role": "system", "content": "be brief"}, *HELLO]
    asked = [ASK, HELLO, "a", system, "the words"]
    found = llm.generate(kind(asked), max_new_tokens=8)
    assert [out.tokens for out in found] == [llm.generate(one, max_new_tokens=8).tokens for one in asked]


def test_a_list_of_one_prompt_gives_a_list(llm: LLM) -> None:
    (out,) = llm.generate(["hello"], max_new_tokens=4)
    (same,) = llm.generate([HELLO], max_new_tokens=4)
    assert out.tokens == same.tokens


def test_samples_of_a_prompt_are_next_to_each_other(llm: LLM) -> None:
    settings = {"temperature": 1.5, "seed": 9, "max_new_tokens": 8}
    alone = llm.generate(ASK, **settings)
    samples = llm.generate(ASK, n=3, **settings)
    assert samples[0].tokens == alone.tokens and len({tuple(one.tokens) for one in samples}) == 3
    assert [one.sampling.seed for one in samples] == [Sampling(seed=9).derived(i).seed for i in range(3)]
    both = llm.generate([ASK, HELLO], n=2, **settings)
    assert [one.stats.prompt_tokens for one in both] == [alone.stats.prompt_tokens] * 2 + [8] * 2
    assert [one.tokens for one in both[:2]] == [one.tokens for one in samples[:2]]
    assert [one.tokens for one in llm.generate(ASK, n=1, **settings)] == [alone.tokens]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ([], "list of prompts is empty"),
        ([[]], "at least one message"),
        (["fine", ""], "empty"),
        (["fine", 5], "got int"),
        ([HELLO[0], "fine"], "got dict"),
        ([["fine"]], "message 0"),
        ([{"role": "user"}], "message 0.*content"),
        ([{"role": "king", "content": "x"}], "role 'king'"),
        ("x" * CONTEXT, "tokens.*max_context"),
    ],
)
def test_prompts_that_cannot_be_answered(prompt: Any, named: str, llm: LLM) -> None:
    with pytest.raises(PromptError, match=named):
        llm.generate(prompt)
    assert not llm.engine.busy


def test_one_bad_prompt_stops_the_whole_list(own: LLM) -> None:
    with pytest.raises(PromptError, match="max_context"):
        own.generate(["fine", "x" * CONTEXT], max_new_tokens=2)
    assert not own.engine.busy


@pytest.mark.parametrize("prompt", [5, None, HELLO[0]], ids=str)
def test_what_is_no_prompt_is_refused_as_such(prompt: Any, own: LLM) -> None:
    with pytest.raises(PromptError):
        own.generate(prompt, max_new_tokens=1)


def test_messages_need_a_chat_template(llm: LLM) -> None:
    with pytest.raises(PromptError, match="chat=False"):
        llm.generate(HELLO, chat=False)


# Results -----------------------------------------------------------------------------------------------------------------


def test_a_result_as_json(llm: LLM) -> None:
    out = llm.generate(ASK, max_new_tokens=8, temperature=0.5, seed=2)
    found = json.loads(json.dumps(out.to_dict()))
    assert list(found) == ["text", "tokens", "finish_reason", "model", "method", "sampling", "stats"]
    assert found["sampling"]["temperature"] == 0.5 and found["tokens"] == out.tokens
    assert found["stats"]["new_tokens"] == len(out.tokens) == 8 and found["text"] == llm.tokenizer.decode(out.tokens)


def test_the_figures_of_a_run_add_up(llm: LLM) -> None:
    """Four rows per pass: some of the three candidates of a round are accepted, and the target adds its own token."""
    stats = llm.generate(ASK, max_new_tokens=30, ignore_eos=True, reuse=False).stats
    assert stats.new_tokens == 30 == stats.rounds + stats.spec_decode_num_accepted_tokens
    assert stats.tokens_per_round == pytest.approx(30 / stats.rounds)
    assert sum(stats.spec_decode_num_accepted_tokens_per_pos) == stats.spec_decode_num_accepted_tokens
    assert stats.spec_decode_num_draft_tokens <= 3 * stats.spec_decode_num_drafts
    assert stats.prompt_tokens == len(llm.tokenizer.encode(ASK)) and stats.reused_tokens == 0
    assert stats.prefill_s > 0 and stats.tokens_per_second == pytest.approx(30 / stats.decode_s)


# Streams -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}, {"stop": "e"}], ids=str)
def test_a_stream_is_generate_in_pieces(settings: dict[str, Any], llm: LLM) -> None:
    whole = llm.generate(ASK, max_new_tokens=30, **settings)
    stream = llm.stream(ASK, max_new_tokens=30, **settings)
    pieces = list(stream)
    assert "".join(pieces) == whole.text == stream.result.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens == stream.result.tokens
    assert len(pieces) == stream.result.stats.rounds and stream.result.finish_reason == whole.finish_reason


def test_a_stream_that_nobody_reads_has_a_result(llm: LLM) -> None:
    assert llm.stream(ASK, max_new_tokens=6).result.tokens == llm.generate(ASK, max_new_tokens=6).tokens


def test_a_stream_takes_one_prompt(llm: LLM) -> None:
    with pytest.raises(PromptError, match="message 0"):
        llm.stream(["one", "two"])
    assert not llm.engine.busy


def test_leaving_a_stream_early_frees_its_slot(folders: dict[str, Path]) -> None:
    llm = foreword.load(folders["llama"], "plain", slots=1)
    whole = llm.generate(ASK, max_new_tokens=6)
    gc.disable()
    try:
        for _ in llm.stream(ASK, max_new_tokens=100, ignore_eos=True):
            break
        assert not llm.engine.busy
    finally:
        gc.enable()
    assert llm.generate(ASK, max_new_tokens=6).tokens == whole.tokens


def test_closing_a_stream_early_frees_its_slot(llm: LLM) -> None:
    whole = llm.generate(ASK, max_new_tokens=12)
    for _ in range(3):  # more often than there are slots
        stream = llm.stream(ASK, max_new_tokens=100, ignore_eos=True)
        next(iter(stream))
        stream.close()
        assert not llm.engine.busy
    assert llm.generate(ASK, max_new_tokens=12).tokens == whole.tokens


def test_a_closed_stream_has_the_output_so_far(llm: LLM) -> None:
    stream = llm.stream(ASK, max_new_tokens=100, ignore_eos=True)
    first = next(iter(stream))
    stream.close()
    assert stream.result.finish_reason == "abort" and stream.result.tokens == first.tokens
    assert not llm.engine.busy and list(stream) == []


def test_closing_a_stream_that_never_began_aborts_it(own: LLM) -> None:
    own.stream(ASK, max_new_tokens=2).close()
    assert not own.engine.busy


def test_streams_in_turns_lose_nothing(llm: LLM) -> None:
    whole = [llm.generate(one, max_new_tokens=10, ignore_eos=True) for one in (ASK, "hello")]
    streams = [llm.stream(one, max_new_tokens=10, ignore_eos=True) for one in (ASK, "hello")]
    found: list[list[int]] = [[], []]
    iterators = [iter(stream) for stream in streams]
    while any(len(tokens) < 10 for tokens in found):
        for tokens, iterator in zip(found, iterators, strict=True):
            tokens += next((piece.tokens for piece in iterator), [])
    assert found == [out.tokens for out in whole]


def test_generating_while_a_stream_is_open_disturbs_neither(llm: LLM) -> None:
    whole = llm.generate(ASK, max_new_tokens=12, ignore_eos=True)
    stream = llm.stream(ASK, max_new_tokens=12, ignore_eos=True)
    first = next(iter(stream)).tokens
    assert llm.generate(ASK, max_new_tokens=12, ignore_eos=True).tokens == whole.tokens
    assert first + [token for piece in stream for token in piece.tokens] == whole.tokens


def test_a_stream_that_never_began_is_not_queued(own: LLM) -> None:
    streams = [own.stream(ASK) for _ in range(200)]
    assert not own.engine.busy and not own._driver._arrived
    assert own.generate(ASK, max_new_tokens=2).stats.new_tokens == 2
    streams[0].close()
    assert streams[0].result.finish_reason == "abort" and streams[0].result.tokens == []
    assert streams[1].result.tokens  # it may still begin


def test_results_come_one_by_one_in_their_order(llm: LLM) -> None:
    """Leaving early aborts the rest."""
    asked = [ASK, "hello", "a", "the words"]
    whole = llm.generate(asked, n=2, temperature=1.0, seed=3, max_new_tokens=8)
    each = llm.generate_each(asked, n=2, temperature=1.0, seed=3, max_new_tokens=8)
    assert [out.tokens for out in each] == [out.tokens for out in whole]
    for _ in llm.generate_each(asked, max_new_tokens=50, ignore_eos=True):
        break
    assert not llm.engine.busy


# Reuse -------------------------------------------------------------------------------------------------------------------


def test_a_prompt_reuses_cached_tokens_of_its_own_salt(folders: dict[str, Path]) -> None:
    """By default in float32, where that is exact; never those of another salt."""
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        first = llm.generate(ASK, max_new_tokens=6, cache_salt="ada")
        stranger = llm.generate(ASK, max_new_tokens=6, cache_salt="bob")
        again = llm.generate(ASK, max_new_tokens=6, cache_salt="bob")
        fresh = llm.generate(ASK, max_new_tokens=6, cache_salt="bob", reuse=False)
    assert [one.stats.reused_tokens > 0 for one in (first, stranger, again, fresh)] == [False, False, True, False]
    assert first.tokens == stranger.tokens == again.tokens == fresh.tokens


def test_in_half_precision_reuse_is_off_by_default(folders: dict[str, Path]) -> None:
    with foreword.load(folders["llama"], "plain", slots=1, dtype="bfloat16") as llm:
        for settings, reused in (({}, False), ({}, False), ({"reuse": True}, True)):
            assert (llm.generate(ASK, max_new_tokens=2, **settings).stats.reused_tokens > 0) == reused


def test_samples_of_a_prompt_read_it_once(folders: dict[str, Path]) -> None:
    """If it is long enough. In half precision they do so only if asked to."""
    asked = {"n": 3, "max_new_tokens": 6, "temperature": 0.8, "seed": 5}
    prompt = [3 + place % 7 for place in range(40)]
    for dtype, reuse, copied in (("float32", {}, True), ("bfloat16", {}, False), ("bfloat16", {"reuse": True}, True)):
        with foreword.load(folders["llama"], "plain", slots=2, dtype=dtype) as llm:
            shared = llm.generate(prompt, **asked, **reuse)
            if dtype == "float32":
                alone = llm.generate(prompt, **asked, reuse=False)
                assert [one.tokens for one in shared] == [one.tokens for one in alone]
            assert [one.stats.reused_tokens for one in shared] == [0, *[39 * copied] * 2]
            short = llm.generate(prompt[:20], **asked, **reuse, cache_salt="other")
            assert [one.stats.reused_tokens for one in short[:2]] == [0, 0]


def test_a_session_changes_no_output(llm: LLM) -> None:
    asked = [llm.generate(ASK, max_new_tokens=6, session=name, cache_salt=name).tokens for name in ("", "a", "b", "a")]
    assert all(tokens == asked[0] for tokens in asked)


@pytest.mark.parametrize("settings", [{"reuse": "yes"}, {"cache_salt": 5}, {"session": 5}, {"session": "x" * 257}], ids=str)
def test_reuse_of_a_wrong_type_is_named(settings: dict[str, Any], own: LLM) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        own.generate(ASK, **settings)


# Chat --------------------------------------------------------------------------------------------------------------------

TURNS = ("hello", "what did I say?", "and before that?")


def test_a_chat_reuses_its_cache_and_replies_as_a_fresh_model(llm: LLM, folders: dict[str, Path]) -> None:
    fresh = foreword.load(folders["llama"], "plain", slots=1)
    chat = llm.chat(system="be brief", max_new_tokens=7, ignore_eos=True)
    for i, text in enumerate(TURNS):
        asked = [*chat.messages, {"role": "user", "content": text}]
        reply = chat.send(text)
        assert reply.tokens == fresh.generate(asked, max_new_tokens=7, ignore_eos=True).tokens
        assert chat.messages == [*asked, {"role": "assistant", "content": reply.text}]
        assert (reply.stats.reused_tokens > 0) == (i > 0) and chat.last is reply
    assert reply.stats.reused_tokens > reply.stats.prompt_tokens / 2


def test_a_chat_takes_settings_for_all_turns_and_for_one(llm: LLM) -> None:
    chat = llm.chat(max_new_tokens=3, ignore_eos=True)
    assert chat.send("hello").stats.new_tokens == 3
    assert chat.send("more", max_new_tokens=5).stats.new_tokens == 5
    assert chat.send("hello").stats.new_tokens == 3


def test_a_chat_forgets_all_but_its_system_message(llm: LLM) -> None:
    chat = llm.chat(system="be brief", max_new_tokens=5)
    first = chat.send("hello")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    assert chat.send("hello").tokens == first.tokens


def test_a_chat_streams(llm: LLM) -> None:
    whole = llm.chat(max_new_tokens=6).send("hello")
    chat = llm.chat(max_new_tokens=6)
    pieces = list(chat.stream("hello"))
    assert "".join(pieces) == whole.text and [t for piece in pieces for t in piece.tokens] == whole.tokens
    assert chat.messages[-1] == {"role": "assistant", "content": whole.text}


def test_an_unfinished_reply_is_not_remembered(llm: LLM) -> None:
    chat = llm.chat(max_new_tokens=20, ignore_eos=True)
    stream = chat.stream("hello")
    next(stream)  # type: ignore[call-overload]
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(PromptError, match="empty"):
        chat.send(" ")
    assert chat.messages == [] and not llm.engine.busy


def test_an_aborted_reply_is_not_remembered(llm: LLM) -> None:
    chat = llm.chat(max_new_tokens=20, ignore_eos=True)
    stream = chat.stream("hello")
    next(stream)  # type: ignore[call-overload]
    llm.engine.give_up()
    assert list(stream) == [] and chat.last.finish_reason == "abort"
    assert chat.messages == []


def test_two_chats_share_the_slots(llm: LLM) -> None:
    one, other = (llm.chat(system=who, max_new_tokens=5) for who in ("a", "b"))
    replies = [(one.send(text), other.send(text)) for text in TURNS]
    alone = llm.chat(system="b", max_new_tokens=5)
    assert [second.tokens for _, second in replies] == [alone.send(text).tokens for text in TURNS]


# Methods and endings -----------------------------------------------------------------------------------------------------


def test_another_method_on_the_same_weights(folders: dict[str, Path]) -> None:
    llm = foreword.load(folders["llama"], "plain")
    weights, whole = llm.model.hf, llm.generate(ASK, max_new_tokens=12)
    for method in WITHOUT_WEIGHTS:
        assert llm.use(method, rows=5) is llm
        out = llm.generate(ASK, max_new_tokens=12)
        assert (out.tokens, out.method, llm.method) == (whole.tokens, method, method)
    assert llm.model.hf is weights


def test_after_an_unknown_method_the_current_one_stays(own: LLM) -> None:
    with pytest.raises(UnknownMethod, match="plain"):
        own.use("plainly")
    assert own.method == "plain" and own.generate(ASK, max_new_tokens=2).stats.new_tokens == 2


def test_after_a_method_that_does_not_fit_the_current_one_stays(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = foreword.load(folders["llama"], "plain")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "free_memory", lambda device: 1000)
        with pytest.raises(CapacityError):
            llm.use("plain")
    assert llm.generate(ASK, max_new_tokens=2).stats.new_tokens == 2


def test_another_method_aborts_requests_in_progress(folders: dict[str, Path]) -> None:
    llm = foreword.load(folders["llama"], "plain", slots=1)
    stream = llm.stream(ASK, max_new_tokens=50, ignore_eos=True)
    next(iter(stream))
    llm.use("plain")
    stream.close()
    assert stream.result.finish_reason == "abort" and not llm.engine.busy


def test_closing_restores_the_model_s_attention(folders: dict[str, Path]) -> None:
    with foreword.load(folders["qwen3"], "plain") as llm:
        hf = llm.model.hf
        assert hf.config._attn_implementation != "sdpa"
    assert hf.config._attn_implementation == "sdpa"
    llm.close()  # a second time does no harm
    assert hf.config._attn_implementation == "sdpa"


def test_a_context_closes_on_errors_too(folders: dict[str, Path]) -> None:
    with pytest.raises(PromptError):
        with foreword.load(folders["llama"], "plain") as llm:
            llm.generate("")
    assert llm.model.hf.config._attn_implementation == "sdpa"


def test_closing_aborts_requests_in_progress(folders: dict[str, Path]) -> None:
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        stream = llm.stream(ASK, max_new_tokens=50, ignore_eos=True)
        next(iter(stream))
    stream.close()
    assert stream.result.finish_reason == "abort" and not llm.engine.busy


def test_a_closed_model_says_so(folders: dict[str, Path]) -> None:
    llm = foreword.load(folders["llama"], "plain")
    llm.close()
    with pytest.raises(InputError, match="closed"):
        llm.generate(ASK)


def test_a_closed_model_takes_no_other_method(folders: dict[str, Path]) -> None:
    llm = foreword.load(folders["llama"], "plain")
    llm.close()
    with pytest.raises(InputError, match="closed"):
        llm.use("plain").generate(ASK, max_new_tokens=8)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_trace_on_a_full_disk_is_a_storage_error(folders: dict[str, Path], tmp_path: Path) -> None:
    with foreword.load(folders["llama"], "prompt_lookup", rows=4, slots=2) as llm:
        text = llm.generate(ASK, max_new_tokens=8).text
        llm.trace("/dev/full")
        for _ in range(2):
            with pytest.raises(StorageError, match="/dev/full cannot be written"):
                llm.generate(ASK, max_new_tokens=8)
        assert llm.trace(tmp_path / "trace").generate(ASK, max_new_tokens=8).text == text
        assert (tmp_path / "trace").stat().st_size > 0
        assert llm.use("prompt_lookup", rows=4).generate(ASK, max_new_tokens=8).text == text


# Warm-up -----------------------------------------------------------------------------------------------------------------


def test_warm_up_is_for_requests_of_the_same_sampling(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(Engine, "warm_up", lambda engine, **given: asked.append(given))
    with foreword.load(folders["llama"], "plain", warm_up=True) as llm:
        assert asked == [{"longest": None, "sampling": Sampling(seed=asked[0]["sampling"].seed)}]
        assert llm.warm_up(32, temperature=0.7, top_k=5) is llm
    assert asked[1]["longest"] == 32 and (asked[1]["sampling"].temperature, asked[1]["sampling"].top_k) == (0.7, 5)
    with foreword.load(folders["llama"], "plain"):
        assert len(asked) == 2


def test_warm_up_changes_no_output(folders: dict[str, Path]) -> None:
    with foreword.load(folders["llama"], "prompt_lookup", warm_up=True) as llm, foreword.load(folders["llama"]) as other:
        assert llm.generate(ASK, max_new_tokens=12).tokens == other.generate(ASK, max_new_tokens=12).tokens


# Earlier names -----------------------------------------------------------------------------------------------------------


def test_the_class_loads_as_the_function_does(folders: dict[str, Path]) -> None:
    assert signature(foreword.LLM) == signature(foreword.load)
    with foreword.LLM(folders["llama"], "prompt_lookup", rows=3) as llm, foreword.load(folders["llama"], "plain") as plain:
        assert isinstance(plain, foreword.LLM) and llm.method == "prompt_lookup"
        assert llm.generate("the words", max_new_tokens=9).tokens == plain.generate("the words", max_new_tokens=9).tokens


@pytest.mark.parametrize(("before", "now"), [("compile", "fused_layers"), ("graph", "cuda_graphs")])
def test_earlier_names_are_accepted_with_a_warning(before: str, now: str, folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {before: False}
    with pytest.warns(ForewordWarning, match=f"{before} is called {now} now"):
        foreword.load(folders["llama"], "plain", **options).close()
    with pytest.raises(InputError, match=f"{now} and {before} are one parameter"):
        foreword.load(folders["llama"], "plain", **{now: False}, **options)  # type: ignore[arg-type]


def test_layers_stay_as_they_are_under_the_earlier_name(folders: dict[str, Path]) -> None:
    kinds = []
    for options in ({"fused_layers": False}, {"compile": False}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForewordWarning)
            with foreword.load(folders["llama"], "plain", device="cpu", **options) as llm:  # type: ignore[arg-type]
                kinds.append({type(module) for module in llm.model.hf.modules()})
    assert kinds[0] == kinds[1]
