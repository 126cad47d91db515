"""A sweep's charts show every figure, and each chart is a file of its own."""

import json
from pathlib import Path
from xml.etree import ElementTree

from typer import Typer
from typer.testing import CliRunner

from foreword.bench.sweeps import drawings, sweeps

SWEPT = Path(__file__).parents[3] / "results" / "train" / "sweep_hidden_transfer.json"
SVG = "{http://www.w3.org/2000/svg}"


def tooltips(drawing: str) -> list[str]:
    """Return the tooltips of a chart, in order."""
    return [str(title.text) for title in ElementTree.fromstring(drawing).iter(f"{SVG}title")]


def test_every_figure_is_drawn() -> None:
    record = json.loads(SWEPT.read_text(encoding="utf-8"))
    found = drawings(record)
    assert list(found) == ["accuracy", "nearness", "sight"]
    assert tooltips(found["accuracy"])[0] == "step 1, top-1, 4: 37.82%" and "step 3, top-5, 26: 33.21%" in tooltips(
        found["accuracy"]
    )
    assert len(tooltips(found["accuracy"])) == 2 * sum(map(len, record["accuracy"].values()))
    assert "step 2, 30: 0.66" in tooltips(found["nearness"])
    assert len(tooltips(found["nearness"])) == sum(map(len, record["cosine"].values()))
    assert {"sees step 1, top-5, 19: 48.52%", "does not see step 1, top-5, 19: 47.93%"} <= set(tooltips(found["sight"]))


def test_a_chart_has_its_style_and_a_legend() -> None:
    root = ElementTree.fromstring(drawings(json.loads(SWEPT.read_text(encoding="utf-8")))["sight"])
    labels = {text.text for text in root.iter(f"{SVG}text")}
    assert {"sees step 1, top-1", "does not see step 1, top-5", "layer"} <= labels
    assert "--c1" in str(root.findtext(f"{SVG}style")) and root.get("viewBox") == "0 -34 860 334"
    dashed = [path for path in root.iter(f"{SVG}path") if "dashed" in path.get("class", "")]
    assert len(dashed) == 2


def test_with_one_step_there_is_no_chart_of_sight(tmp_path: Path) -> None:
    record = json.loads(SWEPT.read_text(encoding="utf-8"))
    record |= {"accuracy": {"1": record["accuracy"]["1"]}, "step 2 without sight of step 1": {}}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    command = Typer()
    command.command()(sweeps)
    done = CliRunner().invoke(
        command, [str(tmp_path / "sweep.json"), "--out", str(tmp_path / "drawn")], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert {file.name for file in (tmp_path / "drawn").iterdir()} == {"accuracy.svg", "nearness.svg"}
