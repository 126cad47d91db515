"""`foreword train looped`: a model becomes a looped one, which every command takes; a resumed run gives the same."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreword.api import load
from foreword.train.loop import TrainingLoop

SMALL = ("--batch", 8, "--steps", 6, "--warm-up", 1, "--evaluate-every", 3, "--checkpoint-every", 2, "--max-length", 64)
SMALL += ("--new-tokens", 6, "--measured", 3, "--held-out", 0.2, "--threads", 1)
SIZES = ("--option", "group=2", "--option", "repeats=3")


@pytest.fixture
def asked(tiny_model: str, data: Path, tmp_path: Path) -> tuple[object, ...]:
    return "train", "looped", "--model", tiny_model, "--data", data, "--out", tmp_path / "out", *SMALL


def test_a_looped_model_with_its_record(run: Any, asked: Any, tmp_path: Path) -> None:
    shown, out = run(*asked, *SIZES), tmp_path / "out"
    assert shown.exit_code == 0 and f"{out}: " in shown.stdout and "rounds/token with speed" in shown.stdout
    assert "step 3 of 6: loss after each repeat " in shown.stderr and "original" in shown.stderr
    record, config = (json.loads((out / name).read_text()) for name in ("record.json", "config.json"))
    assert record["looped"] == {"group": 2, "repeats": 3, "start": "average"} and record["step"] == 6
    assert (config["model_type"], config["num_hidden_layers"], config["repeats"]) == ("foreword_looped", 6, 3)
    stored = record["stored"]
    assert len(stored["losses"]) == len(stored["agreements"]) == 3 and stored["agreements"][-1] == 1.0
    assert stored["final"] == stored["losses"][-1] and stored["first"] == stored["losses"][0] and stored["tokens"] > 0
    assert stored["original"] < stored["final"] and 1 <= stored["settled"] <= 3 and 1 <= stored["rounds_per_token"] <= 3
    assert [entry["step"] for entry in record["history"]] == [3, 6] and record["data"][0]["counts"]
    assert "| after repeat 3 |" in (out / "README.md").read_text()
    assert json.loads(run(*asked, *SIZES, "--resume", "--json").stdout) == record  # nothing is left to do


def test_every_way_to_run_it_gives_one_text(run: Any, asked: Any, tmp_path: Path) -> None:
    """transformers, plain decoding and the pipeline: from the folder, as a user would load it."""
    assert run(*asked, *SIZES).exit_code == 0
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = [7, 9, 30, 12, 5, 40]
    own = hf.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
    with load(tmp_path / "out", "plain", slots=1, max_context=128) as llm:
        texts = [llm.use(method).generate(ids, max_new_tokens=12).tokens for method in ("plain", "speed", "prompt_lookup")]
    assert texts == [own] * 3 and len(own) > 1
    asked_text = ("generate", "the book", "--model", tmp_path / "out", "--max-new-tokens", 6, "--json", "--method")
    plain, speed = (json.loads(run(*asked_text, method).stdout) for method in ("plain", "speed"))
    assert plain["tokens"] == speed["tokens"] and plain["stats"]["rounds"] <= speed["stats"]["rounds"]


def test_ctrl_c_ends_the_step_and_resume_gives_the_same_bits(
    run: Any, asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*asked, *SIZES).exit_code == 0
    given = [tmp_path / "cut" if one == tmp_path / "out" else one for one in (*asked, *SIZES)]
    learn = TrainingLoop._learn

    def interrupted(training: TrainingLoop, step: int) -> None:
        learn(training, step)
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_learn", interrupted)
        assert run(*given).exit_code == 130
    assert run(*given, "--resume").exit_code == 0
    whole, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "cut"))
    assert whole == again


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("--option", "hats=3"), "looped: no option is called 'hats'; there are: group, repeats, start"),
        (("--option", "group=0"), "looped: group is 0; it must be a whole number, 1 or more"),
        (("--option", "group=9"), "group is 9, but the model has 4 layers; choose from 1 to 4"),
        (("--option", "repeats=two"), "looped: repeats is 'two'"),
        (("--option", "start=last"), "looped: start is 'last'; choose from average, first, spread"),
        (("--sweep",), "leave it out"),
        (("--store", "int8"), "is for drafters"),
    ],
)
def test_invalid_arguments(run: Any, asked: Any, changes: Any, reason: str) -> None:
    shown = run(*asked, *changes)
    assert shown.exit_code == 2 and reason in shown.stderr and "Traceback" not in shown.stderr


def test_speed_itself_is_not_trained(run: Any, data: Path, tmp_path: Path) -> None:
    shown = run("train", "speed", "--data", data, "--out", tmp_path)
    assert shown.exit_code == 2 and "`foreword train looped` makes" in " ".join(shown.stderr.split())


def test_speed_refuses_other_models(run: Any, tiny_model: str) -> None:
    shown = run("generate", "the book", "--model", tiny_model, "--method", "speed")
    assert shown.exit_code == 2 and "speed pipelines the repeats of a looped model" in " ".join(shown.stderr.split())
