"""Write the figures of a run for TensorBoard, if that is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

HINT = "pip install tensorboard to watch the figures of every step"


def tensorboard_writer(folder: Path) -> Callable[[int, dict[str, float]], None] | None:
    """Return a function that writes (step, figures) into `folder`, or None if TensorBoard is not installed."""
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
