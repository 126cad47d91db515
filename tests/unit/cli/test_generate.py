"""Prompts from arguments, pipes and files, output as text and JSON, and a clear line for invalid input."""

import json
import shutil
from pathlib import Path

import pytest

import foreword
from foreword.model import cost
from foreword.model.cost import PassTimings

SHORT = ("--max-new-tokens", 8, "--ignore-eos")
CONTRACT = {"text", "tokens", "finish_reason", "model", "method", "sampling", "stats"}


@pytest.fixture(scope="module")
def llm(tiny_model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREWORD_HOME", str(tmp_path_factory.mktemp("home")))
        with foreword.load(tiny_model, method="prompt_lookup") as llm:
            yield llm


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one two", "and three"]},
        {"id": "b", "prompt": "four"},
        {"id": "c", "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "five"}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(prompts: Path) -> list:
    return ["one two", "four", json.loads(prompts.read_text().splitlines()[2])["messages"]]


def test_a_prompt_is_answered_in_plain_text(run, llm, tiny_model):
    shown = run("generate", "hello", "--model", tiny_model, *SHORT)
    assert shown.exit_code == 0
    assert shown.stdout == llm.generate("hello", max_new_tokens=8, ignore_eos=True).text + "\n"
    assert shown.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input(run, tiny_model, arguments):
    direct = run("generate", "a line\nand another", "--model", tiny_model, *SHORT)
    piped = run("generate", *arguments, "--model", tiny_model, *SHORT, input="a line\nand another\n")
    assert piped.exit_code == 0
    assert piped.stdout == direct.stdout


def test_json_holds_the_contract(run, llm, tiny_model):
    sampling = ("--temperature", 0.8, "--seed", 5)
    shown = run("generate", "hello", "--model", tiny_model, "--json", "--method", "prompt_lookup", *sampling, *SHORT)
    found = json.loads(shown.stdout)
    assert set(found) == CONTRACT
    own = llm.generate("hello", temperature=0.8, seed=5, max_new_tokens=8, ignore_eos=True).to_dict()
    assert {key: found[key] for key in CONTRACT - {"stats"}} == {key: own[key] for key in CONTRACT - {"stats"}}
    assert found["stats"].keys() == own["stats"].keys()


def test_every_option_reaches_the_library(run, tiny_model):
    sampling = {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 4}
    flags = [text for name, value in sampling.items() for text in (f"--{name.replace('_', '-')}", value)]
    places = ("--device", "cpu", "--dtype", "float64", "--threads", 1, "--max-context", 100, "--slots", 2)
    method = ("--method", "prompt_lookup", "--rows", 5, "--method-option", "max_match=2", "--min-new-tokens", 3)
    shown = run("generate", "hello", "--model", tiny_model, "--json", "--logprobs", 2, *flags, *places, *method, *SHORT)
    found = json.loads(shown.stdout)
    assert found["sampling"] == sampling | {"logprobs": 2}
    assert found["method"] == "prompt_lookup"
    assert [len(one["top"]) for one in found["logprobs"]] == [2] * 8


def test_every_other_option_reaches_the_library(run, llm, tiny_model, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}{{ mood }}", encoding="utf-8")
    whole = llm.generate("hello", max_new_tokens=8, ignore_eos=True, allowed_token_ids=list(range(1, 200)))
    tokens = [flag for token in range(1, 200) for flag in ("--allowed-token-id", token)]
    ends = ("--stop-token-id", whole.tokens[4], "--include-stop", "--prompt-logprobs", 1, "--truncate-prompt-tokens", 5)
    shown = json.loads(run("generate", "hello", "--model", tiny_model, "--json", *tokens, *ends, *SHORT).stdout)
    assert shown["sampling"]["allowed_token_ids"] == list(range(1, 200)) and shown["stats"]["prompt_tokens"] == 5
    assert [one is None for one in shown["prompt_logprobs"]] == [True] + [False] * 4
    assert len(shown["prompt_logprobs"][1]["top"]) == 1 and max(shown["tokens"]) < 200
    chat = ("--chat-template", template, "--chat-template-kwargs", '{"mood": "calm"}', "--prompt-logprobs", 0)
    shown = json.loads(run("generate", "hello</s>", "--model", tiny_model, "--json", *chat, *SHORT).stdout)
    assert "".join(one["text"] for one in shown["prompt_logprobs"][1:]).endswith("ello</s>calm")
    safe = json.loads(
        run("generate", "hello</s>", "--model", tiny_model, "--json", *chat, "--sanitize-control-tokens", *SHORT).stdout
    )
    assert 1 in [one["token"] for one in shown["prompt_logprobs"][1:]]
    assert 1 not in [one["token"] for one in safe["prompt_logprobs"][1:]]


def test_a_prediction_is_read_from_a_file(run, tiny_model, tmp_path):
    whole = json.loads(run("generate", "hello", "--model", tiny_model, "--json", *SHORT).stdout)
    file = tmp_path / "expected.txt"
    file.write_text(whole["text"], encoding="utf-8")
    ask = ("generate", "hello", "--model", tiny_model, "--json", "--method", "prompt_lookup", "--rows", 4)
    shown = json.loads(run(*ask, "--prediction", file, *SHORT).stdout)
    assert shown["tokens"] == whole["tokens"] and "rejected_prediction_tokens" in shown["stats"]
    refused = run(*ask, "--prediction", tmp_path / "nothing.txt", *SHORT)
    assert refused.exit_code == 2 and "--prediction" in refused.stderr and "cannot read" in refused.stderr


@pytest.fixture
def sampling_model(tiny_model, tmp_path):
    """The same model, with its own sampling defaults."""
    folder = shutil.copytree(tiny_model, tmp_path / "sampling")
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(config | {"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    )
    return folder


def test_sampling_defaults_of_the_model_apply_unless_switched_off(run, sampling_model):
    ask = ("generate", "hello", "--model", sampling_model, "--json", "--seed", 1, *SHORT)
    own, greedy, given = (json.loads(run(*ask, *more).stdout) for more in ([], ["--no-generation-config"], ["--top-p", 1]))
    assert (own["sampling"]["temperature"], own["sampling"]["top_p"]) == (0.6, 0.9)
    assert own["model_defaults"] == ["temperature", "top_p"] and given["model_defaults"] == ["temperature"]
    assert greedy["sampling"]["temperature"] == 0 and "model_defaults" not in greedy
    assert given["sampling"]["top_p"] == 1 and given["sampling"]["temperature"] == 0.6
    chat = run("chat", "--model", sampling_model, "--json", "--seed", 1, "--max-new-tokens", 3, input="hello\n")
    assert json.loads(chat.stdout)["model_defaults"] == ["temperature", "top_p"]


def test_without_speculation_the_output_is_the_same(run, tiny_model):
    fast = run("generate", "hello", "--model", tiny_model, *SHORT, "--json")
    slow = run("generate", "hello", "--model", tiny_model, *SHORT, "--json", "--no-speculation")
    assert json.loads(fast.stdout)["tokens"] == json.loads(slow.stdout)["tokens"]
    assert json.loads(slow.stdout)["stats"]["spec_decode_num_draft_tokens"] == 0


def test_raw_leaves_out_the_chat_template(run, llm, tiny_model):
    shown = run("generate", "the words", "--raw", "--model", tiny_model, *SHORT)
    raw, templated = (llm.generate("the words", chat=chat, max_new_tokens=8, ignore_eos=True) for chat in (False, True))
    assert shown.stdout == raw.text + "\n"
    assert raw.text != templated.text


def test_stop_strings(run, llm, tiny_model):
    text = llm.generate("hello", max_new_tokens=8, ignore_eos=True).text
    first, second = text[3:5], text[5:7]
    shown = run("generate", "hello", "--model", tiny_model, *SHORT, "--stop", second, "--stop", first)
    assert shown.stdout == text[: min(text.index(first), text.index(second))] + "\n"


def test_a_file_gives_json_lines_in_order(run, llm, tiny_model, prompts):
    sampled = ("--temperature", 0.8, "--seed", 3)
    shown = run("generate", "--prompts", prompts, "--model", tiny_model, "--json", "--slots", 2, *sampled, *SHORT)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["id"] for line in lines] == ["81", "b", "c"]
    assert all(set(line) == CONTRACT | {"id"} for line in lines)
    own = llm.generate(asked(prompts), temperature=0.8, seed=3, max_new_tokens=8, ignore_eos=True)
    assert [line["tokens"] for line in lines] == [result.tokens for result in own]


def test_a_file_gives_answers_with_a_blank_line_between(run, llm, tiny_model, prompts):
    shown = run("generate", "--prompts", prompts, "--limit", 2, "--model", tiny_model, *SHORT)
    own = llm.generate(asked(prompts)[:2], max_new_tokens=8, ignore_eos=True)
    assert shown.stdout == "".join(f"{result.text}\n\n" for result in own)


def test_samples_differ_and_can_be_repeated(run, llm, tiny_model):
    sampled = ("--n", 3, "--temperature", 1, "--seed", 2, "--json")
    lines = [
        json.loads(line) for line in run("generate", "hello", "--model", tiny_model, *sampled, *SHORT).stdout.splitlines()
    ]
    assert [line["sample"] for line in lines] == [0, 1, 2]
    assert len({line["text"] for line in lines}) == 3
    own = llm.generate("hello", n=3, temperature=1.0, seed=2, max_new_tokens=8, ignore_eos=True)
    assert [line["tokens"] for line in lines] == [result.tokens for result in own]


def test_one_prompt_of_a_file_still_has_its_id(run, tiny_model, prompts):
    shown = run("generate", "--prompts", prompts, "--limit", 1, "--model", tiny_model, "--json", *SHORT)
    assert json.loads(shown.stdout)["id"] == "81"


# What cannot be used ------------------------------------------------------------------------------------------------------


def refused(result, *fragments: str) -> None:
    """Check for status 2, nothing on stdout, and a message with these fragments, however it is wrapped."""
    assert result.exit_code == 2
    assert result.stdout == ""
    message = " ".join(result.stderr.replace("│", " ").split())
    for fragment in fragments:
        assert fragment in message


def one_line(result, *fragments: str) -> None:
    refused(result, *fragments)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("prompt", ["", "  \n "])
def test_an_empty_prompt(run, tiny_model, prompt):
    one_line(run("generate", prompt, "--model", tiny_model), "the prompt is empty")


def test_empty_standard_input(run, tiny_model):
    one_line(run("generate", "--model", tiny_model, input=""), "the prompt is empty")


def test_a_prompt_longer_than_the_context(run, tiny_model):
    one_line(run("generate", "word " * 50, "--model", tiny_model, "--max-context", 32), "the context holds 32")


def test_a_long_prompt_in_a_file_is_refused_before_anything_is_generated(run, tiny_model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("short\n" + "word " * 50 + "\n")
    one_line(run("generate", "--prompts", file, "--model", tiny_model, "--max-context", 32), "the context holds 32")


def test_an_unknown_method_suggests_a_similar_name(run):
    one_line(run("generate", "hi", "--method", "token_recylcing"), "did you mean 'token_recycling'?")


def test_an_unknown_option_of_a_method(run, tiny_model):
    asked = ("generate", "hi", "--model", tiny_model, "--method", "prompt_lookup", "--method-option")
    one_line(run(*asked, "tabel=reset"), "prompt_lookup", "tabel")
    one_line(run(*asked, "name=x"), "prompt_lookup", "name")


def test_an_option_without_its_method(run, tiny_model):
    one_line(
        run("generate", "hi", "--model", tiny_model, "--method-option", "table=reset"), "table: an option belongs to one"
    )


def test_a_wrong_model_folder(run, tmp_path):
    one_line(run("generate", "hi", "--model", tmp_path / "nothing" / "here"), "no such file or folder")
    one_line(run("generate", "hi", "--model", tmp_path), "no config.json")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-new-tokens", 0),
        ("--max-new-tokens", -3),
        ("--min-new-tokens", -1),
        ("--rows", 0),
        ("--threads", 0),
        ("--slots", 0),
        ("--max-context", 0),
        ("--n", 0),
        ("--limit", 0),
        ("--temperature", -1),
        ("--temperature", "nan"),
        ("--top-p", 1.5),
        ("--top-k", -1),
        ("--min-p", 2),
        ("--logprobs", 1000),
    ],
)
def test_numbers_out_of_range(run, option, value):
    refused(run("generate", "hi", option, value), option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0), "top_p is 0.0"),
        (("--repetition-penalty", 0), "repetition_penalty is 0.0"),
        (("--min-new-tokens", 9, "--max-new-tokens", 8), "min_new_tokens is 9"),
        (("--dtype", "float7"), "float7"),
        (("--device", "tpu"), "tpu"),
        (("--stop", ""), "stop string"),
        (("--max-context", 100_000), "max_context is 100000"),
    ],
)
def test_values_that_the_library_refuses(run, tiny_model, options, message):
    one_line(run("generate", "hi", "--model", tiny_model, *options), message)


def test_nan_logits(run, broken_model):
    one_line(run("generate", "hi", "--model", broken_model), "NaN")
    one_line(run("generate", "hi", "--model", broken_model, "--json"), "NaN")


def test_a_cache_folder_that_cannot_be_written(run, tiny_model, tmp_path, monkeypatch):
    """The default model must be stored there; a model of the user works without it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "file" / "home"))
    one_line(run("generate", "hi"), "FOREWORD_HOME")
    monkeypatch.setattr(PassTimings, "steady", True)  # so that the costs are stored, however busy the machine is
    shown = run("generate", "hi", "--model", tiny_model, *SHORT)
    assert shown.exit_code == 0 and shown.stdout
    (line,) = shown.stderr.splitlines()
    assert line.startswith("warning: costs are measured by every process") and "FOREWORD_HOME" in line


@pytest.mark.parametrize(("name", "given"), [("generate", ("hi",)), ("chat", ())])
def test_remeasure_measures_costs_again(name, given, run, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    measured, measure = [], cost.measure
    monkeypatch.setattr(cost, "measure", lambda model: measured.append(model) or measure(model))
    asked = (name, *given, "--model", tiny_model, "--threads", 1, "--max-new-tokens", 2)
    for more, times in (((), 1), ((), 1), (("--remeasure",), 2), ((), 2)):
        assert run(*asked, *more, input="hi\n").exit_code == 0 and len(measured) == times


def test_a_missing_prompt_file(run, tmp_path):
    one_line(run("generate", "--prompts", tmp_path / "none.jsonl"), "none.jsonl", "No such file")


def test_a_bad_line_in_a_prompt_file(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": \n')
    one_line(run("generate", "--prompts", file), "line 2", "not JSON")


def test_standard_input_that_is_not_text(run, tiny_model):
    one_line(run("generate", "-", "--model", tiny_model, input=b"\xff\xfe\x00"), "UTF-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--prompts", "file"], "not both"),
        (["hi", "--limit", "3"], "--prompts FILE"),
        (["hi", "--logprobs", "3"], "add --json"),
        (["hi", "--method-option", "table"], "KEY=VALUE"),
        (["hi", "--method-option", "rows=3"], "--rows"),
    ],
)
def test_options_that_exclude_each_other(run, arguments, message):
    refused(run("generate", *arguments), message)


def test_a_revision_is_asked_of_the_hub(run, monkeypatch, tiny_model):
    asked = []
    monkeypatch.setattr("foreword.hub.resolve.from_hub", lambda *given: asked.append(given) or Path(tiny_model))
    assert run("generate", "hi", "--model", "org/name", "--revision", "v1", "--max-new-tokens", "2").exit_code == 0
    assert asked == [("org/name", "v1", None)]
    refused = run("generate", "hi", "--model", tiny_model, "--revision", "v1")
    assert refused.exit_code == 2 and "revision is for a model of the hub" in " ".join(refused.stderr.split())
