"""echo drafts the tree of clover2 and the chain of prompt_lookup for the same sequence, in one draft."""

from typing import Any

import pytest
import torch

from doubles import SAMPLINGS, TRAINED, Recorder, engine, paths_of, requests, target, truth, with_random_weights
from foreword.core.draft import Draft
from foreword.drafting.trees import BestFirst
from foreword.errors import InputError
from foreword.methods import make, untrained
from foreword.model.cost import CostCurve

OPTIONS = {name: value for name, value in TRAINED["echo"].items() if name not in ("rows", "chain")}


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Return the paths of the only sequence, and check that none occurs twice."""
    found = paths_of(draft, 0)
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("links", [6, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_draft_joins_both(sampling: str, links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the drafts of echo with those of its two parts after the same sequence. The output repeats itself. Of the
    chain's six rows, six or three pay off."""
    monkeypatch.setattr(BestFirst, "chain_rows", lambda *_: links)
    model = target()
    asked = [*requests(2, SAMPLINGS[sampling], max_new_tokens=30, ignore_eos=True)]
    both = with_random_weights("echo", model, rows=24, chain=6, **OPTIONS)
    single = with_random_weights("clover2", model, rows=18, **OPTIONS), make("prompt_lookup", rows=links + 1)
    drafts: list[dict[Any, set[tuple[int, ...]]]] = []
    for one in (both, *single):
        recorder = Recorder(one)
        for request in asked:
            (run,) = engine(recorder, model, slots=1).generate([request])
            assert run.tokens == truth(model.hf, request)
        drafts.append({tuple(seen.sequences[0]): paths(seen.draft) for seen in recorder.proposed})
    together, tree, chain = drafts
    shared = together.keys() & tree.keys() & chain.keys()
    assert len(shared) > 10
    assert all(together[one] == tree[one] | chain[one] for one in shared)
    assert any(not tree[one] >= chain[one] for one in shared) and any(not chain[one] >= tree[one] for one in shared)


def test_rows_bound_both() -> None:
    for rows in (1, 2, 3, 8, 24):
        one: Any = untrained("echo", rows, heads=3)
        one.prepare(target(), 2)
        assert one.shape.nodes <= rows and one.chain < max(rows / 2, 1)
        assert rows == 1 or one.trees.growth.depth(1) > 0, "with a second row there is a draft token"


def test_where_rows_cost_the_chain_must_agree_with_the_tree() -> None:
    """With a free number of rows, on the CPU: the first tokens are those of clover2, and some paths are longer."""
    model = target()
    model.curve = CostCurve((1, 64), (1.0, 1.5))
    asked = requests(4, max_new_tokens=40, ignore_eos=True)
    drafts: list[dict[Any, set[tuple[int, ...]]]] = []
    for name in ("echo", "clover2"):
        recorder = Recorder(with_random_weights(name, model, **OPTIONS))
        for request in asked:
            (run,) = engine(recorder, model, slots=1).generate([request])
            assert run.tokens == truth(model.hf, request)
        drafts.append({tuple(seen.sequences[0]): paths(seen.draft) for seen in recorder.proposed})
    both, tree = drafts
    shared = both.keys() & tree.keys()
    assert all({path[:1] for path in both[one]} == {path[:1] for path in tree[one]} for one in shared)
    assert all(both[one] >= tree[one] for one in shared) and any(both[one] > tree[one] for one in shared)


def test_without_a_chain_it_is_clover2() -> None:
    model, (request,) = target(), requests(1, max_new_tokens=20, ignore_eos=True)
    seen = []
    for name, more in (("echo", {"chain": 0}), ("clover2", {})):
        recorder = Recorder(with_random_weights(name, model, rows=16, **OPTIONS, **more))
        engine(recorder, model, slots=1).generate([request])
        seen.append([one.draft.tokens for one in recorder.proposed])
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))


@pytest.mark.parametrize("chain", [-1, 16])
def test_an_invalid_chain_is_refused(chain: int) -> None:
    with pytest.raises(InputError, match=f"chain is {chain}"):
        untrained("echo", chain=chain)
