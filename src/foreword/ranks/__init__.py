"""Ranks: processes that run one model together (tensor parallelism)."""
