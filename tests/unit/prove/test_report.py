"""A report counts bugs and ties, has the documented JSON shape, and is written as two files that show the bugs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foreword.core.sampling import Sampling
from foreword.errors import StorageError
from foreword.prove import Difference, MethodProof, Report, ScoredToken
from foreword.prove.report import name_of

TIE = Difference(
    "81",
    "greedy",
    12,
    ScoredToken(5, " a", 17.25),
    ScoredToken(9, " the", 17.2),
    gap=0.05,
    error=0.04,
    verdict="tie",
    reason="gap",
)
BUG = Difference(
    "93|b",
    "T=0.8 seed=7",
    3,
    ScoredToken(5, "\n|", 19.5),
    ScoredToken(9, "x", 11.0),
    gap=8.5,
    error=0.04,
    verdict="bug",
    reason="gap",
)
ENDED = Difference("94", "greedy", 30, ScoredToken(5, "y", None), ScoredToken(None, "", None), None, None, "bug", "length")


def figures(differences: list[Difference], samplings: dict[str, MethodProof] | None = None) -> MethodProof:
    ties = sum(one.verdict == "tie" for one in differences)
    counts = {"prompts": 6, "tokens": 384, "identical": 4, "ties": ties, "bugs": len(differences) - ties}
    return MethodProof(
        **counts, differences=differences, tokens_per_round=1.75, rounds=220, seconds=3.25, samplings=samplings or {}
    )


def report(**methods: list[Difference]) -> Report:
    proofs = {
        name: figures(found, {kind: figures([one for one in found if one.sampling == kind]) for kind in ("greedy",)})
        for name, found in methods.items()
    }
    return Report(
        model="tiny",
        dtype="float32",
        device="cpu",
        versions={"torch": "2"},
        threads=2,
        slots=4,
        samplings={"greedy": Sampling(seed=0)},
        max_new_tokens=64,
        methods=proofs,
    )


def test_bugs_and_ties_of_all_methods() -> None:
    found = report(medusa=[TIE, BUG], clover=[ENDED, TIE], plain=[])
    assert (found.bugs, found.ties) == (2, 2)


def test_an_incomplete_report_says_so() -> None:
    cut = replace(report(medusa=[TIE]), complete=False)
    assert "**Incomplete: the run was interrupted.** Tested: medusa. 0 bugs and 1 proven tie so far" in cut.to_markdown()
    assert cut.to_dict()["complete"] is False and report(medusa=[TIE]).to_dict()["complete"] is True
    assert "ncomplete" not in report(medusa=[TIE]).to_markdown()


def test_the_shape_of_json() -> None:
    whole = json.loads(json.dumps(report(medusa=[TIE, ENDED]).to_dict()))
    medusa = whole["methods"]["medusa"]
    contract = ("prompts", "tokens", "identical", "ties", "bugs")
    assert {name: medusa[name] for name in contract} == dict(prompts=6, tokens=384, identical=4, ties=1, bugs=1)
    assert medusa["differences"][0] == {
        "prompt": "81",
        "sampling": "greedy",
        "position": 12,
        "plain": {"token": 5, "text": " a", "score": 17.25},
        "method": {"token": 9, "text": " the", "score": 17.2},
        "gap": 0.05,
        "error": 0.04,
        "verdict": "tie",
        "reason": "gap",
    }
    assert medusa["samplings"]["greedy"]["ties"] == 1 and "differences" not in medusa["samplings"]["greedy"]
    assert (whole["model"], whole["dtype"], whole["bugs"], whole["max_new_tokens"]) == ("tiny", "float32", 1, 64)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("there", ("there/proof.json", "there/proof.md")),
        ("new/folder", ("new/folder/proof.json", "new/folder/proof.md")),
        ("run.json", ("run.json", "run.md")),
        ("new/run.md", ("new/run.json", "new/run.md")),
    ],
)
def test_two_files_are_written(given: str, expected: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    found = report(medusa=[TIE, BUG])
    assert found.write(tmp_path / given) == tuple(tmp_path / name for name in expected)
    assert json.loads((tmp_path / expected[0]).read_text(encoding="utf-8")) == found.to_dict()
    assert (tmp_path / expected[1]).read_text(encoding="utf-8") == found.to_markdown()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="name a folder"):
        report(medusa=[]).write(tmp_path / "file" / "proof.json")


def test_the_page_shows_the_bugs() -> None:
    page = report(medusa=[TIE, BUG, ENDED], clover=[]).to_markdown()
    assert "**2 bugs** in medusa:" in page
    lines = page.splitlines()
    bug = next(line for line in lines if line.startswith("| bug | gap |"))
    assert "93\\|b | T=0.8 seed=7 | 3 | '\\n\\|' (5): 19.5 | 'x' (9): 11 | 8.5 | 0.04 |" in bug
    assert any("| 94 | greedy | 30 | 'y' (5):  | (ended) |" in line for line in lines)
    assert lines.index(bug) < next(i for i, line in enumerate(lines) if line.startswith("| tie | gap |"))
    assert "## Differences of medusa" in page and "## Differences of clover" not in page


def test_the_page_says_that_there_are_no_bugs() -> None:
    assert "**No bugs.** Every token equals plain decoding's.\n" in report(medusa=[]).to_markdown()
    assert "except for 1 proven tie;" in report(medusa=[TIE]).to_markdown()


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (Sampling(seed=4, top_k=3), "greedy"),
        (Sampling(repetition_penalty=1.2), "greedy penalty=1.2"),
        (Sampling(temperature=0.8, seed=7), "T=0.8 seed=7"),
        (Sampling(temperature=1, top_k=3, top_p=0.9, min_p=0.05, seed=1), "T=1 top_k=3 top_p=0.9 min_p=0.05 seed=1"),
    ],
)
def test_names_of_samplings(sampling: Sampling, name: str) -> None:
    assert name_of(sampling) == name
