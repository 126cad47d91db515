"""The files of the page: how they are served, that they are built from the sources in page/, and what they may not hold."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from foreword.serve import static
from foreword.serve.options import digest

ROOT = Path(__file__).parents[3]
SOURCES, BUILT = ROOT / "page", Path(static.__file__).parent
PATHS = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}
MOST_BYTES = 60_000
STALE = "run `make page`, and commit what it writes"


def answers(serving: Any, ask: Callable[[Any], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with serving(**options) as client:
            return await ask(client)

    return asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
def test_a_file_is_served_with_strict_headers(serving: Any, path: str) -> None:
    async def ask(client: Any) -> Any:
        whole = await client.http.get(path)
        known = await client.http.get(path, headers={"if-none-match": f'"other", W/{whole.headers["etag"]}'})
        return whole, known, await client.http.get(path, headers={"if-none-match": '"other"'}), await client.http.head(path)

    whole, known, other, head = answers(serving, ask, key_digests=(digest("secret"),))  # the page needs no key
    assert whole.status_code == 200 and whole.headers["content-type"] == f"{PATHS[path]}; charset=utf-8"
    assert whole.headers["x-content-type-options"] == "nosniff" and whole.headers["referrer-policy"] == "no-referrer"
    assert whole.headers["cache-control"] == "no-cache"
    policy = dict(part.split(" ", 1) for part in whole.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert known.status_code == 304 and known.content == b"" and known.headers["etag"] == whole.headers["etag"]
    assert other.status_code == 200 and other.content == whole.content
    assert head.status_code == 200 and head.content == b""


def test_a_server_can_leave_the_page_out(serving: Any) -> None:
    async def ask(client: Any) -> list[int]:
        return [(await client.http.get(path)).status_code for path in PATHS]

    assert answers(serving, ask, page=False) == [404] * len(PATHS)


def test_the_built_files_are_those_of_the_sources() -> None:
    """digests.json names every source and every built file, so that no node is needed to see that one was changed."""
    digests = json.loads((BUILT / "digests.json").read_text(encoding="utf-8"))
    own = ("build.mjs", "package-lock.json", "package.json", "tsconfig.json")
    sources = [SOURCES / name for name in own] + [*(SOURCES / "src").iterdir()]
    found = {path.relative_to(SOURCES).as_posix(): sha256(path.read_bytes()).hexdigest() for path in sources}
    assert digests["sources"] == found, STALE
    for name, expected in digests["built"].items():
        assert sha256((BUILT / name).read_bytes()).hexdigest() == expected, f"{name} was edited; {STALE}"
    assert {*digests["built"]} | {"digests.json", "__init__.py"} == {path.name for path in BUILT.iterdir() if path.is_file()}


def test_building_again_gives_the_same_files(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (SOURCES / "node_modules").is_dir():
        pytest.skip("node, or page/node_modules, is missing: `npm ci` in page/ installs what building needs")
    check = ["node", "node_modules/typescript/bin/tsc", "--noEmit"]
    for command in (check, ["node", "build.mjs", str(tmp_path)]):
        subprocess.run(command, cwd=SOURCES, check=True, timeout=120)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (BUILT / path.name).read_bytes(), f"{path.name}: {STALE}"


def test_the_page_is_small_and_asks_nothing_from_elsewhere() -> None:
    files = {name: (BUILT / name).read_text(encoding="utf-8") for name in ("index.html", "page.js", "page.css")}
    assert sum(len(text.encode()) for text in files.values()) <= MOST_BYTES
    for name, text in files.items():
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w-]+\.", text), name
    assert not re.search(r"<script(?! type=\"module\" src)|<style|\son\w+=|\sstyle=", files["index.html"])
    assert "url(" not in files["page.css"] and "@import" not in files["page.css"]


def test_no_source_parses_html() -> None:
    for path in (SOURCES / "src").glob("*.ts"):
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(", path.read_text())
        assert not found, path.name
