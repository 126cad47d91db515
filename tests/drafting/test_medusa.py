"""medusa: heads start as the target's own head, and their candidates do not depend on one another."""

from itertools import product

import pytest
import torch

from doubles import (
    CONTEXT,
    SAMPLINGS,
    VOCABULARY,
    Recorder,
    chain,
    drafts_of,
    engine,
    hf_hidden,
    path_to,
    paths_of,
    requests,
    target,
    with_random_weights,
    written,
)
from foreword.core.needs import Needs
from foreword.core.state import Batch
from foreword.drafting.lessons import Lesson
from foreword.drafting.trees import USUAL_RATES, greedy_paths
from foreword.methods import untrained
from foreword.methods.medusa import Medusa
from foreword.model.model import Model
from foreword.ops.noise import gumbel


def last_state(model: Model, sequence: list[int]) -> torch.Tensor:
    """Return the normed hidden state [H] of the row before the root."""
    return model.norm(hf_hidden(model.hf, sequence[:-1])[-1][-1]).detach()


def test_an_untrained_head_equals_the_target_head() -> None:
    model = target()
    recorder = Recorder(untrained("medusa", rows=3, heads=2, paths=[[0], [0, 0]]))
    written(engine(recorder, model), requests(3))
    late = recorder.proposed[-1]
    for sequence, (tokens, _) in zip(late.sequences, drafts_of(late), strict=True):
        best = int(model.head(last_state(model, sequence)).argmax())
        assert tokens == [sequence[-1], best, best]


@pytest.mark.parametrize("nodes", [4, 16])
def test_the_likeliest_paths_multiply_the_probabilities_of_the_heads(nodes: int) -> None:
    """Compare with every path of up to three tokens: the heads are independent, so probabilities multiply."""
    model = target()
    drafter: Medusa = with_random_weights("medusa", model, rows=nodes, heads=3, tree="best", width=64)
    recorder = Recorder(drafter)
    written(engine(recorder, model), requests(4))
    late = recorder.proposed[-1]
    for sequence, (tokens, parent) in zip(late.sequences, drafts_of(late), strict=True):
        state = last_state(model, sequence)
        chances = [model.head(head(state)).log_softmax(-1).detach() for head in drafter.module]
        best = [list(zip(*map(torch.Tensor.tolist, chance.topk(10)), strict=True)) for chance in chances]
        paths = [path for depth in range(1, 4) for path in product(*best[:depth])]
        likely = sorted(paths, key=lambda path: -sum(chance for chance, _ in path))[: nodes - 1]
        drafted = {tuple(tokens[row] for row in path_to(parent, node)[1:]) for node in range(1, len(tokens))}
        assert drafted == {tuple(token for _, token in path) for path in likely}


@torch.no_grad()
def test_candidates_are_ranked_with_the_sampling_noise() -> None:
    """Each head uses the noise of its token's position."""
    model, temperature = target(), 0.8
    drafter: Medusa = with_random_weights("medusa", model, rows=16, heads=3)
    steps = engine(drafter, model, slots=2)
    for request in requests(3, SAMPLINGS["T=0.8"], ignore_eos=True)[1:]:
        steps.add(request)
    for _ in range(7):
        steps.step()
    state = steps.state.at(Batch.of(sorted(steps.slots.running), max(run.length for run in steps.slots.running.values())))
    logits = model.head(drafter._heads(model.norm(drafter.hidden[state.slots])))
    position = state.length.unsqueeze(1) + torch.arange(1, 4)
    order = (logits / temperature + gumbel(state.sampling.key, position, torch.arange(VOCABULARY))).topk(10).indices
    draft = drafter.propose(state)
    template = greedy_paths([row[:10] for row in USUAL_RATES[:3]], draft.nodes - 1)
    for index in range(2):
        correct = {tuple(int(order[index, step, rank]) for step, rank in enumerate(path)) for path in template}
        assert set(paths_of(draft, index)) == {(), *correct}


def test_calibration_counts_the_ranks_of_the_labels() -> None:
    model = target()
    drafter: Medusa = with_random_weights("medusa", model, heads=2)
    tokens = torch.randint(3, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 20, dtype=torch.bool)
    model.allocate(3, CONTEXT, 20)
    with torch.no_grad():
        scores = model.score(Batch.of([0, 1, 2], 0), chain(tokens.tolist()), Needs(hidden=True))
    rates = drafter.calibrate(tokens, mask, scores, model)
    lesson, found = Lesson.of(tokens, mask, 2), [[0] * 10 for _ in range(2)]
    for head in (1, 2):
        rows = drafter.module[head - 1](model.norm(lesson.of_rows(scores.require_hidden())))
        order = model.head(rows).argsort(-1, descending=True)[:, :10]
        for row, label in zip(
            order[lesson.counts[:, head - 1]], lesson.label(head)[lesson.counts[:, head - 1]], strict=True
        ):
            for rank in range(10):
                found[head - 1][rank] += int(row[rank] == label)
        total = int(lesson.counts[:, head - 1].sum())
        assert rates[head - 1] == pytest.approx([count / total for count in found[head - 1]])
    again = Medusa(**{**drafter.config, "rates": rates, "rows": 8})
    again.prepare(model, 1)
    assert again.growth.shape.nodes == 8 and again.config["rates"] == rates


def test_a_sequence_of_one_token_gets_no_draft() -> None:
    model = target()
    recorder = Recorder(with_random_weights("medusa", model, rows=6))
    written(engine(recorder, model), requests(1, SAMPLINGS["greedy"], max_new_tokens=3, ignore_eos=True))
    assert [len(one) for one in recorder.proposed[0].sequences] == [1]
    assert recorder.proposed[0].draft.size.tolist() == [1] and recorder.proposed[1].draft.size.tolist() == [6]
