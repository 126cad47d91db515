"""What every rank of a test runs: `torchrun --nproc-per-node 2 tests/doubles/ranks_program.py PLAN OUT`.

PLAN is a JSON file with what to load and to ask, step by step. The first rank writes what came out to OUT after each step,
so that what was found stays if a later step is to end all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import foreword
from foreword.api import LLM
from foreword.errors import ForewordError

FIRST = os.environ.get("RANK", "0") == "0"


def answers(llm: LLM, asked: dict[str, Any]) -> list[Any]:
    """Return the outputs of all prompts together, each with how many rounds it took and what they drafted."""
    found = llm.generate(asked["prompts"], settings=asked.get("each"), **asked["settings"])
    counts = [(one.stats.rounds, one.stats.spec_decode_num_draft_tokens) for one in found]
    return [[one.tokens, one.text, one.finish_reason, *count] for one, count in zip(found, counts, strict=True)]


def left_early(llm: LLM, asked: dict[str, Any]) -> list[Any]:
    """Ask for a method that is refused while a stream runs, leave the stream, and return what is answered then."""
    stream = llm.stream(asked["prompts"][0], **asked["settings"])
    next(iter(stream))
    (message,) = refused(lambda: llm.use("medusa"))
    stream.close()
    return [message, answers(llm, asked)]


def run(step: dict[str, Any], tp: int | None) -> dict[str, Any]:
    """Load a model, and ask it with each method."""
    with foreword.load(step["folder"], "plain", device="cpu", tp=tp, threads=1, **step["options"]) as llm:
        found: dict[str, Any] = {}
        for method, more in step["methods"].items():
            llm.use(method, **more)
            found[method] = [answers(llm, asked) for asked in step["asked"]]
        found["left early"] = left_early(llm, step["asked"][-1])
        found["refused"] = refused(lambda: llm.use("amusd"), lambda: llm.trace("rounds.jsonl")) if tp else []
        return found


def refused(*calls: Any) -> list[str]:
    """Return the messages of calls that are refused."""
    found = []
    for call in calls:
        try:
            call()
        except (ForewordError, SystemExit) as error:
            found.append(str(error))
    return found


def die(file: Path) -> None:
    """End this process when the first rank says so, as a crash does."""
    while not file.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_to_be_ended(folder: str, file: Path) -> None:
    """Generate while the other rank dies. The first rank waits for it then, in a sum."""
    if not FIRST:
        Thread(target=die, args=(file,), daemon=True).start()
    llm = foreword.load(folder, "plain", device="cpu", dtype="float32", tp=2, threads=1)
    for _ in llm.stream([5, 6, 7], max_new_tokens=400, ignore_eos=True):
        file.touch()
    print("all was generated", flush=True)


def main(plan_file: Path, out: Path) -> None:
    plan, tp, found = json.loads(plan_file.read_text()), int(os.environ["WORLD_SIZE"]), []
    for folder, options in plan["refused"]:
        found.append(refused(lambda folder=folder, options=options: foreword.load(folder, device="cpu", **options)))
    for step in plan["steps"]:
        try:
            found.append(run(step, tp))
        except SystemExit:  # another rank: the first one has closed the model
            assert not FIRST
        if FIRST:
            out.write_text(json.dumps(found))
    if plan["dies"]:
        wait_to_be_ended(plan["dies"], out.with_suffix(".now"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
