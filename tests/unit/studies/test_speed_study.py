"""The study of a looped model, on one that is made from the tiny model."""

import json
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from foreword.api import load
from foreword.model.fingerprint import Fingerprint
from foreword.model.loading import load_weights
from foreword.model.looped import cut_after_first_repeat
from foreword.model.model import Model
from foreword.text import Prompt
from foreword.train import LoopedOptions, LoopedTraining, Recipe, TrainingSettings, distill, open_data, split_data
from foreword.train.evaluate import held_out_prompts
from speed import speed

SETTINGS = TrainingSettings(batch=4, steps=2, evaluate_every=2, warm_up=0, new_tokens=4, max_length=64)


@pytest.fixture
def looped(folders: dict[str, Path], own_home: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A looped model, and the data that it was trained on."""
    data, out = tmp_path / "data", tmp_path / "looped"
    with load(folders["llama"], "plain", slots=4, max_context=128, device="cpu", fused_layers=False) as llm:
        distill(llm, [Prompt(f"q{i}", "prompts", [f"the words {i}"]) for i in range(12)], data, Recipe(max_new_tokens=8))
        train, held_out = split_data(open_data([data], Fingerprint.of(llm.model)), 0.3, 64)
        prompts, about = held_out_prompts(held_out, 2, 40), {"held_out": 0.3}
        options = LoopedOptions(group=1, repeats=2)
        LoopedTraining(llm.model, llm.tokenizer, options, train, held_out, prompts, SETTINGS, out, about).run()
    return out, data


def test_it_measures_speed_and_quality(looped: tuple[Path, Path], folders: dict[str, Path], tmp_path: Path) -> None:
    (folder, data), out, prompts = looped, tmp_path / "found.json", tmp_path / "prompts.txt"
    prompts.write_text("the words that come\nbefore the words\n", encoding="utf-8")
    own = Typer()
    own.command()(speed)
    given = f"{folder} --data {data} --model {folders['llama']} --prompts {prompts} --out {out} --new-tokens 6"
    done = CliRunner().invoke(own, f"{given} --max-context 128 --device cpu".split(), catch_exceptions=False)
    assert done.exit_code == 0 and "held-out loss" in done.stdout
    found = json.loads(out.read_text())
    rows = {(row["model"], row["method"], row["temperature"]): row for row in found["speed"]}
    assert len(rows) == len(found["speed"]) == 10
    for (model, method, _), row in rows.items():
        pipelined = method != "plain"
        assert row["identical"] == (2 if pipelined else None) and row["tokens_per_second"] > 0
        assert 1 <= row["rounds_per_token"] <= (2 if pipelined else 1) and (model == "looped" or not pipelined)
    assert rows["looped", "plain", 0.0]["over_sequential"] == 1
    record = json.loads((folder / "record.json").read_text())
    assert found["quality"]["losses"] == pytest.approx(record["stored"]["losses"], abs=1e-3)
    assert {"command", "commit", "machine", "looped"} <= set(found["about"])


def test_a_model_cut_after_its_first_repeat_is_its_first_exit(looped: tuple[Path, Path]) -> None:
    whole, cut = (load_weights(looped[0], torch.device("cpu"), torch.float32) for _ in range(2))
    cut_after_first_repeat(cut)
    assert (Model(whole).layers, Model(cut).layers, Model(cut).repeats) == (2, 1, 1)
