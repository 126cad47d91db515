"""Distil: let the target answer prompts, and keep its answers as training data.

A dialogue is a prompt and the number of its answer. Dialogues are sorted by length within a window and enter the engine as
slots become free. A dialogue of several turns returns with the target's own reply, and its prefix is still cached. Finished
dialogues are stored in the order of the prompt file. So the bytes depend only on model, prompts and recipe, an interrupted
run resumes after the last stored dialogue, and no prompt is answered twice.
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

# A GPU reads many prompts in one pass, which is padded to the longest and costs about as much as a pass over one. So WINDOW
# times as many prompts as there are slots are sorted by length, and they enter once 1 / ADMIT of the slots is free. A CPU
# reads one prompt at a time. The host need not see every round: it reads ROUNDS of them while the next ones run.
WINDOW = {"cpu": 1, "cuda": 4}
ADMIT = 8
ROUNDS = {"cpu": 1, "cuda": 8}
SAVE_S = 5.0  # seconds between saves


@dataclass(frozen=True)
class Recipe:
    """The settings that decide which tokens are generated. `drop_loops`: drop answers with a larger share of repetition.
    `tokens`: stop once the target has generated this many."""

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
            raise InputError(f"drop_loops is {self.drop_loops}; it is a share of an answer, at least 0 and below 1")
        if self.answers > 1 and self.temperature == 0:
            raise InputError(f"{self.answers} answers at temperature 0 would all be equal; set a temperature above 0")
        self.sampling(0)  # checks the other fields

    def sampling(self, key: int) -> Sampling:
        """Return the sampling of one dialogue. Its seed depends on the recipe's seed and on `key`, not on the batch."""
        return Sampling(self.temperature, top_p=self.top_p, seed=self.seed).derived(key)


@dataclass
class DistillProgress:
    """How far a run is. `dialogues`: prompts times answers."""

    dialogues: int
    done: int = 0
    written_now: int = 0  # by this run, dropped answers included
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Tokens that the target generated and that were kept, earlier runs included."""
        return self.counts["written"]

    @property
    def tokens_per_second(self) -> float:
        return self.written_now / self.seconds if self.seconds else 0.0

    @property
    def skipped(self) -> dict[str, int]:
        """How many dialogues gave nothing, or less than asked, by reason."""
        known = ("sequences", "tokens", "written", "answers", "loops")
        return {reason: count for reason, count in self.counts.items() if reason not in known}


@dataclass(frozen=True)
class Rules:
    """The recipe and the model, as a dialogue needs them."""

    recipe: Recipe
    tokenizer: Tokenizer
    context: int

    def refuses(self, ids: Sequence[int]) -> str | None:
        """Return why a prompt cannot be used, or None. The context must have room for a whole answer."""
        if len(ids) + self.recipe.max_new_tokens > self.context:
            return "longer than the context allows"
        return None


@dataclass(eq=False)
class Dialogue:
    """One prompt, its current turn, and the answers so far."""

    index: int
    prompt: Prompt
    answer: int
    rules: Rules
    ids: tuple[int, ...] = ()  # the prompt of the next answer
    messages: list[Message] = field(default_factory=list)
    turn: int = 0
    sequences: list[tuple[list[int], list[tuple[int, int]]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def request(self) -> Request:
        sampling = self.rules.recipe.sampling(key_of(f"{self.prompt.id}/{self.answer}"))
        return Request(self.ids, sampling, self.rules.recipe.max_new_tokens, reuse=self.turn > 0)

    def take_answer(self, run: Running) -> bool:
        """Store an answer. Return True if another turn follows."""
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
        self.messages += [{"role": "assistant", "content": self.rules.tokenizer.decode(run.tokens)}, *turns[self.turn]]
        return True

    def _keep(self, answer: list[int]) -> None:
        """Append the answer to the last sequence if that is its prefix. If the tokenizer encodes an earlier reply otherwise
        than the target generated it, start a new sequence, which does not count the earlier replies again."""
        sequence, span = [*self.ids, *answer], (len(self.ids), len(self.ids) + len(answer))
        last = self.sequences[-1] if self.sequences else None
        if last and sequence[: len(last[0])] == last[0]:
            self.sequences[-1] = sequence, [*last[1], span]
        else:
            self.sequences.append((sequence, [span]))

    def set_prompt(self, ids: list[int] | PromptError) -> bool:
        """Set the prompt of the next answer. Return False, and count the reason, if it cannot be used."""
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
    """Let the target answer `prompts`, and store its answers in `folder`. Resumes an interrupted run."""
    engine, recipe = llm.engine, recipe or Recipe()
    if recipe.max_new_tokens >= engine.max_context:
        raise InputError(
            f"max_new_tokens is {recipe.max_new_tokens}, which leaves no room for a prompt in a context of "
            f"{engine.max_context}; lower it, or load with a larger max_context"
        )
    writer = ShardWriter(Path(folder), _description(llm, prompts, recipe, shard_tokens, command), shard_tokens)
    try:
        progress = DistillProgress(len(prompts) * recipe.answers, writer.manifest["done"])
        progress.counts.update(writer.manifest["counts"])
        if not writer.complete:
            rules = Rules(recipe, llm.tokenizer, engine.max_context)
            _write(llm, _dialogues(prompts, rules, progress.done), writer, recipe, progress, save_s, show)
        return progress
    finally:
        engine.give_up()
        writer.close()


def _write(
    llm: LLM,
    dialogues: Iterator[Dialogue],
    writer: ShardWriter,
    recipe: Recipe,
    progress: DistillProgress,
    save_s: float,
    show: Callable[[DistillProgress], None] | None,
) -> None:
    started = saved = time.perf_counter()
    for dialogue in _in_order(_answered(llm, _by_length(dialogues, llm), progress), progress.done):
        _store(dialogue, writer, progress)
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
        raise PromptError(f"none of {progress.done} prompts gave an answer that was kept ({reasons})")
    writer.manifest["complete"] = True
    _save(writer, progress)


def _store(dialogue: Dialogue, writer: ShardWriter, progress: DistillProgress) -> None:
    for tokens, written in dialogue.sequences:
        writer.add(tokens, written, key_of(dialogue.prompt.id))
        dialogue.counts["sequences"] += 1
        dialogue.counts["tokens"] += len(tokens)
        dialogue.counts["written"] += sum(stop - start for start, stop in written)
    progress.done += 1
    progress.counts.update(dialogue.counts)


def _save(writer: ShardWriter, progress: DistillProgress) -> None:
    writer.manifest |= {"done": progress.done, "counts": dict(progress.counts)}
    writer.save()


# Dialogues ------------------------------------------------------------------------------------------------------------


def script(prompt: Prompt) -> list[list[Message]]:
    """Return the messages before each answer. The target's own replies replace those in the file."""
    if prompt.messages is None:
        return [[{"role": "user", "content": turn}] for turn in prompt.turns]
    turns: list[list[Message]] = [[]]
    for message in prompt.messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return turns[:-1]


def _dialogues(prompts: Sequence[Prompt], rules: Rules, first: int) -> Iterator[Dialogue]:
    answers = rules.recipe.answers
    for index in range(first, len(prompts) * answers):
        prompt = prompts[index // answers]
        yield Dialogue(index, prompt, index % answers, rules, messages=list(script(prompt)[0]))


def _by_length(dialogues: Iterator[Dialogue], llm: LLM) -> Iterator[Dialogue]:
    """Tokenize window by window, and yield short prompts first, so that prompts read in one pass have similar lengths."""
    size = WINDOW[llm.model.device.type] * llm.engine.slots.count
    while window := list(islice(dialogues, size)):
        asked = {id(one.prompt): _as_prompt(one.messages) for one in window}  # once for all answers of a prompt
        encoded = dict(zip(asked, llm.tokenizer.encode_all(list(asked.values())), strict=True))
        for one in window:
            one.set_prompt(encoded[id(one.prompt)])
        yield from sorted(window, key=lambda dialogue: len(dialogue.ids))


def _as_prompt(messages: list[Message]) -> str | list[Message]:
    """Return a single message as a string, which models without a chat template accept too."""
    return messages[0]["content"] if len(messages) == 1 else messages


def _answered(llm: LLM, dialogues: Iterator[Dialogue], progress: DistillProgress) -> Iterator[Dialogue]:
    """Yield dialogues as they end, in any order. Further turns wait for the next admission and enter before new dialogues:
    their prefix is still in its slot."""
    engine = llm.engine
    slots, device = engine.slots.count, llm.model.device.type
    least = 1 if device == "cpu" else max(1, slots // ADMIT)
    active: dict[Running, Dialogue] = {}
    again: list[Dialogue] = []
    while True:
        free = slots - len(active)
        if free < least and active:
            free = 0
        elif again:
            asked = llm.tokenizer.encode_all([one.messages for one in again])
            for one, ids in zip(again, asked, strict=True):
                if one.set_prompt(ids):
                    active[engine.add(one.request())] = one
                    free -= 1
                else:
                    yield one
            again = []
        while free and (new := next(dialogues, None)):
            if new.ids:
                active[engine.add(new.request())] = new
                free -= 1
            else:
                yield new
        if not active and not again:
            return
        for run in engine.step_for((), ROUNDS[device]):
            answered = active.pop(run, None)
            if answered is None:  # a request of another caller
                continue
            progress.written_now += len(run.tokens)
            if answered.take_answer(run):
                again.append(answered)
            else:
                yield answered


def _in_order(dialogues: Iterator[Dialogue], first: int) -> Iterator[Dialogue]:
    early: dict[int, Dialogue] = {}
    for dialogue in dialogues:
        early[dialogue.index] = dialogue
        while first in early:
            yield early.pop(first)
            first += 1


def _description(
    llm: LLM, prompts: Sequence[Prompt], recipe: Recipe, shard_tokens: int | None, command: str | None
) -> dict[str, Any]:
    """Describe a run for the manifest. A run with other `settings` may not resume it."""
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
