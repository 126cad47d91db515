"""Model.score against the transformers model's own forward: whole, cached, tree, ragged, partial, with skipped halves."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import (
    CONTEXT,
    EVERY_FAMILY,
    RUN_ONCE,
    VOCABULARY,
    chain,
    engine,
    fresh,
    hf_cache,
    hf_hidden,
    hf_logits,
    path_to,
    prefilled,
    random_tree,
    requests,
    target,
    written,
)
from foreword.core.draft import Draft, Early, Tree
from foreword.core.needs import Needs, Skip
from foreword.core.state import Batch
from foreword.errors import ForewordWarning
from foreword.methods import make
from foreword.model.model import Model
from foreword.model.stack import Rows

TOKENS = [5, 9, 31, 8, 40, 7, 7, 12, 30, 3, 22]
PREFIXES = {0: TOKENS[:4], 2: TOKENS[:9], 3: [11], 1: []}  # slots out of order, different lengths

every_family = pytest.mark.parametrize("family", EVERY_FAMILY)
run_once = pytest.mark.parametrize("family", RUN_ONCE)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def draft_of(batch: int, nodes: int, seed: int = 0) -> Draft:
    """Return a random tree and random tokens for each sequence of a batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (batch, nodes), generator=generator)
    return Draft(tokens, random_tree(batch, nodes, generator), torch.full((batch,), nodes))


def sequence_to(prefix: list[int], draft: Draft, index: int, node: int) -> list[int]:
    """Return the prefix and the path from the root to a node of the tree."""
    parent = draft.tree.parent[min(index, draft.tree.parent.shape[0] - 1)].tolist()
    return [*prefix, *(int(draft.tokens[index, row]) for row in path_to(parent, node))]


@every_family
def test_a_whole_pass(family: str) -> None:
    model = target(family)
    batch = prefilled(model, {0: []})
    close(model.score(batch, chain([TOKENS]), Needs()).require_logits()[0], hf_logits(model.hf, TOKENS))


@every_family
@pytest.mark.parametrize("cut", [1, 4, 10])
def test_a_pass_after_a_cached_prefix(family: str, cut: int) -> None:
    model = target(family)
    batch = prefilled(model, {1: TOKENS[:cut]})
    close(model.score(batch, chain([TOKENS[cut:]]), Needs()).require_logits()[0], hf_logits(model.hf, TOKENS)[cut:])


@every_family
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 3, 1], [2], [0, 2]], ids=str)
def test_every_path_of_a_tree_is_a_sequence_of_its_own(family: str, order: list[int]) -> None:
    """A ragged batch, on adjacent slots or not, each with another tree: every row has the logits of the model's forward."""
    model = target(family)
    prefilled(model, PREFIXES)
    batch = Batch.of(order, 9)
    draft = draft_of(len(order), 12)
    logits = model.score(batch, draft, Needs()).require_logits()
    for index, slot in enumerate(order):
        for node in range(12):
            close(logits[index, node], hf_logits(model.hf, sequence_to(PREFIXES[slot], draft, index, node))[-1])


def test_one_tree_for_a_whole_batch() -> None:
    model = target()
    prefilled(model, PREFIXES)
    tokens = draft_of(2, 5).tokens
    draft = Draft(tokens, Tree.of((0, 0, 1, 1, 0)), torch.tensor([5, 5]))
    logits = model.score(Batch.of([3, 2], 9), draft, Needs()).require_logits()
    for index, slot in enumerate([3, 2]):
        for node in range(5):
            close(logits[index, node], hf_logits(model.hf, sequence_to(PREFIXES[slot], draft, index, node))[-1])


def test_a_pass_writes_scratch_rows_only() -> None:
    """The committed rows and every row of the other slots keep their bits; no length changes."""
    model = target()
    prefilled(model, PREFIXES)
    before = [tensor.clone() for tensor in (*model.cache.keys, *model.cache.values)]
    lengths = model.cache.length.tolist()
    model.score(Batch.of([2, 0], 9), draft_of(2, 12), Needs())
    after = (*model.cache.keys, *model.cache.values)
    assert model.cache.length.tolist() == lengths
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[[1, 3]], new[[1, 3]])
        assert all(torch.equal(old[slot, :, : lengths[slot]], new[slot, :, : lengths[slot]]) for slot in (0, 2))
        assert not torch.equal(old[2], new[2])


@every_family
def test_an_accepted_path_leaves_the_cache_of_its_sequence(family: str) -> None:
    model = target(family)
    prefilled(model, PREFIXES)
    batch, draft = Batch.of([0, 2], 9), draft_of(2, 12)
    model.score(batch, draft, Needs())
    paths = [path_to(draft.tree.parent[index].tolist(), 11) for index in range(2)]
    width = max(map(len, paths))
    path = torch.tensor([rows + [0] * (width - len(rows)) for rows in paths])
    model.cache.keep(batch, path, torch.tensor([len(rows) for rows in paths]))
    for index, slot in enumerate([0, 2]):
        sequence = sequence_to(PREFIXES[slot], draft, index, 11)
        assert int(model.cache.length[slot]) == len(sequence)
        for layer, (keys, values) in enumerate(hf_cache(model.hf, sequence)):
            close(model.cache.keys[layer][slot, :, : len(sequence)], keys)
            close(model.cache.values[layer][slot, :, : len(sequence)], values)


@every_family
@pytest.mark.parametrize("cuts", [[1, 3, 6, 7], [7], [2, 4, 5, 7], [1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_level_by_level_equals_the_whole_tree(family: str, cuts: list[int]) -> None:
    """`rows` scores some rows while the scratch rows before them are kept: a drafter grows its tree that way."""
    model = target(family)
    tree, tokens = Tree.of((0, 0, 0, 1, 1, 2, 3)), draft_of(2, 7).tokens
    draft, batch = Draft(tokens, tree, torch.tensor([7, 7])), Batch.of([0, 2], 9)
    prefilled(model, PREFIXES)
    whole = model.score(batch, draft, Needs(hidden=True, taps=(2,)))
    prefilled(model, PREFIXES)
    parts = [
        model.score(batch, draft, Needs(hidden=True, taps=(2,)), rows=range(start, stop))
        for start, stop in zip([0, *cuts], cuts, strict=False)
    ]
    close(torch.cat([part.require_logits() for part in parts], dim=1), whole.require_logits())
    close(torch.cat([part.require_hidden() for part in parts], dim=1), whole.require_hidden())
    close(torch.cat([part.taps[2] for part in parts], dim=1), whole.taps[2])


# Taps and hidden states


@run_once
def test_taps_are_the_hidden_states_of_transformers(family: str) -> None:
    model = target(family)
    batch = prefilled(model, {1: TOKENS[:4]})
    scores = model.score(batch, chain([TOKENS[4:]]), Needs(hidden=True, taps=(0, 1, 3, 4)))
    with torch.no_grad():
        own = model.hf(input_ids=torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    for layer in (0, 1, 3):
        close(scores.taps[layer][0], own[layer][0, 4:])
    assert set(scores.taps) == {0, 1, 3, 4}
    close(model.norm(scores.taps[4])[0], own[4][0, 4:])


@every_family
def test_hidden_is_before_the_final_norm(family: str) -> None:
    model = target(family)
    batch = prefilled(model, {1: TOKENS[:4]})
    scores = model.score(batch, chain([TOKENS[4:]]), Needs(hidden=True))
    close(scores.require_hidden()[0], hf_hidden(model.hf, TOKENS)[-1][4:])
    close(model.head(model.norm(scores.require_hidden())), scores.require_logits())


def test_what_needs_does_not_ask_for_is_empty() -> None:
    model = target()
    scores = model.score(prefilled(model, {0: TOKENS[:3]}), chain([TOKENS[3:]]), Needs(), logits="none")
    assert scores.logits is None and scores.hidden is None and scores.taps == {} and scores.grafted is None


def test_sequences_are_read_only_up_to_the_last_layer_needed() -> None:
    model, tokens, walked = target(), torch.tensor([TOKENS]), []
    hooks = [layer.register_forward_hook(lambda *_: walked.append(1)) for layer in model.layer_stack.layers]
    for needs, layers in (
        (Needs(taps=(1, 3)), 3),
        (Needs(hidden=True, taps=(1, 3)), 4),
        (Needs(logits=True), 4),
        (Needs(), 0),
    ):
        walked.clear()
        scores = model.read(tokens, needs)
        assert len(walked) == layers and (scores.hidden is None) is not needs.hidden
        for layer, rows in scores.taps.items():
            close(rows[0], hf_hidden(model.hf, TOKENS)[layer])
    for hook in hooks:
        hook.remove()


@every_family
def test_embed_is_the_model_s_own(family: str) -> None:
    model = target(family)
    close(model.embed(torch.tensor(TOKENS)), hf_hidden(model.hf, TOKENS)[0])


# Skipped half-layers, and walks in parts


@run_once
@pytest.mark.parametrize(("attention", "mlp"), [((1,), ()), ((), (2,)), ((0, 3), (3, 1)), ((0, 1, 2, 3), (0, 1, 2, 3))])
def test_a_skipped_half_is_a_half_that_adds_nothing(family: str, attention: tuple[int, ...], mlp: tuple[int, ...]) -> None:
    """The reference is a model whose output projections are zero there."""
    reduced = fresh(family)
    with torch.no_grad():
        for layer in attention:
            for parameter in reduced.model.layers[layer].self_attn.o_proj.parameters():
                parameter.zero_()
        for layer in mlp:
            reduced.model.layers[layer].mlp.down_proj.weight.zero_()
    model, skip = target(family), Skip.of(attention, mlp)
    model.allocate(1, CONTEXT, 16)
    batch = Batch.of([0], 0)
    first = model.score(batch, chain([TOKENS[:4]]), Needs(), skip=skip)
    model.cache.advance(batch, torch.tensor([4]))
    second = model.score(Batch.of([0], 4), chain([TOKENS[4:]]), Needs(), skip=skip)
    own = hf_logits(reduced, TOKENS)
    close(torch.cat([first.require_logits(), second.require_logits()], dim=1)[0], own)


@every_family
@pytest.mark.parametrize("cut", [0, 1, 3, 4])
def test_a_walk_in_two_parts_is_the_walk(family: str, cut: int) -> None:
    model = target(family)
    batch = prefilled(model, {0: TOKENS[:4]})
    draft = draft_of(1, 6)
    where = Rows(model.cache.length[batch.slots], draft.tree.depth, draft.tree.ancestors, batch)
    hidden, stack = model.embed(draft.tokens), model.layer_stack
    with torch.no_grad():
        whole = stack.walk(hidden, where, taps=(2,))
        first = stack.walk(hidden, where, stop=cut)
        second = stack.walk(first.hidden, where, start=cut, taps=(2,))
    close(second.hidden, whole.hidden)
    assert (2 in second.taps) == (cut <= 2)


@every_family
@pytest.mark.parametrize("cut", [1, 3])
def test_a_pass_may_begin_with_early_states(family: str, cut: int) -> None:
    """Scores, taps and cached rows are those of the whole pass, also for some of the rows."""
    model, draft = target(family), draft_of(2, 6)
    batch = prefilled(model, {0: TOKENS[:4], 2: TOKENS[:2]})
    where = Rows(model.cache.length[batch.slots], draft.tree.depth, draft.tree.ancestors, batch)
    needs = Needs(hidden=True, taps=(cut, 3))
    with torch.no_grad():
        whole = model.score(batch, draft, needs)
        held = model.cache.held.clone()
        for slot in batch.ids:
            model.cache.wipe_scratch(slot)
        early = replace(draft, early=Early(cut, model.early(draft.tokens, where, cut)))
        found = [model.score(batch, early, needs), model.score(batch, early, needs, rows=range(2, 6))]
    close(found[0].require_logits(), whole.require_logits())
    close(found[1].require_hidden(), whole.require_hidden()[:, 2:])
    for layer in (cut, 3):
        close(found[0].taps[layer], whole.taps[layer])
    close(model.cache.held, held)


# Attributes of a target


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [(2, 9, [2]), ([5, 2, 5], 9, [2, 5]), (None, 9, [9]), (None, [4, 3], [3, 4]), (None, None, [])],
)
def test_end_tokens(generation: int | list[int] | None, config: int | list[int] | None, ends: list[int]) -> None:
    hf = fresh("llama")
    hf.generation_config.eos_token_id, hf.config.eos_token_id = generation, config
    assert Model(hf).ends.tolist() == ends


@pytest.mark.parametrize(
    ("named", "ends"),
    [
        ([2, VOCABULARY], [2]),
        (-1, [9]),
        ("</s>", [9]),
        (["</s>", 3], [3]),
        (2.0, [9]),
        (True, [9]),
        ([[2]], [9]),
        ([3, None], [3]),
    ],
    ids=str,
)
def test_an_end_that_is_no_id_of_the_vocabulary_is_dropped_with_a_warning(named: Any, ends: list[int]) -> None:
    """If none is left, config.json counts. A request with min_new_tokens, which masks end tokens, must still work."""
    hf = fresh("llama")
    hf.generation_config.eos_token_id, hf.config.eos_token_id = named, 9
    with pytest.warns(ForewordWarning, match=f"generation_config.json: eos_token_id names .* from 0 to {VOCABULARY - 1}"):
        model = Model(hf)
    assert model.ends.tolist() == ends
    assert len(written(engine(make("plain"), model), requests(1, min_new_tokens=5, max_new_tokens=6))[0]) >= 5


@run_once
def test_attributes_of_a_target(family: str) -> None:
    model = target(family)
    assert (model.hidden_size, model.vocab_size, model.layers, model.max_context) == (32, VOCABULARY, 4, 256)
    assert model.name == f"tiny-{family}" and model.dtype == torch.float64 and model.device.type == "cpu"
    assert Model(model.hf).name == family


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_keep_the_dtype_of_the_head(dtype: torch.dtype) -> None:
    model = target("llama", dtype)
    scores = model.score(prefilled(model, {0: TOKENS[:3]}), chain([TOKENS[3:]]), Needs(hidden=True))
    asked = model.head(model.norm(scores.require_hidden()))
    assert scores.require_logits().dtype == dtype and torch.equal(scores.require_logits(), asked)


@every_family
def test_half_precision_stays_near_the_model_s_own(family: str) -> None:
    """Masks, caps and angles have the dtype of the rows, so no operation mixes dtypes."""
    model = target(family, torch.float16)
    logits = model.score(prefilled(model, {0: TOKENS[:4]}), chain([TOKENS[4:]]), Needs()).require_logits()[0]
    torch.testing.assert_close(logits.double(), hf_logits(model.hf, TOKENS)[4:], atol=0.1, rtol=0)


def test_without_a_curve_every_pass_costs_the_same() -> None:
    assert target().cost(50) == 1.0


def test_a_temporary_cache() -> None:
    model = target()
    held = model.allocate(2, 40, 4)
    with pytest.raises(KeyError), model.temporary_cache(1, 16, 8) as other:
        assert model.cache is other is not held and (other.slots, model.context) == (1, 16)
        raise KeyError
    assert model.cache is held and model.context == 40
