"""What a package index and a wheel contain, according to the build backend itself, without building."""

import re
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import foreword

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:a|img)[^>]*(?:href|src)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HOME = "https://github.com/foreword-dev/foreword"


@pytest.fixture(scope="module")
def metadata() -> ProjectMetadata:
    return ProjectMetadata(str(ROOT), PluginManager())


def links(text: str) -> list[str]:
    return [next(part for part in found if part) for found in LINK.findall(FENCE.sub("", text))]


def test_every_link_of_the_page_on_an_index_is_absolute(metadata: ProjectMetadata) -> None:
    page, source = metadata.core.readme, (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.core.readme_content_type == "text/markdown"
    assert FENCE.findall(page) == FENCE.findall(source)
    assert len(links(page)) == len(links(source)) > 30
    assert [link for link in links(page) if not link.startswith(("https://", "#"))] == []


def test_the_links_lead_to_the_files_of_the_release(metadata: ProjectMetadata) -> None:
    """At a tag, so that the links of a release stay valid when files move."""
    release = f"{HOME}/blob/v{foreword.__version__}/"
    ours = [link.removeprefix(release) for link in links(metadata.core.readme) if link.startswith(HOME)]
    assert ours and all((ROOT / link.partition("#")[0]).exists() for link in ours)


def test_pictures_and_foreign_links_of_a_page() -> None:
    """The rules of pyproject.toml, on links that README.md does not have today."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    page = "![a](docs/a.svg) [b](https://b.org/x) [c](#c) [d](docs/d.md#e) [f](mailto:f@g.org)"
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    tag = "v$HFPR_VERSION"
    assert page == (
        f"![a](https://raw.githubusercontent.com/foreword-dev/foreword/{tag}/docs/a.svg) [b](https://b.org/x) [c](#c) "
        f"[d]({HOME}/blob/{tag}/docs/d.md#e) [f](mailto:f@g.org)"
    )


def test_the_project_says_where_it_lives(metadata: ProjectMetadata) -> None:
    urls = metadata.core.urls
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= set(urls)
    assert all(url.startswith(HOME) for url in urls.values())
    kinds = metadata.core.classifiers
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)} < set(kinds)
    assert metadata.core.license_expression == "Apache-2.0"
    assert not [kind for kind in kinds if kind.startswith("License ::")]  # PEP 639


def test_a_wheel_holds_what_the_library_reads_and_nothing_else() -> None:
    held = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {"foreword/py.typed", "foreword/bench/page.css", "foreword/bench/builtin.jsonl"} < held
    drafters = [folder.name for folder in (ROOT / "src/foreword/weights").iterdir() if (folder / "config.json").exists()]
    assert len(drafters) >= 5
    for name in drafters:
        parts = ("model.safetensors", "config.json", "record.json")
        assert {f"foreword/weights/{name}/{part}" for part in parts} < held
    assert all(path.startswith("foreword/") for path in held)


def test_a_source_archive_can_be_tested() -> None:
    held = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/doubles/__init__.py"} < held
    assert not [path for path in held if path.startswith((".venv/", ".git/"))]
