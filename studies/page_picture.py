"""Take docs/pictures/page.png, the picture of the page at / of `foreword serve`: `python studies/page_picture.py`.

The page of a server of the default model answers one prompt in a headless Chromium. The picture shows the round in which
both the lookup and the trained drafter had most tokens accepted.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Page, sync_playwright

from serve_speed import served

ROOT = Path(__file__).parents[1]
PROMPT = "Write a Python function that tells whether a number is prime."
MOST_BYTES = 200_000


def accepted(page: Page, origin: str) -> int:
    return page.locator(f"#drawing .node.{origin}.accepted").count()


def show_best_round(page: Page) -> None:
    """Step to the round that accepted from both origins, and most tokens."""
    rounds = int(re.findall(r"\d+", page.inner_text("#round"))[1])
    page.click("#first")
    scores = []
    for number in range(rounds):
        both = accepted(page, "drafter"), accepted(page, "lookup")
        scores.append((min(both), sum(both), -number))
        if number + 1 < rounds:
            page.click("#forward")
    for _ in range(rounds - 1 + max(scores)[2]):
        page.click("#back")


def main(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = ROOT / "docs/pictures/page.png",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 128,
    scheme: Annotated[str, typer.Option(help="light or dark.")] = "light",
) -> None:
    """Take the picture."""
    chromium = shutil.which("chromium")
    with served([]) as (host, port), sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(
            viewport={"width": 1280, "height": 800}, color_scheme="dark" if scheme == "dark" else "light"
        )
        page.goto(f"http://{host}:{port}/")
        page.wait_for_selector("#served-method:not(:empty)")
        page.locator("#max-tokens").evaluate("(field, value) => { field.value = value }", str(tokens))
        page.fill("#prompt", PROMPT)
        page.click("#send")
        page.wait_for_selector("#stop:disabled", timeout=600_000)
        show_best_round(page)
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)  # transitions of colours
        page.screenshot(path=out)
    if (size := out.stat().st_size) > MOST_BYTES:
        raise SystemExit(f"{out} has {size} bytes, and at most {MOST_BYTES} are wanted; show less")
    print(f"{out}: {size} bytes")


if __name__ == "__main__":
    typer.run(main)
