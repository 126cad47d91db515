"""Where the time of a training step goes: `python studies/training_profile.py FILE train METHOD --data DIR --out FOLDER`.

Runs `foreword train` with the arguments after FILE, and looks at some of its steps with torch's profiler. FILE gets the
kernels (on a CPU: the operations) that took longest, and how long the device was busy. Then the run ends; nothing is saved.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foreword.cli import main
from foreword.ops.device import synchronize
from foreword.train.loop import TrainingLoop

FIRST, LAST = (20, 28) if torch.cuda.is_available() else (1, 2)  # the steps before compile kernels and fill caches
LINES = 60


class Profiled:
    """Learns as `TrainingLoop` does, and ends the run after the profiled steps."""

    def __init__(self, file: Path) -> None:
        self.file, self.learn = file, TrainingLoop._learn
        self.profiler: Any = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True)
        self.since = 0.0

    def step(self, loop: TrainingLoop, step: int) -> None:
        if step == FIRST:
            synchronize(loop.model.device)
            self.since = time.perf_counter()
            self.profiler.start()
        self.learn(loop, step)
        if step == LAST:
            synchronize(loop.model.device)
            seconds = (time.perf_counter() - self.since) / (LAST - FIRST + 1)
            self.profiler.stop()
            self.write(seconds, loop.model.device.type)
            raise SystemExit(0)

    def write(self, seconds: float, device: str) -> None:
        order = f"self_{device}_time_total" if device == "cpu" else "self_device_time_total"
        table = self.profiler.key_averages().table(sort_by=order, row_limit=LINES, max_name_column_width=90)
        shapes = self.profiler.key_averages(group_by_input_shape=True)
        by_shape = shapes.table(sort_by=order, row_limit=LINES // 2, max_name_column_width=60)
        steps = f"{LAST - FIRST + 1} steps, {seconds * 1e3:.1f} ms each, profiled"
        self.file.write_text(f"{steps}\n{table}\n\nBy shape\n{by_shape}\n", encoding="utf-8")
        print(steps)


if __name__ == "__main__":
    profiled = Profiled(Path(sys.argv.pop(1)))
    TrainingLoop._learn = lambda loop, step: profiled.step(loop, step)  # type: ignore[method-assign]
    main()
