"""DISTIL: prompts -> what the target writes when asked, as training data.

Talks (a prompt, and which of its answers) wait in windows sorted by length and enter the engine as slots fall free; a talk
of several turns comes back with the target's own reply in it and finds its beginning still cached. Finished talks leave in
the order of the prompt file, whoever was quicker: so the bytes depend on model, prompts and recipe alone, a cut run goes on
after the last talk that was saved, and no prompt is answered twice.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from foreword import __version__
from foreword.api import LLM
from foreword.core.sampling import Sampling
from foreword.engine.request import Request, Running
from foreword.errors import InputError, PromptError
from foreword.model.fingerprint import Fingerprint
from foreword.text import Message, Prompt, Tokenizer, loop_share
from foreword.train.shards import ShardWriter, key_of

# A GPU reads many prompts in one pass, which is padded to the longest and costs about the same for one: so prompts of
# WINDOW times the slots are sorted by length, and enter when a LOT-th of the slots is free. A CPU reads one at a time.
# Nor need the host look at every round: it reads ROUNDS of them while the next ones run.
WINDOW = {"cpu": 1, "cuda": 4}
LOT = 8
ROUNDS = {"cpu": 1, "cuda": 8}
SAVE_S = 5.0  # seconds between two times that the work is saved


@dataclass(frozen=True)
class Recipe:
    """What decides which tokens are written. `drop_loops`: answers with a larger share of repetition are left out.
    `tokens`: stop once the target has written so many."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    answers: int = 1
    drop_loops: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "answers", *(["tokens"] if self.tokens is not None else [])):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.drop_loops is not None and not 0 <= self.drop_loops < 1:
            raise InputError(f"drop_loops is {self.drop_loops}; it is a share of an answer, from 0 to below 1")
        if self.answers > 1 and self.temperature == 0:
            raise InputError(f"{self.answers} answers at temperature 0 would all be the same; set a temperature")
        self.sampling(0)  # which checks the others

    def sampling(self, key: int) -> Sampling:
        """Of one talk: its seed depends on the recipe's and on the talk's key, not on who is answered beside it."""
        return Sampling(self.temperature, top_p=self.top_p, seed=self.seed).derived(key)


@dataclass
class DistillProgress:
    """How far a run is. `talks` are prompts times answers."""

    talks: int
    done: int = 0
    written_now: int = 0  # by this run, dropped answers included
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """What the target wrote and what was kept, earlier runs included."""
        return self.counts["written"]

    @property
    def tokens_per_second(self) -> float:
        return self.written_now / self.seconds if self.seconds else 0.0

    @property
    def skipped(self) -> dict[str, int]:
        """Why some talks brought nothing, or less than was asked, and how many."""
        known = ("sequences", "tokens", "written", "answers", "loops")
        return {reason: count for reason, count in self.counts.items() if reason not in known}


@dataclass(frozen=True)
class Rules:
    """What a talk needs to know of the recipe and the model."""

    recipe: Recipe
    tokenizer: Tokenizer
    context: int

    def refuses(self, ids: Sequence[int]) -> str | None:
        """Every answer has all of its room, so that none is cut by the length of what was asked."""
        if len(ids) + self.recipe.max_new_tokens > self.context:
            return "longer than the context allows"
        return None


@dataclass(eq=False)
class Dialogue:
    """One prompt on its way through its turns, and what was written so far."""

    index: int
    prompt: Prompt
    answer: int
    rules: Rules
    ids: tuple[int, ...] = ()  # what stands before the answer to come
    said: list[Message] = field(default_factory=list)
    turn: int = 0
    sequences: list[tuple[list[int], list[tuple[int, int]]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def request(self) -> Request:
        sampling = self.rules.recipe.sampling(key_of(f"{self.prompt.id}/{self.answer}"))
        return Request(self.ids, sampling, self.rules.recipe.max_new_tokens, reuse=self.turn > 0)

    def hear(self, run: Running) -> bool:
        """Take an answer down; True if another turn is to be answered."""
        if run.error is not None:
            self.counts["the target answered NaN"] += 1
            return False
        self.counts["answers"] += 1
        limit = self.rules.recipe.drop_loops
        if limit is not None and loop_share(run.tokens) > limit:
            self.counts["loops"] += 1
            return False
        self._keep(run.tokens)
        self.turn += 1
        turns = script(self.prompt)
        if self.turn == len(turns):
            return False
        self.said += [{"role": "assistant", "content": self.rules.tokenizer.decode(run.tokens)}, *turns[self.turn]]
        return True

    def _keep(self, answer: list[int]) -> None:
        """The text goes on in the sequence that it begins with; where the tokenizer reads the target's words otherwise
        than the target wrote them, it is a sequence of its own, in which the earlier replies are not counted again."""
        text, span = [*self.ids, *answer], (len(self.ids), len(self.ids) + len(answer))
        last = self.sequences[-1] if self.sequences else None
        if last and text[: len(last[0])] == last[0]:
            self.sequences[-1] = text, [*last[1], span]
        else:
            self.sequences.append((text, [span]))

    def asks(self, ids: list[int] | PromptError) -> bool:
        """What was said so far, as tokens; False, with the reason counted, where that cannot be asked."""
        turn = "later turns " if self.turn else ""
        if isinstance(ids, PromptError):
            self.counts[f"{turn}refused by the tokenizer"] += 1
        elif refused := self.rules.refuses(ids):
            self.counts[f"{turn}{refused}"] += 1
        else:
            self.ids = tuple(ids)
            return True
        return False


def distill(
    llm: LLM,
    prompts: Sequence[Prompt],
    folder: str | Path,
    recipe: Recipe | None = None,
    *,
    shard_tokens: int | None = None,
    save_s: float = SAVE_S,
    command: str | None = None,
    show: Callable[[DistillProgress], None] | None = None,
) -> DistillProgress:
    """Have the target answer `prompts`, and leave what it wrote in `folder`; goes on where an earlier run was cut."""
    engine, recipe = llm.engine, recipe or Recipe()
    if recipe.max_new_tokens >= engine.max_context:
        raise InputError(
            f"max_new_tokens is {recipe.max_new_tokens}, which leaves no room for a prompt in a context of "
            f"{engine.max_context}; ask for fewer, or load with a larger max_context"
        )
    writer = ShardWriter(Path(folder), _about(llm, prompts, recipe, shard_tokens, command), shard_tokens)
    try:
        progress = DistillProgress(len(prompts) * recipe.answers, writer.manifest["done"])
        progress.counts.update(writer.manifest["counts"])
        if not writer.complete:
            rules = Rules(recipe, llm.tokenizer, engine.max_context)
            _write(llm, _talks(prompts, rules, progress.done), writer, recipe, progress, save_s, show)
        return progress
    finally:
        engine.give_up()
        writer.close()


def _write(
    llm: LLM,
    talks: Iterator[Dialogue],
    writer: ShardWriter,
    recipe: Recipe,
    progress: DistillProgress,
    save_s: float,
    show: Callable[[DistillProgress], None] | None,
) -> None:
    started = saved = time.perf_counter()
    for talk in _in_order(_answered(llm, _by_length(talks, llm), progress), progress.done):
        _take_down(talk, writer, progress)
        now = time.perf_counter()
        progress.seconds = now - started
        if show:
            show(progress)
        enough = recipe.tokens is not None and progress.tokens >= recipe.tokens
        if enough or now - saved >= save_s:
            _save(writer, progress)
            saved = now
        if enough:
            break
    if not progress.counts["sequences"]:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in progress.counts.items() if count)
        raise PromptError(f"none of {progress.done} prompts brought an answer that was kept ({reasons})")
    writer.manifest["complete"] = True
    _save(writer, progress)


def _take_down(talk: Dialogue, writer: ShardWriter, progress: DistillProgress) -> None:
    for tokens, written in talk.sequences:
        writer.add(tokens, written, key_of(talk.prompt.id))
        talk.counts["sequences"] += 1
        talk.counts["tokens"] += len(tokens)
        talk.counts["written"] += sum(stop - start for start, stop in written)
    progress.done += 1
    progress.counts.update(talk.counts)


def _save(writer: ShardWriter, progress: DistillProgress) -> None:
    writer.manifest |= {"done": progress.done, "counts": dict(progress.counts)}
    writer.save()


# Talks, in and out -----------------------------------------------------------------------------------------------------


def script(prompt: Prompt) -> list[list[Message]]:
    """What is said before each answer. Replies that stand in the file give way to the target's own."""
    if prompt.messages is None:
        return [[{"role": "user", "content": turn}] for turn in prompt.turns]
    turns: list[list[Message]] = [[]]
    for message in prompt.messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return turns[:-1]


def _talks(prompts: Sequence[Prompt], rules: Rules, first: int) -> Iterator[Dialogue]:
    answers = rules.recipe.answers
    for index in range(first, len(prompts) * answers):
        prompt = prompts[index // answers]
        yield Dialogue(index, prompt, index % answers, rules, said=list(script(prompt)[0]))


def _by_length(talks: Iterator[Dialogue], llm: LLM) -> Iterator[Dialogue]:
    """Window by window, tokenized, the short ones first: prompts that are read in one pass are about equally long."""
    size = WINDOW[llm.model.device.type] * llm.engine.slots.count
    while window := list(islice(talks, size)):
        asked = {id(talk.prompt): _as_prompt(talk.said) for talk in window}  # once for all answers of a prompt
        encoded = dict(zip(asked, llm.tokenizer.encode_all(list(asked.values())), strict=True))
        for talk in window:
            talk.asks(encoded[id(talk.prompt)])
        yield from sorted(window, key=lambda talk: len(talk.ids))


def _as_prompt(said: list[Message]) -> str | list[Message]:
    """A string where it says as much: models without a chat template take one."""
    return said[0]["content"] if len(said) == 1 else said


def _answered(llm: LLM, talks: Iterator[Dialogue], progress: DistillProgress) -> Iterator[Dialogue]:
    """Talks as they end, in any order. Further turns wait for the next lot, and enter it before new talks: their slot is
    still theirs."""
    engine = llm.engine
    slots, device = engine.slots.count, llm.model.device.type
    lot = 1 if device == "cpu" else max(1, slots // LOT)
    active: dict[Running, Dialogue] = {}
    again: list[Dialogue] = []
    while True:
        free = slots - len(active)
        if free < lot and active:
            free = 0
        elif again:
            asked = llm.tokenizer.encode_all([going.said for going in again])
            for going, ids in zip(again, asked, strict=True):
                if going.asks(ids):
                    active[engine.add(going.request())] = going
                    free -= 1
                else:
                    yield going
            again = []
        while free and (talk := next(talks, None)):
            if talk.ids:
                active[engine.add(talk.request())] = talk
                free -= 1
            else:
                yield talk
        if not active and not again:
            return
        for run in engine.step_for((), ROUNDS[device]):
            talk = active.pop(run, None)
            if talk is None:  # somebody else's, written along
                continue
            progress.written_now += len(run.tokens)
            if talk.hear(run):
                again.append(talk)
            else:
                yield talk


def _in_order(talks: Iterator[Dialogue], first: int) -> Iterator[Dialogue]:
    early: dict[int, Dialogue] = {}
    for talk in talks:
        early[talk.index] = talk
        while first in early:
            yield early.pop(first)
            first += 1


def _about(
    llm: LLM, prompts: Sequence[Prompt], recipe: Recipe, shard_tokens: int | None, command: str | None
) -> dict[str, Any]:
    """What the manifest says of a run; `settings` must be equal for another run to go on with it."""
    asked = hashlib.sha256()
    for prompt in prompts:
        asked.update(json.dumps([prompt.id, script(prompt)]).encode())
    settings = asdict(recipe) | {
        "prompts": f"{len(prompts)}, sha256 {asked.hexdigest()[:16]}",
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "max_context": llm.engine.max_context,
        "shard_tokens": shard_tokens,
    }
    versions = {"foreword": __version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "transformers")}
    model = Fingerprint.of(llm.model).to_dict()
    return {"model": model, "settings": settings, "command": command, "versions": versions}
