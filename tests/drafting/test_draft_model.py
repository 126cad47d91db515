"""draft_model: with all layers of the target it is the target, and every draft token is right."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import SAMPLINGS, engine, prompts, requests, target, truth, with_random_weights
from foreword.core.draft import Shape
from foreword.engine.request import Request
from foreword.methods import untrained

every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)


@pytest.mark.parametrize(("tree", "depth", "rows"), [("chain", 3, 4), ("static", 3, 24), ("best", 2, 111)])
@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma2"])
@every_sampling
def test_drafts_of_all_target_layers_are_always_right(sampling: str, family: str, tree: str, depth: int, rows: int) -> None:
    """Also under sampling noise, which both share: every round accepts the full depth, except the last of a sequence. Later
    drafts build on what earlier rounds accepted."""
    model, asked = target(family), requests(6, SAMPLINGS[sampling], max_new_tokens=12, ignore_eos=True)[1:]
    drafter = untrained("draft_model", rows=rows, layers=4, depth=depth, tree=tree, width=10, stop=0.0)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [depth + 1] * (12 // (depth + 1)) for run in runs)


@pytest.mark.parametrize("length", [3, 5, 6, 11])
def test_the_end_of_a_reused_slot_is_read(length: int) -> None:
    """The target caches the last round's tokens at once, the small model only when it needs them. A sequence that continues
    from them is drafted as well as any other. Prompts end within a chunk and at its edge."""
    model = target()
    steps = engine(untrained("draft_model", rows=4, layers=4, depth=3, tree="chain", stop=0.0), model, slots=1)
    first = Request((*prompts(4)[2], *prompts(4)[3])[:length], SAMPLINGS["greedy"], max_new_tokens=8, ignore_eos=True)
    (before,) = steps.generate([first])
    again = replace(first, prompt=(*first.prompt, *before.tokens, 9, 8), reuse=True)
    (after,) = steps.generate([again])
    assert after.reused >= length + 6 and after.tokens == truth(model.hf, again)
    assert after.accepted == [4, 4]


def test_it_starts_as_the_first_layers() -> None:
    model = target()
    drafter = untrained("draft_model", layers=3)
    drafter.prepare(model, 1)
    own, module = model.hf.model, drafter.module  # type: ignore[attr-defined]
    correct = {f"layers.{name}": weight for name, weight in own.layers[:3].state_dict().items()}
    correct["norm.weight"] = own.norm.weight
    found = module.state_dict()
    assert found.keys() == correct.keys()
    for name, weight in correct.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)
        assert found[name].data_ptr() != weight.data_ptr()


@every_sampling
def test_a_chain_ends_at_an_unlikely_token(sampling: str) -> None:
    """The higher the threshold, the shorter the chains; the output is the same."""
    model, asked = target(), requests(4, SAMPLINGS[sampling], ignore_eos=True)
    drafted = []
    for stop in (0.0, 0.4, 0.9):
        runs = engine(with_random_weights("draft_model", model, rows=6, tree="chain", stop=stop), model).generate(asked)
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
        drafted.append(sum(map(sum, (run.drafted for run in runs))) / sum(len(run.drafted) for run in runs))
    assert drafted[0] > drafted[1] > drafted[2]


class SingleOnly:
    """Trees for a batch of one, and none for a larger batch."""

    def shape(self, batch: int) -> Shape:
        return Shape(111, 2) if batch == 1 else Shape(1, 0)


@pytest.mark.parametrize("method", ["draft_model", "gsd"])
def test_tokens_generated_without_drafts_are_caught_up(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row pays off in a batch of two, so nothing is drafted and the small model reads little. Once a sequence is alone
    again, all its draft tokens are right. The second request enters while a round's tokens are still unread."""
    model, walked = target(), []
    trees = {"tree": "best"} if method == "draft_model" else {"siblings": 0.0, "sure": 0.0}
    drafter: Any = untrained(method, rows=111, layers=4, depth=2, width=10, **trees)
    steps = engine(drafter, model, slots=2)
    drafter.growth = replace(drafter.growth, fixed=SingleOnly())
    first, second = requests(4, max_new_tokens=30, ignore_eos=True)[1:3]
    run = steps.add(first)
    while len(run.accepted) < 3:
        steps.step()
    other = steps.add(replace(second, max_new_tokens=6))
    walk = drafter.small_model.stack.walk
    monkeypatch.setattr(drafter.small_model.stack, "walk", lambda rows, at: walked.append(rows.shape[1]) or walk(rows, at))
    while not other.done:
        steps.step()
    assert walked[-5:] == [2] * 5
    while not run.done:
        steps.step()
    assert run.tokens == truth(model.hf, first) and other.tokens == truth(model.hf, replace(second, max_new_tokens=6))
    undrafted = [count == 1 for count in run.accepted[:-1]]
    assert sum(undrafted) >= 4 and not any(undrafted[:3]) and not any(undrafted[-3:])
    assert {*run.accepted[:-1]} == {1, 3}, "alone, every draft token is right"
    read, whole = int(drafter.small_model.cache.length[0]), model.cache
    torch.testing.assert_close(drafter.small_model.cache.held[:, :, 0, :, :read], whole.held[:, :, 0, :, :read])
