"""Figures of a run for TensorBoard, where that is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

HOW = "pip install tensorboard, and the figures of every step can be watched as they come"


def board(folder: Path) -> Callable[[int, dict[str, float]], None] | None:
    """Told (step, figures), it writes them into `folder`; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an extra
    except ImportError:
        return None
    writer = SummaryWriter(str(folder))

    def write(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write
