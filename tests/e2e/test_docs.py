"""The pages keep their word: their code runs, the method they build obeys the laws, their links lead somewhere."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import foreword
from foreword.methods import Method

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


SNIPPETS = {f"{name_of(page)} {i}": code for page in PAGES for i, code in enumerate(blocks(page, "python"))}


def test_there_are_pages_with_code() -> None:
    assert "README.md 0" in SNIPPETS and "docs/add-a-method.md 0" in SNIPPETS


@pytest.mark.model
@pytest.mark.usefixtures("in_model_home")
@pytest.mark.parametrize("name", [name for name, code in SNIPPETS.items() if "foreword." in code])
def test_the_code_of_a_page_runs(name: str) -> None:
    """As it stands; only `import foreword` may be taken as said."""
    exec(compile(SNIPPETS[name], name, "exec"), {"foreword": foreword, "__name__": "__page__"})


# The method of docs/add-a-method.md --------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "add-a-method.md"
PLUGIN = """
import foreword.methods
foreword.methods.__path__.append({folder!r})
foreword.methods.METHODS["favourites"] = foreword.methods.Method("favourites:Favourites", "an example", paper="-")
"""


def test_the_method_of_the_page_obeys_the_laws(
    python: Callable[..., subprocess.CompletedProcess[str]], environment: dict[str, str], tmp_path: Path
) -> None:
    """In a process where it stands in the table: its tokens are the slow truth, its drafts those of a fresh drafter."""
    (code, *_) = blocks(PAGE, "python")
    (tmp_path / "favourites.py").write_text(code, encoding="utf-8")
    (tmp_path / "favourites_in_the_table.py").write_text(PLUGIN.format(folder=str(tmp_path)), encoding="utf-8")
    plugins = ("-p", "favourites_in_the_table", "-p", "no:cacheprovider", "-p", "no:xdist")
    path = f"{tmp_path}:{environment['PYTHONPATH']}"
    laws = ("tests/lossless/test_every_method.py", "tests/drafting/test_replay.py")
    ran = python("-m", "pytest", *plugins, "-k", "favourites", *laws, PYTHONPATH=path)
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0 and passed, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert int(passed[1]) >= 8 + 2  # the truth in eight ways, and replay, greedy and drawn


def test_the_line_of_the_page_fits_the_table() -> None:
    (line, *_) = [code for code in blocks(PAGE, "") if code.startswith('"favourites"')]
    table = eval(f"{{{line}}}", {"Method": Method})
    assert table["favourites"].place == "favourites:Favourites"


# Links -------------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """A heading's address: its words in small letters, joined by hyphens."""
    heads = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{name_of(page)} links to {link}, which is not there"
        assert not anchor or anchor in anchors(goal), f"{name_of(page)} links to {link}: no such heading"


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = {link for link in LINK.findall((folder / "README.md").read_text(encoding="utf-8"))}
    assert {page.name for page in folder.glob("*.md")} - {"README.md"} <= listed
