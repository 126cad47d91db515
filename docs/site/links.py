"""A hook of MkDocs: links that leave docs/ lead to the repository, since the site has no such page.

In: the Markdown of a page and its path under docs/. Out: the same Markdown with those links replaced. Links inside docs/
stay as they are; `mkdocs build --strict` checks them.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]*)([^)\s]*\))")


def leaving(markdown: str, path: str, repository: str) -> str:
    """`path` is that of the page under docs/, with forward slashes."""

    def replaced(link: re.Match[str]) -> str:
        goal = posixpath.normpath(posixpath.join("docs", posixpath.dirname(path), link[2]))
        return link[0] if goal.startswith("docs/") else f"{link[1]}{repository.rstrip('/')}/blob/main/{goal}{link[3]}"

    return LINK.sub(replaced, markdown)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """MkDocs calls this for every page."""
    return leaving(markdown, page.file.src_uri, config["repo_url"])
