"""The benchmark: every method and every baseline on the same prompts, weights, threads and clock."""

from foreword.bench.contenders import Contender, baseline, contender, context_for
from foreword.bench.report import write_report
from foreword.bench.run import Benchmark, run, sweep

__all__ = ["Benchmark", "Contender", "baseline", "contender", "context_for", "run", "sweep", "write_report"]
