"""The origin of a result: the command, the machine, and the commit of the source."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import foreword
from foreword.bench import report
from foreword.bench.report import facts


def test_every_result_names_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/foreword", "bench", "--prompts", "my questions.jsonl"])
    about = facts(model="tiny")
    assert about["command"] == "foreword bench --prompts 'my questions.jsonl'"
    assert (about["model"], about["threads"]) == ("tiny", torch.get_num_threads())
    assert about["machine"] and about["commit"] and about["date"]
    assert about["versions"]["foreword"] == foreword.__version__ and about["versions"]["torch"] == torch.__version__


def test_the_machine_is_what_the_model_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of the CPU are not labelled with a GPU that is also there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    assert facts(torch.device("cpu"))["machine"].startswith(report.cpu_name())
    assert facts(torch.device("cuda:1"))["machine"] == "GPU cuda:1" and facts()["machine"] == "GPU None"


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_COMMIT", "abc1234")
    assert report._commit() == "abc1234"


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_says_whether_the_source_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "src" / "foreword" / "bench" / "report.py"
    file.parent.mkdir(parents=True)
    file.write_text("as committed")
    monkeypatch.setattr(report, "__file__", str(file))

    def git(*arguments: str) -> str:
        person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *person, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
        ).stdout.strip()

    git("init", "--quiet")
    assert facts()["commit"] == "no checkout"  # the file lies in a repository that does not track it
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert facts()["commit"] == git("rev-parse", "--short", "HEAD")
    (tmp_path / "notes.md").write_text("not source")
    assert facts()["commit"] == git("rev-parse", "--short", "HEAD")
    (tmp_path / "src" / "other.py").write_text("new")
    assert facts()["commit"] == git("rev-parse", "--short", "HEAD") + "+changes"
