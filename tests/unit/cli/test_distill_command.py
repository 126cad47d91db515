"""`foreword distill`: a prompt file becomes a folder, with a summary line; the same command resumes."""

import json
import lzma
import os
import shlex
import signal
import time
from threading import Thread

import pytest

from foreword.train import Shards

ROWS = [
    {"id": "a", "turns": ["the words", "and then"]},
    {"id": "b", "prompt": ""},
    {"id": "c", "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "come"}]},
    {"id": "d", "prompt": "before " * 200},
    {"id": "e", "prompt": "the book"},
]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl.xz"
    file.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return file


@pytest.fixture
def asked(prompts, tiny_model, tmp_path):
    options = ("--max-new-tokens", 6, "--slots", 2, "--threads", 1, "--max-context", 200)
    return "distill", "--model", tiny_model, "--prompts", prompts, "--out", tmp_path / "data", *options


def test_a_compressed_file_becomes_a_folder(run, asked, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/foreword", *map(str, asked)])
    shown = run(*asked)
    assert shown.exit_code == 0
    shards = Shards.open(tmp_path / "data")
    assert shards.complete and shards.manifest["done"] == 4
    counts = shards.manifest["counts"]
    assert f"{counts['written']} tokens written by the model, in {counts['sequences']} sequences" in shown.stdout
    assert "1 longer than the context allows" in shown.stdout and "1 rows that cannot be used" in shown.stdout
    assert "line 2: prompt holds ''" in shown.stderr and shown.stderr.startswith("warning: ")
    assert shards.manifest["command"] == shlex.join(["foreword", *map(str, asked)])


def test_json_and_nothing_left_to_do(run, asked):
    first = json.loads(run(*asked, "--json").stdout)
    assert first["done"] == first["talks"] == 4 and first["unusable_rows"] == 1 and first["tokens_per_second"] > 0
    assert first["skipped"] == {"longer than the context allows": 1}
    again = json.loads(run(*asked, "--json").stdout)
    assert again["written"] == first["written"] and again["tokens_per_second"] == 0
    assert "nothing was left to do" in run(*asked).stdout


def test_several_answers_with_a_seed(run, asked, tmp_path):
    sampled = ("--temperature", 0.9, "--top-p", 0.9, "--answers", 3, "--limit", 1, "--seed", 4)
    found = json.loads(run(*asked, *sampled, "--json").stdout)
    assert found["talks"] == 3 and found["answers"] == 6
    shards = Shards.open(tmp_path / "data")
    assert len({tuple(shards[i][0].tolist()) for i in range(len(shards))}) == len(shards) >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "7"], "max_new_tokens was 6, is 7"),
        (["--temperature", "0.5"], "temperature was 0.0, is 0.5"),
        (["--limit", "1"], "prompts was 4"),
        (["--answers", "2"], "would all be equal"),
        (["--drop-loops", "1"], "drop_loops is 1.0"),
        (["--prompts", "none.txt"], "none.txt"),
        (["--max-new-tokens", "300"], "leaves no room for a prompt"),
        (["--slots", "0"], "--slots"),
        (["--tokens", "0"], "--tokens"),
    ],
)
def test_invalid_or_changed_settings(run, asked, arguments, message):
    if "was" in message:
        assert run(*asked).exit_code == 0
    shown = run(*asked, *arguments)
    assert shown.exit_code == 2
    assert message in " ".join(shown.stderr.split())


def test_only_unusable_rows(run, asked, prompts):
    prompts.write_bytes(lzma.compress(b'{"prompt": " "}\n{"nothing": 1}\nno json\n'))
    shown = run(*asked)
    assert shown.exit_code == 2
    assert "none of 3 rows can be used; line 1: prompt holds ' '" in shown.stderr


def test_ctrl_c_leaves_a_usable_folder(run, tiny_model, tmp_path):
    file, out = tmp_path / "many.txt", tmp_path / "data"
    file.write_text("".join(f"the book number {i}\n" for i in range(50_000)))

    def interrupt():
        while not (out / "tokens-00000.bin").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()
    options = ("--slots", 8, "--max-new-tokens", 8, "--threads", 1, "--max-context", 64)
    shown = run("distill", "--model", tiny_model, "--prompts", file, "--out", out, *options)
    assert (shown.exit_code, shown.stdout) == (130, "")
    assert not Shards.open(out).complete
    file.write_text("another file")
    assert "prompts was 50000" in run("distill", "--model", tiny_model, "--prompts", file, "--out", out, *options).stderr
