"""The cost of pseudo rows: the timed passes have the rows they are labelled with, divided as the drafter divides them."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

import foreword
import pseudo_rows
from doubles import target, with_random_weights
from foreword.bench.passes import Probe
from foreword.core.needs import Needs
from foreword.drafters import saved
from foreword.errors import InputError
from foreword.model.model import Model


def test_every_division_is_timed(folders: dict[str, Path], own_home: Path, tmp_path: Path) -> None:
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        saved.save(with_random_weights("hidden_transfer", llm.model, steps=2), tmp_path / "drafter", llm.model)
    command = Typer()
    command.command()(pseudo_rows.pseudo_rows)
    asked = f"--drafter {tmp_path / 'drafter'} --out {tmp_path / 'found.json'} --rows 9,12 --repeats 2 --context 20"
    done = CliRunner().invoke(command, f"{asked} --model {folders['llama']}".split(), catch_exceptions=False)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert done.exit_code == 0 and found["about"]["command"].startswith("python studies/")
    divided = [(one["carry"], one["rows"], one["nodes"], one["carried"]) for one in found["grafts"]]
    assert divided[2:] == [("all", 9, 3, 6), ("all", 12, 4, 8)]
    assert all(nodes + carried == rows and nodes > 1 for _, rows, nodes, carried in divided)
    assert all(one[name] > 0 for one in found["grafts"] for name in ("nodes_alone", "with_carried", "all_nodes", "own_walk"))


def test_passes_have_the_rows_of_their_label(
    folders: dict[str, Path], own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        saved.save(with_random_weights("hidden_transfer", llm.model, steps=2), tmp_path, llm.model)
        seen: list[tuple[int, int]] = []
        score = Model.score

        def noted(self: Model, batch: object, draft: object, needs: Needs, *rest: object, **more: object) -> object:
            scores = score(self, batch, draft, needs, *rest, **more)  # type: ignore[arg-type]
            grafted = 0 if scores.grafted is None else scores.grafted.shape[1]
            seen.append((scores.require_logits().shape[1], grafted))
            return scores

        monkeypatch.setattr(Model, "score", noted)
        one = pseudo_rows.cost(llm.model, tmp_path, "all", 12, 20, 1)
        assert [seen[0], seen[2], seen[4]] == [(4, 0), (4, 8), (12, 0)] and (one.nodes, one.carried) == (4, 8)
        with pytest.raises(InputError, match="1 rows leave no room for pseudo rows"):
            pseudo_rows.cost(llm.model, tmp_path, "likely", 1, 20, 1)


def test_a_probe_has_room_for_pseudo_rows() -> None:
    model = target()
    drafter = with_random_weights("hidden_transfer", model, rows=16, steps=3)
    scores = Probe(model, drafter.shape.nodes, 9, drafter.needs).score()
    assert scores.grafted is not None and scores.grafted.shape[1] == 16 - drafter.shape.nodes > 4
    assert bool(scores.grafted.isfinite().all())
