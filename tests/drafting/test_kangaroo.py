"""kangaroo: the target's first layers run once, while drafting, and the adapter computes what it was trained to."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import (
    CONTEXT,
    POISON,
    SAMPLINGS,
    VOCABULARY,
    Recorder,
    chain,
    engine,
    path_to,
    poisoned_model,
    prompts,
    requests,
    rerunning,
    run_to_end,
    sequences_of,
    target,
    truth,
    with_random_weights,
    written,
)
from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.state import Batch, State
from foreword.engine import fit
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.errors import DrafterError, ForewordWarning
from foreword.methods import untrained
from foreword.methods.kangaroo import Kangaroo, _exit_of
from foreword.model.cost import CostCurve
from foreword.model.model import Model
from foreword.ops.noise import gumbel

every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)
WHOLE: dict[str, Any] = {"exit": 3, "adapter": "layer"}  # of four layers: the adapter starts as the fourth


def state_after(steps: Engine, asked: list[Request], rounds: int) -> State:
    """Return the state of requests that fill all slots, some rounds after the last prompt was read."""
    runs = [steps.add(request) for request in asked]
    while not all(len(run.accepted) >= rounds for run in runs):
        steps.step()
    return steps.state.at(Batch.of([*range(len(runs))], max(run.length for run in runs)))


# With all layers of the target, untrained ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "depth"), [(1, 3), (3, 2)])
@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma2"])
@every_sampling
def test_drafts_of_all_target_layers_are_always_right(sampling: str, family: str, width: int, depth: int) -> None:
    """Every round accepts the full depth, the last level included, from the first token of a sequence on."""
    model, asked = target(family), requests(5, SAMPLINGS[sampling], max_new_tokens=12, ignore_eos=True)
    drafter = untrained("kangaroo", rows=1 + width * depth, width=width, depth=depth, **WHOLE)
    runs = engine(drafter, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(run.accepted == [depth + 1] * (12 // (depth + 1)) for run in runs)


@pytest.mark.parametrize("shift", [0, 1], ids=["right drafts", "wrong drafts"])
@pytest.mark.parametrize("width", [1, 3])
def test_after_every_round_both_caches_are_those_of_a_new_reading(width: int, shift: int) -> None:
    """The adapter's cache is that of the target's last layer. The target's own cache, whose first layers were written while
    drafting, is that of one pass over the sequence."""
    model, rounds = target("qwen3"), 0
    drafter: Any = untrained("kangaroo", rows=1 + 3 * width, width=width, depth=3, **WHOLE)
    steps, own = engine(drafter, model), drafter.vocabulary.candidates

    def shifted(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, chances = own(*given)
        return (tokens + shift) % VOCABULARY, chances

    drafter.vocabulary.candidates = shifted
    runs = [steps.add(request) for request in requests(4, max_new_tokens=9, ignore_eos=True)[1:]]
    while steps.busy:
        steps.step()
        for run in (run for run in runs if run.accepted and not run.done):
            length = int(steps.state.lengths[run.slot])
            tokens, held = steps.state.tokens[run.slot, :length].tolist(), model.cache.held[:, :, run.slot, :, :length]
            torch.testing.assert_close(held, cache_of(model, tokens))
            torch.testing.assert_close(drafter.stack.cache.held[:, 0, run.slot, :, :length], held[:, 3])
            rounds += 1
    assert rounds >= 6 and [run.tokens for run in runs] == [truth(model.hf, run.request) for run in runs]


def cache_of(model: Model, tokens: list[int]) -> torch.Tensor:
    """Return the cached rows of a sequence that one pass reads."""
    other = model.with_own_cache()
    other.allocate(1, CONTEXT, 1)
    with torch.no_grad():
        other.score(Batch.of([0], 0), chain([tokens]), Needs(), logits="none")
    return other.cache.held[:, :, 0, :, : len(tokens)]


# What is computed where ----------------------------------------------------------------------------------------------------


def test_no_layer_runs_twice_over_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers run the root and level after level, the others the whole tree in one pass."""
    model, rows = target(), []
    steps = engine(with_random_weights("kangaroo", model, rows=8, width=3, depth=3), model, slots=1)
    state_after(steps, requests(2, max_new_tokens=20, ignore_eos=True)[1:], 1)
    run_layer = model.layer_stack._run_layer
    monkeypatch.setattr(
        model.layer_stack,
        "_run_layer",
        lambda index, hidden, *rest: rows.append((index, hidden.shape[1])) or run_layer(index, hidden, *rest),
    )
    steps.step()
    drafted = [(layer, count) for count in (1, 3, 3, 1) for layer in (0, 1)]
    assert rows == [*drafted, (2, 8), (3, 8)]


def head_inputs(drafter: Any, call: Callable[[], object]) -> list[torch.Tensor]:
    """Return what the drafter hands to the target's head, call by call."""
    found, own = [], drafter.vocabulary.head

    def head(rows: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
        found.append(norm(rows))
        return own(rows, norm)

    drafter.vocabulary.head = head
    with torch.no_grad():
        call()
    drafter.vocabulary.head = own
    return found


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("adapter", ["attention", "layer"])
def test_training_and_drafting_compute_the_same(adapter: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path of a tree is given to the loss as a sequence: its last row is the one that drafting continued from."""
    model, drafts = target(family), []
    drafter = with_random_weights("kangaroo", model, rows=7, width=2, depth=3, adapter=adapter, labels="hard")
    state = state_after(engine(drafter, model, slots=2), requests(3, max_new_tokens=20, ignore_eos=True)[1:], 2)
    levels = head_inputs(drafter, lambda: drafts.append(drafter.propose(state)))
    parents, trained = drafts[0].tree.parent, []
    monkeypatch.setattr(model, "head", lambda rows, head=model.head: trained.append(rows.detach()) or head(rows))
    for row, sequence in enumerate(sequences_of(state)):
        for node, level, place in [(0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 2, 0), (4, 2, 1)]:
            path = path_to(parents[row].tolist(), node)[1:]
            whole = torch.tensor([[*sequence, *drafts[0].tokens[row, path].tolist(), 5]])
            mask = torch.arange(whole.shape[1]).unsqueeze(0) == whole.shape[1] - 1
            drafter.loss(whole, mask, model.read(whole, drafter.needs), model)
            torch.testing.assert_close(levels[level][row, place], trained[-1][0])


def test_candidates_are_ranked_with_the_sampling_noise() -> None:
    """The noise is that of the token's position, which the target samples with."""
    model, drafts = target(), []
    drafter = with_random_weights("kangaroo", model, rows=4, width=1)
    state = state_after(engine(drafter, model, slots=2), requests(3, SAMPLINGS["T=0.8"], ignore_eos=True)[1:], 1)
    for level, rows in enumerate(head_inputs(drafter, lambda: drafts.append(drafter.propose(state))), start=1):
        noise = gumbel(state.sampling.key, (state.length + level).unsqueeze(1), torch.arange(VOCABULARY))
        best = (model.head(rows).detach() / 0.8 + noise).argmax(-1)
        assert drafts[0].tokens[:, level : level + 1].tolist() == best.tolist()


# Trees ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "width", "depth", "widths"),
    [
        (1, 8, 6, ()),
        (2, 8, 6, (1,)),
        (4, 8, 6, (1, 1, 1)),
        (8, 8, 3, (3, 3, 1)),
        (64, 4, 3, (4, 4, 4)),
        (64, 60, 2, (32, 31)),
    ],
)
def test_rows_are_spread_over_the_levels(rows: int, width: int, depth: int, widths: tuple[int, ...]) -> None:
    model = target()
    drafter: Any = with_random_weights("kangaroo", model, rows=rows, width=width, depth=depth)
    steps = engine(drafter, model, slots=2)
    assert drafter.growth.widths(1) == widths and drafter.shape.nodes == 1 + sum(widths)
    asked = requests(3, max_new_tokens=6)
    assert written(steps, asked) == [truth(model.hf, request) for request in asked]


def test_no_level_is_wider_than_there_are_tokens() -> None:
    drafter: Any = untrained("kangaroo", width=VOCABULARY + 9, depth=2)
    drafter.prepare(target(), 1)
    assert drafter.shape.nodes == 1 + 2 * VOCABULARY and drafter.growth.branch == VOCABULARY


def test_the_cost_of_rows_decides_how_many_there_are() -> None:
    """If rows are nearly free, a level is as wide as it may be; if each costs a pass, nothing is drafted."""
    found = []
    for last in (1.01, 64.0):
        model = target()
        model.curve = CostCurve((1, 64), (1.0, last))
        drafter: Any = untrained("kangaroo", exit=1, width=7)
        drafter.prepare(model, 1)
        found.append(drafter.growth.widths(1))
    assert found[0][0] == 7 and found[1] == () and drafter.wants_cost


@every_sampling
def test_a_chain_ends_after_an_unlikely_token(sampling: str) -> None:
    """The higher the threshold, the fewer tokens are drafted, and the fewer levels are computed on a CPU."""
    model, asked = target(), requests(3, SAMPLINGS[sampling], ignore_eos=True)
    drafted, levels = [], []
    for stop in (0.0, 0.4, 0.9):
        drafter: Any = with_random_weights("kangaroo", model, rows=6, width=1, stop=stop)
        recorder = Recorder(drafter)
        runs = engine(recorder, model, slots=1).generate(asked)
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
        drafted.append(sum(sum(run.drafted) for run in runs) / sum(len(run.drafted) for run in runs))
        levels.append(sum(seen.draft.nodes for seen in recorder.proposed) / len(recorder.proposed))
        assert all((seen.draft.size == seen.draft.nodes).all() for seen in recorder.proposed)
    assert drafted[0] > drafted[1] > drafted[2] >= 1 and levels[0] > levels[1] > levels[2]


def test_a_level_that_holds_too_little_is_the_last() -> None:
    """By the probabilities of its nodes together, given those of the level before; each sequence has a size of its own."""
    model, stop = target(), 0.6
    drafter: Any = with_random_weights("kangaroo", model, rows=10, width=3, depth=3, stop=stop)
    state = state_after(engine(drafter, model), requests(4, max_new_tokens=20, ignore_eos=True)[1:], 1)
    shares = torch.tensor([[0.9, 0.5, 0.9], [0.5, 0.9, 0.9], [0.9, 0.61, 0.1]])  # sequence, level
    number = iter(range(3))

    def candidates(rows: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        level, live = next(number), rows.shape[1]
        chances = (shares[:, level] / (3 if level == 0 else 1)).log()  # of three nodes that are equally likely
        return torch.arange(3).expand(3, live, 3), chances.view(3, 1, 1).expand(3, live, 3)

    drafter.vocabulary.candidates = candidates
    drafter.growth = replace(drafter.growth, branch=3)
    with torch.no_grad():
        draft = drafter.propose(state)
    assert draft.size.tolist() == [7, 4, 10] and draft.nodes == 10


# Laws with early states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [True, False], ids=["rows are cut", "rows are fixed"])
def test_a_nan_in_a_draft_does_not_reach_the_output(cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers write NaN to the target's cache while drafting. The request continues without drafts, and the next
    one in its slot drafts again. On a GPU, rows that do not count go through the pass too."""
    if not cuts:
        monkeypatch.setattr(fit, "fixes_shapes", lambda device: True)
    model, asked = Model(poisoned_model()), Request((3, 9, 4), SAMPLINGS["greedy"], 9)
    drafter: Any = with_random_weights("kangaroo", model, rows=7, width=2, depth=3)
    steps, own = engine(drafter, model, slots=1), drafter.vocabulary.candidates
    drafter.vocabulary.candidates = lambda *given: (torch.full_like(own(*given)[0], POISON), own(*given)[1])
    with pytest.warns(ForewordWarning, match="NaN to a draft.*without speculation"):
        (sick,) = steps.generate([asked])
    drafter.vocabulary.candidates = own
    (after,) = steps.generate([asked])
    assert sick.tokens == after.tokens == truth(model.hf, asked)
    assert sick.accepted[0] == 0 and sum(sick.drafted[1:]) == 0 < sum(after.drafted)


class OnTheHost(Kangaroo):
    captures = "check"


@every_sampling
def test_a_replayed_check_reads_the_states_of_its_own_draft(sampling: str) -> None:
    """Early states that were made outside a recorded check are copied to where it reads them."""
    model, asked = target(), requests(5, SAMPLINGS[sampling], ignore_eos=True)
    drafter = OnTheHost(rows=4, width=1, **WHOLE)
    steps = Engine(model, drafter, slots=2, max_context=CONTEXT, chunk=16)
    steps.loop = rerunning(steps.loop, drafter)
    runs = [steps.add(request) for request in asked]
    run_to_end(steps)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(count == 4 for run in runs for count in run.accepted[:-1])
    assert any(one.graph for one in steps.loop.buckets.values())


def test_a_sequence_without_drafts_repeats_its_root() -> None:
    model = target()
    drafter: Any = with_random_weights("kangaroo", model, rows=7, width=2, depth=3)
    state = state_after(engine(drafter, model, slots=2), requests(3, max_new_tokens=20, ignore_eos=True)[1:], 1)
    state.speculates[1] = False
    with torch.no_grad():
        draft: Draft = drafter.propose(state)
    assert (draft.tokens[1] == state.root[1]).all() and not (draft.tokens[0] == state.root[0]).all()
    assert draft.early is not None and draft.early.states.shape == (2, 7, model.hidden_size)


# Options -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "early"), [(2, 1), (3, 2), (4, 2), (30, 2), (32, 2), (40, 3), (80, 5)])
def test_the_layers_that_draft(layers: int, early: int) -> None:
    model = target()
    model.layers = layers
    assert _exit_of(model, None) == early and _exit_of(model, 1) == 1


@pytest.mark.parametrize(("exit", "layers"), [(4, 4), (9, 4), (None, 1)])
def test_a_layer_has_to_be_left_to_verify(exit: int | None, layers: int) -> None:
    model = target()
    model.layers = layers
    with pytest.raises(DrafterError, match=f"kangaroo: exit is .*tiny-llama has layers 1 to {layers}; at least one has to"):
        untrained("kangaroo", exit=exit).prepare(model, 1)


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma2"])
def test_an_adapter_of_attention_has_no_other_weights(family: str) -> None:
    model = target(family)
    drafter: Any = untrained("kangaroo")
    drafter.prepare(model, 1)
    names = {name.split(".")[2] for name in drafter.module.state_dict() if name.startswith("layers")}
    norms = {"llama": {"input_layernorm"}, "olmo2": {"post_attention_layernorm"}}
    assert names == {"self_attn"} | norms.get(family, {"input_layernorm", "post_attention_layernorm"})
    assert drafter.config == {"exit": 2, "adapter": "attention"}


def test_prompts_of_one_token_are_drafted_too() -> None:
    model = target()
    (run,) = engine(untrained("kangaroo", rows=3, width=1, **WHOLE), model, slots=1).generate(
        [Request(prompts(1)[0], SAMPLINGS["greedy"], 6, ignore_eos=True)]
    )
    assert run.accepted == [3, 3]
