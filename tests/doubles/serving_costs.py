"""Made-up costs, simple enough that what a server does can be computed by hand."""

from foreword.model.cost import CostCurve
from foreword.simulate.costs import MethodCosts, RoundCost, Scheduling

ROUND_S, ROW_S = 0.02, 0.001
ON_CPU = Scheduling(chunk=256, joins_prompts=False, captured=False, late=False, reuses=True)
ON_GPU = Scheduling(chunk=1024, joins_prompts=True, captured=True, late=True, reuses=False)


def costs_of(name: str, decided: tuple[float, ...], slower: float = 1.0, per_sequence: float = 0.1) -> MethodCosts:
    """Rounds of 1, 4 and 16 sequences, each sequence making them a little slower; a prompt costs a millisecond per row."""
    rounds = tuple(
        RoundCost(batch, slower * ROUND_S * (1 + per_sequence * (batch - 1)), batch * len(decided), decided)
        for batch in (1, 4, 16)
    )
    return MethodCosts(name, rounds, CostCurve((1, 1024), (ROW_S, 1024 * ROW_S)), "made up")
