"""chimera: the trigrams of nodes, what an untrained drafter computes, and how many rows it learns from. That training and
drafting compute the same is tested for all trained methods together."""

from typing import Any

import torch

from doubles import VOCABULARY, engine, requests, target, written
from foreword.core.needs import Needs
from foreword.methods import untrained
from foreword.methods.chimera import next_trigrams, trigrams_at
from foreword.ops.rows import rms_of, unit_rms


def test_trigrams_end_at_a_place_and_go_on_at_a_node() -> None:
    """The first token stands for those before it; a place after the end gives the last token, which is padding there."""
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4], [9, 9, 9, 9]])
    found = trigrams_at(tokens, torch.tensor([1, 0]), torch.tensor([[0, 1, 2], [3, 2, 4]]))
    assert found.tolist() == [[[1, 1, 1], [2, 1, 1], [3, 2, 1]], [[8, 7, 6], [7, 6, 5], [8, 8, 7]]]
    after = next_trigrams(found, torch.tensor([[30, 31], [40, 41]]), torch.tensor([[2, 0], [1, 1]]))
    assert after.tolist() == [[[30, 3, 2], [31, 1, 1]], [[40, 7, 6], [41, 7, 6]]]


def test_an_untrained_drafter_starts_with_embeddings_and_the_target_s_state() -> None:
    """A node's row is its own embedding, as large as the last committed row. A head adds a tenth of it to the target's last
    state, and taps add nothing."""
    model = target()
    drafter: Any = untrained("chimera", heads=2, taps=(1, 3))
    drafter.prepare(model, 1)
    generator = torch.Generator().manual_seed(0)
    embeddings, sources = (torch.randn(2, 4, 3, 32, generator=generator).double() for _ in range(2))
    anchor = 50 * sources[:, :1, 0]
    torch.testing.assert_close(drafter.module.nodes(embeddings, anchor), rms_of(anchor) * unit_rms(embeddings[:, :, 0]))
    torch.testing.assert_close(drafter.module.committed(sources), sources[:, :, 0])
    for level in (1, 2):
        torch.testing.assert_close(
            drafter.module.guess(level, anchor, sources[:, :, 1]), anchor.expand(-1, 4, -1) + 0.1 * sources[:, :, 1]
        )


def test_a_step_learns_from_as_many_anchors_as_asked_for() -> None:
    model = target()
    tokens = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    for anchors, rows in ((2, 3 * 2), (99, 3 * 10)):
        drafter: Any = untrained("chimera", heads=2, anchors=anchors)
        drafter.prepare(model, 1)
        scores = model.read(tokens, Needs(hidden=True))
        _, figures = drafter.loss(tokens, torch.ones(3, 12, dtype=torch.bool), scores, model)
        assert figures["rows/1"] == rows >= figures["rows/2"]


def test_each_level_runs_the_layer_once_and_the_root_comes_with_the_accepted_rows() -> None:
    model, asked = target(), requests(2, max_new_tokens=6)
    drafter: Any = untrained("chimera", rows=12, heads=3, width=4)
    steps, counts = engine(drafter, model), []
    walk, propose = drafter.stack.walk, drafter.propose

    def counted(hidden: torch.Tensor, *given: Any, **options: Any) -> Any:
        counts.append(hidden.shape[1])
        return walk(hidden, *given, **options)

    def noted(state: Any) -> Any:
        counts.clear()
        draft = propose(state)
        assert counts == [4, 4]  # the candidates of the first level come from the root's row
        return draft

    drafter.stack.walk, drafter.propose = counted, noted
    assert all(written(steps, asked))
    assert counts == [4, 4, 5]  # then the longest path of four, and the new root
