"""The losslessness proof: every method against plain decoding, token for token; a float64 referee where they diverge."""

from foreword.prove.proof import compare, prove
from foreword.prove.referee import Case, Referee, Ruling
from foreword.prove.report import Difference, MethodProof, Report, ScoredToken

__all__ = ["Case", "ScoredToken", "Difference", "MethodProof", "Referee", "Report", "Ruling", "compare", "prove"]
