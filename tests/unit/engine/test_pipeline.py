"""The pipeline: whatever the exits predict, and whatever is dropped, the output is the truth; right exits make it faster."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from doubles import (
    CONTEXT,
    POISON,
    SAMPLINGS,
    VOCABULARY,
    engine,
    fresh,
    requests,
    run_to_end,
    state_of,
    target,
    tokenizer,
    truth,
)
from foreword.core.sampling import Sampling
from foreword.core.scores import Emission
from foreword.core.state import Batch
from foreword.engine import fit
from foreword.engine.engine import Engine
from foreword.engine.pipeline import Pipeline
from foreword.engine.request import Request
from foreword.errors import DrafterError, ForewordWarning, InputError, NumericsError
from foreword.methods import make
from foreword.model.model import Model
from foreword.ops.flights import NONE, Flight, FlightColumns, move
from foreword.text import TextStream
from foreword.trace import Traced

REPEATS = 3
OPTIONS: dict[str, dict[str, Any]] = {"every": {}, "ends": {"check": "ends"}, "gate": {"gate": 0.2}}


def rounds_of(steps: Engine, asked: list[Request]) -> list[int]:
    """Run requests, check their tokens, and return how many rounds each took."""
    runs = steps.generate(asked)
    assert [run.tokens for run in runs] == [truth(steps.target.hf, request) for request in asked]
    assert all(max(run.accepted) == 1 and sum(run.accepted) == len(run.tokens) for run in runs)
    return [len(run.accepted) for run in runs]


def with_idle_layers() -> Model:
    """Return a looped model whose layers add nothing, so that every exit predicts what the last one does."""
    hf = fresh("foreword_looped")
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return Model(hf)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("option", OPTIONS)
def test_if_all_exits_agree_a_round_decides_a_token(option: str, sampling: Sampling) -> None:
    """Once the first token is through. With a gate, those that are not sure wait."""
    asked = requests(3, sampling, max_new_tokens=10, ignore_eos=True)
    rounds = rounds_of(engine(make("speed", **OPTIONS[option]), with_idle_layers()), asked)
    assert rounds == [10 + REPEATS - 1] * 3 if option != "gate" else min(rounds) >= 10 + REPEATS - 1


@pytest.mark.parametrize("way", ["a gate that nothing passes", "no speculation"])
def test_without_predictions_a_token_takes_all_repeats(way: str) -> None:
    gate = way.startswith("a gate")
    asked = requests(3, max_new_tokens=6, ignore_eos=True, speculate=gate)
    rounds = rounds_of(engine(make("speed", gate=0.999999 if gate else 0.0), with_idle_layers()), asked)
    assert rounds == [6 * REPEATS] * 3


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_writes_the_truth(option: str, slots: int) -> None:
    steps = engine(make("speed", **OPTIONS[option]), target("foreword_looped"), slots)
    rounds_of(steps, requests(4, SAMPLINGS["T=0.8"], max_new_tokens=10))


def predict(steps: Engine, tokens: list[int], counts: list[bool]) -> None:
    """Let exits predict planned tokens, and let them count or not. Predictions that are final stay as they are."""
    loop: Any = steps.loop
    usual, calls = loop._predictions, iter(range(10**6))

    def planned(plan: list[Any], like: Tensor) -> Tensor:
        first = next(calls)
        return torch.tensor([plan[(first + i) % len(plan)] for i in range(like.shape[1])]).expand_as(like)

    def predictions(flight: Flight, *others: Any) -> tuple[Tensor, Tensor]:
        predicted, logits = usual(flight, *others)
        return predicted.where(is_final(flight), planned(tokens, predicted)), logits

    loop._predictions, loop._sure = predictions, lambda logits, predicted: planned(counts, predicted)


def is_final(flight: Flight) -> Tensor:
    """[b, n] bool: rows that have been through all repeats."""
    return flight.repeat == REPEATS


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=7),
    counts=st.lists(st.booleans(), min_size=1, max_size=5),
    slots=st.integers(1, 3),
)
def test_any_predictions_give_the_truth(sampling: Sampling, tokens: list[int], counts: list[bool], slots: int) -> None:
    """They are wrong almost always: tokens are dropped at every repeat."""
    steps = engine(make("speed"), target("foreword_looped"), slots)
    predict(steps, tokens, counts)
    rounds_of(steps, requests(3, sampling, max_new_tokens=5))


# NaN ---------------------------------------------------------------------------------------------------------------------


def poisoned() -> Model:
    """Return a looped model in which the embedding of one token is NaN."""
    hf = fresh("foreword_looped", tie_word_embeddings=False)
    with torch.no_grad():
        hf.model.embed_tokens.weight[POISON] = torch.nan
    return Model(hf)


@pytest.mark.parametrize("late", [False, True])
def test_a_nan_in_flight_does_not_reach_the_output(late: bool) -> None:
    """The wrong token is dropped, but its row stays in the cache, where 0 x NaN is NaN. So the request goes on without
    predictions, from its root; the next one in that slot speculates again. One slot: in a batch, padding overwrites it."""
    model = poisoned()
    asked = requests(8, max_new_tokens=8, ignore_eos=True)
    asked = [one for one in asked if POISON not in (*one.prompt, *truth(model.hf, one))][:2]
    assert len(asked) == 2
    steps = engine(make("speed"), model, slots=1, late=late)
    loop: Any = steps.loop
    usual = loop._predictions

    def poison(flight: Flight, *others: Any) -> tuple[Tensor, Tensor]:
        """Let the root predict a token, and the row after it the token whose embedding is NaN."""
        predicted, logits = usual(flight, *others)
        return predicted.where(is_final(flight), torch.tensor([9, POISON, 9])[: predicted.shape[1]]), logits

    loop._predictions = poison
    runs = [steps.add(one) for one in asked]
    with pytest.warns(ForewordWarning, match="NaN to a draft.*without speculation"):
        run_to_end(steps)
    assert [run.tokens for run in runs] == [truth(model.hf, one) for one in asked]
    loop._predictions = usual
    again = steps.generate(asked)
    assert [run.tokens for run in again] == [run.tokens for run in runs]


@pytest.mark.filterwarnings("ignore::foreword.errors.ForewordWarning")
@pytest.mark.parametrize("late", [False, True])
def test_a_nan_of_the_model_itself_is_an_error(late: bool) -> None:
    steps = engine(make("speed"), poisoned(), slots=1, late=late)
    with pytest.raises(NumericsError, match="NaN"):
        steps.generate([Request((3, POISON, 9), max_new_tokens=4)])
    healthy = Request((3, 9, 4), Sampling(seed=1), 5)
    assert steps.generate([healthy])[0].tokens == truth(steps.target.hf, healthy)


# As on a GPU -------------------------------------------------------------------------------------------------------------


class NoHost(TorchDispatchMode):
    """Raises where an operation hands a value, or a shape that depends on values, to the host."""

    def __torch_dispatch__(self, function: Any, types: Any, given: tuple = (), options: Any = None) -> Any:  # type: ignore[type-arg]
        assert not any(word in str(function) for word in ("_local_scalar_dense", "nonzero", "masked_select"))
        return function(*given, **(options or {}))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_round_of_fixed_shape_asks_the_device_nothing(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are run, whether or not a token is in flight there, and the output is the same."""
    monkeypatch.setattr(fit, "fixes_shapes", lambda device: True)
    model, asked = target("foreword_looped"), requests(3, max_new_tokens=9)
    steps = engine(make("speed", **OPTIONS[option]), model)
    rounds_of(steps, asked)
    for request in asked:
        steps.add(replace(request, ignore_eos=True))
    while not all(run.tokens for run in steps.slots.running.values()) or len(steps.slots.running) < 3:
        steps.step()
    state = steps.state.at(Batch.of([0, 1, 2], max(run.length for run in steps.slots.running.values())))
    with torch.inference_mode(), NoHost():
        assert steps.loop.round(state).count.shape == (3,)


def test_the_loop_keeps_its_buffers() -> None:
    steps = engine(make("speed"), target("foreword_looped"))
    assert isinstance(steps.loop, Pipeline)
    before = [column.data_ptr() for column in steps.loop.columns]
    steps.generate(requests(5, max_new_tokens=6))
    assert [column.data_ptr() for column in steps.loop.columns] == before
    assert not any(column.is_inference() for column in steps.loop.columns)


# Moving ------------------------------------------------------------------------------------------------------------------


def moved(tokens: list[int], repeat: list[int], predicted: list[int], sure: list[int], decided: int) -> list[Any]:
    """Return the tokens in flight of one slot after `move`, each with its repeat. The other slot stays as it is."""
    columns, state = FlightColumns.empty(2, 3, 1, torch.float32, torch.device("cpu")), state_of([[5], [5]])
    flight = Flight(torch.tensor([tokens]), torch.tensor([repeat]), torch.tensor([repeat]).unsqueeze(-1).float())
    emission = Emission.in_a_block(1, 1, torch.device("cpu"))
    emission.count.fill_(decided)
    emission.broken.fill_(False)
    plan = torch.tensor([predicted]), torch.tensor([sure]).bool(), True, emission
    move(columns, state.at(Batch.of([1], 0)), flight, *plan)
    rows = zip(columns.tokens[1].tolist(), columns.repeat[1].tolist(), columns.hidden[1, :, 0].tolist(), strict=True)
    found = [(token, times, state) for token, times, state in rows if times != NONE]
    assert all(times == 0 or state == times for _, times, state in found), "a state moves with its token"
    assert columns.repeat[0].tolist() == [0, NONE, NONE]
    return [(token, times) for token, times, _ in found]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (([5, 6, 7], [3, 2, 1], [6, 7, 8], [1, 1, 1], 1), [(6, 2), (7, 1), (8, 0)]),  # all agree
        (([5, 6, 7], [3, 2, 1], [9, 7, 8], [1, 1, 1], 1), [(9, 0)]),  # the final one contradicts
        (([5, 6, 7], [3, 2, 1], [6, 9, 8], [1, 1, 1], 1), [(6, 2), (9, 0)]),  # a later one does
        (([5, 6, 7], [3, 2, 1], [6, 9, 8], [1, 0, 1], 1), [(6, 2), (7, 1), (8, 0)]),  # which does not count
        (([5, 6, 7], [3, 2, 1], [6, 7, 8], [1, 1, 0], 1), [(6, 2), (7, 1)]),  # the youngest waits
        (([5], [1], [6], [1], 0), [(5, 1), (6, 0)]),  # the first prediction
        (([5, 0], [2, NONE], [6, 0], [0, 0], 0), [(5, 2)]),  # nothing counts
    ],
)
def test_tokens_that_enter_stay_and_leave(given: Any, expected: list[tuple[int, int]]) -> None:
    assert moved(*given)[1:] == expected[1:] and moved(*given)[0][1] == expected[0][1]


# What users see ----------------------------------------------------------------------------------------------------------


def test_ordinary_models_are_refused() -> None:
    with pytest.raises(DrafterError, match="looped model, and tiny-llama applies each of its layers once; .*train looped"):
        engine(make("speed"), target())


@pytest.mark.parametrize(
    ("options", "named"), [({"check": "some"}, "check is 'some'; choose from every, ends"), ({"gate": 1.0}, "gate is 1.0")]
)
def test_wrong_options_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        make("speed", **options)


def test_a_stream_has_no_empty_pieces(tmp_path: Any) -> None:
    """Rounds that decide nothing are no events of a request. A trace has a line for every decided token."""
    model, request = target("foreword_looped"), replace(requests(2)[1], ignore_eos=True, stream=TextStream(tokenizer()))
    traced = Traced(make("speed"), tmp_path / "trace", str)
    (run,) = Engine(model, traced, slots=1, max_context=CONTEXT).generate([request])
    assert len(run.events) == len(run.tokens) < len(run.accepted) and all(len(one.tokens) == 1 for one in run.events)
    assert len((tmp_path / "trace").read_text().splitlines()) == len(run.tokens)
