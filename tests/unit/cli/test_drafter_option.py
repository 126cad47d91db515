"""--drafter and NAME=FOLDER on every command that generates, the listing of methods, and the choice of `auto`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword.methods import METHODS


@pytest.fixture(scope="session")
def clover(tiny_model: str, keep_drafter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keep_drafter("clover", tiny_model, tmp_path_factory.mktemp("drafters") / "clover")


def test_generate(run: Any, tiny_model: str, clover: Path) -> None:
    asked = ("generate", "hello", "--model", tiny_model, "--max-new-tokens", 8, "--ignore-eos", "--json")
    plain = json.loads(run(*asked, "--method", "plain").stdout)
    for option in (("--drafter", clover), ("--method", "clover", "--drafter", clover), ("--method", f"clover={clover}")):
        found = json.loads(run(*asked, *option, "--rows", 4).stdout)
        assert found["method"] == "clover" and found["tokens"] == plain["tokens"]
        assert found["stats"]["spec_decode_num_draft_tokens"] > 0


def test_chat(run: Any, tiny_model: str, clover: Path) -> None:
    asked = ("chat", "--model", tiny_model, "--drafter", clover, "--max-new-tokens", 4, "--json")
    turns = [json.loads(line) for line in run(*asked, input="hello\nagain\n").stdout.splitlines()]
    assert [one["method"] for one in turns] == ["clover", "clover"]


def test_prove(run: Any, tiny_model: str, clover: Path) -> None:
    quick = ("--model", tiny_model, "--limit", 2, "--max-new-tokens", 6, "--threads", 1, "--json")
    found = json.loads(run("prove", "--methods", f"clover={clover}, plain", *quick).stdout)
    assert list(found["methods"]) == [f"clover={clover}", "plain"] and found["bugs"] == 0


def test_bench_and_profile(run: Any, tiny_model: str, clover: Path) -> None:
    name = f"clover={clover}"
    quick = ("--model", tiny_model, "--methods", name, "--threads", 1, "--json")
    found = json.loads(run("bench", *quick, "--limit", 2, "--max-new-tokens", 6).stdout)
    assert [row["contender"] for row in found["tables"]["overall"]] == ["plain", name]
    asked = ("profile", *quick, "--quick", "--tokens", 16, "--context", 16, "--contexts", 16, "--rows", 1)
    (rounds,) = json.loads(run(*asked).stdout)["sections"]["rounds"]
    assert rounds["method"] == name and rounds["tokens_per_round"] >= 1


def test_all_includes_shipped_drafters_of_the_model(
    run: Any, tiny_model: str, clover: Path, ship: Callable[[Path], Path], keep_drafter: Any, folders: Any, tmp_path: Path
) -> None:
    ship(clover)
    ship(keep_drafter("medusa", folders["qwen3"], tmp_path / "medusa"))
    quick = ("--model", tiny_model, "--limit", 1, "--max-new-tokens", 4, "--temperature", 0, "--json")
    names = ["prompt_lookup", "token_recycling", "swift", "clover"]
    assert list(json.loads(run("prove", *quick).stdout)["methods"]) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "hi", "--drafter", "none/here"), "the folder none/here is missing"),
        (("generate", "hi", "--drafter", "none", "--method", "plain"), "plain has no weights"),
        (("generate", "hi", "--method", "medusa"), "no drafter of it ships"),
        (("generate", "hi", "--method", "clovr=x"), "did you mean 'clover'"),
        (("prove", "--methods", "clover=none/here"), "the folder none/here is missing"),
        (("bench", "--methods", "plain,medusa"), "no drafter of it ships"),
        (("profile", "--methods", "plain=x"), "plain has no weights"),
    ],
)
def test_errors_are_one_line_and_come_before_loading(
    run: Any, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))  # where there is no model
    monkeypatch.setattr("foreword.drafters.shipped.WEIGHTS", tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


# The listing, and the choice ---------------------------------------------------------------------------------------------


def test_the_listing_shows_shipped_drafters(run: Any, clover: Path, ship: Callable[[Path], Path], tiny_model: str) -> None:
    ship(clover)
    lines = {line.split()[0]: line for line in run("methods").stdout.splitlines()}
    assert f"ships for {Path(tiny_model).name}" in lines["clover"]
    assert "must be trained" in lines["medusa"] and "not needed" in lines["plain"]
    assert "must be searched for" in lines["self_speculative"] and "not needed" in lines["swift"]
    listed = json.loads(run("methods", "--json").stdout)
    assert {name: one["ships_for"] for name, one in listed["methods"].items()} == dict.fromkeys(METHODS) | {
        "clover": Path(tiny_model).name
    }
    assert "expected" not in listed


def test_the_listing_measures(run: Any, clover: Path, ship: Callable[[Path], Path], tiny_model: str) -> None:
    ship(clover)
    asked = ("methods", "--measure", "--model", tiny_model, "--threads", 1)
    listed = json.loads(run(*asked, "--json").stdout)
    found = listed["expected"]
    assert listed["auto"] in {one["method"] for one in found}
    assert {one["method"] for one in found} == {"plain", "prompt_lookup", "token_recycling", "clover"}
    speeds = [one["speedup"] for one in found]
    assert speeds == sorted(speeds, reverse=True)
    shown = run(*asked).stdout
    assert "over plain" in shown and "record.json" in shown and f"auto picks {listed['auto']}" in shown


def test_the_doctor_says_what_auto_takes_and_why(
    run: Any, clover: Path, ship: Callable[[Path], Path], tiny_model: str
) -> None:
    ship(clover)
    result = run("doctor", "--full", "--model", tiny_model, "--threads", 1, "--json")
    said = {check["check"]: check["said"] for check in json.loads(result.stdout)["checks"]}
    assert said["drafters"].startswith(f"shipped: clover (for {Path(tiny_model).name}); must be trained: medusa")
    assert said["self-test clover"].startswith("same 64 tokens as plain")
    assert "tokens/round, a round costs" in said["expected clover"]
    assert said["expected plain"].endswith("1.00x its speed")
    speeds = {name: float(one.split(": ")[1].split("x")[0]) for name, one in said.items() if name.startswith("expected ")}
    fastest = said["auto"].split()[1]
    assert speeds[f"expected {fastest}"] == max(speeds.values())


def test_a_damaged_shipped_drafter_is_a_finding(
    run: Any, clover: Path, ship: Callable[[Path], Path], tiny_model: str
) -> None:
    (ship(clover) / "config.json").write_text("{")
    result = run("doctor", "--full", "--model", tiny_model, "--threads", 1, "--json")
    checks = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 1 and checks["drafters"]["status"] == "fail"


@pytest.mark.parametrize(("before", "now"), [("--no-compile", "--no-fused-layers"), ("--no-graph", "--no-cuda-graphs")])
def test_old_flags_work_with_a_warning(run: Any, tiny_model: str, before: str, now: str) -> None:
    asked = ("generate", "hello", "--model", tiny_model, "--method", "plain", "--max-new-tokens", 4, "--json")
    new, old = run(*asked, now), run(*asked, before)
    assert json.loads(new.stdout)["tokens"] == json.loads(old.stdout)["tokens"]
    assert f"{before} is called {now} now" in " ".join(old.stderr.split()) and "is called" not in new.stderr
    shown = run("generate", "--help").stdout
    assert now in shown and before not in shown


def test_a_folder_can_be_given_as_the_method(run: Any, tiny_model: str, clover: Path) -> None:
    asked = ("generate", "hello", "--model", tiny_model, "--max-new-tokens", 4, "--json")
    assert json.loads(run(*asked, "--method", clover, "--rows", 4).stdout)["method"] == "clover"
