"""The data classes of a round, and the interfaces of drafters, targets and loops. Imports torch and `ops`."""

from foreword.core.choosing import pick, rank
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.loop import Loop, Pipelining
from foreword.core.needs import Graft, Needs, Skip
from foreword.core.sampling import Sampling
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import Batch, State
from foreword.core.target import Target
from foreword.core.trainable import Trainable

__all__ = [
    "Accepted",
    "Draft",
    "Drafter",
    "Emission",
    "Graft",
    "Batch",
    "Loop",
    "Needs",
    "Pipelining",
    "Sampling",
    "Scores",
    "Shape",
    "Skip",
    "State",
    "Target",
    "Trainable",
    "Tree",
    "pick",
    "rank",
]
