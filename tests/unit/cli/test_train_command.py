"""`foreword train`: distilled data becomes a drafter; a resumed run gives the same; bad input is refused."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.api import LLM, load
from foreword.cli.train import LearningOptions
from foreword.core.sampling import Sampling
from foreword.drafters.saved import load_into, read_config
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.methods import untrained
from foreword.model.fingerprint import Fingerprint
from foreword.results import Stats
from foreword.train import TrainingSettings, open_data, split_data
from foreword.train.evaluate import held_out_prompts
from foreword.train.loop import Training

SMALL = ("--batch", 8, "--steps", 6, "--warm-up", 1, "--evaluate-every", 3, "--checkpoint-every", 2, "--max-length", 64)
SMALL += ("--new-tokens", 6, "--measured", 3, "--rows", 8, "--held-out", 0.2, "--threads", 1)


@pytest.fixture
def asked(tiny_model: str, data: Path, tmp_path: Path) -> tuple[object, ...]:
    return "train", "medusa", "--model", tiny_model, "--data", data, "--out", tmp_path / "out", *SMALL


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "run" / "checkpoint.pt", weights_only=True)["module"]


def test_a_drafter_with_its_record(run: Any, asked: Any, tmp_path: Path, data: Path) -> None:
    shown = run(*asked, "--option", "heads=2")
    out = tmp_path / "out"
    assert shown.exit_code == 0 and f"{out}: " in shown.stdout and "tokens/round as bfloat16" in shown.stdout
    assert "step 3 of 6: " in shown.stderr and "top-5" in shown.stderr
    record = json.loads((out / "record.json").read_text())
    assert record["options"] == {"heads": 2} and record["settings"]["batch"] == 8 and record["step"] == 6
    assert record["data"][0]["counts"] == json.loads((data / "manifest.json").read_text())["counts"]
    assert {"command", "commit", "machine", "versions"} <= set(record["run"])
    assert record["tokens"] > 0 and record["tokens_per_second"] > 0
    assert set(record["best"]["figures"]) == {"loss", "top1/1", "top5/1", "top1/2", "top5/2"}
    assert record["stored"]["categories"]["held out"]["prompts"] == 3
    assert read_config(out)["config"] == record["config"] and read_config(out)["method"] == "medusa"
    again = (*asked, "--option", "heads=2", "--resume", "--json")
    assert json.loads(run(*again).stdout) == record  # nothing is left to do
    unfinished = {name: entry for name, entry in record.items() if name != "stored"}
    config = read_config(out)
    (out / "config.json").write_text(json.dumps(config | {"config": config["config"] | {"rates": [[0.5, 0.1], [0.4, 0.1]]}}))
    (out / "record.json").write_text(json.dumps(unfinished))  # interrupted between the two, at the very end
    assert json.loads(run(*again).stdout)["stored"] == record["stored"] and read_config(out) == config


def test_prompts_of_a_file_by_category_and_stored_formats(run: Any, asked: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"words {i}", "category": "ab"[i % 2]} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {}
    for store in ("bfloat16", "int8", "int4"):
        out = tmp_path / store
        given = [out if one == tmp_path / "out" else one for one in asked]
        record = json.loads(run(*given, "--prompts", file, "--measured", 4, "--store", store, "--json").stdout)
        assert {name: one["prompts"] for name, one in record["stored"]["categories"].items()} == {"a": 2, "b": 2}
        assert record["stored"]["dtype"] == read_config(out)["dtype"] == store
        sizes[store] = (out / "model.safetensors").stat().st_size
    assert sizes["int8"] < 0.8 * sizes["bfloat16"] and sizes["int4"] < 0.8 * sizes["int8"]


def test_ctrl_c_ends_the_step_and_resume_gives_the_same_bits(
    run: Any, asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*asked).exit_code == 0
    whole = weights(tmp_path / "out")
    given = [tmp_path / "cut" if one == tmp_path / "out" else one for one in asked]
    learn = Training._learn

    def interrupted(training: Training, step: int) -> None:
        learn(training, step)
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_learn", interrupted)
        shown = run(*given)
    assert shown.exit_code == 130 and "stopped after step 5; the same command with --resume continues" in shown.stderr
    assert "already holds a run; continue it with --resume" in run(*given).stderr
    assert run(*given, "--resume").exit_code == 0
    again = weights(tmp_path / "cut")
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert "started with learning_rate 0.002, not 0.5;" in run(*given, "--resume", "--learning-rate", 0.5).stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("--option", "hats=3"), "medusa: no option is called 'hats'; there are: rows, heads"),
        (("--option", "heads=0"), "needs at least one head"),
        (("--device", "cuda"), "torch sees no CUDA device here"),
        (("--steps", 3, "--tokens", 5), "give one of them"),
        (("--learning-rate", 0), "learning_rate is 0.0"),
        (("--batch", 1000, "--at-once", 1000), "a step reads 1000; lower --batch"),
        (("--held-out", 0), "raise --held-out"),
        (("--max-length", 600), "takes 512 tokens at most"),
        (("--resume",), "holds no run to continue"),
        (("--prompts", "no such file"), "cannot read the prompt file"),
    ],
)
def test_invalid_arguments(run: Any, asked: Any, changes: Any, reason: str) -> None:
    shown = run(*asked, *changes)
    assert shown.exit_code == 2 and reason in shown.stderr and "Traceback" not in shown.stderr


def test_a_sweep_finds_layers(run: Any, tiny_model: str, data: Path, tmp_path: Path) -> None:
    """The sweep gives figures, and its layers train a drafter."""
    rest = ("--model", tiny_model, "--data", data, *SMALL)
    shown = run("train", "hidden_transfer", "--sweep", "--out", tmp_path, *rest)
    record = json.loads((tmp_path / "sweep.json").read_text())
    layers = ",".join(map(str, record["layers"]))
    assert shown.exit_code == 0 and f"train hidden_transfer --option layers={layers}" in shown.stdout
    assert "step 2 without step 1" in shown.stdout and list(record["accuracy"]) == ["1", "2", "3"]
    assert {"command", "commit", "machine"} <= set(record["run"]) and record["data"][0]["counts"]
    assert {"accuracy.svg", "nearness.svg", "sight.svg"} <= {file.name for file in tmp_path.iterdir()}
    printed = run(
        "train", "hidden_transfer", "--sweep", "--out", tmp_path, *rest, "--json", "--option", "steps=1", "--steps", 2
    ).stdout
    assert list(json.loads(printed)["accuracy"]) == ["1"]
    assert (
        run("train", "hidden_transfer", "--option", f"layers={layers}", "--out", tmp_path / "drafter", *rest).exit_code == 0
    )
    assert read_config(tmp_path / "drafter")["config"]["layers"] == record["layers"]


def test_the_command_that_a_sweep_prints_works(run: Any, tiny_model: str, data: Path, tmp_path: Path) -> None:
    """Also with options of the sweep, and with a single layer."""
    rest = ("--model", tiny_model, "--data", data, *SMALL)
    given = ("--option", "steps=1", "--option", "norm=false", "--steps", 2)
    shown = run("train", "hidden_transfer", "--sweep", "--out", tmp_path, *rest, *given)
    printed = re.search(r"foreword train hidden_transfer (.*) \.\.\.", shown.stdout)
    assert printed is not None
    assert run("train", "hidden_transfer", *printed[1].split(), "--out", tmp_path / "drafter", *rest).exit_code == 0
    config = read_config(tmp_path / "drafter")["config"]
    assert (config["steps"], config["norm"], len(config["layers"])) == (1, False, 1)


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("medusa", (), "--sweep finds the layers of hidden_transfer; medusa has none"),
        ("hidden_transfer", ("--option", "layers=1,2,3"), "layers=(1, 2, 3) is given"),
        ("hidden_transfer", ("--resume",), "leave --resume out"),
    ],
)
def test_invalid_sweeps(
    method: str, changes: Any, reason: str, run: Any, tiny_model: str, data: Path, tmp_path: Path
) -> None:
    shown = run("train", method, "--sweep", "--model", tiny_model, "--data", data, "--out", tmp_path, *SMALL, *changes)
    assert shown.exit_code == 2 and reason in shown.stderr


def test_a_sweep_runs_in_one_process(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    shown = run("train", "hidden_transfer", "--sweep", "--data", tmp_path, "--out", tmp_path)
    assert shown.exit_code == 2 and "start it without accelerate launch" in shown.stderr


def test_methods_that_are_not_trained(run: Any, tiny_model: str, data: Path, tmp_path: Path) -> None:
    rest = ("--model", tiny_model, "--data", data, "--out", tmp_path)
    for method, reason in (
        ("plain", "plain has no weights to train; these have: medusa"),
        ("medsua", "did you mean 'medusa'"),
        ("gsd", "gsd takes the drafters of draft_model; train that one"),
        ("amusd", "amusd takes the drafters of draft_model; train that one"),
        ("firp", "firp takes the drafters of hidden_transfer; train that one"),
    ):
        shown = run("train", method, *rest)
        assert shown.exit_code == 2 and reason in shown.stderr


def test_data_of_another_model_is_refused(run: Any, asked: Any, data: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no manifest.json; `foreword distill` makes such a folder" in run(*asked, "--data", empty).stderr
    other = tmp_path / "other"
    other.mkdir()
    for file in data.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["model"] |= {"weights": "0123456789abcdef", "name": "another"}
    (other / "manifest.json").write_text(json.dumps(manifest))
    shown = run(*asked, "--data", other)
    assert shown.exit_code == 2 and "was written by another (weights 0123456789abcdef" in shown.stderr


def test_without_accelerate(run: Any, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    shown = run(*asked)
    assert shown.exit_code == 2 and "training needs accelerate; pip install accelerate" in shown.stderr


def test_defaults_are_those_of_the_library() -> None:
    assert LearningOptions().settings() == LearningOptions().reaching(8192) == TrainingSettings()
    assert LearningOptions().fitted(TrainingSettings(), 2000, processes=1) == TrainingSettings()


def test_defaults_follow_the_model_and_the_data() -> None:
    assert LearningOptions().reaching(512) == TrainingSettings(max_length=512)
    assert LearningOptions(max_length=2048).reaching(512) == TrainingSettings(max_length=2048)
    assert LearningOptions().fitted(TrainingSettings(), 160, processes=1) == TrainingSettings(batch=10)
    assert LearningOptions(batch=8).fitted(TrainingSettings(batch=8), 20, processes=1) == TrainingSettings(batch=8)


def commands_of(page: str, first: str) -> list[list[str]]:
    """Return the commands of the fenced block that begins with `first`."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if block.startswith(first))
    return [shlex.split(line)[1:] for line in block.splitlines()]


def test_the_smallest_recipe_of_the_docs_works_on_twenty_prompts(
    run: Any, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run it unchanged except for the model: it gives a drafter without a warning. The shortest command works too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.txt").write_text("".join(f"the book {i} that comes\n" for i in range(20)))
    page = (Path(__file__).parents[3] / "docs" / "train.md").read_text(encoding="utf-8")
    smallest = commands_of(page, "foreword distill --prompts questions.txt")
    assert [line[0] for line in smallest] == ["distill", "train", "generate"]
    for line in smallest:
        shown = run(*line, "--model", tiny_model, "--threads", 1)
        assert shown.exit_code == 0 and "warning" not in shown.stderr, shown.stderr
    record = json.loads((tmp_path / "drafters" / "try" / "record.json").read_text())
    assert record["step"] == record["settings"]["steps"] and record["stored"]["categories"]["held out"]["prompts"] == 4
    shortest = ("train", "medusa", "--data", "data/try", "--out", "again", "--model", tiny_model, "--threads", 1)
    shown = run(*shortest, "--new-tokens", 6, "--rows", 8)
    assert shown.exit_code == 0
    assert "warning: warm_up is 100 steps, but the run has 16" in shown.stderr.replace("\n", " ")


COUNT = {"hidden_transfer": "steps", "masked": "block", "kangaroo": "depth"}
"""The option for the number of tokens that a method drafts ahead, if it is not `heads`."""
TRAINED = [("medusa", 120), ("chimera", 40), ("clover2", 50), ("hidden_transfer", 60), ("masked", 50), ("kangaroo", 40)]


@pytest.mark.parametrize(("method", "steps"), TRAINED)
def test_a_trained_drafter_is_better_than_an_untrained_one(
    method: str, steps: int, run: Any, tiny_model: str, data: Path, tmp_path: Path
) -> None:
    """From prompts to a folder to tokens per round, measured by a separate engine on sequences of the training data."""
    given = ("--steps", steps, "--learning-rate", 0.01, "--batch", 16, "--evaluate-every", steps)
    given += ("--option", f"{COUNT.get(method, 'heads')}=2")
    given += ("--option", "layers=1") if method == "masked" else ()
    shown = run("train", method, "--model", tiny_model, "--data", data, "--out", tmp_path, *SMALL, *given)
    assert shown.exit_code == 0
    with load(tiny_model, "plain", slots=1, device="cpu", fused_layers=False) as llm:
        before, after = (_tokens_per_round(llm, method, data, folder) for folder in (None, tmp_path))
    assert after > before + 0.1


def _tokens_per_round(llm: LLM, method: str, data: Path, folder: Path | None) -> float:
    torch.manual_seed(0)
    own: Any = {} if folder is None else read_config(folder)["config"]
    drafter: Any = untrained(method, rows=8, **own | {COUNT.get(method, "heads"): 2})
    engine = Engine(llm.model, drafter, slots=4, max_context=128)
    if folder is not None:
        load_into(drafter, folder, llm.model)
    learned, _ = split_data(open_data([data], Fingerprint.of(llm.model)), 0.2, 64)
    asked = [Request(one.prompt, Sampling(seed=0), max_new_tokens=20) for one in held_out_prompts(learned, 8, 60)]
    return Stats.of(engine.generate(asked)).tokens_per_round
