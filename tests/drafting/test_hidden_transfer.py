"""hidden_transfer: grafted rows change no real row, and the rows of the last accepted node equal a fresh walk."""

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
    hf_cache,
    path_to,
    requests,
    target,
    truth,
    with_random_weights,
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
from foreword.ops.rows import unit_rms


def made(model: Model, **options: Any) -> HiddenTransfer:
    return with_random_weights("hidden_transfer", model, **{"rows": 14, "steps": 3} | options)


def head_inputs(drafter: HiddenTransfer, model: Model, state: State) -> torch.Tensor:
    """Compute the inputs of the target's head another way: each step's state, conditioned on the root."""
    root = unit_rms(model.head_weight()[state.root])
    conditioning = torch.stack([root @ one.weight.T for one in drafter.module[-1].of_step], dim=1)
    return model.norm(drafter.states[state.slots]) + conditioning


class StepRecorder(Recorder):
    """Also records how many steps there were to draft from. `limit` overrides their number."""

    def __init__(self, inner: HiddenTransfer, limit: int | None = None) -> None:
        super().__init__(inner)
        self.had: list[list[int]] = []
        self.drafter, self.limit = inner, limit

    def propose(self, state: State) -> Draft:
        if self.limit is not None:
            self.drafter.have[state.slots] = self.limit
        self.had.append(self.drafter.have[state.slots].tolist())
        return super().propose(state)


def recorded(model: Model, sampling: Sampling = SAMPLINGS["greedy"], **options: Any) -> StepRecorder:
    """Run six requests on three slots."""
    recorder = StepRecorder(made(model, **options))
    asked = requests(6, sampling, max_new_tokens=20, ignore_eos=True)
    assert written(engine(recorder, model), asked) == [truth(model.hf, request) for request in asked]
    return recorder


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("tree", ["static", "best"])
def test_fewer_steps_equal_the_first_steps_of_a_new_drafter(tree: str, sampling: Sampling) -> None:
    """If an unlikely node carries fewer steps, the draft is that of a new drafter with as many steps."""
    model = target()
    recorder = recorded(model, sampling, tree=tree)
    had = [count for counts in recorder.had for count in counts]
    assert len(set(had)) > 2  # none at the first token, fewer after unlikely nodes, all after a prompt
    seeds = {request.prompt[0]: request.sampling for request in requests(6, sampling)}
    for seen, counts in list(zip(recorder.proposed, recorder.had, strict=True))[::3]:
        for sequence, draft, count in zip(seen.sequences, drafts_of(seen), counts, strict=True):
            fresh = target()
            other = StepRecorder(made(fresh, tree=tree), count)
            steps = engine(other, fresh, slots=1)
            steps.add(Request(tuple(sequence), seeds[sequence[0]], max_new_tokens=1))
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
    """The same weights and trees: the pseudo rows walk in the verify pass or in a pass of their own."""
    model, asked = target("qwen3"), requests(4, max_new_tokens=16, ignore_eos=True)
    one, other = (
        made(model, rows=64, carry="all", **own),
        with_random_weights("firp", target("qwen3"), rows=16, steps=3, **own),
    )
    assert one.shape == other.shape
    drafts = []
    for drafter in (one, other):
        recorder = Recorder(drafter)
        written(engine(recorder, model), asked)
        found = [pair for seen in recorder.proposed for pair in zip(seen.sequences, drafts_of(seen), strict=True)]
        drafts.append([(one, {tuple(d[0][r] for r in path_to(d[1], n)) for n in range(len(d[0]))}) for one, d in found])
    assert drafts[0] == drafts[1] and len(drafts[0]) > 20


@torch.no_grad()
def test_grafted_rows_do_not_change_real_rows() -> None:
    """Compare the logits of a round's tree, and the rows that are committed."""
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
    grafted = model.score(state.batch, draft, drafter.needs)
    torch.testing.assert_close(grafted.logits, bare.logits, atol=1e-10, rtol=0)
    for index, run in enumerate(runs):
        length = int(state.length[index])
        tokens = [*run.request.prompt, *run.tokens][:length]
        for layer, (keys, values) in enumerate(hf_cache(model.hf, tokens)):
            torch.testing.assert_close(model.cache.keys[layer][run.slot, :, :length], keys, atol=1e-10, rtol=0)
            torch.testing.assert_close(model.cache.values[layer][run.slot, :, :length], values, atol=1e-10, rtol=0)


def test_static_trees_follow_the_number_of_steps() -> None:
    """The tree is the greedy template for the steps at hand."""
    recorder = recorded(target(), rows=20)
    nodes, sizes = recorder.drafter.shape.nodes, set()
    for seen, counts in zip(recorder.proposed, recorder.had, strict=True):
        for (tokens, parent), count in zip(drafts_of(seen), counts, strict=True):
            paths = greedy_paths([row[:10] for row in USUAL_RATES[:count]], nodes - 1)
            depths = sorted(len(path) for path in [(), *paths])
            assert sorted(len(path_to(parent, node)) - 1 for node in range(len(tokens))) == depths
            sizes.add(len(tokens))
    assert {1, nodes} <= sizes


def test_the_likeliest_paths_multiply_the_probabilities_of_the_steps() -> None:
    """Compare with every path of up to three tokens, for sequences that have all steps."""
    model = target()
    drafter = made(model, tree="best", rows=32, carry="all")
    steps = engine(drafter, model)
    for request in requests(3, max_new_tokens=20, ignore_eos=True)[1:]:
        steps.add(request)
    for _ in range(8):
        steps.step()
    state = steps.state.at(Batch.of(sorted(steps.slots.running), max(run.length for run in steps.slots.running.values())))
    with torch.no_grad():
        chances = model.head(head_inputs(drafter, model, state)).log_softmax(-1)
        draft = drafter.propose(state)
    for index in range(2):
        best = [list(zip(*map(torch.Tensor.tolist, chance.topk(6)), strict=True)) for chance in chances[index]]
        paths = [path for depth in range(1, 4) for path in product(*best[:depth])]
        likely = sorted(paths, key=lambda path: -sum(chance for chance, _ in path))[:7]
        tokens, parent = draft.tokens[index].tolist(), draft.tree.parent[index].tolist()
        drafted = {tuple(tokens[row] for row in path_to(parent, node)[1:]) for node in range(1, 8)}
        assert drafted == {tuple(token for _, token in path) for path in likely}


def test_candidates_are_ranked_with_the_sampling_noise() -> None:
    """Each step uses the noise of its token's position."""
    model, temperature = target(), 0.8
    drafter = made(model, carry="all", rows=64)
    steps = engine(drafter, model, slots=2)
    for request in requests(3, SAMPLINGS["T=0.8"], ignore_eos=True)[1:]:
        steps.add(request)
    for _ in range(7):
        steps.step()
    state = steps.state.at(Batch.of(sorted(steps.slots.running), max(run.length for run in steps.slots.running.values())))
    with torch.no_grad():
        logits = model.head(head_inputs(drafter, model, state))
        draft = drafter.propose(state)
    position = state.length.unsqueeze(1) + torch.arange(1, 4)
    order = (logits / temperature + gumbel(state.sampling.key, position, torch.arange(VOCABULARY))).topk(10).indices
    for index in range(2):
        tokens, parent = draft.tokens[index].tolist(), draft.tree.parent[index].tolist()
        paths = {tuple(tokens[row] for row in path_to(parent, node)[1:]) for node in range(1, draft.nodes)}
        template = greedy_paths([row[:10] for row in USUAL_RATES[:3]], draft.nodes - 1)
        correct = {tuple(int(order[index, step, rank]) for step, rank in enumerate(path)) for path in template}
        assert paths == correct


def test_a_sequence_of_one_token_gets_no_draft() -> None:
    model = target()
    recorder = StepRecorder(made(model))
    written(engine(recorder, model), requests(1, max_new_tokens=3, ignore_eos=True))
    assert recorder.had[0] == [0] and recorder.proposed[0].draft.size.tolist() == [1]
    assert recorder.had[1] == [recorder.drafter.carries[0]] and recorder.proposed[1].draft.size.tolist() != [1]


def test_a_new_request_in_a_slot_starts_without_steps() -> None:
    """A second request in the same slot that has nothing to draft from yet drafts nothing."""
    model = target()
    recorder = StepRecorder(made(model))
    steps = engine(recorder, model, slots=1)
    for request in reversed(requests(3, max_new_tokens=4, ignore_eos=True)):
        before = len(recorder.had)
        steps.generate([request])
    assert recorder.had[before] == [0]


def test_rows_follow_their_cost() -> None:
    """The rows of a pass are nodes and grafted rows; with more slots each costs more."""
    model = target()
    found = []
    for slots, seconds in ((1, (1.0, 1.01)), (1, (1.0, 4.0)), (6, (1.0, 4.0))):
        model.curve = CostCurve((1, 64), seconds)
        drafter = untrained("hidden_transfer", steps=3)
        drafter.prepare(model, slots)
        found.append(drafter.shape.nodes + drafter.needs.grafted_rows)
    assert 64 >= found[0] > found[1] > found[2] >= 1


def test_the_rows_of_every_slot_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the lower layers, which have nodes alone, and those of the upper layers."""
    model, asked = target(), set()
    monkeypatch.setattr(model, "cost", lambda rows, sequences: (asked.add((rows, sequences)), 1.0)[1])
    untrained("hidden_transfer", steps=3).prepare(model, 5)
    assert {(5, 5), (5 * 64, 5)} < asked and len(asked) > 12
    assert all(rows % 5 == 0 and sequences == 5 for rows, sequences in asked)


def test_older_drafters_are_not_conditioned_on_the_token(tmp_path: Path) -> None:
    """Their config lacks the option `told`, which did not exist."""
    model = target()
    save(made(model, told=False), tmp_path, model, "bfloat16")
    file = tmp_path / "config.json"
    about = json.loads(file.read_text())
    assert about["config"].pop("told") is False
    file.write_text(json.dumps(about))
    for options in ({}, {"told": False}):
        drafter = restore(tmp_path, model, **options)
        assert isinstance(drafter, HiddenTransfer) and not drafter.options.conditioned and len(drafter.module) == 3
    with pytest.raises(InputError, match="trained with told=False"):
        restore(tmp_path, model, told=True)
