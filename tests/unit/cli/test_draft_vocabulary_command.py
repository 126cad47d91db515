"""`foreword draft-vocabulary` gives a trained drafter the frequent tokens of its training data."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from foreword.api import load
from foreword.drafters.saved import read_config
from foreword.drafting.draft_vocabulary import unpacked

QUICK = ("--batch", 8, "--steps", 2, "--evaluate-every", 2, "--max-length", 64, "--new-tokens", 6, "--measured", 2)
QUICK += ("--rows", 8, "--held-out", 0.2, "--threads", 1)


@pytest.fixture
def drafter(run: Any, tiny_model: str, data: Path, tmp_path: Path) -> Path:
    """A drafter that drafts all tokens."""
    out = tmp_path / "drafter"
    assert run("train", "medusa", "--model", tiny_model, "--data", data, "--out", out, "--cover", 1, *QUICK).exit_code == 0
    return out


def test_a_draft_vocabulary_is_chosen_and_removed_again(run: Any, drafter: Path, tiny_model: str, data: Path) -> None:
    before = {file.name: file.read_bytes() for file in drafter.iterdir() if file.is_file()}
    given = ("draft-vocabulary", drafter, "--model", tiny_model, "--data", data, "--threads", 1)
    shown = run(*given, "--cover", 0.6)
    assert shown.exit_code == 0 and f"{drafter}: 128 of 280 tokens, " in shown.stdout
    assert read_config(drafter)["words"] == 128
    chosen = unpacked(load_file(drafter / "model.safetensors")["words"], 280, "tiny")
    assert chosen.sum() == 128 and chosen[1], "</s> is one of them"
    record = json.loads((drafter / "record.json").read_text())
    assert record["words"]["count"] == 128 and record["words"]["covered"] >= 0.6
    assert "Its draft vocabulary has 128 of the 280 tokens" in (drafter / "README.md").read_text()
    with load(tiny_model, drafter=drafter, rows=4, device="cpu") as llm:
        held: Any = llm.engine.drafter
        assert held.vocabulary.tokens.tolist() == chosen.nonzero().flatten().tolist()
    found = json.loads(run(*given, "--cover", 1, "--json").stdout)
    assert found == {"count": 280, "of": 280, "covered": 1.0}
    assert {file.name: file.read_bytes() for file in drafter.iterdir() if file.is_file()} == before


def test_a_very_small_draft_vocabulary_gives_a_warning(
    run: Any, drafter: Path, tiny_model: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.train.frequent_tokens.MULTIPLE", 16)  # so that few tokens are chosen
    shown = run("draft-vocabulary", drafter, "--model", tiny_model, "--data", data, "--threads", 1, "--cover", 0.2)
    message = shown.stderr.replace("\n", " ")
    assert shown.exit_code == 0 and "warning: the draft vocabulary has" in message and "--cover 1" in message


def test_training_chooses_one_by_itself(run: Any, tiny_model: str, data: Path, tmp_path: Path) -> None:
    given = ("train", "clover2", "--model", tiny_model, "--data", data, "--out", tmp_path, *QUICK)
    assert run(*given, "--cover", 0.6).exit_code == 0
    assert read_config(tmp_path)["words"] == 128
    assert "started with cover 0.6, not 0.98" in run(*given, "--resume").stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("--cover", 0), "cover is 0.0; it is a share of what the model generates"),
        (("--data", "nowhere"), "nowhere holds no manifest.json"),
    ],
)
def test_invalid_arguments(run: Any, drafter: Path, tiny_model: str, data: Path, changes: Any, reason: str) -> None:
    """Under the old name of the command."""
    before = (drafter / "model.safetensors").read_bytes()
    shown = run("words", drafter, "--model", tiny_model, "--data", data, *changes, "--threads", 1)
    assert shown.exit_code == 2 and reason in shown.stderr and (drafter / "model.safetensors").read_bytes() == before


def test_a_drafter_of_another_model_is_refused(
    run: Any, tiny_model: str, data: Path, tmp_path: Path, keep_drafter: Any, folders: dict[str, Path]
) -> None:
    foreign = keep_drafter("medusa", folders["llama"], tmp_path / "foreign")
    shown = run("draft-vocabulary", foreign, "--model", tiny_model, "--data", data)
    assert shown.exit_code == 2 and "medusa: trained for" in shown.stderr
