"""Findings on a sound machine and on faulty ones, with a tiny model and the real self-test."""

import json
import os
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import foreword
from foreword.cli import checks
from foreword.cli.options import ModelOptions
from foreword.hub.checksums import write_checksums
from foreword.model import cost
from foreword.model.cost import CostCurve, PassTimings


def found(result) -> dict[str, dict[str, str]]:
    return {check["check"]: check for check in json.loads(result.stdout)["checks"]}


def test_a_sound_machine(run, tiny_model, cache):
    result = run("doctor", "--full", "--model", tiny_model, "--threads", 1, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["usable"] is True
    said = {name: check["said"] for name, check in found(result).items()}
    assert said["torch"] == torch.__version__
    assert said["dtype"].startswith("float32")
    assert said["cache folder"] == f"{cache}, writable"
    assert said["model"] == f"{tiny_model}, in {tiny_model}"
    for method in checks.TRIED:
        assert said[f"self-test {method}"].startswith("same 64 tokens as plain")
    assert "1 row" in said["row costs"] and said["auto"].startswith("takes ")
    assert said["model's files"] == "there are no checksums of them" and "left out" not in said


def test_the_default_checks_measure_nothing(run, tiny_model, tmp_path, monkeypatch):
    """They run plain decoding and two methods with a fixed number of rows, and say what they leave out."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    for name in ("measure", "measure_draft"):
        monkeypatch.setattr(cost, name, lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(checks, "shipped_for", lambda *_: pytest.fail("tried what ships"))
    monkeypatch.setattr(checks, "verify_model", lambda *_: pytest.fail("read every byte"))
    result = run("doctor", "--model", tiny_model, "--threads", 1, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["full"] is False
    said = {name: check["said"] for name, check in found(result).items()}
    for method in checks.TRIED:
        assert said[f"self-test {method}"].startswith("same 32 tokens as plain")
    assert said["row costs"].startswith("not measured yet") and "--full" in said["left out"]


def test_the_default_checks_show_stored_costs(run, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    shown = [PassTimings((1, 16, 64), [[0.001] * 3, [0.002] * 3, [0.004] * 3], waited="a thread waited")]
    monkeypatch.setattr(cost, "measure", lambda model: shown.pop())
    run("generate", "hi", "--model", tiny_model, "--threads", 1, "--method", "token_recycling", "--max-new-tokens", 1)
    check = found(run("doctor", "--model", tiny_model, "--threads", 1, "--json"))["row costs"]
    assert check["status"] == "warn" and "x2.0" in check["said"] and "(a thread waited)" in check["said"]
    assert "--remeasure" in check["do"]


def test_remeasure_measures_again(run, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "read_speed", lambda device: 1.0)
    shown = [PassTimings((1, 4, 16, 64), [[0.001 * times] * 3 for times in (1, 1, more, 4)]) for more in (1, 2, 3)]
    monkeypatch.setattr(cost, "measure", lambda model: shown.pop(0))
    asked = ("doctor", "--model", tiny_model, "--threads", 1, "--json")
    for more, costs in ((("--full",), "x1.0"), (("--full",), "x1.0"), (("--remeasure",), "x2.0"), (("--full",), "x2.0")):
        assert costs in found(run(*asked, *more))["row costs"]["said"].split("16 rows")[1]


def test_a_busy_machine_gives_a_warning(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(checks, "others_at_work", lambda: 0.73)
    check = found(run("doctor", "--json"))["other programs"]
    assert check["status"] == "warn" and "73% of the cores" in check["said"]
    monkeypatch.setattr(checks, "others_at_work", lambda: 0.03)
    assert found(run("doctor", "--json"))["other programs"]["status"] == "ok"


def test_a_speed_up_above_tokens_per_round_is_noise(tiny_model):
    with foreword.load(tiny_model, "plain") as llm:
        plain = checks._generate(llm)

    def timed(seconds: float) -> list:
        return [replace(one, stats=replace(one.stats, decode_s=seconds)) for one in plain]

    check = checks._compare("plain", timed(13.18), timed(1.0), "float32")
    assert check.status == "warn" and "13.18x its speed, which is noise" in check.said
    assert checks._compare("plain", timed(1.02), timed(1.0), "float32").status == "ok"


def test_changed_files_are_a_fault(run, tiny_model, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    write_checksums(folder)
    asked = ("doctor", "--full", "--model", folder, "--threads", 1, "--json")
    assert found(run(*asked))["model's files"]["said"] == "they match their checksums"
    config = folder / "generation_config.json"
    config.write_text(config.read_text().replace("\n", " "))
    result = run(*asked)
    check = found(result)["model's files"]
    assert (
        result.exit_code == 1 and check["status"] == "fail" and "generation_config.json holds other bytes" in check["said"]
    )


def test_lines_for_a_person(run, tiny_model):
    result = run("doctor", "--model", tiny_model, "--threads", 1)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok    python") and "\x1b" not in result.stdout
    assert [line for line in lines if "self-test token_recycling" in line]


def test_too_many_threads(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    check = found(run("doctor", "--threads", 4096, "--json"))["threads"]
    cores = len(os.sched_getaffinity(0))
    assert check["status"] == "warn" and check["do"].endswith(f"--threads {cores}")


def test_without_the_model_the_self_test_is_skipped(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    result = run("doctor", "--json")
    assert result.exit_code == 0
    assert found(result)["model"]["status"] == "warn" and "--fetch" in found(result)["model"]["do"]
    assert found(result)["self-test"]["said"].startswith("skipped")
    assert not (tmp_path / "models").exists()


def test_faults_are_findings_and_status_1(run, tmp_path, monkeypatch, broken_model):
    (tmp_path / "file").write_text("")
    for arguments, check in (
        (("--model", tmp_path / "none"), "model"),
        (("--device", "tpu"), "device"),
        (("--model", broken_model), "self-test"),
    ):
        result = run("doctor", "--json", *arguments)
        assert result.exit_code == 1
        assert found(result)[check]["status"] == "fail"
        assert json.loads(result.stdout)["usable"] is False
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "file" / "home"))
    assert found(run("doctor", "--json"))["cache folder"]["status"] == "fail"


def test_another_output_is_a_fault_in_float32(tiny_model):
    with foreword.load(tiny_model, "plain") as llm:
        plain, other = checks._generate(llm), [llm.generate("something else", max_new_tokens=4)] * 2
    assert checks._compare("plain", plain, other, "float32").status == "fail"
    assert checks._compare("plain", plain, other, "bfloat16").status == "warn"
    assert checks._compare("plain", plain, plain, "float32").status == "ok"


@pytest.mark.parametrize(("sixteen", "steady", "status"), [(0.015, True, "ok"), (0.3, True, "warn"), (0.015, False, "warn")])
def test_row_costs_of_a_busy_machine(sixteen, steady, status):
    class Loaded:
        class model:
            curve = CostCurve((1, 16, 64), (0.01, sixteen, 0.4), steady)

    assert checks._curve(Loaded).status == status


def test_old_packages_are_a_fault(monkeypatch):
    monkeypatch.setattr(checks, "version", lambda name: "1.9.1+cpu")
    assert checks._package("torch").status == "fail"


def test_the_least_versions_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for name, least in checks.LEAST.items():
        assert f"{name}>={'.'.join(map(str, least))}" in project["dependencies"]


def test_the_default_model_is_found_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    assert not ModelOptions().is_here()
    (tmp_path / "models" / ModelOptions().name).mkdir(parents=True)
    assert ModelOptions().is_here()
