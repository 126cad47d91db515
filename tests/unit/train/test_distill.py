"""Distilling keeps what the target generates, in file order, once, even after an interruption."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foreword
from doubles import truth
from foreword.api import LLM
from foreword.engine.request import Request
from foreword.errors import DataError, InputError, PromptError, StorageError
from foreword.text import Prompt, Tokenizer, read_prompts
from foreword.train import Recipe, Shards, distill
from foreword.train.distill import script
from foreword.train.shards import key_of

Make = Callable[..., LLM]
Row = tuple[list[int], list[int]]
QUICK = Recipe(max_new_tokens=8)
SAMPLED = Recipe(max_new_tokens=8, temperature=0.8, seed=5, answers=2)


def rows(folder: Path) -> list[Row]:
    shards = Shards.open(folder)
    return [(tokens.tolist(), mask.tolist()) for tokens, mask in (shards[i] for i in range(len(shards)))]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.bin"))}


def expected(hf: Any, tokenizer: Tokenizer, prompt: Prompt, recipe: Recipe, answer: int) -> list[Row]:
    """Answer turn by turn with the slow truth."""
    messages, found = [], []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.encode(messages)
        sampling = recipe.sampling(key_of(f"{prompt.id}/{answer}"))
        new = truth(hf, Request(tuple(ids), sampling, recipe.max_new_tokens), context=200, ends=(1,))
        tokens, mask = [*ids, *new], [0] * len(ids) + [1] * len(new)
        if found and tokens[: len(found[-1][0])] == found[-1][0]:
            before = found.pop()[1]
            mask[: len(before)] = before
        found.append((tokens, mask))
        messages.append({"role": "assistant", "content": tokenizer.decode(new)})
    return found


@pytest.mark.parametrize("recipe", [QUICK, SAMPLED], ids=["greedy", "sampled"])
def test_what_is_kept_is_what_the_target_generates(
    make: Make, hf: Any, questions: list[Prompt], recipe: Recipe, tmp_path: Path
) -> None:
    llm = make()
    progress = distill(llm, questions, tmp_path, recipe)
    correct = [
        row for prompt in questions for i in range(recipe.answers) for row in expected(hf, llm.tokenizer, prompt, recipe, i)
    ]
    assert rows(tmp_path) == correct
    assert progress.done == progress.dialogues == len(questions) * recipe.answers
    assert progress.tokens == sum(sum(mask) for _, mask in correct) and progress.counts["sequences"] == len(correct)
    assert progress.counts["answers"] == sum(len(prompt.turns) for prompt in questions) * recipe.answers


def test_later_turns_find_their_prefix_cached(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    llm, runs = make(), []
    add = llm.engine.add
    llm.engine.add = lambda request: runs.append(add(request)) or runs[-1]  # type: ignore[method-assign]
    distill(llm, [prompt for prompt in questions if len(prompt.turns) == 3], tmp_path, QUICK)
    later = [run for run in runs if run.request.reuse]
    assert len(later) == 4
    for run in later:
        earlier = [(*one.request.prompt, *one.tokens) for one in runs]
        before = max(len(tokens) for tokens in earlier if run.request.prompt[: len(tokens)] == tokens)
        assert run.reused == before - 1, "the last token of an answer was never cached"
    sequences = rows(tmp_path)
    assert len(sequences) == 2, "a dialogue that encodes to the same tokens is one sequence"
    assert [sum(mask) for _, mask in sequences] == [sum(len(run.tokens) for run in runs[i::2]) for i in range(2)]


def test_bytes_do_not_depend_on_the_batch(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    for slots in (1, 2, 7):
        distill(make(slots=slots), questions, tmp_path / str(slots), SAMPLED, shard_tokens=100)
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "7")
    assert len(list((tmp_path / "1").glob("tokens-*.bin"))) > 3


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", [1, 4, 9, 15])
def test_a_resumed_run_ends_with_the_same_bytes(make: Make, questions: list[Prompt], tmp_path: Path, after: int) -> None:
    def cut(progress: Any) -> None:
        if progress.done >= after:
            raise Interrupted

    options: dict[str, Any] = {"shard_tokens": 150, "save_s": 0}
    distill(make(), questions, tmp_path / "whole", SAMPLED, **options)
    with pytest.raises(Interrupted):
        distill(make(), questions, tmp_path / "cut", SAMPLED, show=cut, **options)
    partial = Shards.open(tmp_path / "cut")
    assert not partial.complete and partial.manifest["done"] == after - 1
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")[: len(partial)]
    asked: list[Request] = []
    llm = make()
    add = llm.engine.add
    llm.engine.add = lambda request: asked.append(request) or add(request)  # type: ignore[method-assign]
    distill(llm, questions, tmp_path / "cut", SAMPLED, **options)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    ended = Shards.open(tmp_path / "cut")
    assert ended.complete and ended.manifest["counts"] == Shards.open(tmp_path / "whole").manifest["counts"]
    assert len([one for one in asked if not one.reuse]) == 16 - (after - 1), "no prompt is answered twice"


def test_a_finished_run_is_not_changed(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    first = distill(make(), questions, tmp_path, QUICK)
    before = (tmp_path / "manifest.json").read_bytes(), files(tmp_path)
    again = distill(make(), questions, tmp_path, QUICK)
    assert ((tmp_path / "manifest.json").read_bytes(), files(tmp_path)) == before
    assert again.written_now == 0 and again.counts == first.counts


KILLED = """
import os, signal, sys
import foreword
from foreword.text import read_prompts
from foreword.train import Recipe, distill
llm = foreword.load(sys.argv[1], "plain", slots=3, max_context=200, device="cpu", threads=1)
def show(progress):
    if progress.done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
distill(llm, read_prompts(sys.argv[2]), sys.argv[3], Recipe(max_new_tokens=6), save_s=0, show=show)
"""


def test_a_killed_process_leaves_a_usable_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    file, model = tmp_path / "prompts.txt", str(folders["llama"])
    file.write_text("".join(f"question {i}\n" for i in range(12)))
    environment = os.environ | {"PYTHONPATH": str(Path(foreword.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", KILLED, model, str(file), str(tmp_path / "cut")]
    assert subprocess.run(line, env=environment, check=False, timeout=120).returncode == -signal.SIGKILL
    assert 0 < len(Shards.open(tmp_path / "cut")) < 12
    with foreword.load(model, "plain", slots=3, max_context=200, device="cpu") as llm:
        for folder in ("cut", "whole"):
            distill(llm, read_prompts(file), tmp_path / folder, Recipe(max_new_tokens=6))
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_the_tokens_of_a_run_are_counted_in_file_order(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    distill(make(), questions, tmp_path / "all", QUICK)
    counts = [sum(mask) for _, mask in rows(tmp_path / "all")]
    enough = sum(counts[:3]) - 1
    progress = distill(make(slots=5), questions, tmp_path / "some", replace(QUICK, tokens=enough))
    assert rows(tmp_path / "some") == rows(tmp_path / "all")[:3]
    assert progress.tokens == sum(counts[:3]) and Shards.open(tmp_path / "some").complete


def test_loops_are_dropped_and_end_the_dialogue(make: Make, talking: Any, questions: list[Prompt], tmp_path: Path) -> None:
    """A model with weights of this size loops now and then. Answers before the loop are kept."""
    model, recipe = talking("llama", initializer_range=0.2), Recipe(max_new_tokens=60, drop_loops=0.3)
    progress = distill(make(model, max_context=400), questions, tmp_path / "some", recipe)
    distill(make(model, max_context=400), questions, tmp_path / "all", replace(recipe, drop_loops=None))
    kept, every = rows(tmp_path / "some"), rows(tmp_path / "all")
    assert 0 < progress.counts["loops"] < progress.counts["answers"] < 15
    assert progress.counts["answers"] - progress.counts["loops"] == sum(len(answers(row)) for row in kept)
    assert all(slow_loop_share(answer) <= 0.3 for row in kept for answer in answers(row))
    assert any(slow_loop_share(answer) > 0.3 for row in every for answer in answers(row))
    whole = [answer for row in every for answer in answers(row)]
    assert all(answer in whole for row in kept for answer in answers(row)), "kept answers are kept whole"


def answers(row: Row) -> list[list[int]]:
    """Return the spans that the target generated."""
    found: list[list[int]] = []
    for place, (token, written) in enumerate(zip(*row, strict=True)):
        if written and (place == 0 or not row[1][place - 1]):
            found.append([])
        if written:
            found[-1].append(token)
    return found


def slow_loop_share(tokens: list[int], gram: int = 8) -> float:
    """Return the share of tokens inside an 8-gram that occurred before in the answer."""
    grams = [tokens[i : i + gram] for i in range(len(tokens) - gram + 1)]
    inside = {i + j for i, one in enumerate(grams) if one in grams[:i] for j in range(gram)}
    return len(inside) / len(tokens)


# What cannot be used ---------------------------------------------------------------------------------------------------


def test_another_model_is_refused(make: Make, talking: Any, questions: list[Prompt], tmp_path: Path) -> None:
    distill(make(), questions, tmp_path, QUICK)
    other = talking("llama", seed=3)
    with pytest.raises(DataError, match="started with .*the model here is"):
        distill(make(other), questions, tmp_path, QUICK)
    assert Shards.open(tmp_path).complete


def test_other_settings_are_refused_and_named(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    distill(make(), questions, tmp_path, QUICK)
    with pytest.raises(DataError, match=r"max_new_tokens was 8, is 9\)"):
        distill(make(), questions, tmp_path, replace(QUICK, max_new_tokens=9))
    with pytest.raises(DataError, match="prompts was 8, sha256"):
        distill(make(), questions[::-1], tmp_path, QUICK)


def test_overlong_prompts_are_skipped_and_counted(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    long = Prompt("long", "prompts", ["word " * 60])
    grows = Prompt("grows", "prompts", ["short", "word " * 60, "never asked"])
    asked = [long, long, long, long, questions[0], grows]
    progress = distill(make(slots=2), asked, tmp_path, QUICK)
    assert progress.skipped == {"longer than the context allows": 4, "later turns longer than the context allows": 1}
    assert progress.done == 6 and len(rows(tmp_path)) == 2
    assert sum(rows(tmp_path)[1][1]) == progress.tokens - sum(rows(tmp_path)[0][1])


def test_only_bad_prompts_are_an_error(make: Make, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="none of 1 prompts .*longer than the context allows: 1"):
        distill(make(), [Prompt("long", "prompts", ["word " * 60])], tmp_path, QUICK)


def test_a_target_that_answers_nan(make: Make, talking: Any, questions: list[Prompt], tmp_path: Path) -> None:
    broken = talking("llama", seed=4)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(PromptError, match="the target answered NaN: 8"):
        distill(make(broken), questions, tmp_path, QUICK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": 2}, "would all be equal"),
        ({"answers": 0}, "answers is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"drop_loops": 1.0}, "drop_loops is 1.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_invalid_recipes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(QUICK, **changes)


def test_answers_must_fit_the_context(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leaves no room for a prompt in a context of 200"):
        distill(make(), questions, tmp_path, Recipe(max_new_tokens=200))


def test_a_full_disk_loses_nothing_that_was_saved(
    make: Make, questions: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill(make(), questions, tmp_path / "whole", QUICK)
    synced, sync = [], os.fsync

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 20:
            raise OSError(28, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left .*run the same command again"):
            distill(make(), questions, tmp_path / "full", QUICK, save_s=0)
    assert 0 < len(Shards.open(tmp_path / "full")) < len(rows(tmp_path / "whole"))
    distill(make(), questions, tmp_path / "full", QUICK)
    assert files(tmp_path / "full") == files(tmp_path / "whole")


# The turns of a dialogue -----------------------------------------------------------------------------------------------


def test_replies_of_the_target_replace_those_of_the_file() -> None:
    roles = ("system", "user", "assistant", "user")
    system, one, reply, two = ({"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles))
    prompt = Prompt("m", "prompts", ["user 1", "user 3"], [system, one, reply, two, reply])
    assert script(prompt) == [[system, one], [two]]
    assert script(Prompt("t", "prompts", ["a", "b"])) == [[{"role": "user", "content": turn}] for turn in "ab"]


def test_the_manifest_says_how_it_was_made(make: Make, questions: list[Prompt], tmp_path: Path) -> None:
    distill(make(), questions, tmp_path, SAMPLED, command="foreword distill ...")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["command"] == "foreword distill ..." and manifest["versions"]["torch"] == torch.__version__
    assert manifest["settings"]["temperature"] == 0.8 and manifest["settings"]["max_context"] == 200
    assert set(manifest["model"]) == {"name", "config", "vocab_size", "weights", "dtype", "few"}
