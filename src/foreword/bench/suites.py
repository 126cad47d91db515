"""What is asked: prompt sets by name or file, and the samples of them that have names of their own.

In: the words of `--prompts`: a file, NAME=FILE, or `builtin`. Out: `Suite`s. A suite that is called by the name of a sample
holds that sample of its file. The built-in set is sixty prompts in six categories, written for this project, so that the
command works where there is nothing else.
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

# By question number. Eight of each of the six groups, evenly spaced in one half of the file; of MT-bench, one of each of its
# eight kinds. They are written down, so that the whole file and that half of it give the same sample.
SAMPLES: dict[str, tuple[int, ...]] = {
    "spec_bench_48": (
        *(81, 91, 101, 112, 122, 131, 142, 153),  # multi-turn conversation
        *(161, 169, 182, 198, 210, 217, 227, 233),  # translation
        *(243, 250, 262, 272, 278, 288, 293, 308),  # summarization
        *(321, 331, 341, 349, 362, 371, 382, 392),  # question answering
        *(401, 413, 422, 438, 448, 455, 463, 469),  # mathematical reasoning
        *(481, 495, 503, 511, 520, 526, 542, 553),  # retrieval-augmented generation
    )
}


@dataclass(frozen=True)
class Suite:
    name: str
    prompts: list[Prompt]

    def groups(self) -> dict[str, list[Prompt]]:
        return groups(self.prompts)


def read_suite(words: str = BUILTIN, limit: int | None = None, per_group: int | None = None) -> Suite:
    """FILE, NAME=FILE or `builtin`; of it the first `limit` prompts, at most `per_group` of each group."""
    name, file = _named(words)
    every = name in SAMPLES or per_group is not None  # of which some are chosen
    prompts = _told_apart(read_prompts(file, None if every else limit))
    if name in SAMPLES:
        prompts = _sample(name, prompts)
    if per_group is not None:
        prompts = spread(prompts, per_group)
    return Suite(name, prompts[:limit])


def read_suites(asked: Sequence[str], limit: int | None = None, per_group: int | None = None) -> list[Suite]:
    """Several prompt sets; of more than one, prompts are called by their set's name too."""
    found = [read_suite(words, limit, per_group) for words in asked or (BUILTIN,)]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise PromptError(f"two prompt sets are called the same: {', '.join(names)}; name them, as in mine=questions.jsonl")
    if len(found) == 1:
        return found
    return [Suite(one.name, [replace(prompt, id=f"{one.name}/{prompt.id}") for prompt in one.prompts]) for one in found]


def _named(words: str) -> tuple[str, str | Path]:
    if words == BUILTIN:
        return BUILTIN, BUILTIN_FILE
    name, equals, file = words.partition("=")
    if equals and re.fullmatch(r"\w+", name):
        return name, file
    if words in SAMPLES:
        raise PromptError(f"{words} is a sample of a file; say of which: {words}=FILE")
    return ("stdin" if words == "-" else Path(words).name.split(".")[0]), words


def _told_apart(prompts: list[Prompt]) -> list[Prompt]:
    """Reports call prompts by their ids: of several with one id, the later ones get a number."""
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
    """The number of a question, also where a name stands before it."""
    found = re.search(r"(\d+)$", name)
    return int(found[1]) if found else None
