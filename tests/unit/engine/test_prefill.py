"""What a drafter sees of the prompt: nothing, the last row of each chunk, or all rows, with the values of transformers."""

import pytest
import torch

from doubles import FAMILIES, LastHidden, Liar, Recorder, Seen, engine, hf_hidden, hf_logits, requests, target, truth
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.state import State
from foreword.core.target import Target
from foreword.engine.graph import GraphedLoop
from foreword.engine.lockstep import Lockstep
from foreword.engine.prefill import MOST_CAPTURED, prompt_groups
from foreword.engine.request import Request, Running

every_family = pytest.mark.parametrize("family", FAMILIES)


def recorded(needs: Needs, family: str = "llama", slots: int = 2) -> tuple[Recorder, list[Request]]:
    recorder, asked = Recorder(Liar(), needs), requests(4, max_new_tokens=2)
    engine(recorder, target(family), slots).generate(asked)
    return recorder, asked


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_without_a_need_for_the_prompt_nothing_is_read() -> None:
    recorder, _ = recorded(Needs(hidden=True, logits=True, taps=(2,)))
    assert recorder.read_calls == []


@every_family
def test_all_rows_of_the_prompt(family: str) -> None:
    """In chunks, in order, all but the last token; hidden states, taps and logits are the model's own."""
    recorder, asked = recorded(Needs(hidden=True, logits=True, taps=(0, 3), prompt="all"), family)
    hf = target(family).hf
    for request in asked:
        chunks = [seen for seen in recorder.read_calls if _of(seen, request)]
        tokens = [token for seen in chunks for token in seen.draft.tokens[0, : int(seen.draft.size[0])].tolist()]
        assert tokens == list(request.prompt[:-1])
        assert all(seen.draft.nodes <= 5 for seen in chunks)
        if not chunks:
            continue
        own, layers = hf_logits(hf, request.prompt[:-1]), hf_hidden(hf, request.prompt[:-1])
        close(torch.cat([seen.scores.require_logits()[0] for seen in chunks]), own)
        close(torch.cat([seen.scores.require_hidden()[0] for seen in chunks]), layers[4])
        close(torch.cat([seen.scores.taps[0][0] for seen in chunks]), layers[0])
        close(torch.cat([seen.scores.taps[3][0] for seen in chunks]), layers[3])


def _of(seen: Seen, request: Request) -> bool:
    """Whether a chunk belongs to a request: the sequence so far is a prefix of its prompt."""
    return seen.sequences[0] == list(request.prompt[: len(seen.sequences[0])])


@every_family
def test_the_last_row_of_each_chunk(family: str) -> None:
    """Once for every chunk; the row before the root is read last."""
    recorder, asked = recorded(Needs(hidden=True, taps=(1,), prompt="last"), family)
    assert len(recorder.read_calls) == sum(-(-(len(request.prompt) - 1) // 5) for request in asked)
    for request in asked:
        calls = [seen for seen in recorder.read_calls if _of(seen, request)]
        ends = [*range(5, len(request.prompt) - 1, 5), *([len(request.prompt) - 1] if len(request.prompt) > 1 else [])]
        layers = hf_hidden(target(family).hf, request.prompt[:-1]) if ends else {}
        for seen, end in zip(calls, ends, strict=True):
            assert seen.draft.tokens.tolist() == [[request.prompt[end - 1]]] and seen.draft.size.tolist() == [1]
            close(seen.scores.require_hidden()[0, 0], layers[4][end - 1])
            close(seen.scores.taps[1][0, 0], layers[1][end - 1])


@pytest.mark.parametrize("hidden", [True, False])
def test_the_last_row_with_logits(hidden: bool) -> None:
    """A drafter that needs logits gets them, whether it needs the hidden state too or not."""
    recorder, asked = recorded(Needs(hidden=hidden, logits=True, prompt="last"))
    for request in asked[1:]:
        seen = [seen for seen in recorder.read_calls if _of(seen, request)][-1]
        close(seen.scores.require_logits()[0, 0], hf_logits(target().hf, request.prompt[:-1])[-1])
        assert (seen.scores.hidden is not None) == hidden


@every_family
def test_observe_gets_what_was_asked_for(family: str) -> None:
    """For every row of the draft that counts: the model's own hidden states and taps along that row's path."""
    recorder, hf = Recorder(Liar(nodes=4), Needs(hidden=True, logits=True, taps=(2,))), target(family).hf
    engine(recorder, target(family), slots=3).generate(requests(3, max_new_tokens=3))
    for before, seen in zip(recorder.proposed, recorder.observed, strict=True):
        for index, text in enumerate(before.sequences):
            for node in range(int(seen.draft.size[index])):
                path = seen.draft.tree.ancestors[index, node].nonzero().flatten()[1:]
                layers = hf_hidden(hf, text + seen.draft.tokens[index, path].tolist())
                close(seen.scores.require_hidden()[index, node], layers[4][-1])
                close(seen.scores.taps[2][index, node], layers[2][-1])


def test_observe_gets_no_more_than_was_asked_for() -> None:
    recorder, _ = recorded(Needs())
    assert all(seen.scores.hidden is None and seen.scores.taps == {} for seen in recorder.observed)


def test_a_drafter_of_hidden_states_writes_the_truth() -> None:
    model, asked = target(), requests(5, max_new_tokens=20, ignore_eos=True)
    runs = engine(LastHidden(), model, slots=2).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]


def test_a_drafter_may_have_a_stack_of_its_own() -> None:
    """It is made in `bind`, like everything that a drafter allocates; the context is known there."""

    class WithStack(Drafter):
        paper = "-"
        shape = Shape(1, 0)

        def bind(self, target: Target, slots: int) -> None:
            self.stack = target.stack(slots, init=0)

        def propose(self, state: State) -> Draft:
            return Draft(state.root.unsqueeze(1), Tree.chain(1), torch.ones_like(state.root))

    drafter = WithStack()
    engine(drafter, slots=3, context=40)
    assert drafter.stack.cache.slots == 3 and drafter.stack.cache.context == 40


def entering(*lengths: int) -> list[Running]:
    return [Running(Request((5,) * (length + 1)), slot=slot) for slot, length in enumerate(lengths)]


def test_captured_passes_are_shared_by_prompts_of_one_size() -> None:
    """Passes of 64, 128 and 1024 rows, four prompts at a time; chunks after cached tokens are in another group."""
    loop = GraphedLoop(Lockstep(target(), Liar()))
    runs = entering(40, 1024, 64, 3, 100, 5, 6, 2000)
    runs[7].prefilled = 1024
    groups = prompt_groups(runs, loop, 1024, joins_prompts=True)
    assert [[run.slot for run in group] for group in groups] == [[0, 2, 3, 5], [6], [4], [1], [7]]


def test_prompts_that_are_not_captured_are_read_together() -> None:
    """Many prompts keep a GPU busy in one pass; a CPU is busy with one prompt."""
    plain = Lockstep(target(), Liar())
    many = entering(*range(1, MOST_CAPTURED + 2))
    assert prompt_groups(many, GraphedLoop(plain), 1024, joins_prompts=True) == [many]
    assert prompt_groups(many[:9], plain, 1024, joins_prompts=True) == [many[:9]]
    assert prompt_groups(many[:9], plain, 256, joins_prompts=False) == [[run] for run in many[:9]]
    assert prompt_groups([], plain, 1024, joins_prompts=True) == []
