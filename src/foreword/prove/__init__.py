"""The losslessness proof: every method against plain decoding, token for token, and a float64 referee where they part."""

from foreword.prove.proof import compare, prove
from foreword.prove.referee import Case, Referee, Ruling
from foreword.prove.report import Choice, Difference, MethodProof, Report

__all__ = ["Case", "Choice", "Difference", "MethodProof", "Referee", "Report", "Ruling", "compare", "prove"]
