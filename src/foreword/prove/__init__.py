"""The losslessness proof: every method against plain decoding, token for token, and a float64 referee where they part."""

from foreword.prove.proof import compare, prove
from foreword.prove.report import Choice, Difference, MethodProof, Report

__all__ = ["Choice", "Difference", "MethodProof", "Report", "compare", "prove"]
