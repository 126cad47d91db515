"""Prompt sets by name or file, and named samples of them.

In: the values of `--prompts`: a file, NAME=FILE, or `builtin`. Out: `Suite`s. If NAME is the name of a sample, the suite
holds that sample of its file. The built-in set has sixty prompts in six categories, written for this project, so that the
command works without any file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.errors import PromptError
from foreword.text import Prompt, groups, read_prompts, spread

BUILTIN = "builtin"
BUILTIN_FILE = Path(__file__).parent / "builtin.jsonl"

# Half of Spec-Bench by question number: forty of each of its six groups; of MT-bench, five of each of its eight kinds.
HALF = (
    # multi-turn conversation
    *(81, 83, 86, 89, 90, 91, 92, 94, 99, 100, 101, 104, 105, 106, 110, 112, 116, 117, 118, 120),
    *(122, 123, 125, 126, 129, 131, 133, 137, 138, 139, 142, 143, 145, 146, 148, 153, 154, 155, 156, 158),
    # translation
    *(161, 163, 164, 166, 167, 169, 172, 173, 174, 178, 182, 184, 186, 190, 194, 198, 200, 202, 203, 206),
    *(210, 212, 213, 215, 216, 217, 219, 222, 223, 225, 227, 228, 229, 230, 231, 233, 236, 237, 238, 240),
    # summarization
    *(243, 244, 245, 247, 248, 250, 255, 256, 257, 260, 262, 265, 267, 269, 270, 272, 273, 274, 275, 276),
    *(278, 279, 281, 286, 287, 288, 289, 290, 291, 292, 293, 294, 297, 300, 304, 308, 311, 312, 315, 320),
    # question answering
    *(321, 322, 323, 326, 328, 331, 334, 335, 336, 339, 341, 342, 345, 347, 348, 349, 350, 355, 358, 361),
    *(362, 365, 366, 368, 369, 371, 372, 373, 374, 376, 382, 383, 384, 386, 391, 392, 394, 396, 397, 400),
    # mathematical reasoning
    *(401, 404, 405, 407, 411, 413, 415, 417, 418, 420, 422, 424, 432, 436, 437, 438, 439, 442, 443, 447),
    *(448, 450, 451, 452, 453, 455, 457, 459, 461, 462, 463, 464, 466, 467, 468, 469, 471, 472, 474, 476),
    # retrieval-augmented generation
    *(481, 484, 487, 488, 490, 495, 496, 497, 498, 502, 503, 504, 506, 508, 510, 511, 513, 514, 515, 518),
    *(520, 521, 522, 524, 525, 526, 530, 535, 539, 540, 542, 543, 547, 549, 551, 553, 556, 557, 558, 560),
)
# The numbers are listed, so that the whole file and a file with that half of it give the same samples.
# Eight questions of each group that are not in the half: nothing is tuned on them, so headline figures use these.
HELD_OUT = (
    *(88, 98, 109, 119, 130, 140, 150, 160),
    *(220, 221, 224, 226, 232, 234, 235, 239),
    *(309, 310, 313, 314, 316, 317, 318, 319),
    *(387, 388, 389, 390, 393, 395, 398, 399),
    *(465, 470, 473, 475, 477, 478, 479, 480),
    *(545, 546, 548, 550, 552, 554, 555, 559),
)
SAMPLES: dict[str, tuple[int, ...]] = {"spec_bench_240": HALF, "spec_bench_48": HALF[::5], "spec_bench_48b": HELD_OUT}


@dataclass(frozen=True)
class Suite:
    name: str
    prompts: list[Prompt]

    def groups(self) -> dict[str, list[Prompt]]:
        return groups(self.prompts)


def read_suite(spec: str = BUILTIN, limit: int | None = None, per_group: int | None = None) -> Suite:
    """Read FILE, NAME=FILE or `builtin`: the first `limit` prompts, at most `per_group` of each group."""
    name, file = _named(spec)
    every = name in SAMPLES or per_group is not None  # read all; some are chosen below
    prompts = _with_unique_ids(read_prompts(file, None if every else limit))
    if name in SAMPLES:
        prompts = _sample(name, prompts)
    if per_group is not None:
        prompts = spread(prompts, per_group)
    return Suite(name, prompts[:limit])


def read_suites(specs: Sequence[str], limit: int | None = None, per_group: int | None = None) -> list[Suite]:
    """Read prompt sets; if there are several, prompt ids begin with the name of their set."""
    found = [read_suite(spec, limit, per_group) for spec in specs or (BUILTIN,)]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise PromptError(f"two prompt sets have the same name: {', '.join(names)}; name them, as in mine=questions.jsonl")
    if len(found) == 1:
        return found
    return [Suite(one.name, [replace(prompt, id=f"{one.name}/{prompt.id}") for prompt in one.prompts]) for one in found]


def _named(spec: str) -> tuple[str, str | Path]:
    if spec == BUILTIN:
        return BUILTIN, BUILTIN_FILE
    name, equals, file = spec.partition("=")
    if equals and re.fullmatch(r"\w+", name):
        return name, file
    if spec in SAMPLES:
        raise PromptError(f"{spec} is a sample of a file; name the file: {spec}=FILE")
    return ("stdin" if spec == "-" else Path(spec).name.split(".")[0]), spec


def _with_unique_ids(prompts: list[Prompt]) -> list[Prompt]:
    """Make ids unique, because reports name prompts by id: later prompts with the same id get a number."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        seen[prompt.id] += 1
        found.append(replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}") if seen[prompt.id] > 1 else prompt)
    return found


def _sample(name: str, prompts: list[Prompt]) -> list[Prompt]:
    by_number = {number: prompt for prompt in prompts if (number := _number(prompt.id)) is not None}
    missing = [number for number in SAMPLES[name] if number not in by_number]
    if missing:
        raise PromptError(
            f"{name} needs {len(SAMPLES[name])} questions of Spec-Bench, and {len(missing)} of them are not in the file, "
            f"the first being number {missing[0]}; give Spec-Bench's question.jsonl"
        )
    return [by_number[number] for number in SAMPLES[name]]


def _number(name: str) -> int | None:
    """Return the number at the end of a question's id."""
    found = re.search(r"(\d+)$", name)
    return int(found[1]) if found else None
