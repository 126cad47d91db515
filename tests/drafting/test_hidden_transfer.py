"""hidden_transfer: what rides along changes nothing, and what the last right node carried is what a fresh walk gives."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import (
    SAMPLINGS,
    VOCABULARY,
    Recorder,
    drafts_of,
    engine,
    own_cache,
    path_to,
    requests,
    target,
    taught,
    truth,
    written,
)
from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.state import Batch, State
from foreword.drafters.saved import restore, save
from foreword.drafting.trees import USUAL_RATES, greedy_paths
from foreword.engine.request import Request
from foreword.errors import InputError
from foreword.methods import untrained
from foreword.methods.hidden_transfer import HiddenTransfer
from foreword.model.cost import CostCurve
from foreword.model.model import Model
from foreword.ops.noise import gumbel
from foreword.ops.rows import at_one


def made(model: Model, **options: Any) -> HiddenTransfer:
    return taught("hidden_transfer", model, **{"rows": 14, "steps": 3} | options)


def handed_over(drafter: HiddenTransfer, model: Model, state: State) -> torch.Tensor:
    """What the target's head guesses from, by another way: each step's state, told of the token decided behind it."""
    known = at_one(model.head_weight()[state.root])
    told = torch.stack([known @ one.weight.T for one in drafter.module[-1].of_step], dim=1)
    return model.norm(drafter.states[state.slots]) + told


class Noted(Recorder):
    """Also writes down how many steps there were to guess with; may be told of fewer than there are."""

    def __init__(self, inner: HiddenTransfer, told: int | None = None) -> None:
        super().__init__(inner)
        self.had: list[list[int]] = []
        self.drafter, self.told = inner, told

    def propose(self, state: State) -> Draft:
        if self.told is not None:
            self.drafter.have[state.slots] = self.told
        self.had.append(self.drafter.have[state.slots].tolist())
        return super().propose(state)


def noted(model: Model, sampling: Sampling = SAMPLINGS["greedy"], **options: Any) -> Noted:
    """Six texts on three slots."""
    recorder = Noted(made(model, **options))
    asked = requests(6, sampling, max_new_tokens=20, ignore_eos=True)
    assert written(engine(recorder, model), asked) == [truth(model.hf, request) for request in asked]
    return recorder


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("tree", ["static", "best"])
def test_fewer_steps_are_a_fresh_drafter_s_first_ones(tree: str, sampling: Sampling) -> None:
    """Where unlikely nodes carry less, the draft is what a fresh drafter with so many steps makes of the same text."""
    model = target()
    recorder = noted(model, sampling, tree=tree)
    had = [count for counts in recorder.had for count in counts]
    assert len(set(had)) > 2  # none at the first token of a text, fewer behind unlikely nodes, all behind a prompt
    seeds = {request.prompt[0]: request.sampling for request in requests(6, sampling)}
    for seen, counts in list(zip(recorder.proposed, recorder.had, strict=True))[::3]:
        for text, draft, count in zip(seen.texts, drafts_of(seen), counts, strict=True):
            fresh = target()
            other = Noted(made(fresh, tree=tree), count)
            steps = engine(other, fresh, slots=1)
            steps.add(Request(tuple(text), seeds[text[0]], max_new_tokens=1))
            while not other.proposed:
                steps.step()
            assert draft == drafts_of(other.proposed[0])[0]


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"layers": (1, 1, 1)},
        {"source": "chain", "layers": (0, 2, 3)},
        {"squeeze": 2, "bias": False},
        {"norm": False},
        {"told": False},
    ],
    ids=str,
)
def test_it_drafts_what_firp_drafts(own: dict[str, Any]) -> None:
    """The same weights, and trees of the same nodes: walked in the checking pass or in one of their own."""
    model, asked = target("qwen3"), requests(4, max_new_tokens=16, ignore_eos=True)
    one, other = made(model, rows=64, carry="all", **own), taught("firp", target("qwen3"), rows=16, steps=3, **own)
    assert one.shape == other.shape
    drafts = []
    for drafter in (one, other):
        recorder = Recorder(drafter)
        written(engine(recorder, model), asked)
        found = [
            (text, draft) for seen in recorder.proposed for text, draft in zip(seen.texts, drafts_of(seen), strict=True)
        ]
        drafts.append([(text, {tuple(d[0][r] for r in path_to(d[1], n)) for n in range(len(d[0]))}) for text, d in found])
    assert drafts[0] == drafts[1] and len(drafts[0]) > 20


@torch.no_grad()
def test_real_rows_are_the_same_with_and_without() -> None:
    """Logits of a round's tree, and what is committed of it."""
    model = target("qwen3")
    drafter = made(model)
    steps = engine(drafter, model, slots=2)
    runs = [steps.add(request) for request in requests(3, max_new_tokens=12, ignore_eos=True)[1:]]
    for _ in range(8):
        steps.step()
    state = steps.state.at(Batch.of([run.slot for run in runs], max(run.length for run in runs)))
    draft = drafter.propose(state)
    assert draft.nodes + drafter.needs.grafted_rows == 14 and drafter.needs.grafted_rows > 4
    bare = model.score(state.batch, draft, Needs())
    laden = model.score(state.batch, draft, drafter.needs)
    torch.testing.assert_close(laden.logits, bare.logits, atol=1e-10, rtol=0)
    for index, run in enumerate(runs):
        length = int(state.length[index])
        text = [*run.request.prompt, *run.tokens][:length]
        for layer, (keys, values) in enumerate(own_cache(model.hf, text)):
            torch.testing.assert_close(model.cache.keys[layer][run.slot, :, :length], keys, atol=1e-10, rtol=0)
            torch.testing.assert_close(model.cache.values[layer][run.slot, :, :length], values, atol=1e-10, rtol=0)


def test_static_trees_by_how_many_steps_there_are() -> None:
    """The greedy template of just so many steps, with as many nodes."""
    recorder = noted(target(), rows=20)
    nodes, sizes = recorder.drafter.shape.nodes, set()
    for seen, counts in zip(recorder.proposed, recorder.had, strict=True):
        for (tokens, parent), count in zip(drafts_of(seen), counts, strict=True):
            paths = greedy_paths([row[:10] for row in USUAL_RATES[:count]], nodes - 1)
            depths = sorted(len(path) for path in [(), *paths])
            assert sorted(len(path_to(parent, node)) - 1 for node in range(len(tokens))) == depths
            sizes.add(len(tokens))
    assert {1, nodes} <= sizes


def test_the_likeliest_paths_are_products_of_the_steps_chances() -> None:
    """Against every path of up to three tokens, for texts that have all steps."""
    model = target()
    drafter = made(model, tree="best", rows=32, carry="all")
    steps = engine(drafter, model)
    for request in requests(3, max_new_tokens=20, ignore_eos=True)[1:]:
        steps.add(request)
    for _ in range(8):
        steps.step()
    state = steps.state.at(Batch.of(sorted(steps.slots.running), max(run.length for run in steps.slots.running.values())))
    with torch.no_grad():
        chances = model.head(handed_over(drafter, model, state)).log_softmax(-1)
        draft = drafter.propose(state)
    for index in range(2):
        best = [list(zip(*map(torch.Tensor.tolist, chance.topk(6)), strict=True)) for chance in chances[index]]
        paths = [path for depth in range(1, 4) for path in product(*best[:depth])]
        likely = sorted(paths, key=lambda path: -sum(chance for chance, _ in path))[:7]
        tokens, parent = draft.tokens[index].tolist(), draft.tree.parent[index].tolist()
        drafted = {tuple(tokens[row] for row in path_to(parent, node)[1:]) for node in range(1, 8)}
        assert drafted == {tuple(token for _, token in path) for path in likely}


def test_guesses_are_ranked_under_the_noise() -> None:
    """That of the place where the token will stand."""
    model, heat = target(), 0.8
    drafter = made(model, carry="all", rows=64)
    steps = engine(drafter, model, slots=2)
    for request in requests(3, SAMPLINGS["T=0.8"], ignore_eos=True)[1:]:
        steps.add(request)
    for _ in range(7):
        steps.step()
    state = steps.state.at(Batch.of(sorted(steps.slots.running), max(run.length for run in steps.slots.running.values())))
    with torch.no_grad():
        logits = model.head(handed_over(drafter, model, state))
        draft = drafter.propose(state)
    place = state.length.unsqueeze(1) + torch.arange(1, 4)
    order = (logits / heat + gumbel(state.sampling.key, place, torch.arange(VOCABULARY))).topk(10).indices
    for index in range(2):
        tokens, parent = draft.tokens[index].tolist(), draft.tree.parent[index].tolist()
        paths = {tuple(tokens[row] for row in path_to(parent, node)[1:]) for node in range(1, draft.nodes)}
        template = greedy_paths([row[:10] for row in USUAL_RATES[:3]], draft.nodes - 1)
        wanted = {tuple(int(order[index, step, rank]) for step, rank in enumerate(path)) for path in template}
        assert paths == wanted


def test_a_text_of_one_token_is_not_guessed_on() -> None:
    model = target()
    recorder = Noted(made(model))
    written(engine(recorder, model), requests(1, max_new_tokens=3, ignore_eos=True))
    assert recorder.had[0] == [0] and recorder.proposed[0].draft.size.tolist() == [1]
    assert recorder.had[1] == [recorder.drafter.carries[0]] and recorder.proposed[1].draft.size.tolist() != [1]


def test_a_slot_that_is_taken_again_forgets() -> None:
    """A second text in the same slot that has nothing to guess from yet guesses nothing."""
    model = target()
    recorder = Noted(made(model))
    steps = engine(recorder, model, slots=1)
    for request in reversed(requests(3, max_new_tokens=4, ignore_eos=True)):
        before = len(recorder.had)
        steps.generate([request])
    assert recorder.had[before] == [0]


def test_rows_follow_what_they_cost() -> None:
    """Those of a pass: nodes and what they carry; at more slots each costs more."""
    model = target()
    found = []
    for slots, seconds in ((1, (1.0, 1.01)), (1, (1.0, 4.0)), (6, (1.0, 4.0))):
        model.curve = CostCurve((1, 64), seconds)
        drafter = untrained("hidden_transfer", steps=3)
        drafter.prepare(model, slots)
        found.append(drafter.shape.nodes + drafter.needs.grafted_rows)
    assert 64 >= found[0] > found[1] > found[2] >= 1


def test_every_slot_s_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the lower layers, where nodes are alone, and those of the upper ones."""
    model, asked = target(), set()
    monkeypatch.setattr(model, "cost", lambda rows, texts: (asked.add((rows, texts)), 1.0)[1])
    untrained("hidden_transfer", steps=3).prepare(model, 5)
    assert {(5, 5), (5 * 64, 5)} < asked and all(rows % 5 == 0 and texts == 5 for rows, texts in asked) and len(asked) > 12


def test_a_drafter_of_before_was_told_nothing(tmp_path: Path) -> None:
    """Its config does not say so, since there was no such option."""
    model = target()
    save(made(model, told=False), tmp_path, model, "bfloat16")
    file = tmp_path / "config.json"
    about = json.loads(file.read_text())
    assert about["config"].pop("told") is False
    file.write_text(json.dumps(about))
    for options in ({}, {"told": False}):
        drafter = restore(tmp_path, model, **options)
        assert isinstance(drafter, HiddenTransfer) and not drafter.options.told and len(drafter.module) == 3
    with pytest.raises(InputError, match="trained with told=False"):
        restore(tmp_path, model, told=True)
