"""Prompt files: every format that is read, and every way in which one can be wrong."""

import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.errors import PromptError
from foreword.text import Prompt, groups, read_prompts, spread


def written(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns(tmp_path: Path) -> None:
    rows = [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}, {"id": "b", "turns": ["Why?"]}]
    first, second = read_prompts(written(tmp_path / "p.jsonl", *rows))
    assert first == Prompt("81", "writing", ["Write.", "Again."])
    assert first.first() == "Write."
    assert (second.id, second.category, second.first()) == ("b", "prompts", "Why?")


def test_messages(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, user("Hi"), {"role": "assistant", "content": ""}, user("Bye")]
    answered = [*talk, {"role": "assistant", "content": "Bye"}]
    open_end, closed = read_prompts(written(tmp_path / "p.jsonl", {"messages": talk}, {"messages": answered}))
    assert open_end.first() == closed.first() == talk
    assert open_end.turns == ["Hi", "Bye"]
    assert (open_end.id, closed.id) == ("1", "2")


def test_conversations_in_both_spellings(tmp_path: Path) -> None:
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}, {"from": "human", "value": "Why?"}]
    plain = [user("Hi"), {"role": "assistant", "content": "Yes?"}, user("Why?")]
    a, b = read_prompts(written(tmp_path / "p.jsonl", {"conversations": share}, {"conversations": plain}))
    assert a.messages == b.messages == plain


def test_a_prompt_field(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path / "p.jsonl", {"prompt": "Why?"}))[0].first() == "Why?"


def test_plain_text_skips_blank_lines_and_keeps_their_count(tmp_path: Path) -> None:
    prompts = read_prompts(written(tmp_path / "p.txt", "Why?", "", "  ", '{"not": "JSON here"}'))
    assert [(p.id, p.turns) for p in prompts] == [("1", ["Why?"]), ("4", ['{"not": "JSON here"}'])]


def test_a_unicode_line_separator_ends_no_line(tmp_path: Path) -> None:
    assert [p.turns for p in read_prompts(written(tmp_path / "p.txt", "one\u2028two"))] == [["one\u2028two"]]


def test_without_a_known_suffix_the_first_line_decides(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path / "json", {"prompt": "Why?"}))[0].turns == ["Why?"]
    assert read_prompts(written(tmp_path / "text", "Why {so}?"))[0].turns == ["Why {so}?"]


def test_windows_files(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "Why?"}\r\n\r\n{"prompt": "How?"}\r\n')
    assert [p.turns for p in read_prompts(tmp_path / "p.jsonl")] == [["Why?"], ["How?"]]


def test_sets_as_they_are_published(tmp_path: Path) -> None:
    human = {"task_id": "HumanEval/0", "prompt": "def f():\n    pass\n", "entry_point": "f", "test": "..."}
    grade = {"question": "How many?", "answer": "Three. #### 3"}
    basic = {"task_id": 11, "text": "Write f.", "code": "...", "test_list": ["assert f(1)", "assert f(2)"]}
    code, math, more = read_prompts(written(tmp_path / "p.jsonl", human, grade, basic))
    assert (code.id, code.category) == ("HumanEval/0", "code") and (more.id, more.category) == ("11", "code")
    assert code.turns == ["Complete the following Python function.\n\n```python\ndef f():\n    pass\n```"]
    assert (math.category, math.turns) == ("math", ["How many?"])
    assert more.turns == ["Write f. Your code should pass these tests:\n\n```python\nassert f(1)\nassert f(2)\n```"]


def test_one_json_list(tmp_path: Path) -> None:
    """The format of ShareGPT, on one line or on many."""
    rows = [{"id": "a", "conversations": [{"from": "human", "value": "Hi"}]}, {"id": "b", "turns": ["Why?"]}]
    for indent in (None, 1):
        (tmp_path / "p.json").write_text(json.dumps(rows, indent=indent))
        assert [p.id for p in read_prompts(tmp_path / "p.json")] == ["a", "b"]
        assert [p.id for p in read_prompts(tmp_path / "p.json", limit=1)] == ["a"]
    for text in ("[draft] Why?", "[1, 2]"):
        assert [p.turns for p in read_prompts(written(tmp_path / "p.txt", text, "How?"))] == [[text], ["How?"]]
    unnamed = read_prompts(written(tmp_path / "p", "[draft] Why?", "How?"))
    assert [p.turns for p in unnamed] == [["[draft] Why?"], ["How?"]]


def test_text_that_begins_with_a_bracket_keeps_its_lines(tmp_path: Path) -> None:
    """Blank lines are not prompts, but count as lines."""
    (tmp_path / "p").write_text("[1] Why?\n\nHow?\u2028Where?\n")
    assert [(p.id, p.turns) for p in read_prompts(tmp_path / "p")] == [("1", ["[1] Why?"]), ("3", ["How?\u2028Where?"])]


def test_the_prompt_after_replies() -> None:
    prompt = Prompt("81", "writing", ["Write.", "Again.", "Shorter."])
    assert prompt.answers == 3 and prompt.after([]) == "Write."
    messages = [user("Write."), {"role": "assistant", "content": "Yes."}, user("Again.")]
    assert prompt.after(["Yes."]) == messages
    assert prompt.after(["Yes.", "No."])[2:] == [user("Again."), {"role": "assistant", "content": "No."}, user("Shorter.")]
    assert Prompt("1", "chat", ["Hi", "Bye"], [user("Hi"), user("Bye")]).answers == 1


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    packed = compress(b'{"prompt": "Why?"}\n' * 200)
    path = tmp_path / f"p.jsonl{suffix}"
    path.write_bytes(packed)
    assert len(read_prompts(path)) == 200
    for damaged in (packed[: len(packed) // 2], b"no such format"):
        path.write_bytes(damaged)
        with pytest.raises(PromptError, match="cannot read the prompt file"):
            read_prompts(path)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\nHow?\n")))
    assert [p.turns for p in read_prompts("-")] == [["Why?"], ["How?"]]
    assert not sys.stdin.closed


def test_ids_that_are_null_and_scores_that_are_nan(tmp_path: Path) -> None:
    rows = [
        '{"id": null, "question_id": null, "task_id": "a", "prompt": "Why?", "score": NaN}',
        '{"id": null, "prompt": "How?"}',
    ]
    for path in (written(tmp_path / "p.jsonl", *rows), written(tmp_path / "p.json", f"[{rows[0]}, {rows[1]}]")):
        assert [p.id for p in read_prompts(path)] == ["a", "2"]


def test_a_row_of_a_list_that_is_no_unicode_is_left_out_alone(tmp_path: Path) -> None:
    path, left_out = written(tmp_path / "p.json", '[{"prompt": "Why?"}, {"prompt": "\\ud83d"}, {"prompt": "How?"}]'), []
    assert [p.turns for p in read_prompts(path, left_out=left_out)] == [["Why?"], ["How?"]]
    assert left_out == ["line 2: holds half of a surrogate pair, which is no character; clean the text"]


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    for path in ("a\0b", "x" * 5000, tmp_path):
        with pytest.raises(PromptError, match="cannot read the prompt file"):
            read_prompts(path)


def test_the_limit_ends_the_reading(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "a"}, "", {"prompt": "b"}, "{broken")
    assert [p.turns for p in read_prompts(path, limit=2)] == [["a"], ["b"]]
    with pytest.raises(PromptError, match="limit is 0"):
        read_prompts(path, limit=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[" * 100_000, "not JSON .*nest deeper"),
        ('{"prompt": "Why?", "id": ' + "[" * 500 + "]" * 500 + "}", "not JSON .*nest deeper"),
        ('{"prompt": "Why?", "id": ' + "9" * 5000 + "}", "not JSON .*4300 digits"),
        ('{"prompt": "Why\\ud83d?"}', "half of a surrogate pair"),
        ('{"prompt": "Why?", "id": "\\ud83d"}', "half of a surrogate pair"),
        ({"prompt": None, "entry_point": "f"}, "prompt holds None"),
        ({"text": None, "test_list": ["assert f(1)"]}, "text holds None"),
        ({"text": "Write f.", "test_list": 5}, "test_list needs a list of at least one string, got 5"),
        ({"text": "Write f.", "test_list": [5]}, "test_list holds 5"),
        ({"question": None, "answer": "3"}, "prompt holds None"),
        ("{broken", "not JSON"),
        ("[1]", "JSON object"),
        ({}, "has nothing"),
        ({"question": "Why?", "id": 3}, "has question, id"),
        ({"turns": []}, "at least one"),
        ({"turns": "Why?"}, "at least one"),
        ({"turns": ["Why?", " "]}, "turns holds ' '"),
        ({"prompt": 5}, "prompt holds 5"),
        ({"prompt": ""}, "not empty"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "messages needs"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"conversations": ["Hi"]}, "message 0"),
        ({"conversations": [{"from": "bot", "value": "Hi"}]}, "'bot'"),
        ({"conversations": [{"from": ["human"], "value": "Hi"}]}, "role"),
        ({"conversations": [{"from": "human", "text": "Hi"}]}, "content"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_row_is_refused_with_its_place(tmp_path: Path, row: object, message: str) -> None:
    path = written(tmp_path / "bad.jsonl", {"prompt": "fine"}, "", row)
    with pytest.raises(PromptError, match=message) as caught:
        read_prompts(path)
    assert "bad.jsonl, line 3" in str(caught.value)


def test_bad_rows_can_be_left_out_and_are_named(tmp_path: Path) -> None:
    file, left_out = tmp_path / "prompts.jsonl", []
    file.write_text('{"prompt": "a"}\n{"prompt": " "}\n\nno json\n{"prompt": "b"}\n', encoding="utf-8")
    assert [prompt.turns for prompt in read_prompts(file, left_out=left_out)] == [["a"], ["b"]]
    assert [line.split(":")[0] for line in left_out] == ["line 2", "line 4"] and "not JSON" in left_out[1]
    with pytest.raises(PromptError, match="line 2: prompt holds ' '"):
        read_prompts(file)
    file.write_text('{"prompt": " "}\n', encoding="utf-8")
    with pytest.raises(PromptError, match="none of 1 rows can be used; line 1: prompt holds"):
        read_prompts(file, left_out=[])


def test_bytes_that_are_not_utf8_are_refused_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"Why?\nna\xefve\n")
    with pytest.raises(PromptError, match=r"p\.txt, line 2: not UTF-8"):
        read_prompts(tmp_path / "p.txt")


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere\.txt: No such file"):
        read_prompts(tmp_path / "nowhere.txt")
    with pytest.raises(PromptError, match="Is a directory"):
        read_prompts(tmp_path)
    with pytest.raises(PromptError, match="no prompts"):
        read_prompts(written(tmp_path / "empty.jsonl", "", " "))


def question(number: int, category: str, turns: int = 1) -> Prompt:
    return Prompt(str(number), category, ["Why?"] * turns)


def test_the_categories_of_mt_bench_are_one_group() -> None:
    prompts = [question(1, "writing", 2), question(2, "qa"), question(3, "math", 2), question(4, "math")]
    names = {name: [p.id for p in group] for name, group in groups(prompts).items()}
    assert names == {"mt_bench": ["1", "3"], "qa": ["2"], "math": ["4"]}


def test_spread_takes_evenly_from_each_group_in_file_order() -> None:
    prompts = [question(i, "qa" if i % 2 else "rag") for i in range(20)] + [question(20, "translation")]
    assert [p.id for p in spread(prompts, 3)] == ["0", "1", "6", "7", "12", "13", "20"]
    assert spread(prompts, 100) == prompts
    with pytest.raises(PromptError, match="per_group is 0"):
        spread(prompts, 0)
