"""The tokens that a grammar allows after the rows of a draft: those of a new matcher that reads the way to each row."""

import random
from dataclasses import replace

import pytest
import torch

from doubles import (
    CONTEXT,
    END,
    GRAMMAR_COMPILER,
    VOCABULARY,
    Liar,
    drafter,
    engine,
    json_ids,
    path_to,
    requests,
    rerunning,
    state_of,
    target,
    truth,
)
from foreword.core.draft import Draft, Tree
from foreword.engine.engine import Engine
from foreword.engine.grammar import Grammars, linked
from foreword.engine.graph import GraphedLoop
from foreword.engine.request import EngineLimits, Request
from foreword.errors import InputError
from foreword.methods import make
from foreword.ops.bitmasks import drop_barred, words_of
from foreword.text.grammar import GrammarSpec

SCHEMA = GrammarSpec(
    "json_schema",
    '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"array","items":{"enum":["ab",null,true]}}},'
    '"required":["a","b"]}',
)
TEXT = '{"a": 120, "b": ["ab", null, true, "ab"]}'


def allowed_by(tokens: list[int], spec: GrammarSpec = SCHEMA) -> set[int] | None:
    """Return the tokens allowed after some others; None if the grammar refuses these, or has ended."""
    matcher, words = GRAMMAR_COMPILER.matcher(spec), torch.zeros(1, words_of(VOCABULARY), dtype=torch.int32)
    if not all(matcher.accept_token(token) for token in tokens) or matcher.is_terminated():
        return None
    matcher.fill_next_token_bitmask(words)
    return those(words[0])


def those(words: torch.Tensor) -> set[int]:
    scores = drop_barred(torch.zeros(1, 1, VOCABULARY), words.view(1, 1, -1))
    return set((scores[0, 0] == 0).nonzero().flatten().tolist())


def grown(text: list[int], place: int, generator: random.Random) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a tree: the text after `place`, and three wrong tokens next to each of its tokens."""
    tokens, parents, last = [text[place]], [0], 0
    for token in [*text[place + 1 : place + 9], END]:
        siblings = [token, *(generator.randrange(VOCABULARY) for _ in range(3))]
        order = generator.sample(range(4), 4)
        tokens += [siblings[index] for index in order]
        parents += [last] * 4
        last = len(tokens) - 4 + order.index(0)
    return tokens, parents


def test_every_row_has_the_tokens_that_a_new_matcher_allows() -> None:
    """At several places of a text. One slot has no grammar; the rows past a draft's size are left as they are."""
    text, generator, compared = json_ids(TEXT), random.Random(0), 0
    for place in range(0, len(text) - 1, 4):
        grammars = Grammars(GRAMMAR_COMPILER, VOCABULARY)
        grammars.begin(1, SCHEMA)
        assert grammars.follow(1, text[: place + 1]) and grammars.follow(0, [5])
        tokens, parents = grown(text, place, generator)
        tree = Tree(torch.tensor([parents, parents]))
        draft = Draft(torch.tensor([tokens, tokens]), tree, torch.tensor([len(tokens), len(tokens) - 2]))
        found = grammars.constrain(state_of([[3, 4], [3, 4]]), draft).allowed
        assert found is not None and found.dtype == torch.int32
        assert (found[0] == -1).all() and (found[1, -2:] == -1).all()
        for row in range(len(tokens) - 2):
            way = [tokens[node] for node in path_to(parents, row)[1:]]
            expected = allowed_by(text[: place + 1] + way)
            if expected is not None:
                compared += 1
                assert those(found[1, row]) == expected
    assert compared > 60


def test_children_are_linked_in_their_order() -> None:
    child, sibling = linked([0, 0, 0, 1, 2, 1])
    assert child.tolist() == [1, 3, 4, -1, -1, -1] and sibling.tolist() == [-1, 2, -1, 5, -1, -1]
    assert [column.tolist() for column in linked([0])] == [[-1], [-1]]


def test_the_last_bits_of_a_vocabulary_that_fills_no_word() -> None:
    allowed = torch.tensor([[[1 << 31, 1 | 1 << 15]]], dtype=torch.int64).to(torch.int32)
    assert those(allowed[0, 0]) == {31, 32, 47}


def test_the_end_is_allowed_exactly_where_the_grammar_may_end() -> None:
    ab, spec = json_ids("ab"), GrammarSpec("regex", "(ab){2,3}")
    ends = [END in (allowed_by([*ab] * count, spec) or ()) for count in range(4)]
    assert ends == [False, False, True, True] and allowed_by([*ab] * 3, spec) == {END}
    assert allowed_by([*ab, *ab, END], spec) is None


def test_rounds_without_a_grammar_have_none_of_this() -> None:
    """Their stages are those of before, their drafts have no masks, and a recorded round stays one graph."""
    model, asked = target(), requests(3, max_new_tokens=8)
    steps = engine(drafter("token_recycling", model), model)
    steps.loop = rerunning(steps.loop, steps.drafter)  # type: ignore[arg-type]
    assert isinstance(steps.loop, GraphedLoop)
    steps.generate(asked)
    alone = list(steps.loop.buckets)
    assert not steps.loop.proposals and not any(kind.grammar for _, _, kind, *_ in alone)
    steps.generate([replace(asked[0], grammar=SCHEMA), *asked[1:]])
    assert steps.loop.proposals and any(bucket.graph for bucket in steps.loop.proposals.values())
    with_grammar = [key for key in steps.loop.buckets if key[2].grammar]
    assert with_grammar and all(steps.loop.buckets[key].draft is not None for key in with_grammar)


def test_a_replayed_check_reads_the_tree_of_its_own_round() -> None:
    """Trees of one size whose shape changes from round to round."""
    fixed = Draft(torch.zeros(1, 4, dtype=torch.long), Tree(torch.tensor([[0, 0, 0, 0]])), torch.tensor([4])).clone()
    other = Draft(torch.tensor([[5, 6, 7, 8]]), Tree(torch.tensor([[0, 0, 1, 2]])), torch.tensor([3]))
    masks = torch.arange(8, dtype=torch.int32).view(1, 4, 2)
    fixed, other = (replace(draft, allowed=masks * factor) for draft, factor in ((fixed, 0), (other, 1)))
    fixed.overwrite(other)
    assert fixed.tree.parent.tolist() == [[0, 0, 1, 2]] and fixed.tree.depth.tolist() == [[0, 1, 2, 3]]
    assert torch.equal(fixed.tree.ancestors, other.tree.ancestors) and torch.equal(fixed.allowed, masks)  # type: ignore[arg-type]
    assert fixed.tokens.tolist() == [[5, 6, 7, 8]] and fixed.size.tolist() == [3]
    assert other.head(2).allowed.tolist() == [[[0, 1], [2, 3]]]  # type: ignore[union-attr]


def test_rounds_are_read_at_once_only_while_a_grammar_runs() -> None:
    """The first step after the request enters reads what is unread; from then on nothing is, until it leaves."""
    model, (free, bound) = target(), requests(2, max_new_tokens=40)
    free = replace(free, ignore_eos=True)
    bound = replace(bound, prompt=bound.prompt[:3], max_new_tokens=4, grammar=GrammarSpec("regex", "[0-9]{9}"))
    steps = engine(Liar(), model, late=True)
    runs = [steps.add(free)]
    steps.step()
    assert steps.unread is not None
    runs.append(steps.add(bound))
    while not runs[1].done:
        steps.step()
        assert steps.unread is None
    steps.step()
    assert steps.unread is not None
    while steps.busy:
        steps.step_for((), 4)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in (free, bound)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"min_new_tokens": 2}, "min_new_tokens is 2 and regex is given"),
        ({"ignore_eos": True}, "ignore_eos is True and regex is given"),
    ],
)
def test_settings_that_keep_an_output_from_ending_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        engine(make("plain")).add(Request((5,), grammar=GrammarSpec("regex", "a"), **settings))  # type: ignore[arg-type]


def test_a_grammar_that_cannot_be_served_is_refused_before_it_is_queued() -> None:
    asked = Request((5,), grammar=GrammarSpec("regex", "("))
    with pytest.raises(InputError, match="regex cannot be used: Regex parsing error"):
        engine(make("plain")).add(asked)
    model = target()
    with pytest.raises(InputError, match="needs the tokenizer"):
        Engine(model, make("plain"), max_context=CONTEXT).add(asked)
    with pytest.raises(InputError, match="needs an end token, and this model has none"):
        EngineLimits(CONTEXT, CONTEXT, VOCABULARY).check(asked)
