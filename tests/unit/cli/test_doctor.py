"""Findings on a sound machine and on faulty ones; the model is tiny, the self-test is real."""

import json
import os
import tomllib
from pathlib import Path

import pytest
import torch

import foreword
from foreword.cli import checks
from foreword.cli.options import ModelOptions
from foreword.model.cost import CostCurve


def found(result) -> dict[str, dict[str, str]]:
    return {check["check"]: check for check in json.loads(result.stdout)["checks"]}


def test_a_sound_machine(run, tiny_model, cache):
    result = run("doctor", "--model", tiny_model, "--threads", 1, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["usable"] is True
    said = {name: check["said"] for name, check in found(result).items()}
    assert said["torch"] == torch.__version__
    assert said["dtype"].startswith("float32")
    assert said["cache folder"] == f"{cache}, writable"
    assert said["model"] == f"{tiny_model}, in {tiny_model}"
    for method in checks.TRIED:
        assert said[f"self-test {method}"].startswith("same 64 tokens as plain")
    assert "1 row" in said["row costs"]


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


def test_without_the_model_nothing_is_fetched_and_the_self_test_is_skipped(run, tmp_path, monkeypatch):
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


def test_a_text_that_differs_is_a_fault_where_it_must_be_equal(tiny_model):
    with foreword.load(tiny_model, "plain") as llm:
        plain, other = checks._write(llm), [llm.generate("something else", max_new_tokens=4)] * 2
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
