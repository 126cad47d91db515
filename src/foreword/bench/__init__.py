"""The benchmark: every method and every baseline on the same prompts, weights, threads and clock."""

from foreword.bench.baselines import check_baseline, make_baselines
from foreword.bench.contenders import Answer, Contender, GenerationSettings, Task, contender, context_for, failing_contender
from foreword.bench.divergences import Divergence, Verdicts
from foreword.bench.figures import Benchmark, Row, Timing, benchmarks, rows, tables, timings
from foreword.bench.report import content, read_results, write_report
from foreword.bench.run import BlockRun, Plan, run
from foreword.bench.suites import Suite, read_suite, read_suites

__all__ = [
    "Answer",
    "Benchmark",
    "Contender",
    "BlockRun",
    "GenerationSettings",
    "Divergence",
    "Plan",
    "Row",
    "Suite",
    "Task",
    "Timing",
    "Verdicts",
    "make_baselines",
    "benchmarks",
    "check_baseline",
    "content",
    "contender",
    "context_for",
    "read_results",
    "rows",
    "run",
    "read_suite",
    "read_suites",
    "tables",
    "timings",
    "failing_contender",
    "write_report",
]
