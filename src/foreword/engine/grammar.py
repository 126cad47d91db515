"""Grammars of running requests: which tokens each allows after every row of a draft.

In: the `GrammarSpec` of a request when it enters, drafts before they are verified, tokens when they are emitted. Out: drafts
with `allowed`. A matcher has read exactly the tokens that the host has. So rounds with a grammar are read at once, and the
next draft begins after the last token that its matcher has read. Drafters know nothing of grammars: a draft token that a
grammar bars is never chosen after its parent, and so never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foreword.core.draft import Draft
from foreword.core.state import State
from foreword.errors import InputError
from foreword.ops.bitmasks import words_of
from foreword.ops.rounds import rows_that_count
from foreword.ops.sending import sent_along
from foreword.text.grammar import GrammarCompiler, GrammarSpec

if TYPE_CHECKING:
    from xgrammar import GrammarMatcher


class Grammars:
    """A matcher for each slot whose request has a grammar."""

    def __init__(self, compiler: GrammarCompiler | None, vocabulary: int) -> None:
        """`compiler`: None if the tokenizer is not known; then grammars are refused."""
        self.compiler, self.words = compiler, words_of(vocabulary)
        self.matchers: dict[int, GrammarMatcher] = {}

    def check(self, spec: GrammarSpec) -> None:
        """Compile a grammar, so that it is at hand when its request enters. Any thread may call this."""
        if self.compiler is None:
            raise InputError("a grammar needs the tokenizer, which this engine does not have; give Engine a GrammarCompiler")
        self.compiler.compiled(spec)

    def begin(self, slot: int, spec: GrammarSpec | None) -> None:
        """A request enters."""
        if spec is not None:
            assert self.compiler is not None, "requests are checked before they enter"
            self.matchers[slot] = self.compiler.matcher(spec)

    def end(self, slot: int) -> None:
        """A request leaves."""
        self.matchers.pop(slot, None)

    def follow(self, slot: int, tokens: Sequence[int]) -> bool:
        """Read the tokens that a round decided. Return whether the grammar allows them all."""
        matcher = self.matchers.get(slot)
        return matcher is None or all(matcher.accept_token(token) for token in tokens)

    def constrain(self, state: State, draft: Draft) -> Draft:
        """Return a draft with the tokens that are allowed after each of its rows."""
        columns = (draft.tokens, draft.tree.parent.expand_as(draft.tokens))
        tokens, parents = (column.cpu() for column in columns)
        sizes = rows_that_count(state, draft.size).tolist()
        allowed = torch.full((*tokens.shape, self.words), -1, dtype=torch.int32)
        for row, slot in enumerate(state.batch.ids):
            matcher, size = self.matchers.get(slot), sizes[row]
            if matcher is not None:
                child, sibling = linked(parents[row, :size].tolist())
                matcher.traverse_draft_tree(child, sibling, tokens[row, :size].clone(), allowed[row, :size])
        return replace(draft, allowed=sent_along(allowed, draft.tokens.device))


def linked(parents: list[int]) -> tuple[Tensor, Tensor]:
    """Return the first child of each row, and its next sibling; -1 where there is none."""
    child, sibling = ([-1] * len(parents) for _ in range(2))
    for row in range(len(parents) - 1, 0, -1):
        parent = parents[row]
        if parent < row:
            child[parent], sibling[row] = row, child[parent]
    return torch.tensor(child), torch.tensor(sibling)
