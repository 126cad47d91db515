"""Traced: wraps a drafter and writes every round to a file, as one line of JSON per sequence: what was drafted, what of it
was accepted, and how the drafter made it, if it says so (`Drafter.sketch`).

Output and rounds are the same as without it. It reads whole drafts from the device, so rounds are not captured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.errors import StorageError


class Traced(Drafter):
    captures = "nothing"

    def __init__(self, inner: Drafter, file: Path, spell: Callable[[int], str]) -> None:
        """`inner`: the drafter. `file`: is overwritten. `spell`: returns a token as text."""
        self.inner, self.file, self.spell = inner, file, spell
        self.sequence_in: dict[int, int] = {}  # slot -> number of its sequence, in the order that they enter
        self.rounds: list[int] = []  # rounds of each sequence so far
        try:
            file.write_text("")
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def bind(self, target: Target, slots: int) -> None:
        self.inner.prepare(target, slots)
        self.shape, self.needs, self.pipelining = self.inner.shape, self.inner.needs, self.inner.pipelining
        self.predicts, self.copies = self.inner.predicts, self.inner.copies

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.inner.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        for slot in state.batch.ids:
            self.sequence_in[slot] = len(self.rounds)
            self.rounds.append(0)
        self.inner.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.inner.read(state, chunk, scores)

    def propose(self, state: State) -> Draft:
        return self.inner.propose(state)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        counts = accepted.count.tolist()
        decided = [row for row, count in enumerate(counts) if count]  # the others are frozen
        lines = [json.dumps(self._line(state, row, draft, accepted), ensure_ascii=False) + "\n" for row in decided]
        self._append("".join(lines).encode())
        self.inner.observe(state, draft, scores, accepted)

    def _append(self, lines: bytes) -> None:
        """Append all lines or none: if they do not fit on the disk, the file is restored."""
        before = None
        try:
            before = self.file.stat().st_size
            with self.file.open("ab") as file:
                file.write(lines)
        except OSError as error:
            if before is not None:
                with suppress(OSError):
                    os.truncate(self.file, before)
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> StorageError:
        reason = f"the trace {self.file} cannot be written ({error})"
        return StorageError(f"{reason}; make room, name another file, or choose a method again to continue without a trace")

    def _line(self, state: State, row: int, draft: Draft, accepted: Accepted) -> dict[str, Any]:
        sequence, size = self.sequence_in[state.batch.ids[row]], int(draft.size[row])
        parents = draft.tree.parent.expand_as(draft.tokens)[row, :size].tolist()
        self.rounds[sequence] += 1
        line = {
            "text": sequence,
            "round": self.rounds[sequence] - 1,
            "nodes": [
                {"token": token, "piece": self.spell(token), "parent": parent}
                for token, parent in zip(draft.tokens[row, :size].tolist(), parents, strict=True)
            ],
            "accepted": accepted.path[row, : int(accepted.count[row])].tolist(),
            "next": self.spell(int(accepted.next[row])),
            "next_token": int(accepted.next[row]),
        }
        sketch = self.inner.sketch(row)
        for node in sketch.get("nodes", ()):
            node["piece"] = self.spell(node["token"])
        return line | ({"graph": sketch} if sketch else {})

    def decided(self, state: State, emission: Emission) -> None:
        self.inner.decided(state, emission)

    def end(self, slots: Sequence[int]) -> bool | None:
        return self.inner.end(slots)

    def close(self) -> None:
        self.inner.close()
