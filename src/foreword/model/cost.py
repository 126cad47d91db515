"""What a pass costs by its number of rows, on this machine: measured once per model, device, dtype and thread count.

Tree sizes follow the machine: on a GPU 64 rows cost little more than one, on a small CPU every row costs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass at a few row counts, rising; straight lines between them."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: int) -> float:
        points = list(zip(self.rows, self.seconds, strict=True))
        for (low, before), (high, after) in zip(points, points[1:], strict=False):
            if rows <= high:
                return before + (after - before) * max(rows - low, 0) / (high - low)
        return self.seconds[-1] * rows / self.rows[-1]

    def relative(self, rows: int) -> float:
        return self.at(rows) / self.at(1)
