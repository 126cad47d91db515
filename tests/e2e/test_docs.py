"""The pages keep their word: their code runs, the method they build obeys the laws, their links lead somewhere."""

import importlib.util
import json
import lzma
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

import foreword
from foreword.bench.report import read_results
from foreword.cli.app import app
from foreword.drafters.checkpoint import read_weights
from foreword.drafting.lessons import LOGITS_AT_A_TIME
from foreword.methods import METHODS, Method

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
foreword.methods.all_methods()
"""


def install(folder: Path, code: str, entry_points: dict[str, dict[str, str]]) -> None:
    """A package as pip leaves it: a module, and a dist-info folder with its entry points."""
    (folder / "my_package.py").write_text(code, encoding="utf-8")
    about = folder / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n", encoding="utf-8")
    groups = [f"[{group}]\n" + "\n".join(map(" = ".join, names.items())) for group, names in entry_points.items()]
    (about / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")


def test_the_methods_of_the_page_obey_the_laws(
    python: Callable[..., subprocess.CompletedProcess[str]], environment: dict[str, str], tmp_path: Path
) -> None:
    """In a process where one stands in the table and the other is found by its package's entry point: their tokens are the
    slow truth, their drafts those of a fresh drafter."""
    code, package = blocks(PAGE, "python")
    assert len(package.splitlines()) < 30
    (tmp_path / "favourites.py").write_text(code, encoding="utf-8")
    install(tmp_path, package, tomllib.loads(blocks(PAGE, "toml")[0])["project"]["entry-points"])
    (tmp_path / "in_the_table.py").write_text(PLUGIN.format(folder=str(tmp_path)), encoding="utf-8")
    plugins = ("-p", "in_the_table", "-p", "no:cacheprovider", "-p", "no:xdist")
    path = f"{tmp_path}:{environment['PYTHONPATH']}"
    laws = ("tests/lossless/test_every_method.py", "tests/drafting/test_replay.py")
    ran = python("-m", "pytest", "-rp", *plugins, "-k", "favourites or followers", *laws, PYTHONPATH=path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    for name in ("favourites", "followers"):
        passed = re.findall(rf"PASSED .*{name}", ran.stdout)
        assert len(passed) >= 8 + 2, name  # the truth in eight ways, and replay, greedy and sampled


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_headings_have_one_address_on_github_and_on_the_site(page: Path) -> None:
    """Python-Markdown joins words by one hyphen, GitHub by as many as there are spaces."""
    assert [anchor for anchor in anchors(page) if "--" in anchor or anchor.strip("-") != anchor] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_two_headings_of_a_page_are_alike(page: Path) -> None:
    heads = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    assert len(anchors(page)) == len(heads), "a link could lead to one of them only"


# The site ----------------------------------------------------------------------------------------------------------------

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def nav_pages(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        yield from nav_pages(list(entries.values()))
    else:
        for entry in entries:
            yield from nav_pages(entry)


def test_the_site_shows_every_page_once() -> None:
    """Decisions are listed by their own index, which is complete."""
    shown = list(nav_pages(SITE["nav"]))
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page != ROOT / "README.md"}
    decisions = {page for page in written if re.match(r"decisions/\d", page)}
    assert len(shown) == len({*shown}) and {*shown} == written - decisions, (
        "mkdocs.yml: nav names other pages than docs/ has"
    )
    assert SITE["validation"]["links"]["anchors"] == "warn" and "mkdocs build --strict" in (ROOT / "Makefile").read_text()


def test_links_that_leave_the_site_lead_to_the_repository() -> None:
    (path,) = SITE["hooks"]
    hook = module(path)
    page = "[a](../../results/x/report.md#y) [b](../api.md#z) ![c](gsd/c.svg) [d](https://e.org) [f](../../README.md)"
    assert hook.leaving(page, "methods/gsd.md", "https://host/us/") == (
        "[a](https://host/us/blob/main/results/x/report.md#y) [b](../api.md#z) ![c](gsd/c.svg) [d](https://e.org) "
        "[f](https://host/us/blob/main/README.md)"
    )


def test_the_glossary_has_one_line_per_term() -> None:
    rows = re.findall(r"^\| (?!term|---)([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    terms = [term for row, *_ in rows for term in row.split(", ")]
    assert len(terms) == len({*terms}) > 50
    assert {"tokens per round", "root", "pass", "slot", "draft vocabulary", "widened", "tie", "pseudo row"} <= {*terms}


def test_the_page_on_the_command_line_has_every_command() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `foreword ([\w-]+)", page, re.MULTILINE))
    assert named == {*typer.main.get_command(app).commands}  # type: ignore[attr-defined]


# Architecture -------------------------------------------------------------------------------------------------------------

ARCHITECTURE, SOURCE = ROOT / "docs" / "architecture.md", ROOT / "src" / "foreword"


def test_every_file_of_the_architecture_page_is_there() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", ARCHITECTURE.read_text(encoding="utf-8"))) - {"src/foreword/"}
    missing = [name for name in sorted(named) if not (SOURCE / name).exists() and not (ROOT / name).exists()]
    assert len(named) > 40 and missing == [], "docs/architecture.md names files that moved"


def test_the_architecture_page_explains_every_room() -> None:
    explained = {name.strip("`") for name, *_ in table(ARCHITECTURE, "room |")}
    assert explained == {file.parent.name for file in SOURCE.glob("*/__init__.py")} | {"weights"}


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = {link for link in LINK.findall((folder / "README.md").read_text(encoding="utf-8"))}
    assert {page.name for page in folder.glob("*.md")} - {"README.md"} <= listed


# Pictures -----------------------------------------------------------------------------------------------------------------

PICTURES = ROOT / "docs" / "pictures"


def module(path: str) -> ModuleType:
    """A file that is no part of the package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_chart_is_what_the_command_draws_from_the_results() -> None:
    study = module("studies/speedup_chart.py")
    drawn = study.chart()
    assert drawn == study.PICTURE.read_text(encoding="utf-8"), "it is stale: run `python studies/speedup_chart.py`"
    for folder in study.SOURCES.values():
        shown = [
            row
            for row in read_results(ROOT / folder)["tables"]["overall"]
            if row["contender"] in METHODS and row["contender"] != "plain"
        ]
        assert len(shown) >= 10 and all(f">{row['speedup']:.2f}x</text>" in drawn for row in shown)


def test_the_claims_of_papers_are_those_of_the_pages_of_methods() -> None:
    study = module("studies/papers_table.py")
    page = study.PAGE.read_text(encoding="utf-8")
    assert page == study.written(), "it is stale: run `python studies/papers_table.py`"
    for method in METHODS:
        assert METHODS[method].paper == "-" or f"| [`{method}`](methods/{method}.md) |" in page


def test_the_round_is_what_the_command_draws_from_the_trace() -> None:
    """`foreword draw docs/pictures/round.jsonl --out docs/pictures/round.svg` makes it."""
    ran = CliRunner().invoke(app, ["draw", str(PICTURES / "round.jsonl")])
    assert ran.exit_code == 0 and ran.stdout == (PICTURES / "round.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda picture: picture.name)
def test_a_picture_is_readable_on_light_and_on_dark_pages(picture: Path) -> None:
    """It has a ground of its own, other colours where the page is dark, and asks for nothing from elsewhere."""
    drawn = picture.read_text(encoding="utf-8")
    assert re.search(r"@media \(prefers-color-scheme: ?dark\)", drawn) and re.search(r'var\(--card\)|class="ground"', drawn)
    assert not re.search(r"<script|<image|href=|url\(", drawn)


# Figures of the README ----------------------------------------------------------------------------------------------------

README = ROOT / "README.md"


def by_method(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in rows}


def proof(name: str) -> dict[str, Any]:
    (file,) = [*(ROOT / "results" / name).glob("proof.json*")]
    return json.loads(lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_text())


def test_the_readme_fits_a_screen_or_two() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110 and [line for line in lines if len(line) > 100 and not line.startswith(("|", "!["))] == []


def test_the_readme_names_every_method_its_papers_and_its_by_method() -> None:
    timed = by_method(measured(HELD_OUT)["tables"]["overall"])
    timed |= {"amusd": by_method(measured("bench_cuda_amusd")["tables"]["overall"])["amusd"]}
    rows = table(README, "method | paper")
    others = [name for name in METHODS if name not in timed]
    assert [re.findall(r"`(\w+)`", cell)[0] for cell, *_ in rows] == [n for n in METHODS if n not in ("plain", *others)]
    assert all(f"[`{name}`](docs/methods/{name}.md)" in README.read_text(encoding="utf-8") for name in others)
    for cell, paper, _, *shown in rows:
        name = re.findall(r"`(\w+)`", cell)[0]
        known = re.findall(r"\d{4}\.\d{5}", METHODS[name].paper)
        assert re.findall(r"arxiv\.org/abs/([\d.]+)", paper) == known[:1] or (paper == "our own" and not known)
        assert shown == [f"{timed[name]['speedup']:.2f}x", f"{timed[name]['tokens_per_round']:.2f}"], name


def test_the_readme_in_its_sentences() -> None:
    said = " ".join(README.read_text(encoding="utf-8").split())
    gpu, cpu, wide = (by_method(measured(one)["tables"]["overall"]) for one in (HELD_OUT, "bench_cpu_48", WIDE))
    trace = json.loads((PICTURES / "round.jsonl").read_text(encoding="utf-8"))
    assert f"One pass verifies {len(trace['nodes'])} rows and decides {len(trace['accepted'])} tokens" in said
    runs = f"[GPU run](results/{HELD_OUT}/report.md), [CPU run](results/bench_cpu_48b/report.md)"
    assert f"Nothing was tuned on these prompts ({runs})" in said
    assert f"The mean on an H200 is {gpu['clover2']['tokens_per_round']:.2f} tokens per round" in said
    ahead = cpu["plain"]["tokens_per_second"] / cpu["hf"]["tokens_per_second"]
    assert f"`plain` has [{ahead:.2f}x](results/bench_cpu_48/report.md) the speed of `generate` of transformers" in said
    grown = measured("bench_cuda_7b")["about"]["grown"]["parameters"]
    assert f"to {grown / 1e9:.1f} B parameters" in said
    assert f"`echo` reaches {wide['echo']['speedup']:.2f}x and `clover2` {wide['clover2']['speedup']:.2f}x" in said
    assert f"{gpu['plain']['loop_share']:.2f}" == "0.25" and "A quarter of the default model's greedy tokens" in said
    for run in ("bench_cpu_all", "bench_cpu_echo"):
        xeon = by_method(measured(run)["tables"]["overall"])["clover2"]["speedup"]
        assert f"[{xeon:.2f}x](results/{run}/report.md)" in said.partition("an Intel Xeon `clover2` reached ")[2]


def test_the_readme_says_where_drafting_stops_paying() -> None:
    said, found = " ".join(README.read_text(encoding="utf-8").split()), measured("bench_cuda_batches")
    greedy, sampled = by_method(found["batches"]["32"]), by_method(found["temperatures"]["0.8"]["batches"]["32"])
    best, slower = max(row["speedup"] for row in greedy.values()), [n for n, row in greedy.items() if row["speedup"] < 0.995]
    assert f"With 32 requests on the H200 the best method reaches {best:.2f}x greedily" in said
    assert slower == ["draft_model", "gsd"] and "`draft_model` and `gsd` are slower than `plain`" in said
    assert f"greedily, and {max(row['speedup'] for row in sampled.values()):.2f}x at temperature 0.8" in said
    assert all(sampled[name]["speedup"] < 0.995 for name in slower)


def test_the_readme_says_what_was_proven() -> None:
    said = " ".join(README.read_text(encoding="utf-8").split())
    cpu, exact, half = (proof(name) for name in ("prove_cpu_all", "prove_cuda", "prove_cuda_bf16"))
    assert cpu["ties"] == cpu["bugs"] == exact["ties"] == exact["bugs"] == half["bugs"] == 0 and len(cpu["methods"]) == 11
    lookup, recycling = half["methods"]["prompt_lookup"], half["methods"]["token_recycling"]
    assert {"float32"} == {cpu["dtype"], exact["dtype"]} and half["dtype"] == "bfloat16"
    drafted = {name: one["drafted"] for name, one in exact["methods"].items()}
    assert f"`token_recycling` ({drafted.pop('token_recycling'):,} draft tokens verified) and" in said
    assert f"`prompt_lookup` ({drafted.pop('prompt_lookup')};" in said and not drafted
    assert f"{half['ties']} ties in {lookup['tokens'] + recycling['tokens']:,} tokens and no bug" in said
    diverging = 1 - (lookup["identical"] + recycling["identical"]) / (lookup["prompts"] + recycling["prompts"])
    assert f"{diverging:.1f}" == "0.8" and "Four prompts in five diverge somewhere" in said


# Figures of the training pages -------------------------------------------------------------------------------------------

TRAIN, RECORD = (ROOT / "docs" / name for name in ("train.md", "training-record.md"))
WEIGHTS = ROOT / "src" / "foreword" / "weights"


def table(page: Path, head: str) -> list[list[str]]:
    """The cells of the table whose first line begins so, its head left out."""
    (found,) = re.findall(
        rf"^\| {re.escape(head)}.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]


def training(method: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / "train" / f"{method}.json").read_text())


def learned_weights(method: str) -> int:
    weights = read_weights(WEIGHTS / method / "model.safetensors")
    return sum(weight.numel() for name, weight in weights.items() if name != "words")


def millions(number: float) -> str:
    return f"{number / 1e6:.1f} M"


def test_the_methods_to_train_first() -> None:
    rows = table(TRAIN, "method | weights")
    assert {name.strip("`") for name, *_ in rows} == {folder.parent.name for folder in WEIGHTS.glob("*/config.json")}
    for name, weights, read, rounds in rows:
        record = training(name.strip("`"))
        measured = record.get("stored", record["best"])["tokens_per_round"]
        assert [weights, read, rounds] == [
            millions(learned_weights(name.strip("`"))),
            millions(record["tokens"]),
            f"{measured:.2f}",
        ]


def test_what_training_costs_by_model_size_follows_from_the_measured_rates() -> None:
    """By the formulas that the page states, whose figures are those of the records."""
    said = " ".join(TRAIN.read_text(encoding="utf-8").split())
    clover2 = training("clover2")
    wrote = sum(folder["counts"]["written"] for folder in clover2["data"])
    rates = round(training("distill")["tokens_per_second"]), clover2["tokens_per_second"]
    share = round(learned_weights("clover2") / 576**2, 1)
    assert f"hours to distil = {millions(wrote)} / ({rates[0]:,} × 0.135 / N) / 3,600" in said
    assert f"hours to train = {millions(clover2['tokens'])} / ({rates[1]:,} × 0.135 / N) / 3,600" in said
    logits = round(2 * 2 * LOGITS_AT_A_TIME / 1e9, 1)  # the model's and the drafter's, two bytes each
    assert f"memory in GB = (2 × N × 10⁹ + 16 × {share} × H²) / 10⁹ + {logits}" in said
    for method in ("medusa", "hidden_transfer"):
        assert f"`{method}` {'has ' if method == 'medusa' else ''}{learned_weights(method) / 576**2:.1f} × H²" in said
    rows = table(TRAIN, "model | N")
    assert len(rows) >= 4
    for _, *shape, distil, train, memory in rows:
        size, hidden, _ = (float(cell.replace(",", "")) for cell in shape)
        hours = [tokens / (rate * 0.135 / size) / 3600 for tokens, rate in zip((30.1e6, 26.7e6), rates, strict=True)]
        held = (2e9 * size + 16 * share * hidden**2) / 1e9 + logits
        for cell, figure in zip((distil, train, memory), (*hours, held), strict=True):
            assert cell == f"{figure:.{len(cell.partition('.')[2])}f}"
    history = [f"{one['tokens_per_round']:.2f}" for one in training("clover")["history"]]
    assert f"had {history[0]} tokens per round after 960 steps and {history[1]} after 1,600" in said


def test_the_record_of_the_shipped_drafters() -> None:
    rows = table(RECORD, "method | tokens read")
    assert len(rows) == 6
    for name, read, steps, top1, top5, rounds, stored in rows:
        record = training(re.findall(r"`(\w+)`", name)[0])
        figures = record["best"]["figures"]
        assert read == millions(record["tokens"]) and int(steps.split()[0]) == record["step"]
        for shown, kind in ((top1, "top1"), (top5, "top5")):
            heads = [value for key, value in figures.items() if key.startswith(kind)]
            assert [float(one) for one in shown.split()] == pytest.approx([100 * value for value in heads], abs=0.51), name
        assert rounds.partition(",")[0] == f"{record['best']['tokens_per_round']:.2f}"
        assert stored.partition(",")[0] == (f"{record['stored']['tokens_per_round']:.2f}" if "stored" in record else "")


def test_the_record_of_trees_and_of_what_made_the_difference() -> None:
    files = (ROOT / "results" / "trees_cuda").glob("*.json")
    found = {
        (one["method"], one["tree"]): one["tokens_per_round"]
        for file in files
        for one in json.loads(file.read_text())["trees"]
    }
    method = ""
    for name, tree, *shown in table(RECORD, "tokens per round | tree"):
        method = name.strip("`") or method
        counts = found[method, tree.partition(",")[0]]
        assert shown == [f"{counts[rows]:.2f}" if rows in counts else "" for rows in ("5", "16", "64")], (method, tree)
    runs = [one["printed"] for one in training("sweep_clover2")["runs"]]
    for (_, top5, rounds), printed in zip(table(RECORD, "change | top-5"), runs, strict=True):
        assert f"top-5 {top5} " in printed and f"{float(re.findall(r': ([0-9.]+) tokens/round', printed)[0]):.2f}" == rounds


def test_the_record_of_the_longer_run() -> None:
    said = " ".join(RECORD.read_text(encoding="utf-8").split())
    shipped, longer, masked = table(RECORD, "drafter | tokens read | tokens/s | tokens per round, held out")
    for row, name in ((shipped, "clover2"), (longer, "clover2_longer"), (masked, "masked_longer")):
        found = training(name)
        figures = millions(found["tokens"]), f"{found['tokens_per_second']:,}", f"{found['best']['tokens_per_round']:.2f}"
        assert tuple(row[1:4]) == figures
    assert f"interrupted at step {training('masked_longer')['step']} of 1,200" in masked[0]
    for row, method, ending in ((shipped, "clover2", ""), (longer, "clover2", "longer"), (masked, "masked", "longer")):
        runs = [f"bench_cuda_clover2_longer{one}" for one in ("_48b", "", "_7b")] if ending else [HELD_OUT, SMALL, WIDE]
        for shown, run in zip(row[4:], runs, strict=True):
            timed = {one["contender"].partition("=")[0]: one for one in measured(run)["tables"]["overall"]}.get(method)
            assert shown == ("" if timed is None else f"{timed['tokens_per_round']:.2f}, {timed['speedup']:.2f}x"), (
                row,
                run,
            )
    rates = {file.stem: json.loads(file.read_text()) for file in (ROOT / "results/train/clover2_rates").iterdir()}
    best = {rate: f"{one['best']['tokens_per_round']:.2f}" for rate, one in rates.items()}
    assert f"1e-3 and 2e-3 brought {best['1e-3']} tokens per round on held-out prompts, 4e-3 brought {best['4e-3']}" in said
    words, stored = training("clover2_longer")["words"], training("clover2_longer")["stored"]["tokens_per_round"]
    assert best["1e-3"] == best["2e-3"] and f"for {words['count']:,} tokens in place of {words['of']:,}" in said
    assert f"Stored in int8 they were {stored:.2f}" in said


def test_what_stored_forms_take_and_cost() -> None:
    page = ROOT / "docs" / "decisions" / "40-codes-are-deflated.md"
    folder = ROOT / "results" / "stored_drafters_cpu"
    sizes = {(one["method"], one["form"]): one for one in json.loads((folder / "sizes.json").read_text())["stored"]}
    forms = ["4 bits, groups", "16 levels, groups", "5 bits, groups", "2 steps", "4 steps", "8 steps"]
    for form, (_, bits, clover2, medusa) in zip(forms, table(page, "form | bits"), strict=True):
        one, other = sizes["clover2", form], sizes["medusa", form]
        assert (bits, clover2) == (f"{one['bits']:.2f}", f"{100 * one['error']:.1f} %")
        assert medusa == f"{100 * other['error']:.1f} %"
    runs = [json.loads(file.read_text()) for file in folder.glob("*.json") if file.stem != "sizes"]
    kept = {(one["method"], one["form"]): one for run in runs for one in run["stored"]}
    for method, *shown in table(page, "drafter | as it ships"):
        whole, one = (kept[method.strip("`"), form] for form in ("as it is", "4 steps"))
        share = f"{one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
        assert shown == [f"{whole['tokens_per_round']:.3f}", f"{one['tokens_per_round']:.3f}", share]
        assert f"answered {runs[0]['about']['prompts']} prompts of Spec-Bench" in page.read_text(encoding="utf-8")


def test_the_record_in_its_sentences() -> None:
    said = " ".join(RECORD.read_text(encoding="utf-8").split())
    alone, words = training("hidden_transfer"), json.loads((WEIGHTS / "clover2" / "record.json").read_text())["words"]
    assert f"in {alone['seconds']:.0f} s ({alone['tokens_per_second']:,} tokens/s), on 8 M tokens of its own" in said
    assert f"at {training('distill')['tokens_per_second']:,.0f} tokens/s" in said
    assert f"With {words['count']:,} of the {words['of']:,} tokens" in said
    for command in (training(name)["run"]["command"] for name in ("clover2", "hidden_transfer")):
        options = [
            part for part in re.findall(r"--\w[\w-]* \S+", command) if not part.startswith(("--check", "--eval", "--out"))
        ]
        assert all(option in said for option in options), command


# Figures of the methods' pages -------------------------------------------------------------------------------------------

METHOD_PAGES = ROOT / "docs" / "methods"
SMALL, HELD_OUT, WIDE = "bench_cuda_48", "bench_cuda_48b", "bench_cuda_7b"
TUNED_ON = "Over the 48 prompts that this project [tunes on](../results.md), on an H200, it reaches"
TIMED = sorted(
    {"prompt_lookup", "token_recycling", "medusa", "clover", "clover2", "echo", "hidden_transfer"}
    | {"firp", "draft_model", "gsd"}
)
PUBLISHED = sorted({page.stem for page in METHOD_PAGES.glob("*.md")} - {"plain", "echo"})  # echo is ours
VERDICT = re.compile(r"(partly |not )?(matched|missed|contradicted|untested|between the two|lost)\b")


@cache
def measured(folder: str) -> dict[str, Any]:
    return read_results(ROOT / "results" / folder)


def figures(folder: str, method: str, group: str = "overall", temperature: str = "") -> tuple[str, str]:
    """A method's speed-up and its tokens per round, as pages write them."""
    found = measured(folder)["temperatures"][temperature] if temperature else measured(folder)
    (row,) = [row for row in found["tables"][group] if row["contender"] == method]
    return f"{row['speedup']:.2f}x", f"{row['tokens_per_round']:.2f}"


def said_of(method: str) -> tuple[str, str]:
    """A method's page in one line, and its last section, the one that sets it against its paper."""
    said = (METHOD_PAGES / f"{method}.md").read_text(encoding="utf-8")
    return " ".join(said.split()), said.rpartition("\n## ")[2]


@pytest.mark.parametrize("method", TIMED)
def test_a_method_says_what_it_reaches_on_both_models(method: str) -> None:
    said, _ = said_of(method)
    (small, rounds), (wide, wide_rounds) = figures(SMALL, method), figures(WIDE, method)
    links = [f"([results](../../results/{folder}/report.md))" for folder in (SMALL, WIDE)]
    assert f"{TUNED_ON} {small} of `plain` at {rounds} tokens per round {links[0]}." in said
    assert f"On the model widened to 7.0 B it reaches {wide} at {wide_rounds} {links[1]}." in said


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_page_ends_with_the_paper_and_what_is_here(method: str) -> None:
    """Claim by claim, with a verdict: what was missed, contradicted or never tested stands there too."""
    _, last = said_of(method)
    assert last.startswith("Against the paper")
    head, _, *rows = [line for line in last.splitlines() if line.startswith("|")]
    assert re.match(r"\| the papers? says? \| here \| \|", head) and rows
    for row in rows:
        claim, here, verdict = [cell.strip() for cell in row.strip("|").split("|")]
        assert claim and here and VERDICT.match(verdict), row


@pytest.mark.parametrize(
    ("method", "folder", "group", "temperature"),
    [
        ("medusa", WIDE, "mt_bench", ""),
        ("clover2", WIDE, "mt_bench", ""),
        ("token_recycling", WIDE, "overall", ""),
        ("gsd", WIDE, "overall", ""),
        ("prompt_lookup", WIDE, "rag", ""),
        ("prompt_lookup", WIDE, "summarization", ""),
    ],
)
def test_what_is_set_against_a_paper_is_what_results_hold(method: str, folder: str, group: str, temperature: str) -> None:
    _, last = said_of(method)
    assert all(figure in last for figure in figures(folder, method, group, temperature))


def test_ratios_that_are_set_against_papers() -> None:
    wide, table1 = (
        {row["contender"]: row for row in measured(folder)["tables"]["overall"]} for folder in (WIDE, "bench_cuda_table1")
    )
    recycling = wide["token_recycling"]["speedup"]
    for other in ("prompt_lookup", "medusa"):
        assert (
            f"{recycling / wide[other]['speedup'] - 1:.0%} faster than `{other}`".replace("%", " %")
            in said_of("token_recycling")[1]
        )
    extra = [table1[method]["tokens_per_round"] - 1 for method in ("clover", "medusa")]
    assert (
        f"{100 * (extra[0] / extra[1] - 1):.0f} % more: {1 + extra[0]:.2f} tokens per round against {1 + extra[1]:.2f}"
        in said_of("clover")[1]
    )
    for batch, at in (("1", "1.09x at batch 1"), ("4", "0.99x at batch 4"), ("8", "1.01x at batch 8")):
        speeds = {row["contender"]: row["tokens_per_second"] for row in measured("bench_cuda_table1")["batches"][batch]}
        assert f"{speeds['clover'] / speeds['medusa']:.2f}x" == at.partition(" ")[0] and at in said_of("clover")[1]
    assert figures(WIDE, "clover2", "mt_bench", "0.8")[0] in said_of("clover2")[1]
    firp = [figures(WIDE, "firp", group)[0] for group in ("overall", "summarization", "math_reasoning")]
    assert all(figure in said_of("firp")[1] for figure in firp)


# Figures of the pages on results and performance ---------------------------------------------------------------------------


def rows_at(folder: str, batch: int) -> dict[str, dict[str, Any]]:
    found = measured(folder)
    rows = found["tables"]["overall"] if batch == 1 else found["batches"][str(batch)]
    return {row["contender"]: row for row in rows}


def test_clovers_table_is_what_results_hold() -> None:
    lines = table(ROOT / "docs" / "results.md", "batch | `plain`")
    assert len(lines) == 5
    for batch, *shown in lines:
        rows = rows_at("bench_cuda_table1", int(batch))
        speeds = [f"{rows[name]['tokens_per_second']:.0f}" for name in ("plain", "medusa", "clover")]
        ratios = [f"{rows[name]['speedup']:.2f}x" for name in ("medusa", "clover")]
        assert shown == [speeds[0], speeds[1], ratios[0], speeds[2], ratios[1]]


def test_held_out_prompts_stand_next_to_those_that_were_tuned_on() -> None:
    said = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    held, tuned = rows_at(HELD_OUT, 1), rows_at(SMALL, 1)
    ranked = sorted((name for name in held if name != "plain"), key=lambda name: -held[name]["speedup"])
    pairs = (f"`{name}` {held[name]['speedup']:.2f}x against {tuned[name]['speedup']:.2f}x" for name in ranked)
    assert f"Speed-ups of the first table against this one: {', '.join(pairs)}. " in said
    ratios = [held[name]["speedup"] / tuned[name]["speedup"] - 1 for name in ranked]
    assert len(ratios) == 10 and sum(ratio > 0 for ratio in ratios) == sum(ratio < 0 for ratio in ratios) == 5
    assert f"by {100 * max(map(abs, ratios)):.1f} % at most" in said
    assert all(held[name]["low"] < tuned[name]["high"] and tuned[name]["low"] < held[name]["high"] for name in ranked)
    drafted = [f"{rows['echo']['draft_tokens_per_round']:.1f}" for rows in (held, tuned)]
    assert f"which drafted {drafted[0]} tokens per round in the first and {drafted[1]} here" in said
    loops = [f"{rows['plain']['loop_share']:.0%}".replace("%", " %") for rows in (tuned, held)]
    assert f"{loops[0]} in `spec_bench_48` and {loops[1]} in `spec_bench_48b`" in said


def test_the_first_token_and_the_equal_outputs_of_both_sets_of_prompts() -> None:
    said = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    speeds = []
    for folder, words in (
        (HELD_OUT, "the first token of `plain` takes {:.1f} ms on the held-out prompts ([results]({}), commit {})"),
        (SMALL, "It took {:.1f} ms on the prompts that were tuned on ([results]({}), commit {})"),
    ):
        plain = rows_at(folder, 1)["plain"]
        link = f"../results/{folder}/report.md"
        assert words.format(1000 * plain["first_token_s"], link, measured(folder)["about"]["commit"]) in said
        speeds.append(plain["decode_tokens_per_second"])
        assert plain["prompts"] == 56 and "means over 56 outputs" in said
    assert f"{speeds[0]:.0f} against {speeds[1]:.0f} tokens/s" in said
    equal = [[row["identical"] for name, row in rows_at(one, 1).items() if name != "plain"] for one in (SMALL, HELD_OUT)]
    (tuned, held) = ((min(counts), max(counts)) for counts in equal)
    assert f"On the tuned prompts {tuned[0]} to {tuned[1]} of 56 outputs" in said
    assert f"and {held[0]} to {held[1]} on the held-out ones" in said


def test_what_the_performance_page_comes_to() -> None:
    """The fastest methods at each batch size, the fastest first, none of them left out."""
    sources = [(HELD_OUT, 1), (SMALL, 1), ("bench_cuda_batches", 8), ("bench_cuda_batches", 32)]
    sources += [(WIDE, 1), ("bench_cuda_7b_batches", 8), ("bench_cuda_7b_batches", 32)]
    lines = table(ROOT / "docs" / "performance.md", "| `plain`, tokens/s")
    for (_, speed, fastest), (folder, batch) in zip(lines, sources, strict=True):
        rows = rows_at(folder, batch)
        ranked = sorted(rows.values(), key=lambda row: -row["speedup"])[: fastest.count("`") // 2]
        assert speed.replace(",", "") == f"{rows['plain']['tokens_per_second']:.0f}"
        assert fastest == ", ".join(f"`{row['contender']}` {row['speedup']:.2f}x" for row in ranked)


def test_what_passes_take_on_the_performance_page() -> None:
    named = {line[0]: line[1:] for line in table(ROOT / "docs" / "performance.md", "pass, ms by rows | 1 | 4")}
    for name, folder in (("SmolLM2-135M", SMALL), ("widened to 7.0 B", WIDE)):
        passes = {one["rows"]: one for one in measured(folder)["roofline"]["passes"]}
        assert named[name] == [
            *(f"{passes[rows]['ms']:.3f}" for rows in (1, 4, 16, 32, 64)),
            f"{passes[1]['bandwidth_share']:.0%}",
        ]


def test_what_echo_brings_over_its_parts() -> None:
    (small, wide) = table(METHOD_PAGES / "echo.md", "| `clover2` alone")
    for shown, folder in ((small, SMALL), (wide, WIDE)):
        cells = dict(zip(("clover2", "prompt_lookup", "echo"), shown[1:4], strict=True))
        for method, cell in cells.items():
            assert cell.partition(",")[0] == figures(folder, method)[0]
    trees = {folder: rows_at(folder, 1)["clover2"]["draft_tokens_per_round"] for folder in (SMALL, WIDE)}
    assert {folder: f"{1 + tokens:.0f} rows" for folder, tokens in trees.items()} == {SMALL: "16 rows", WIDE: "32 rows"}
    assert small[1].endswith("16 rows") and wide[1].endswith("32 rows")
    assert len(rows_at(SMALL, 1)["clover2"]["accepted_per_position"]) == 3  # levels: docs/results.md says three


def test_the_page_of_self_speculative_says_when_it_pays_off() -> None:
    """Both tables are what `python studies/break_even.py` prints."""
    study, page = module("studies/break_even.py"), METHOD_PAGES / "self_speculative.md"
    assert table(page, "cost of a draft token") == study.needed()
    assert table(page, "left out") == study.found()
    few, *_, usual = study.read("swift_plans_cpu.json")["plans"]
    said, _ = said_of("swift")
    assert f"the first plan has {usual['half_layers']} half-layers left out, {usual['agreement']:.1%} of the tokens" in said
    assert f"with {few['half_layers']} half-layers left out {few['agreement']:.1%}" in said


def test_what_is_accepted_inside_vllm() -> None:
    found = json.loads((ROOT / "results" / "vllm_cpu" / "drafters.json").read_text(encoding="utf-8"))
    shown = {name.split("`")[1]: cells for name, *cells in table(ROOT / "docs" / "vllm.md", "drafter |")}
    expected = {}
    for row in found["in_vllm"]:
        theirs, ours = row["vllm"], row["foreword"] or {}
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else "-"
        cells = [f"{theirs['accepted']}", f"{ours.get('accepted', '-')}", ratio, f"{theirs['tokens_per_pass']:.2f}"]
        expected[row["drafter"]] = cells
    assert shown == expected
    assert all(row["vllm"]["identical"] == found["about"]["prompts"] for row in found["in_vllm"])
