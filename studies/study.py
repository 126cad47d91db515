"""What the studies share: how they choose prompts and write their results.

In: a prompt file, and later the figures. Out: prompts as token ids, and a JSON file that says which command made it.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from foreword.api import LLM
from foreword.bench.report import facts
from foreword.model.model import Model
from foreword.text.prompts import groups, read_prompts, spread

ROOT = Path(__file__).parents[1]


def command() -> str:
    """Return the command line of this study, for its result."""
    return shlex.join(["python", f"studies/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def first_turns(llm: LLM, prompts: Path, per_group: int) -> list[tuple[int, ...]]:
    """Return the first turn of at most `per_group` prompts of each category, as token ids."""
    chosen = spread(read_prompts(prompts), per_group)
    return [tuple(llm.tokenizer.encode(one.first())) for some in groups(chosen).values() for one in some]


def keep(out: Path, study: str, model: Model, found: list[dict[str, Any]], **more: Any) -> None:
    """Write `found` under the key `study`, with the command, the machine, the model and `more`."""
    write(out, study, found, model.device, model=model.name, dtype=str(model.dtype).removeprefix("torch."), **more)


def write(out: Path, study: str, found: list[dict[str, Any]], device: torch.device, **more: Any) -> dict[str, Any]:
    """Write `found` under the key `study`, with the command, the machine and `more`. Return what is written about it."""
    about = facts(device, **more) | {"command": command()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": about, study: found}, indent=1) + "\n", encoding="utf-8")
    return about
