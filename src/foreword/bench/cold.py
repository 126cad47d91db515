"""Cold start: how long a fresh process takes from its start to its first token, step by step.

The child notes the time when it began and after its imports, after loading and after the first token. Parent and child read
the same clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

CHILD = """
import time
marks = [time.time()]
import json, sys
from foreword.api import load
from foreword.bench.profile import random_subject
from foreword.engine.request import Request
marks.append(time.time())
shapes, model, method, where = json.loads(sys.argv[1])
engine = random_subject(shapes, 1, **where).engine(method) if shapes else load(model, method, slots=1, **where).engine
marks.append(time.time())
engine.generate([Request((1, 2, 3), max_new_tokens=1)])
marks.append(time.time())
print(json.dumps(marks))
"""


def cold_start(shapes: str | None, model: str | None, method: str, where: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step. `where`: options of `foreword.load`."""
    asked = json.dumps([shapes, model, method, where])
    began = time.time()
    done = subprocess.run([sys.executable, "-c", CHILD, asked], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the fresh process ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    marks = [began, *json.loads(done.stdout.splitlines()[-1])]
    names = ("python_s", "imports_s", "load_s", "first_token_s")
    steps = dict(zip(names, (after - before for before, after in pairwise(marks)), strict=True))
    return {"method": method, **steps, "total_s": marks[-1] - began}
