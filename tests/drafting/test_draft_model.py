"""A second model: with all of the target's layers it is the target, and whatever it guesses is right."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import SAMPLINGS, engine, prompts, requests, target, taught, truth
from foreword.core.draft import Shape
from foreword.engine.request import Request
from foreword.methods import untrained

every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)


@pytest.mark.parametrize(("tree", "depth", "rows"), [("chain", 3, 4), ("static", 3, 24), ("best", 2, 111)])
@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma2"])
@every_sampling
def test_the_target_s_own_layers_are_always_right(sampling: str, family: str, tree: str, depth: int, rows: int) -> None:
    """Under the noise too, which both share: every round goes to the full depth, but for the one that ends a text. What is
    guessed a second time round stands on what was accepted the first time."""
    model, asked = target(family), requests(6, SAMPLINGS[sampling], max_new_tokens=12, ignore_eos=True)[1:]
    drafter = untrained("draft_model", rows=rows, layers=4, depth=depth, tree=tree, width=10, stop=0.0)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [depth + 1] * (12 // (depth + 1)) for run in runs)


@pytest.mark.parametrize("length", [3, 5, 6, 11])
def test_what_a_slot_holds_is_read_to_its_end(length: int) -> None:
    """The last round's tokens are the target's at once, and the small model's only when they are asked for: a text that goes
    on from them is guessed as well as any. Prompts end within a chunk and at its edge."""
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
    wanted = {f"layers.{name}": weight for name, weight in own.layers[:3].state_dict().items()}
    wanted["norm.weight"] = own.norm.weight
    found = module.state_dict()
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)
        assert found[name].data_ptr() != weight.data_ptr()


@every_sampling
def test_a_chain_ends_where_it_is_not_sure(sampling: str) -> None:
    """The surer it has to be, the shorter the chains; the texts are the same."""
    model, asked = target(), requests(4, SAMPLINGS[sampling], ignore_eos=True)
    drafted = []
    for stop in (0.0, 0.4, 0.9):
        runs = engine(taught("draft_model", model, rows=6, tree="chain", stop=stop), model).generate(asked)
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
        drafted.append(sum(map(sum, (run.drafted for run in runs))) / sum(len(run.drafted) for run in runs))
    assert drafted[0] > drafted[1] > drafted[2]


class Alone:
    """Trees for a text that is alone, and none in company."""

    def shape(self, batch: int) -> Shape:
        return Shape(111, 2) if batch == 1 else Shape(1, 0)


@pytest.mark.parametrize("method", ["draft_model", "gsd"])
def test_what_was_written_in_company_is_known_afterwards(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row pays while there are two texts, so that none is guessed and few are read; as soon as one is alone again, every
    guess of its own layers is right. A text enters company with a round's tokens still unread."""
    model, walked = target(), []
    trees = {"tree": "best"} if method == "draft_model" else {"siblings": 0.0, "sure": 0.0}
    drafter: Any = untrained(method, rows=111, layers=4, depth=2, width=10, **trees)
    steps = engine(drafter, model, slots=2)
    drafter.growth = replace(drafter.growth, fixed=Alone())
    first, second = requests(4, max_new_tokens=30, ignore_eos=True)[1:3]
    run = steps.add(first)
    while len(run.accepted) < 3:
        steps.step()
    other = steps.add(replace(second, max_new_tokens=6))
    walk = drafter.guesser.stack.walk
    monkeypatch.setattr(drafter.guesser.stack, "walk", lambda rows, at: walked.append(rows.shape[1]) or walk(rows, at))
    while not other.done:
        steps.step()
    assert walked[-5:] == [2] * 5
    while not run.done:
        steps.step()
    assert run.tokens == truth(model.hf, first) and other.tokens == truth(model.hf, replace(second, max_new_tokens=6))
    in_company = [count == 1 for count in run.accepted[:-1]]
    assert sum(in_company) >= 4 and not any(in_company[:3]) and not any(in_company[-3:])
    assert {*run.accepted[:-1]} == {1, 3}, "alone, everything is right"
    read, whole = int(drafter.guesser.cache.length[0]), model.cache
    torch.testing.assert_close(drafter.guesser.cache.held[:, :, 0, :, :read], whole.held[:, :, 0, :, :read])
