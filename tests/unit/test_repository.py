"""What the repository holds in addition to code: results that pages cite, their index, no large files, forms, hooks."""

import importlib.util
import json
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
INDEX = "python studies/results_index.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    """The script that writes results/README.md; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("results_index", ROOT / "studies" / "results_index.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout: what is tracked is not known")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Size ---------------------------------------------------------------------------------------------------------------------


def test_the_tracked_tree_stays_small() -> None:
    """A clone is quick, and no file reaches the size limits of hosts."""
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in tracked()}
    assert {name: size for name, size in sizes.items() if size > 24 * MIB} == {}
    assert sum(sizes.values()) <= 44 * MIB


# Results ------------------------------------------------------------------------------------------------------------------


def test_the_index_is_what_the_command_writes(study: ModuleType) -> None:
    found = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert found == study.index(), f"results/README.md is stale: run `{INDEX}`"


def test_every_result_is_cited(study: ModuleType) -> None:
    uncited = [path.relative_to(ROOT).as_posix() for path, citing in study.citations().items() if not citing]
    assert not uncited, f"no page and no source file cites {uncited}: cite them or remove them"


def test_results_hold_results_and_their_reports_alone(study: ModuleType) -> None:
    results = study.result_files()
    reports = {path.parent / name for path in results for name in ("report.md", "proof.md")}
    others = {path for path in (ROOT / "results").rglob("*") if path.is_file()} - {*results} - reports
    assert {path.relative_to(ROOT).as_posix() for path in others} == {"results/README.md"}


def test_the_links_of_the_index_lead_somewhere() -> None:
    page = ROOT / "results" / "README.md"
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert len(links) > 100 and [link for link in links if not (page.parent / link).exists()] == []


def test_a_result_must_say_where_it_comes_from(study: ModuleType) -> None:
    path = ROOT / "results" / "mine.json"
    with pytest.raises(SystemExit, match=r"results/mine\.json lacks command, date: add it to its field `about`"):
        study.provenance(path, {"about": {"commit": "1234567", "machine": "m"}})
    with pytest.raises(SystemExit, match=r"results/mine\.json is of a kind that .* does not know"):
        study.kind(path, {"about": {}})


def test_a_line_of_the_index(study: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a result and the page that cites its report."""
    about = {"command": "foreword bench", "commit": "1234567", "date": "2026-01-02", "machine": "m", "dtype": "float32"}
    table = [
        {"contender": name, "speedup": speed} for name, speed in (("plain", 1.0), ("slow", 0.5), ("fast", 2.0), ("x", None))
    ]
    found = {"about": {**about, "model": "tiny", "prompts": 3}, "base": "plain", "tables": {"overall": table}}
    folder = tmp_path / "results" / "mine"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(found))
    (folder / "report.md").write_text("")
    (tmp_path / "README.md").write_text("[a report](results/mine/report.md), and `results/other`")
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results")
    assert study.index().count(
        "| [mine](mine/report.md) | tiny, 3 prompts; greedy, batch 1: `fast` 2.00x, `slow` 0.50x | m, float32 | 1234567 "
        "| 2026-01-02 | [README](../README.md) | `foreword bench` |\n"
    )


# Hooks, forms and pages for those who contribute --------------------------------------------------------------------------


def form(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))


def test_hooks_run_what_check_runs_and_fetch_nothing() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = [hook for repo in repos for hook in repo["hooks"]]
    assert {repo["repo"] for repo in repos} == {"local"} and {hook["language"] for hook in hooks} == {"system"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for program in ("ruff check", "ruff format", "mypy"):
        assert f"$(BIN)/{program}" in makefile
        assert [hook for hook in hooks if hook["entry"].startswith(f".venv/bin/{program}")]


def test_coverage_is_there_and_no_part_of_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"pytest-cov", "pre-commit"} <= {one.split(">")[0] for one in project["project"]["optional-dependencies"]["dev"]}
    assert "--cov" not in project["tool"]["pytest"]["ini_options"]["addopts"]
    targets = dict(re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert "--cov-report=term" in targets["coverage"] and "--cov-report=html" in targets["coverage"]
    assert "--cov" not in targets["test"] and "pre-commit install" in targets["hooks"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"htmlcov/", ".coverage"} <= {*ignored}


def test_a_bug_is_asked_for_what_shows_it_again() -> None:
    needed = {field["id"]: field for field in form("bug")["body"] if field.get("validations", {}).get("required")}
    assert {"doctor", "model", "method", "seed", "reproduce"} <= set(needed)
    assert "`foreword doctor`" in needed["doctor"]["attributes"]["label"]


@pytest.mark.parametrize("name", ["bug", "feature", "question"])
def test_a_form_is_complete(name: str) -> None:
    """It has what GitHub needs to show it: a name, a description, and fields of known types with distinct ids."""
    found = form(name)
    ids = [field["id"] for field in found["body"]]
    assert found["name"] and found["description"] and len(ids) == len(set(ids))
    assert {field["type"] for field in found["body"]} <= {"textarea", "input", "dropdown"}
    assert all(field["attributes"]["label"] for field in found["body"])


def test_a_vulnerability_is_reported_in_private() -> None:
    page, (contact,) = (ROOT / "SECURITY.md").read_text(encoding="utf-8"), form("config")["contact_links"]
    assert contact["url"].endswith("/security/advisories/new") and f"({contact['url']})" in page
    assert not re.search(r"[\w.]+@[\w.]+|mailto:", page)


def test_a_pull_request_is_asked_for_the_laws_and_for_figures() -> None:
    asked = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    assert "tests/lossless" in asked and "foreword bench compare" in asked and "| | before | after |" in asked


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert links and [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []


def test_the_page_for_contributors_names_every_target() -> None:
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [target for target in targets if f"`make {target}`" not in page and target not in {"help", "demo", "clean"}] == []
