"""What merging saves, by rule and threshold: an ordinary tree comes first, and the printed figures are those in the file."""

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from merged_graphs import MergeFigures, merged_graphs


def test_every_rule_and_threshold(study: Callable[..., tuple[Result, Any]]) -> None:
    rules = "--repeat 0,1 --siblings 0.0 --sure 0.0,0.9 --depth 3 --width 16 --rows 12 --max-new-tokens 12"
    done, written = study(merged_graphs, "draft_model", f"--drafter {{drafter}} {rules}", layers=1)
    found = written["graphs"]
    assert done.exit_code == 0
    assert [(one["sure"], one["repeat"]) for one in found] == [(sure, rule) for sure in (0.0, 0.9) for rule in (-1, 0, 1)]
    for one in found:
        tree = next(other for other in found if (other["sure"], other["repeat"]) == (one["sure"], -1))
        assert one["fewer_rows"] == pytest.approx(1 - one["rows_per_round"] / tree["rows_per_round"])
        assert one["fewer_tokens"] == pytest.approx(1 - one["tokens_per_round"] / tree["tokens_per_round"])
        assert one["tokens_per_round"] >= 1 and (one["repeat"] >= 0 or one["saved_per_round"] == 0)
        assert MergeFigures(**one).line in done.output
    assert found[1]["saved_per_round"] > max(0, found[2]["saved_per_round"])  # longer matches are rarer
    assert found[1]["fewer_rows"] > 0 and found[0]["rows_per_round"] > found[3]["rows_per_round"]  # as unlikely nodes
