"""Health: whether an engine can serve, and what it is busy with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from foreword.serve.messages import EngineLoad


@dataclass(frozen=True)
class Health:
    state: Literal["starting", "ready", "dead"]
    load: EngineLoad = field(default_factory=EngineLoad)
