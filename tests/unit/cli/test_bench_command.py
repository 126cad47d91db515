"""The bench command: batches, widened models, trained drafters, resuming, and what is refused at the start."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foreword
import foreword.bench as bench_room
import foreword.bench.baselines as baselines_module
import foreword.bench.contenders as contenders_module
import foreword.bench.figures as figures_module
import foreword.bench.roofline as roofline_module
import foreword.bench.widening as widening_module
import foreword.cli.bench as bench_command
import foreword.cli.console as console_module
import foreword.model.busy as busy_module
import foreword.prove.referee as referee_module
from doubles import with_random_weights
from foreword.bench.journal import Journal
from foreword.drafters import saved
from foreword.model import cost

SMALL = ("--threads", 1, "--max-new-tokens", 8, "--device", "cpu", "--repeats", 2)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(f"the words that come before {i}" for i in range(6)))
    return file


@pytest.fixture
def medusa(tiny_model: str, tmp_path: Path) -> Path:
    with foreword.load(tiny_model, "plain", device="cpu", slots=1) as llm:
        saved.save(with_random_weights("medusa", llm.model, heads=2), tmp_path / "medusa", llm.model)
    return tmp_path / "medusa"


def test_batches_of_a_widened_model_with_a_trained_drafter(run, tiny_model, questions, medusa, tmp_path, monkeypatch):
    monkeypatch.setattr(figures_module, "NOISE", math.inf)  # so that noise of this machine refuses no speed-up
    out = tmp_path / "out"
    arguments = ("--methods", f"prompt_lookup,medusa={medusa}", "--batch", "1,2", "--widen", 2, "--out", out)
    result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    assert "by batch" in result.stdout and "pay" in result.stdout and "grown r=2" in result.stdout
    found = json.loads((out / "results.json").read_text())
    assert found["about"]["model"].endswith("grown r=2")
    widened = found["about"]["grown"]
    assert (widened["times"], widened["prompts"], widened["identical"] + (widened["ties"] > 0) >= 4) == (2, 4, True)
    assert list(found["batches"]) == ["1", "2"] and found["tables"]
    costs = found["costs"]
    assert len(costs["rows"]) == len(costs["seconds"]) > 1 and costs["rows"][0] == costs["texts"] == 1
    for table in found["batches"].values():
        assert [row["contender"] for row in table] == ["plain", "prompt_lookup", f"medusa={medusa}"]
        assert all(row["prompts"] == 6 for row in table)
    assert set(found["stops_paying"]) == {"prompt_lookup", f"medusa={medusa}"}
    report = (out / "report.md").read_text()
    assert "grown r=2" in report and "## over plain by batch" in report


def test_batch_1_as_json(run, tiny_model, questions):
    result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "plain", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and list(found["batches"]) == ["1"] and "grown" not in found["about"]
    assert found["repeats"] == 2 and found["about"]["resumed"] == 0


def test_methods_suites_temperatures_and_baselines_in_one_run(run, tiny_model, questions, medusa, tmp_path):
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"question_id": 81, "category": "writing", "turns": ["words", "more words"]}')
    out, sets = tmp_path / "out", ("--prompts", questions, "--prompts", f"talks={talk}")
    asked = ("--methods", "prompt_lookup", "--drafter", f"medusa={medusa}", "--baselines", "hf,hf_lookup")
    result = run("bench", "--model", tiny_model, *sets, *asked, *SMALL, "--temperature", "0,0.7", "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads((out / "results.json").read_text())
    names = ["plain", "prompt_lookup", f"medusa={medusa}"]
    rows = found["tables"]["overall"]
    assert [row["contender"] for row in rows] == [*names, "hf", "hf_lookup"]
    assert [row["prompts"] for row in rows] == [8] * 5  # one prompt has two turns
    assert all(row["identical"] + row["ties"] == 8 and row["speedup"] for row in rows)
    assert list(found["tables"]) == ["overall", "questions", "talks", "questions: prompts", "talks: mt_bench"]
    sampled = found["temperatures"]["0.7"]["tables"]["overall"]
    assert [row["contender"] for row in sampled] == names and all(row["identical"] == 8 for row in sampled)
    assert {row["suite"] for row in found["timings"]} == {"questions", "talks"}
    assert set(found["spec_bench"]) == {row["contender"] for row in rows}
    assert {file.name for file in out.iterdir()} == {"results.json", "report.md", "report.html", "answers"}
    assert "overall, T=0.7" in result.stdout


def test_a_failed_prompt_is_reported(run, tiny_model, tmp_path):
    file = tmp_path / "questions.txt"
    file.write_text("hello\n" + "long " * 400)
    asked = ("--prompts", file, "--methods", "prompt_lookup", *SMALL)
    result = run("bench", "--model", tiny_model, *asked)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("PromptError: the prompt has") == 2 and "1 of 1, 1 failed" in result.stdout


def test_a_prompt_that_is_too_long_fails_alone(run, tiny_model, tmp_path):
    file = tmp_path / "questions.jsonl"
    long = "long " * 400
    rows = [{"prompt": "hello"}, {"prompt": long}, {"turns": ["hello", long]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    result = run("bench", "--model", tiny_model, "--prompts", file, "--methods", "plain", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(one["prompt"], one["turn"], "tokens" in one["why"]) for one in found["failures"]] == [
        ("2", 0, True),
        ("3", 1, True),
    ]
    assert found["tables"]["overall"][0]["prompts"] == 2


def test_a_method_that_needs_its_own_run_is_not_in_all_but_can_be_named(run, tiny_model, questions, monkeypatch):
    monkeypatch.setattr(
        bench_command, "and_fitting", lambda given, names, _: [*names, *(["gsd", "amusd"] if given == "all" else [])]
    )
    monkeypatch.setattr(contenders_module, "needs_own_run", lambda names, *_: [name for name in names if name == "amusd"])
    monkeypatch.setattr(
        bench_room, "contender", lambda llm, name, *_, **__: bench_room.failing_contender(name, RuntimeError("not here"))
    )
    asked = ("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--rows", 4, "--limit", 1, "--json")
    found = json.loads(run(*asked).stdout)
    assert found["apart"] == ["amusd"] and "amusd" not in found["warm_up_failed"] and "gsd" in found["warm_up_failed"]
    assert "--methods amusd" in run(*asked[:-1]).stdout
    found = json.loads(run(*asked, "--drafter", "amusd:least=2").stdout)
    assert found["apart"] == [] and "amusd:least=2" in found["warm_up_failed"]
    found = json.loads(run(*asked, "--methods", "prompt_lookup,amusd").stdout)
    assert found["apart"] == [] and "amusd" in found["warm_up_failed"]


def test_a_contender_that_fails_at_a_larger_batch_fails_only_there(run, tiny_model, questions, monkeypatch):
    right = bench_room.contender

    def small(llm: Any, name: str, context: int, slots: int, *more: Any, **options: Any) -> Any:
        if name == "prompt_lookup" and slots > 1:
            raise RuntimeError("no memory")
        return right(llm, name, context, slots, *more, **options)

    monkeypatch.setattr(bench_room, "contender", small)
    asked = ("bench", "--model", tiny_model, "--prompts", questions, "--methods", "prompt_lookup", *SMALL, "--json")
    found = json.loads(run(*asked, "--batch", "1,2").stdout)
    (_, one), (plain, two) = found["batches"].values()
    assert one["speedup"] and plain["speedup"] and two["refused"] == "no answers"
    assert {one["why"] for one in found["failures"]} == {"RuntimeError: no memory"}
    with pytest.raises(RuntimeError, match="no memory"):
        run(*asked, "--batch", "2")


def test_differences_that_cannot_be_judged_for_lack_of_memory(run, tiny_model, questions, monkeypatch):
    right = baselines_module.up_to_stop
    monkeypatch.setattr(baselines_module, "up_to_stop", lambda tokens, *more: right([9, *tokens[1:]], *more))

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("no memory\nleft")

    monkeypatch.setattr(referee_module, "own_logits", full)
    asked = ("--prompts", questions, *SMALL, "--methods", "plain", "--baselines", "hf", "--limit", 1, "--json")
    row = json.loads(run("bench", "--model", tiny_model, *asked).stdout)["tables"]["overall"][1]
    assert row["speedup"] is None and row["refused"].endswith("whether at ties: no memory left")


def test_the_roofline_is_measured_only_for_json_or_files(run, tiny_model, questions, monkeypatch):
    measured = []
    monkeypatch.setattr(roofline_module, "roofline", lambda *_: measured.append("passes") or {})
    asked = ("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "plain", "--limit", 1)
    assert run(*asked).exit_code == 0 and not measured
    assert run(*asked, "--json").exit_code == 0 and measured == ["passes"]


def test_every_table_names_its_temperature(run, tiny_model, questions):
    asked = ("--prompts", questions, *SMALL, "--methods", "plain", "--temperature", "0.7,0", "--limit", 1, "--repeats", 1)
    shown = run("bench", "--model", tiny_model, *asked).stdout
    assert shown.index("overall, T=0.7") < shown.index("overall, T=0 ")


def test_an_interrupted_run_resumes(run, tiny_model, questions, tmp_path, monkeypatch):
    out = tmp_path / "out"
    asked = ("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "prompt_lookup", "--out", out)
    add, added = Journal.add, []

    def interrupt(journal: Journal, block_run: Any) -> None:
        add(journal, block_run)
        added.append(block_run.place)
        if len(added) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", interrupt)
    assert run(*asked).exit_code == 130 and len(added) == 5
    assert [file.name for file in out.iterdir()] == ["unfinished.jsonl"]
    began = json.loads((out / "unfinished.jsonl").read_text().splitlines()[0])["costs"]
    refused = run(*asked, "--repeats", 1)
    assert refused.exit_code == 2 and "another repeats" in refused.output
    refused = run(*asked, "--no-fused-layers", "--max-context", 128)
    assert refused.exit_code == 2 and "another max_context, another compile or graph" in refused.output
    assert run(*asked).exit_code == 0 and len(added) == len(set(added)) == 12
    found = json.loads((out / "results.json").read_text())
    assert found["about"]["resumed"] == 5 and len(found["timings"]) == 24 and not (out / "unfinished.jsonl").exists()
    assert found["costs"] == began


@pytest.mark.parametrize("command", [("bench", "--json", *SMALL), ("profile", "--quick")], ids=str)
def test_costs_of_a_busy_machine_are_measured_again(run, command, tiny_model, tmp_path, monkeypatch):
    """Unless rows are given, because then no costs are needed. Real load on this machine must not matter here."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "SLOWER", math.inf)
    monkeypatch.setattr(cost, "MAX_READ_TIMES", math.inf)
    measured, measure = [], cost.measure
    monkeypatch.setattr(cost, "measure", lambda model: measured.append(model) or measure(model))
    name, *more = command
    more += ["--model", tiny_model, "--methods", "token_recycling", *(["--limit", 1] if name == "bench" else [])]
    given = "--rows" if name == "bench" else "--candidates"
    assert run(name, *more, given, 4).exit_code == 0 and not measured
    for steady, times in ((False, 1), (True, 2), (True, 2)):
        monkeypatch.setattr(cost.PassTimings, "steady", steady)
        assert run(name, *more).exit_code == 0 and len(measured) == times
    assert run(name, *more, "--remeasure").exit_code == 0 and len(measured) == 3
    assert run(name, *more).exit_code == 0 and len(measured) == 3


def test_a_busy_machine_gives_a_warning_and_a_line_in_the_report(run, tiny_model, questions, monkeypatch):
    asked = ("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "plain", "--limit", 1, "--json")
    monkeypatch.setattr(busy_module, "others_at_work", lambda: 0.73)
    result = run(*asked)
    assert "other programs used 73% of the cores" in result.stderr
    assert json.loads(result.stdout)["busy"]["told"].startswith("the machine was busy (other programs used 73%")
    monkeypatch.setattr(busy_module, "others_at_work", lambda: 0.03)
    monkeypatch.setattr(busy_module, "_waited", lambda: {"1": 0.0})
    result = run(*asked)
    assert result.stderr == "" and json.loads(result.stdout)["busy"] == {"others": 0.03, "waited": 0.0, "told": ""}


def test_progress_is_shown_in_a_pipe(run, tiny_model, questions, monkeypatch):
    """Also of the warm-up, before there is an answer."""
    lines = []

    class Recorded(console_module.ProgressLines):
        def update(self, what: str, done: int, total: int) -> None:
            super().update(what, done, total)
            lines.append(self._line)

    monkeypatch.setattr(console_module, "ProgressLines", Recorded)
    asked = ("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "prompt_lookup", "--limit", 2)
    assert run(*asked, "--rows", 4).exit_code == 0
    assert lines[0] == "answers, 0 of 4: warming up plain" and lines[-1] == "answers, 4 of 4: batch 1, run 2 of 2"


def test_another_output_gets_no_speedup(run, tiny_model, questions, monkeypatch):
    right = baselines_module.up_to_stop
    monkeypatch.setattr(baselines_module, "up_to_stop", lambda tokens, *more: right([9, *tokens[1:]], *more))
    asked = ("--prompts", questions, *SMALL, "--methods", "plain", "--baselines", "hf", "--limit", 2)
    result = run("bench", "--model", tiny_model, *asked, "--json")
    row = json.loads(result.stdout)["tables"]["overall"][1]
    assert row["contender"] == "hf" and row["speedup"] is None and row["refused"] == "other output" and row["differing"] == 2


def test_near_ties_are_counted_and_refuse_nothing(run, tiny_model, questions, tmp_path, monkeypatch):
    """Token 2k + 1 has the weights of token 2k, so both score the same, and only rounding could choose between them. The
    baseline chooses otherwise once per output."""
    folder, right = tmp_path / "twins", baselines_module.up_to_stop
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"]
    head[1::2] = head[::2]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(baselines_module, "up_to_stop", lambda tokens, *more: right([tokens[0] ^ 1, *tokens[1:]], *more))
    asked = ("--prompts", questions, *SMALL, "--methods", "plain", "--baselines", "hf", "--limit", 2, "--dtype", "float16")
    row = json.loads(run("bench", "--model", folder, *asked, "--json").stdout)["tables"]["overall"][1]
    assert (row["ties"], row["differing"], row["identical"]) == (2, 0, 0) and row["speedup"] is not None


def test_a_quick_look(run, tiny_model):
    small = ("bench", "--model", tiny_model, "--quick", "--limit", 1, *SMALL, "--methods", "plain", "--json")
    assert json.loads(run(*small).stdout)["about"]["prompts"] == 1
    found = json.loads(run("bench", "--model", tiny_model, "--quick", *SMALL, "--methods", "plain", "--json").stdout)
    assert found["repeats"] == 1 and found["about"]["prompts"] == 6
    assert found["tables"]["overall"][0]["prompts"] + found["tables"]["overall"][0]["failed"] == 7


def test_a_widened_model_with_another_output_is_not_timed(run, tiny_model, questions, monkeypatch):
    right = widening_module.widen_model

    def wrong(hf: Any, times: int) -> Any:
        wide = right(hf, times)
        wide.model.norm.weight.data[:8] *= -3
        return wide

    monkeypatch.setattr(widening_module, "widen_model", wrong)
    options = ("--methods", "plain", "--widen", 2, "--limit", 1)  # the referee judges every token of a wrong output
    result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, *options)
    assert result.exit_code == 2 and "positions that are not ties" in result.output and "tokens/s" not in result.output


def test_a_widened_model_is_profiled(run, tiny_model):
    """Under the old name of the flag."""
    small = ("--threads", 1, "--rows", "1,4", "--contexts", "16", "--context", 24, "--tokens", 16, "--quick")
    result = run("profile", "--model", tiny_model, *small, "--grow", 2, "--json", "--methods", "plain", "--device", "cpu")
    found = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert found["about"]["grown"]["times"] == 2 and found["about"]["model"].endswith("grown r=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--batch", "1,x"), "whole numbers"),
        (("bench", "--batch", "0"), "whole numbers"),
        (("bench", "--batch", "2", "--baselines", "hf"), "baselines run greedily at batch 1"),
        (("bench", "--temperature", "0.8", "--baselines", "hf"), "run greedily"),
        (("bench", "--temperature", "hot"), "list of temperatures"),
        (("bench", "--baselines", "hf,vllm", "--model", "nowhere"), "no baseline is called 'vllm'"),
        (("bench", "--prompts", "spec_bench_48", "--model", "nowhere"), "spec_bench_48=FILE"),
        (("bench", "--drafter", "medusa=nowhere", "--model", "nowhere"), "nowhere is missing"),
        (("bench", "--batch", "1,64", "--model", "nowhere"), "60 prompts cannot fill a batch of 64"),
        (("bench", "--methods", "medusa=nowhere"), "nowhere is missing"),
        (("bench", "--widen", "1"), "--widen"),
        (("bench", "--grow", "1"), "--grow"),
        (("bench", "--widen", "0.0b"), "neither a number of 2 or more"),
        (("bench", "--widen", "big"), "neither a number of 2 or more"),
        (("profile", "--widen", "2", "--cold"), "leave out --shapes"),
    ],
)
def test_invalid_arguments_are_refused_first(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize(
    "content",
    [
        '{"tables": 5}',
        '{"tables": {"overall": [5]}, "batches": {}, "timings": [5]}',
        '{"tables": {"overall": [{}]}, "batches": {}, "timings": [], "about": []}',
        '{"tables": {"overall": [{"contender": "plain"}]}, "base": "plain", "temperature": "warm"}',
    ],
)
def test_malformed_results_are_refused(run, tmp_path, content):
    page = tmp_path / "page.md"
    page.write_text("<!-- foreword bench table . -->\n\n| a |\n")
    (tmp_path / "results.json").write_text(content)
    for asked in (("compare", tmp_path, tmp_path), ("table", tmp_path), ("table", "--into", page)):
        result = run("bench", *asked)
        assert result.exit_code == 2 and "foreword bench" in result.stderr and result.exception.__class__ is SystemExit


def test_malformed_costs_of_an_unfinished_run_are_refused(run, tiny_model, questions, tmp_path, monkeypatch):
    asked = ("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "prompt_lookup", "--out", tmp_path)
    monkeypatch.setattr(Journal, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    run(*asked)
    file = tmp_path / "unfinished.jsonl"
    began = json.loads(file.read_text())
    for costs in (5, {"rows": 1}, [1]):
        file.write_text(json.dumps(began | {"costs": costs}) + "\n")
        result = run(*asked)
        assert result.exit_code == 2 and "unfinished.jsonl is not what" in result.stderr.replace("\n", " ")


def test_invalid_widths_and_batches(run, tiny_model, questions):
    for given, message in ((("--widen", 3), "power of two"), (("--batch", "8"), "cannot fill a batch of 8")):
        result = run("bench", "--model", tiny_model, "--prompts", questions, *SMALL, "--methods", "plain", *given)
        assert result.exit_code == 2 and message in result.output
