"""Traces: one line per round, from which the output can be reconstructed."""

import errno
import json
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from doubles import SAMPLINGS, drafter, engine, requests, target, truth, with_random_weights
from foreword.errors import StorageError
from foreword.trace import Traced


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class FullDisk(FileIO):
    def write(self, data: Any) -> int:
        super().write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["token_recycling", "gsd"])
def test_the_lines_contain_the_outputs(name: str, late: bool, tmp_path: Path) -> None:
    """In their order, with the accepted tokens before the last one of each round; sequences share slots."""
    model, asked = target(), requests(5, SAMPLINGS["T=0.8"], ignore_eos=True)
    traced = Traced(drafter(name, model), tmp_path / "trace", str)
    runs = engine(traced, model, slots=2, late=late).generate(asked)
    lines = lines_of(tmp_path / "trace")
    assert {line["text"] for line in lines} == set(range(5))
    for number, (run, request) in enumerate(zip(runs, asked, strict=True)):
        own = [line for line in lines if line["text"] == number]
        assert [line["round"] for line in own] == list(range(len(own))) and len(own) == len(run.accepted)
        tokens = [
            token
            for line in own
            for token in (*(line["nodes"][row]["token"] for row in line["accepted"][1:]), int(line["next"]))
        ]
        assert tokens == run.tokens == truth(model.hf, request)
        assert all(line["nodes"][0]["piece"] == str(line["nodes"][0]["token"]) for line in own)


def test_a_graph_holds_the_tree_that_was_checked(tmp_path: Path) -> None:
    """Every path of the draft is a walk through the sketch, and some use an alias. The counters have the rows that were
    read, and those that were saved: merged candidates, except on the last level, which is never read."""
    model = target()
    made = with_random_weights("gsd", model, rows=40, depth=4, repeat=0, siblings=0.0, sure=0.0)
    engine(Traced(made, tmp_path / "trace", str), model).generate(requests(4, ignore_eos=True))
    aliases = read = saved = 0
    for line in lines_of(tmp_path / "trace"):
        nodes, edges, at = line["graph"]["nodes"], line["graph"]["edges"], {0: 0}
        for row, node in enumerate(line["nodes"][1:], start=1):
            start = at[node["parent"]]
            (step,) = (e for e in edges if e["start"] == start and nodes[e["goal"]]["token"] == node["token"])
            at[row] = step["goal"]
            aliases += step["alias"]
        tree, depth = [edge for edge in edges if not edge["alias"]], {0: 0}
        assert sorted(edge["goal"] for edge in tree) == list(range(1, len(nodes)))
        for edge in tree:
            depth[edge["goal"]] = depth[edge["start"]] + 1
        read += len({edge["start"] for edge in edges})
        saved += sum(edge["alias"] and depth[edge["start"]] < 3 for edge in edges)
    assert aliases and saved and made.counters() == {"rows_read": read, "rows_saved": saved}


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    for file in (tmp_path / "no" / "trace", tmp_path, Path("a\0b")):
        with pytest.raises(StorageError, match="cannot be written.*name another file"):
            Traced(drafter("plain", target()), file, str)


def test_a_full_disk_aborts_the_requests_and_the_engine_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete lines stay in the file; with room again the same engine gives the output of plain."""
    model, asked = target(), requests(3, ignore_eos=True)
    running = engine(Traced(drafter("token_recycling", model), tmp_path / "trace", str), model)
    running.generate(asked)
    whole = (tmp_path / "trace").read_bytes()
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda file, mode: FullDisk(file, mode))
        with pytest.raises(StorageError, match="trace cannot be written .*No space left.*continue without a trace"):
            running.generate(asked)
    assert (tmp_path / "trace").read_bytes() == whole and not running.busy
    found = running.generate(asked)
    assert [run.tokens for run in found] == [truth(model.hf, request) for request in asked]
    assert len(lines_of(tmp_path / "trace")) > len(whole.splitlines())
