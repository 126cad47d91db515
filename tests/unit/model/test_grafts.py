"""Grafted rows attend to the right rows, no real row attends to them, and nothing of them is committed."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from doubles import (
    EVERY_FAMILY,
    RUN_ONCE,
    Liar,
    Recorder,
    chain,
    engine,
    hf_cache,
    hf_hidden,
    hf_window,
    path_to,
    prefilled,
    requests,
    target,
    truth,
)
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, Join, Needs
from foreword.core.state import Batch
from foreword.model.model import Model
from foreword.model.stack import Rows, Stack

PREFIX = [5, 9, 31, 8]
PARENT = (0, 0, 1, 1)
TREE = [7, 12, 30, 22]

every_family = pytest.mark.parametrize("family", EVERY_FAMILY)
run_once = pytest.mark.parametrize("family", RUN_ONCE)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def tokens_graft(model: Model, anchor: tuple[int, ...], offset: tuple[int, ...], tokens: list[int]) -> Graft:
    """Graft the embeddings of given tokens, as if they were part of the sequence."""
    rows = model.embed(torch.tensor(tokens)).detach()
    return Graft.of(0, anchor, offset, lambda real, _: rows.expand(real.shape[0], -1, -1))


def mixing_graft(layer: int, anchor: tuple[int, ...], offset: tuple[int, ...], seed: int) -> Graft:
    """Graft rows made from the anchors' rows by a matrix and from the rows grafted before."""
    matrix = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).double() / 6

    def make(real: Tensor, grafted: Tensor) -> Tensor:
        return real[:, list(anchor)] @ matrix + grafted.sum(1, keepdim=True) / 3

    return Graft.of(layer, anchor, offset, make)


def score(model: Model, grafts: tuple[Graft, ...], prefixes: dict[int, list[int]] | None = None) -> tuple:  # type: ignore[type-arg]
    batch = prefilled(model, prefixes or {0: PREFIX})
    count = len(batch.ids)
    draft = Draft(torch.tensor([TREE] * count), Tree.of(PARENT), torch.full((count,), 4))
    with torch.no_grad():
        return model.score(batch, draft, Needs(hidden=True, taps=(2,), grafts=grafts)), batch, draft


@every_family
def test_a_grafted_token_is_a_token_of_the_sequence(family: str) -> None:
    """Grafted at layer 0 with offset 1, a row is the next token after its anchor; the second row of an anchor is the one
    after that. Node 2 carries two rows, node 0 one, nodes 1 and 3 none."""
    model = target(family)
    grafts = (tokens_graft(model, (2, 0, 2), (1, 1, 2), [40, 41, 42]),)
    scores, *_ = score(model, grafts)
    sequences = [[*PREFIX, 7, 12, 30, 40], [*PREFIX, 7, 41], [*PREFIX, 7, 12, 30, 40, 42]]
    for row, sequence in enumerate(sequences):
        close(scores.grafted[0, row], hf_hidden(model.hf, sequence)[-1][-1])


@every_family
@torch.no_grad()
def test_a_graft_on_part_of_a_tree(family: str) -> None:
    """Its anchors are rows of the pass; the scratch rows before them stay in place."""
    model = target(family)
    batch = prefilled(model, {0: PREFIX})
    draft = Draft(torch.tensor([TREE]), Tree.of(PARENT), torch.tensor([4]))
    model.score(batch, draft, Needs(), rows=range(2))
    graft = tokens_graft(model, (0, 1), (1, 1), [40, 41])
    scores = model.score(batch, draft, Needs(grafts=(graft,)), rows=range(2, 4))
    assert scores.grafted is not None
    for row, sequence in enumerate([[*PREFIX, 7, 12, 30, 40], [*PREFIX, 7, 12, 22, 41]]):
        close(scores.grafted[0, row], hf_hidden(model.hf, sequence)[-1][-1])


@every_family
def test_rows_of_one_anchor_attend_to_earlier_ones_across_grafts(family: str) -> None:
    """The second graft's row comes after the first one's, although they are declared separately."""
    model = target(family)
    grafts = (tokens_graft(model, (2, 1), (1, 1), [40, 41]), tokens_graft(model, (2,), (2,), [42]))
    scores, *_ = score(model, grafts)
    close(scores.grafted[0, 2], hf_hidden(model.hf, [*PREFIX, 7, 12, 30, 40, 42])[-1][-1])
    close(scores.grafted[0, 1], hf_hidden(model.hf, [*PREFIX, 7, 12, 41])[-1][-1])


@every_family
def test_offsets_are_positions(family: str) -> None:
    """A row at offset 3 differs from the same row at offset 1."""
    model = target(family)
    near, far = (score(model, (tokens_graft(model, (2,), (offset,), [40]),))[0].grafted for offset in (1, 3))
    assert not torch.allclose(near, far)


def slow_walk(
    model: Model,
    prefix: list[int],
    grafts: tuple[Graft, ...],
    tree: Sequence[int] = TREE,
    parent: Sequence[int] = PARENT,
) -> tuple[Tensor, Tensor]:
    """Run the transformers layers over prefix, tree and grafted rows together, with an explicit mask. Return the real and
    the grafted rows."""
    hf, count = model.hf, len(prefix) + len(tree)
    paths = [path_to(parent, node) for node in range(len(tree))]
    positions = [*range(len(prefix)), *(len(prefix) + len(path) - 1 for path in paths)]
    sees = [set(range(i + 1)) for i in range(len(prefix))]
    sees += [set(range(len(prefix))) | {len(prefix) + row for row in path} for path in paths]
    anchors: list[int] = []
    hidden = model.embed(torch.tensor([[*prefix, *tree]]))
    for layer in range(model.layers + 1):
        for graft in [graft for graft in grafts if graft.layer == layer]:
            hidden = torch.cat([hidden[:, : len(prefix)], graft.onto(hidden[:, len(prefix) :], len(tree))], dim=1)
            for anchor, offset in zip(graft.anchor, graft.offset, strict=True):
                earlier = {count + i for i, other in enumerate(anchors) if other == anchor}
                sees.append(sees[len(prefix) + anchor] | earlier | {count + len(anchors)})
                positions.append(positions[len(prefix) + anchor] + offset)
                anchors.append(anchor)
        if layer < model.layers:
            beyond = [p - (hf_window(hf, layer) or 999) for p in positions]
            allowed = torch.tensor(
                [
                    [key in row and positions[key] > edge for key in range(len(sees))]
                    for row, edge in zip(sees, beyond, strict=True)
                ]
            )
            mask = torch.zeros(allowed.shape).double().masked_fill(~allowed, float("-inf"))[None, None]
            table = [hf.config.layer_types[layer]] if model.family.name == "gemma3_text" else []
            turn = hf.model.rotary_emb(hidden, torch.tensor([positions]), *table)
            hidden = hf.model.layers[layer](hidden, attention_mask=mask, position_embeddings=turn)
    return hidden[0, len(prefix) : count], hidden[0, count:]


GRAFTS = {
    "one": (mixing_graft(1, (0, 3, 3, 2), (1, 1, 2, 4), 0),),
    "two layers": (mixing_graft(1, (2, 0), (1, 1), 0), mixing_graft(3, (0, 2, 2), (2, 2, 3), 1)),
    "one layer twice": (mixing_graft(2, (1, 1), (1, 2), 0), mixing_graft(2, (1, 3), (3, 1), 1)),
    "after the last layer": (mixing_graft(1, (3,), (1,), 0), mixing_graft(4, (3, 0), (2, 1), 1)),
}
every_graft = pytest.mark.parametrize("grafts", GRAFTS.values(), ids=GRAFTS)


@run_once
@every_graft
@torch.no_grad()
def test_grafted_rows_equal_the_slow_walk(grafts: tuple[Graft, ...], family: str) -> None:
    """In a ragged batch on slots that are not adjacent."""
    model, prefixes = target(family), {0: PREFIX, 2: [11, 3, 3, 8, 9, 10, 4], 3: [6]}
    scores, *_ = score(model, grafts, prefixes)
    for index, prefix in enumerate(prefixes.values()):
        real, grafted = slow_walk(model, prefix, grafts)
        close(scores.hidden[index], real)
        close(scores.grafted[index], grafted)


@every_family
@every_graft
def test_real_rows_never_attend_to_a_grafted_one(grafts: tuple[Graft, ...], family: str) -> None:
    model = target(family)
    bare, *_ = score(model, ())
    scores, *_ = score(model, grafts)
    close(scores.logits, bare.logits)
    close(scores.hidden, bare.hidden)
    close(scores.taps[2], bare.taps[2])
    assert bare.grafted is None and scores.grafted.shape == (1, sum(graft.rows for graft in grafts), 32)


@every_graft
def test_nothing_of_a_graft_is_committed(grafts: tuple[Graft, ...]) -> None:
    model = target()
    _, batch, draft = score(model, grafts)
    model.cache.keep(batch, torch.tensor([[0, 1, 3]]), torch.tensor([3]))
    sequence = [*PREFIX, 7, 12, 22]
    for layer, (keys, values) in enumerate(hf_cache(model.hf, sequence)):
        close(model.cache.keys[layer][0, :, :7], keys)
        close(model.cache.values[layer][0, :, :7], values)
    after = model.score(Batch.of([0], 7), chain([[9]]), Needs(hidden=True))
    close(after.require_hidden()[0, 0], hf_hidden(model.hf, [*sequence, 9])[-1][-1])


@run_once
@torch.no_grad()
def test_a_drafter_with_grafts_changes_nothing_and_gets_its_rows(family: str) -> None:
    """Through the engine, with wrong draft tokens: the output is right, and `observe` gets the rows of the slow walk."""
    model, asked = target(family), requests(4, max_new_tokens=8)
    grafts = (mixing_graft(1, (0, 2), (1, 1), 0), mixing_graft(3, (0,), (2,), 1))
    recorder = Recorder(Liar(nodes=5), Needs(hidden=True, grafts=grafts))
    found = [run.tokens for run in engine(recorder, model, slots=3).generate(asked)]
    assert found == [truth(model.hf, request) for request in asked]
    for before, seen in zip(recorder.proposed, recorder.observed, strict=True):
        assert seen.scores.grafted is not None and seen.scores.grafted.shape == (len(seen.slots), 3, 32)
        for index, sequence in enumerate(before.sequences):
            tree, parent = seen.draft.tokens[index].tolist(), seen.draft.tree.parent[index].tolist()
            real, grafted = slow_walk(model, sequence[:-1], grafts, tree, parent)
            close(seen.scores.require_hidden()[index], real)
            close(seen.scores.grafted[index], grafted)


def test_gradients_reach_a_graft_s_projection() -> None:
    """In a stack without a cache rows attend to each other, and a projection is trained through frozen layers."""
    model, projection = target(), nn.Linear(32, 32).double()
    stack = Stack(model.hf, model.family, model.layer_stack.layers)
    graft = Graft.of(2, (1, 3), (1, 1), lambda real, _: projection(real[:, [1, 3]]))
    with torch.inference_mode():
        tree = Tree.chain(37)  # training may use a tree that a round made in inference mode
    tree = tree.head(4)
    where = Rows(torch.zeros(1, dtype=torch.long), tree.depth, tree.ancestors)
    with torch.no_grad():
        hidden = model.embed(torch.tensor([PREFIX]))
    walked = stack.walk(hidden, where, grafts=(graft,))
    assert walked.grafted is not None
    walked.grafted.pow(2).sum().backward()
    gradient = projection.weight.grad
    assert gradient is not None and gradient.isfinite().all() and gradient.abs().sum() > 0
    close(walked.hidden[0].detach(), hf_hidden(model.hf, PREFIX)[-1])


# Alongside whole sequences -----------------------------------------------------------------------------------------------


@run_once
@torch.no_grad()
def test_rows_that_join_a_sequence_equal_grafted_rows(family: str) -> None:
    """Two sequences, each with anchors of its own. On every layer their rows equal those of transformers; at the end the
    joined rows equal those grafted onto each sequence as a chain."""
    model = target(family)
    sequences, anchor = [[5, 9, 31, 8, 7, 12, 30], [11, 3, 3, 8, 9, 10, 4]], torch.tensor([[1, 3, 6], [0, 2, 4]])
    matrices = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)).double() / 6
    joins = [
        Join(layer, i + 1, lambda rows, _, i=i: rows @ matrices[i], tuple(range(i))) for i, layer in enumerate((1, 1, 3))
    ]
    hidden = [hf_hidden(model.hf, sequence) for sequence in sequences]
    found = list(model.alongside(torch.stack([one[1] for one in hidden]), 1, anchor, joins))
    assert [(one.layer, len(one.rows)) for one in found] == [(1, 2), (2, 2), (3, 3), (4, 3)]
    for one in found:
        close(one.sequences, torch.stack([layers[one.layer] for layers in hidden]))
    for index, sequence in enumerate(sequences):
        places = tuple(anchor[index].tolist())
        grafts = tuple(
            Graft.of(join.layer, places, (join.offset,) * 3, lambda real, _, i=i, p=places: real[:, list(p)] @ matrices[i])
            for i, join in enumerate(joins)
        )
        _, rows = slow_walk(model, [], grafts, sequence, [0, *range(len(sequence) - 1)])
        close(torch.cat([one[index] for one in found[-1].rows]), rows)


@torch.no_grad()
def test_a_joined_row_attends_to_the_joins_that_it_names() -> None:
    """The second step, with the first in `sees` or not; a third that names neither does not depend on them."""
    model = target()
    anchor, hidden = torch.tensor([[2, 5]]), hf_hidden(model.hf, [5, 9, 31, 8, 7, 12, 30])[1].unsqueeze(0)

    def last(*sees: tuple[int, ...]) -> Tensor:
        joins = [Join(1, i + 1, lambda rows, _, i=i: rows / (i + 1), seen) for i, seen in enumerate(sees)]
        return list(model.alongside(hidden, 1, anchor, joins))[-1].rows[-1]

    assert not torch.allclose(last((), (0,)), last((), ()))
    close(last((), (), ()), last((), (0,), ()))
    assert not torch.allclose(last((), (), (1,)), last((), (), (0, 1)))


def test_only_joined_rows_carry_gradients() -> None:
    model, projection = target(), nn.Linear(32, 32).double()
    hidden = hf_hidden(model.hf, [5, 9, 31, 8])[1].unsqueeze(0)
    joins = [Join(2, 1, lambda rows, _: projection(rows))]
    found = list(model.alongside(hidden, 1, torch.tensor([[0, 2]]), joins))
    assert not any(one.sequences.requires_grad for one in found)
    found[-1].rows[0].sum().backward()
    assert projection.weight.grad is not None and projection.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_layers_that_learn_get_gradients_from_the_sequences_too(family: str) -> None:
    """One pass over all rows, with a mask, gives the same joined rows and the same gradients of inputs and weights."""
    model = target(family)
    stack, anchor = model.stack(0, 2, init=1), torch.tensor([[1, 3, 6], [0, 2, 4]])
    generator = torch.Generator().manual_seed(0)
    given, matrices = (torch.randn(2, n, 32, generator=generator).double() for n in (8, 32))
    joins = [Join(0, i + 1, lambda rows, _, i=i: rows @ matrices[i], tuple(range(i))) for i in range(2)]
    found = []
    for at_once in (False, True):
        hidden = given.clone().requires_grad_()
        stack.layers.zero_grad()
        if at_once:
            rows = Rows.alongside(8, anchor, joins)
            causal = nn.functional.pad(torch.ones(8, 8, dtype=torch.bool).tril(), (0, 6)).expand(2, -1, -1)
            made = [torch.stack([one[at] for one, at in zip(hidden, anchor, strict=True)]) @ matrix for matrix in matrices]
            where = Rows(rows.base, rows.depth, torch.cat([causal, rows.sees], dim=1))
            bare = Stack(model.hf, model.family, stack.layers)
            walked = bare.walk(torch.cat([hidden, *made], dim=1), where).hidden[:, 8:]
        else:
            walked = torch.cat(stack.walk_joined(hidden, anchor, joins), dim=1)
        walked.pow(2).sum().backward()
        found.append([walked.detach(), hidden.grad, *(weight.grad for weight in stack.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_rows_go_on_after_the_committed_sequence() -> None:
    """From the hidden states of a layer, `onward` computes those of the last one; a grafted row is the next one."""
    model, sequence = target("qwen3"), [5, 9, 31, 8, 7, 12]
    own = hf_hidden(model.hf, sequence)
    batch = prefilled(model, {2: sequence[:3]})
    later = Graft.of(3, (1,), (1,), lambda real, _: own[3][5:].unsqueeze(0))
    close(model.onward(batch, own[2][3:5].unsqueeze(0), 2, (later,))[0], own[4][3:])
    alone = model.onward(batch, own[2][3:6].unsqueeze(0), 2)
    close(alone[0], own[4][3:])
    assert int(model.cache.length[2]) == 3
