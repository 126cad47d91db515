"""What echo drafts: the tree that clover2 drafts on the same text, and the chain that prompt_lookup does, in one draft."""

from typing import Any

import pytest
import torch

from doubles import SAMPLINGS, TRAINED, Recorder, engine, paths_of, requests, target, taught, truth
from foreword.core.draft import Draft
from foreword.drafting.trees import BestFirst
from foreword.errors import InputError
from foreword.methods import make, untrained
from foreword.model.cost import CostCurve

OPTIONS = {name: value for name, value in TRAINED["echo"].items() if name not in ("rows", "chain")}


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Of the only sequence; none stands there twice."""
    found = paths_of(draft, 0)
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("links", [6, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_draft_is_that_of_both(sampling: str, links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round on a text that repeats itself. The alone ones write it too, as far as they guess; drafts depend on the
    text, so those behind the same text are compared. Of the chain's six rows all pay, or three."""
    monkeypatch.setattr(BestFirst, "chain_rows", lambda *_: links)
    model = target()
    asked = [*requests(2, SAMPLINGS[sampling], max_new_tokens=30, ignore_eos=True)]
    both = taught("echo", model, rows=24, chain=6, **OPTIONS)
    alone = taught("clover2", model, rows=18, **OPTIONS), make("prompt_lookup", rows=links + 1)
    drafts: list[dict[Any, set[tuple[int, ...]]]] = []
    for one in (both, *alone):
        recorder = Recorder(one)
        for request in asked:
            (run,) = engine(recorder, model, slots=1).generate([request])
            assert run.tokens == truth(model.hf, request)
        drafts.append({tuple(seen.texts[0]): paths(seen.draft) for seen in recorder.proposed})
    together, tree, chain = drafts
    shared = together.keys() & tree.keys() & chain.keys()
    assert len(shared) > 10
    assert all(together[text] == tree[text] | chain[text] for text in shared)
    assert any(not tree[text] >= chain[text] for text in shared) and any(not chain[text] >= tree[text] for text in shared)


def test_rows_bound_both() -> None:
    for rows in (1, 2, 3, 8, 24):
        one: Any = untrained("echo", rows, heads=3)
        one.prepare(target(), 2)
        assert one.shape.nodes <= rows and one.chain < max(rows / 2, 1)
        assert rows == 1 or one.trees.growth.depth(1) > 0, "with a second row there is a guess"


def test_where_rows_cost_a_chain_needs_an_agreed_beginning() -> None:
    """Rows that nobody fixed, on the CPU: behind the root stands what clover2 expects there, and some ways go further."""
    model = target()
    model.curve = CostCurve((1, 64), (1.0, 1.5))
    asked = requests(4, max_new_tokens=40, ignore_eos=True)
    drafts: list[dict[Any, set[tuple[int, ...]]]] = []
    for name in ("echo", "clover2"):
        recorder = Recorder(taught(name, model, **OPTIONS))
        for request in asked:
            (run,) = engine(recorder, model, slots=1).generate([request])
            assert run.tokens == truth(model.hf, request)
        drafts.append({tuple(seen.texts[0]): paths(seen.draft) for seen in recorder.proposed})
    both, tree = drafts
    shared = both.keys() & tree.keys()
    assert all({way[:1] for way in both[text]} == {way[:1] for way in tree[text]} for text in shared)
    assert all(both[text] >= tree[text] for text in shared) and any(both[text] > tree[text] for text in shared)


def test_no_chain_is_clover2() -> None:
    model, (request,) = target(), requests(1, max_new_tokens=20, ignore_eos=True)
    seen = []
    for name, more in (("echo", {"chain": 0}), ("clover2", {})):
        recorder = Recorder(taught(name, model, rows=16, **OPTIONS, **more))
        engine(recorder, model, slots=1).generate([request])
        seen.append([one.draft.tokens for one in recorder.proposed])
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))


@pytest.mark.parametrize("chain", [-1, 16])
def test_a_chain_that_cannot_be_is_refused(chain: int) -> None:
    with pytest.raises(InputError, match=f"chain is {chain}"):
        untrained("echo", chain=chain)
