"""The proposers for vLLM, called as vLLM calls them. Slow references say what they must draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles import fresh, prompts, target, tiny, with_random_weights
from doubles.states import state_of
from doubles.vllm import VllmModel, VllmRunner, vllm_config
from foreword.drafters.saved import restore, save
from foreword.drafting.draft_vocabulary import packed
from foreword.errors import DrafterError, ForewordError, InputError
from foreword.methods import make
from foreword.vllm import Heads, Lookup, Recycling

LENGTH = 3
REPEATING = [(9, 8, 7, 9, 8, 7, 9, 8), *prompts(6), (5, 5, 5)]


def run(proposer: Any, given: list[tuple[int, ...]] = REPEATING, family: str = "llama", **how: Any) -> list[Any]:
    model = VllmModel(tiny(family))
    proposer.load_model(model)
    return VllmRunner(model, proposer, **how).run(given)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of medusa heads for the tiny model, which draft among half of its tokens."""
    folder, model = tmp_path_factory.mktemp("heads"), target()
    drafter = with_random_weights("medusa", model, heads=4)
    drafter.vocabulary.choose(packed(torch.arange(model.vocab_size) % 2 == 0))
    save(drafter, folder, model)
    return folder


# What is drafted ----------------------------------------------------------------------------------------------------------


def test_lookup_drafts_what_our_engine_would() -> None:
    drafter: Any = make("prompt_lookup", LENGTH + 1)
    drafter.prepare(target(), 1)
    lengths = set()

    def seen(runner: VllmRunner, drafts: list[list[int]]) -> None:
        for one, rows, found in zip(runner.running, runner.rows, drafts, strict=True):
            expected = drafter.propose(state_of([one.sequence]))
            assert found == (expected.tokens[0, 1 : int(expected.size)].tolist() if rows.decided else [])
            lengths.add(len(found))

    found = run(Lookup(vllm_config(tiny("llama"))), seen=seen)
    assert lengths == {0, LENGTH} and sum(sum(one.accepted) for one in found) > 10


def test_heads_draft_from_the_last_accepted_row(heads: Path) -> None:
    model, drafted = VllmModel(tiny("llama")), []
    own: Any = restore(heads, target())

    def seen(runner: VllmRunner, drafts: list[list[int]]) -> None:
        for one, rows, found in zip(runner.running, runner.rows, drafts, strict=True):
            state = model.states(one.sequence[:-1])[-1]
            logits = torch.stack([model.compute_logits(head(state)) for head in own.module[:LENGTH]])
            assert found == ((2 * logits[:, ::2].argmax(1)).tolist() if rows.decided else [])
            drafted.append(found)

    run(Heads(vllm_config(tiny("llama"), drafter=str(heads))), seen=seen)
    assert sum(map(len, drafted)) > 150


def test_recycling_walks_what_the_target_ranked_first() -> None:
    table: dict[int, int] = {}
    drafted = []

    def learn(runner: VllmRunner) -> None:
        """All rows in their order, then those of drafts again: the accepted ones last."""
        for rows in runner.rows:
            table.update(zip(rows.read, rows.ranked, strict=True))
        for accepted in (False, True):
            for rows in runner.rows:
                for place, row in enumerate(rows.sampled):
                    if rows.decided and (place < len(rows.decided)) is accepted:
                        table[rows.read[row]] = rows.ranked[row]

    def seen(runner: VllmRunner, drafts: list[list[int]]) -> None:
        learn(runner)
        for one, rows, found in zip(runner.running, runner.rows, drafts, strict=True):
            chain = [one.sequence[-1]]
            while rows.decided and len(chain) <= LENGTH and chain[-1] in table:
                chain.append(table[chain[-1]])
            assert found == chain[1:]
            drafted.append(found)

    found = run(Recycling(vllm_config(tiny("llama"))), seen=seen)
    assert sum(map(len, drafted)) > 100 and sum(sum(one.accepted) for one in found) > 10


def test_recycling_learns_of_drafts_alone_where_no_python_runs() -> None:
    """vLLM replays passes as CUDA graphs: `forward` is not called, so the rows of prompts are not known."""
    proposer, model = Recycling(vllm_config(tiny("llama"))), VllmModel(tiny("llama"))
    in_python = model.forward
    proposer.load_model(model)
    model.forward = in_python  # type: ignore[method-assign]
    VllmRunner(model, proposer).run([(9, 8, 7, 6)], new_tokens=4)
    known = (proposer.drafter.table.chances[0, :, 0] > -torch.inf).nonzero().flatten().tolist()  # type: ignore[attr-defined]
    assert 6 in known and not {9, 8, 7} & set(known)


# Which rows are whose -----------------------------------------------------------------------------------------------------


def test_heads_leave_out_a_step_with_a_cut_draft(heads: Path) -> None:
    """As where a grammar allows only the beginning of a draft. The step after it drafts as ever."""
    lengths: dict[bool, list[int]] = {True: [], False: []}

    def cut(step: int, draft: list[int]) -> list[int]:
        return draft[:1] if step % 3 == 0 else draft

    def seen(runner: VllmRunner, drafts: list[list[int]]) -> None:
        if len(runner.running) == runner.most and all(rows.decided for rows in runner.rows):
            lengths[runner.steps % 3 == 1] += map(len, drafts)

    run(Heads(vllm_config(tiny("llama"), drafter=str(heads))), seen=seen, cut=cut)
    assert set(lengths[True]) == {0} and set(lengths[False]) == {LENGTH}


def test_recycling_goes_on_after_a_cut_draft() -> None:
    found = run(Recycling(vllm_config(tiny("llama"))), cut=lambda step, draft: draft[: step % 3])
    assert sum(sum(one.accepted) for one in found) > 5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_outputs_are_those_of_the_model(family: str) -> None:
    """Whatever is drafted: the runner is right, so that the tests above say something."""
    model = VllmModel(tiny(family))
    for one in run(Recycling(vllm_config(tiny(family))), [(3, 4, 5, 6, 7, 8), (11,)], family):
        for place in range(len(one.sequence) - 14, len(one.sequence)):
            assert one.sequence[place] == int(model.compute_logits(model.states(one.sequence[:place])[-1:]).argmax())


# Settings -----------------------------------------------------------------------------------------------------------------


def test_options_come_from_the_additional_config() -> None:
    lookup: Any = Lookup(vllm_config(tiny("llama"), min_match=2, max_match=4))
    assert (lookup.drafter.min_match, lookup.drafter.max_match, lookup.drafter.rows) == (2, 4, LENGTH + 1)
    recycling: Any = Recycling(vllm_config(tiny("llama"), fade=0.5))
    assert (recycling.drafter.fade, recycling.drafter.mode, recycling.drafter.tree) == (0.5, "shared", "chain")


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (Lookup, {"rows": 4}, "rows is num_speculative_tokens \\+ 1 inside vLLM; leave it out"),
        (Recycling, {"table": "slot"}, "table is shared inside vLLM"),
        (Lookup, {"max_macth": 4}, "no option is called 'max_macth'"),
        (Recycling, {"ways": 2}, "Recycling: tensor_parallel_size is 2.*use Lookup"),
        (Heads, {"ways": 2}, "Heads: tensor_parallel_size is 2"),
        (Heads, {"drafter": "nowhere"}, "nowhere is missing"),
    ],
)
def test_what_is_refused(kind: Callable[..., Any], config: dict[str, Any], message: str) -> None:
    with pytest.raises(ForewordError, match=message):
        kind(vllm_config(tiny("llama"), **config))


def test_options_must_be_an_object() -> None:
    config = vllm_config(tiny("llama"))
    config.additional_config = {"foreword": "medusa"}
    with pytest.raises(InputError, match="is 'medusa'; give an object with the options of the method"):
        Lookup(config)


def test_heads_of_another_model_are_refused(heads: Path) -> None:
    for other in (fresh("llama", seed=1), tiny("qwen3")):
        with pytest.raises(DrafterError, match="was trained for tiny-llama .* and tiny is another model"):
            Heads(vllm_config(other, drafter=str(heads))).load_model(VllmModel(other))


def test_drafters_of_other_methods_are_refused(tmp_path: Path) -> None:
    model = target()
    save(with_random_weights("draft_model", model, layers=1), tmp_path, model)
    with pytest.raises(InputError, match="holds a drafter of draft_model, but Heads runs those of medusa alone"):
        Heads(vllm_config(tiny("llama"), drafter=str(tmp_path)))


def test_a_quantised_head_is_refused(heads: Path) -> None:
    model: Any = VllmModel(tiny("llama"))
    model.lm_head = SimpleNamespace(weight=torch.zeros(48, 32, dtype=torch.int8))
    with pytest.raises(DrafterError, match="the head of tiny is quantised"):
        Heads(vllm_config(tiny("llama"), drafter=str(heads))).load_model(model)
