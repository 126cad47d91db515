"""Trees of draft tokens: templates, trees that grow with their candidates, and how many rows of them pay off.

A drafter names its options in a `TreePlan`, which makes a `Growth` for one target. The growth turns candidates into a
`Draft` of fixed shape.
"""

from foreword.drafting.trees.beam import Beam, none_goes_on
from foreword.drafting.trees.growth import BestFirst, Budgeted, Chain, NextCandidates
from foreword.drafting.trees.plan import BRANCH, Growth, TreeKind, TreePlan, unconditional
from foreword.drafting.trees.rows import (
    LEVEL_KERNELS,
    MOST_NODES,
    TRAINED_BEND,
    USUAL_GAIN,
    FixedRows,
    RowCosts,
    chain_lengths,
    paying_rows,
    share_of_gain,
)
from foreword.drafting.trees.templates import (
    EAGLE_COUNTS,
    USUAL_RATES,
    Path,
    Rates,
    StaticTree,
    Template,
    greedy_paths,
    level_paths,
    path_rate,
)

__all__ = [
    "BRANCH",
    "Beam",
    "BestFirst",
    "Budgeted",
    "Chain",
    "EAGLE_COUNTS",
    "FixedRows",
    "Growth",
    "NextCandidates",
    "LEVEL_KERNELS",
    "MOST_NODES",
    "Path",
    "Rates",
    "RowCosts",
    "StaticTree",
    "TRAINED_BEND",
    "Template",
    "TreeKind",
    "TreePlan",
    "USUAL_GAIN",
    "USUAL_RATES",
    "chain_lengths",
    "greedy_paths",
    "level_paths",
    "none_goes_on",
    "paying_rows",
    "path_rate",
    "share_of_gain",
    "unconditional",
]
