"""Files of costs: results of `foreword bench`, or what `foreword simulate --out` wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreword.errors import InputError
from foreword.files import BadJSON, read_json
from foreword.simulate.bench_costs import costs_of_results
from foreword.simulate.costs import ServingCosts


def read_costs(files: Sequence[Path], temperature: float = 0.0) -> ServingCosts:
    """Read the costs of serving: from one file of ours, or from results of benchmarks."""
    ours = {file: kept for file in files if (kept := _ours(file)) is not None}
    if not ours:
        return costs_of_results(files, temperature)
    file, kept = next(iter(ours.items()))
    if len(files) > 1:
        raise InputError(
            f"{file} holds costs that were measured together; give it alone, or give results of `foreword bench`"
        )
    try:
        found = ServingCosts.read(kept["costs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{file} holds no costs that can be read ({error!r}); make it again with --out") from error
    if found.temperature != temperature:
        raise InputError(
            f"the costs in {file} are at temperature {found.temperature:g}; give --temperature {found.temperature:g}"
        )
    return found


def _ours(file: Path) -> dict[str, Any] | None:
    """Return the content of a file that this command wrote; None if it is something else."""
    if os.path.isdir(file) or file.suffix != ".json":
        return None
    try:
        kept = read_json(file, strict=False)
    except (OSError, BadJSON) as error:
        raise InputError(
            f"{file} cannot be read: {error}; give results of `foreword bench` or of `foreword simulate`"
        ) from error
    return kept if isinstance(kept, dict) and isinstance(kept.get("costs"), dict) and "methods" in kept["costs"] else None
