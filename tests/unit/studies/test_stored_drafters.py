"""Drafters in other forms: bits and errors of each, what is compared, and what conversion keeps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from doubles import target, with_random_weights
from foreword.drafters import saved
from stored_drafters import FORMS, app, measure

Study = Callable[..., tuple[Result, Any]]
SHORT = "--rows 6 --max-new-tokens 12 --slots 2"


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_bits_and_the_error_that_it_says(form: str) -> None:
    weight = torch.randn(48, 576, generator=torch.Generator().manual_seed(0))
    back, size = FORMS[form](weight)
    bits, error = 8 * size / weight.numel(), float((back - weight).norm() / weight.norm())
    expected = {"int8": (8.06, 0.01), "4 bits, groups": (4.5, 0.085), "5 bits, groups": (5.5, 0.043)}
    expected |= {"16 levels, groups": (4.51, 0.085), "2 steps": (3.7, 0.1), "4 steps": (4.7, 0.05), "8 steps": (5.7, 0.025)}
    assert back.shape == weight.shape and bits == pytest.approx(expected[form][0], abs=0.06)
    assert 0.75 * expected[form][1] < error < 1.03 * expected[form][1]


def test_every_form_is_compared_with_the_folder(study: Study) -> None:
    done, written = study(measure, "medusa", f"--drafters {{drafter}} --forms int8 {SHORT}")
    first, rounded = written["stored"]
    assert done.exit_code == 0 and (first["form"], rounded["form"]) == ("as it is", "int8")
    assert first["ratio"] == 1 and "bits" not in first and rounded["bits"] > 8
    assert first["tokens"] == rounded["tokens"] and first["tokens"] / first["rounds"] == first["tokens_per_round"]
    assert f"{rounded['tokens_per_round']:.3f} tokens per round" in done.output
    assert written["about"]["rows"] == 6 and written["about"]["prompts"] == 2


def test_sizes_need_no_model(tmp_path: Path) -> None:
    folder, out = tmp_path / "drafter", tmp_path / "sizes.json"
    saved.save(with_random_weights("medusa", target()), folder, target())
    done = CliRunner().invoke(app, ["sizes", "--drafters", str(folder), "--out", str(out), "--forms", "4 steps;8 steps"])
    coarse, fine = json.loads(out.read_text())["stored"]
    assert done.exit_code == 0 and coarse["error"] > 1.8 * fine["error"] and coarse["bytes"] < fine["bytes"]
    assert f"{coarse['bits']:.2f} bits, error {coarse['error']:.3f}" in done.output


def test_an_unknown_form_is_refused() -> None:
    refused = CliRunner().invoke(app, ["measure", "--drafters", "x", "--prompts", "x", "--out", "x", "--forms", "3 bits"])
    assert refused.exit_code == 2 and "3 bits" in refused.output


def test_a_folder_is_stored_again(tmp_path: Path) -> None:
    model, first, second = target(), tmp_path / "first", tmp_path / "second"
    saved.save(with_random_weights("medusa", model), first, model, "int8")
    (first / "record.json").write_text('{"store": "int8"}')
    assert CliRunner().invoke(app, ["convert", str(first), str(second)]).exit_code == 0
    before, after = (json.loads((one / "config.json").read_text()) for one in (first, second))
    assert after == before | {"dtype": "int4"} and (second / "record.json").read_text() == '{"store": "int8"}'
    held, drafters = load_file(second / saved.WEIGHTS), [saved.restore(one, model) for one in (first, second)]
    assert held["0.0.linear.weight"].dtype == torch.uint8 and held["0.0.linear.weight"].dim() == 1
    one, other = (drafter.module.state_dict() for drafter in drafters)  # type: ignore[attr-defined]
    assert all((other[name] - one[name]).norm() < 0.06 * one[name].norm() + 1e-6 for name in one)
    assert CliRunner().invoke(app, ["convert", str(second), str(second), "--store", "bfloat16"]).exit_code == 0
    assert load_file(second / saved.WEIGHTS)["0.0.linear.weight"].dtype == torch.bfloat16
