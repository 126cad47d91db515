"""Graphs of candidates by kernels, against the torch body in ops/candidate_graphs.py, level by level, in Triton's
interpreter."""

import pytest

pytest.importorskip("triton")

from foreword.ops.candidate_graphs import Rule
from rounds import check_candidate_graphs

RULES = [
    Rule(branch=1, repeat=0, siblings=0.0, sure=0.0, width=1),
    Rule(branch=4, repeat=1, siblings=0.1, sure=0.05, width=8),
    Rule(branch=3, repeat=0, siblings=0.0, sure=0.0, width=5),
    Rule(branch=2, repeat=0, siblings=0.0, sure=0.0, width=16),
    Rule(branch=5, repeat=2, siblings=0.5, sure=0.3, width=3),
    Rule(branch=4, repeat=-1, siblings=0.1, sure=0.0, width=6),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_graph_grows_and_is_unrolled(seed: int, rule: Rule) -> None:
    check_candidate_graphs(seed, "cpu", rule, depth=4, tokens=5)


def test_a_level_may_have_as_many_nodes_as_there_are_bits() -> None:
    check_candidate_graphs(0, "cpu", Rule(branch=8, repeat=0, siblings=0.0, sure=0.0, width=64), depth=3, tokens=90)
