"""What the studies beside the benchmark share (`trees.py`, `graphs.py`, `grafts.py`): what is asked, and how it is kept.

In: a prompt file, and later what was found. Out: prompts as token ids, and a JSON file that says what made it.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from foreword.api import LLM
from foreword.bench.report import facts
from foreword.model.model import Model
from foreword.text.prompts import groups, read_prompts, spread


def first_turns(llm: LLM, prompts: Path, per_group: int) -> list[tuple[int, ...]]:
    """The first turn of at most `per_group` prompts of each category, as token ids."""
    chosen = spread(read_prompts(prompts), per_group)
    return [tuple(llm.tokenizer.encode(one.first())) for some in groups(chosen).values() for one in some]


def keep(out: Path, study: str, model: Model, found: list[dict[str, Any]], **more: Any) -> None:
    """Write what the module called `study` found, with the command, the machine, the model and `more`."""
    about = facts(model.device, model=model.name, dtype=str(model.dtype).removeprefix("torch."), **more)
    about["command"] = shlex.join(["python", "-m", f"foreword.bench.{study}", *sys.argv[1:]])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": about, study: found}, indent=1) + "\n", encoding="utf-8")
