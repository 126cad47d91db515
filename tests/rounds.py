"""Random rounds, and checks of kernels against their torch references, for tests on the CPU and on a GPU.

A check makes everything twice from one seed: on the CPU for the torch operations, which define what is right, and on the
given device for the kernels. Results have to be equal, not close, unless a check says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from doubles import END, random_tree, target
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, on_device
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SlotOptions
from foreword.core.scores import Accepted, Emission
from foreword.core.state import Batch, State
from foreword.drafting.heads import remember
from foreword.drafting.joining import attach
from foreword.drafting.transfer import Projection, append_step
from foreword.drafting.trees import BestFirst, Budgeted, NextCandidates, StaticTree, greedy_paths
from foreword.engine.accept import settle
from foreword.methods.clover2 import Clover2
from foreword.methods.hidden_transfer import Candidates
from foreword.methods.prompt_lookup import PromptLookup
from foreword.methods.token_recycling import CANDIDATES, rank_template
from foreword.model.cache import CacheShape, SlotCache
from foreword.model.draft_linears import int8_codes
from foreword.model.stack import Rows, anchors_and_offsets
from foreword.ops import cached_rows
from foreword.ops.candidate_graphs import Rule, TorchGraph
from foreword.ops.device import synchronize
from foreword.ops.filters import Filters, filtered
from foreword.ops.flights import NONE, Flight, FlightColumns, board, continued, move
from foreword.ops.growth import RankPaths, TorchTrees
from foreword.ops.growth import filled as filled_by_torch
from foreword.ops.growth import likeliest_paths as paths_by_torch
from foreword.ops.lookup import Predictions
from foreword.ops.lookup import looked_up_in_both as both_by_torch
from foreword.ops.noise import gumbel
from foreword.ops.pseudo_rows import carried_on as carried_by_torch
from foreword.ops.recycling import CandidateTable, SlotNoise
from foreword.ops.recycling import learnt as learnt_by_torch
from foreword.ops.recycling import walked as walked_by_torch
from foreword.ops.rounds import fit, write
from foreword.ops.rows import carried_and_embedded, conditioned_on_next, counted
from foreword.ops.transitions import after_live_nodes, likeliest_transitions
from foreword.ops.trees import lineage as lineage_of
from foreword.ops.trees import next_level
from foreword.ops.unread import unread

if TYPE_CHECKING:
    from foreword.ops.layer.tiles import Tiles

TOKENS = 6  # token ids: so few that candidates often match the choice
FIELDS = ("tokens", "count", "drafted", "ended", "broken")


@dataclass(frozen=True)
class Round:
    state: State
    draft: Draft
    choice: Tensor
    peak: Tensor
    places: int

    @staticmethod
    def random(seed: int, device: str, nodes: int, ends: int = 1, shared: bool = False) -> Round:
        """Slots are in any order; some are frozen, ignore end tokens, do not speculate, or are near their length limit."""
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        slots, batch = 5, int(integers(1, 5, 1))
        tree = random_tree(1 if seed % 3 == 0 else batch, nodes, generator)
        lengths = integers(0, 20, slots)
        state = State(
            batch=Batch(torch.randperm(slots, generator=generator)[:batch], tuple(range(batch)), 20),
            roots=integers(0, TOKENS, slots),
            lengths=lengths,
            tokens=integers(0, TOKENS, slots, 60),
            limits=lengths + integers(2, 9, slots),
            **{name: integers(0, 4, slots) > 0 for name in ("heeds_ends", "speculates", "alive_slots")},
            seen=torch.zeros(slots, 0, dtype=torch.int32),
            table=State.empty(slots, 1, lengths, torch.arange(ends)).table,
        )
        size, tokens = integers(1, nodes + 1, batch), integers(0, TOKENS, batch, nodes)
        if seed % 5 == 0:  # one size for all, as a drafter may give it
            size = integers(1, nodes + 1, 1).expand(batch)
        choice = integers(0, TOKENS, batch, nodes)
        peak = torch.randn(batch, nodes, 1 if shared else TOKENS, generator=generator)
        peak = peak.masked_fill(torch.rand(peak.shape, generator=generator) < 0.03, torch.nan)
        places = min(nodes, int(lineage_of(tree.parent)[1].max()) + 1)
        return Round(*_on(device, state, Draft(tokens, tree, size)), choice.to(device), peak.to(device), places)


def _on(device: str, state: State, draft: Draft) -> tuple[State, Draft]:
    columns = {name: column.to(device) for name, column in vars(state).items() if isinstance(column, Tensor)}
    batch = replace(state.batch, slots=state.slots.to(device))
    table = replace(state.table, ends=state.table.ends.to(device))
    tree = Tree(draft.tree.parent.to(device))
    return replace(state, **columns, batch=batch, table=table), Draft(draft.tokens.to(device), tree, draft.size.to(device))


def same(found: Tensor, exact: Tensor) -> bool:
    return found.dtype == exact.dtype and torch.equal(found.cpu(), exact.cpu())


# The kernels of a round --------------------------------------------------------------------------------------------------


def check_fit(seed: int, device: str, nodes: int) -> None:
    from foreword.ops.round.settle import fitted  # noqa: PLC0415  a test sets the environment first

    actual, expected = (Round.random(seed, where, nodes) for where in (device, "cpu"))
    tokens, size = fitted(actual.state, actual.draft.tokens, actual.draft.tree.depth, actual.draft.size)
    exact, rows = fit(expected.state, expected.draft.tokens, expected.draft.tree.depth, expected.draft.size)
    assert same(tokens, exact) and same(size, rows)


def check_settle(seed: int, device: str, nodes: int, ends: int, shared: bool) -> tuple[Accepted, Emission]:
    """Check ACCEPT, then COMMIT's columns, as in a round."""
    from foreword.ops.round.settle import decided, written  # noqa: PLC0415

    actual, expected = (Round.random(seed, where, nodes, ends, shared) for where in (device, "cpu"))
    accepted, emission = settle(expected.state, expected.draft, expected.choice, expected.peak, expected.places)
    state = actual.state
    found = Emission.in_a_block(len(actual.choice), actual.places, actual.choice.device)
    path, last = decided(state, actual.draft, actual.choice, actual.peak, found)
    arrived = found.fetched()
    synchronize(actual.choice.device)
    for name in FIELDS:
        assert same(getattr(found, name), getattr(emission, name)), name
        assert same(getattr(arrived, name), getattr(emission, name)), name
    assert same(path, accepted.path) and same(last, accepted.next)

    write(expected.state, emission.tokens, accepted.count, accepted.next, emission.ended)
    written(state, found.tokens, found.count, last, found.ended)
    assert same(state.tokens[:, :-1], expected.state.tokens[:, :-1])
    assert same(state.roots, expected.state.roots) and same(state.alive_slots, expected.state.alive_slots)
    return accepted, emission


def check_keep(seed: int, device: str, nodes: int, width: int, dtype: torch.dtype) -> None:
    from foreword.ops.round.keep import keep_rows  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    caches = [SlotCache(CacheShape(3, 2, width, dtype), 4, 20, nodes, where) for where in (device, "cpu")]
    rows = torch.randn(caches[0].held.shape, generator=generator).to(dtype)
    length = torch.randint(0, 20, (4,), generator=generator)
    slots = torch.randperm(4, generator=generator)[:3]
    paths = [torch.randperm(nodes - 1, generator=generator)[: nodes // 2].sort().values + 1 for _ in range(3)]
    path = torch.stack([torch.cat([torch.zeros(1, dtype=torch.long), one]) for one in paths])
    count = torch.randint(0, path.shape[1] + 1, (3,), generator=generator)
    for cache in caches:
        cache.held.copy_(rows)
        cache.length.copy_(length)
    given, truth = caches
    keep_rows(given.held, *(part.to(device) for part in (slots, length, path, count)))
    cached_rows.keep_rows(truth.held, slots, truth.length, path, count)
    assert same(given.held, truth.held)


# Rows over a vocabulary --------------------------------------------------------------------------------------------------


def scores_with_ties(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return scores of few values, so that most occur more than once: both zeros, both infinities, and in some rows NaN of
    either sign, since the sign of a NaN depends on the machine."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 5, (rows, width), generator=generator).to(torch.float32) / 2
    odd = torch.rand(rows, width, generator=generator)
    scores = scores.masked_fill(odd < 0.1, -0.0).masked_fill(odd > 0.9, -torch.inf)
    scores[rows // 2] = scores[rows // 2].masked_fill(odd[rows // 2] > 0.8, torch.nan)
    if rows > 2:
        scores[0], scores[-1, width // 3] = -torch.inf, torch.inf
    scores = scores.to(dtype)
    bits = scores.view(torch.int32 if dtype == torch.float32 else torch.int16)
    sign = torch.iinfo(bits.dtype).min
    return torch.where(scores.isnan() & (odd > 0.9), bits ^ sign, bits).view(dtype)


def check_top(scores: Tensor, k: int, device: str) -> None:
    from foreword.ops.round.top import top, top_with_chances  # noqa: PLC0415

    exact = scores.float().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    found, chances = top_with_chances(scores.to(device), k)
    assert same(found, exact) and same(top(scores.to(device), k), exact)
    wide = scores.float()
    true = wide.gather(-1, exact) - wide.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(chances.cpu(), true, rtol=1e-5, atol=1e-5, equal_nan=True)


def check_vocabulary(dtype: torch.dtype, device: str) -> None:
    """Check a draft vocabulary of 2500 of 5000 tokens, more than one stretch: noise belongs to the token, not its column."""
    from foreword.ops.round.top import Noise, top_with_chances  # noqa: PLC0415

    generator = torch.Generator().manual_seed(3)
    vocabulary = torch.randperm(5000, generator=generator)[:2500].sort().values
    key, position = torch.tensor([[0x9ABCDEF0, 0x12345678], [7, 7]]), torch.tensor([[3, 70_000], [1, 2]])
    temperature = torch.tensor([0.7, 0.0])
    scores = torch.randn(2, 2, 2500, generator=generator).to(dtype)
    wide = scores.float() / torch.where(temperature > 0, temperature, 1).view(2, 1, 1)
    wide = (wide + gumbel(key, position, vocabulary)).where(temperature.view(2, 1, 1) > 0, wide)
    places = wide.sort(descending=True, stable=True).indices[..., :6]
    noise = Noise(*(part.to(device) for part in (key, position, temperature)))
    tokens, chances = top_with_chances(scores.to(device), 6, noise, vocabulary.to(device))
    assert same(tokens, vocabulary[places])
    torch.testing.assert_close(chances.cpu(), wide.log_softmax(-1).gather(-1, places), rtol=1e-5, atol=1e-5)
    greedy, _ = top_with_chances(scores.to(device), 6, vocabulary=vocabulary.to(device))
    assert same(greedy, vocabulary[scores.float().sort(descending=True, stable=True).indices[..., :6]])


def check_filtered(seed: int, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Several sequences, each with filters of its own, some of them off; ties, and tokens of probability zero. A row's
    result is the same alone."""
    from foreword.ops.round.filters import filtered as filtered_by_kernel  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn(5, rows, width, generator=generator)).to(dtype)
    scores[:, :, ::7], scores[1] = -torch.inf, scores[1].round()
    temperature = torch.tensor([0.7, 1.0, 0.0, 1.3, 0.9])
    filters = Filters(
        top_k=torch.tensor([0, 5, 3, 2 * width, 1]) if seed % 4 else None,
        largest_k=2 * width,
        top_p=torch.tensor([0.9, 0.6, 1.0, 0.3, 0.95]) if seed % 4 != 1 else None,
        min_p=torch.tensor([0.0, 0.05, 0.1, 0.0, 0.2]) if seed % 4 != 2 else None,
    )
    expected = filtered(scores, temperature, filters)
    sent = [None if part is None else part.to(device) for part in (filters.top_k, filters.top_p, filters.min_p)]
    theirs = Filters(sent[0], filters.largest_k, *sent[1:])
    found = filtered_by_kernel(scores.to(device), temperature.to(device), theirs)
    assert same(found, expected)
    last = [None if part is None else part[-1:] for part in sent]
    alone = filtered_by_kernel(scores[-1:, -1:].to(device), temperature[-1:].to(device), Filters(last[0], 1, *last[1:]))
    assert same(alone, found[-1:, -1:])


def check_cross_entropies(logits: Tensor, teacher: Tensor | None, device: str) -> None:
    """Losses, label ranks and gradients against torch's in float64, with rows that do not count, with gradient or not."""
    from foreword.ops.training.cross_entropy import cross_entropies, log_mass  # noqa: PLC0415

    generator = torch.Generator().manual_seed(logits.shape[1])
    labels = logits.float().topk(min(3, logits.shape[1])).indices[:, -1]
    counts = torch.rand(logits.shape[0], generator=generator) < 0.7
    leaf = logits.double().requires_grad_()
    goal = labels if teacher is None else teacher.double().softmax(-1)
    losses = functional.cross_entropy(leaf, goal, reduction="none").where(counts, 0)
    losses.sum().backward()
    assert leaf.grad is not None
    exact = (logits > logits.gather(1, labels.unsqueeze(1))).sum(1)
    given, of_teacher = logits.to(device, copy=True), None
    if teacher is not None:
        of_teacher = teacher.to(device), log_mass(teacher.to(device))
    for with_gradient in (False, True):  # the logits are read first, then written over
        found, ranks = cross_entropies(given, labels.to(device), counts.to(device), of_teacher, with_gradient)
        torch.testing.assert_close(found.cpu().double(), losses.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(ranks.cpu(), exact)
        expected = leaf.grad.to(logits.dtype) if with_gradient else logits
        near = dict(rtol=5e-5, atol=1e-6) if logits.dtype == torch.float32 else dict(rtol=1e-2, atol=1e-6)
        torch.testing.assert_close(given.cpu(), expected, **near)


# Token Recycling ---------------------------------------------------------------------------------------------------------


class Tables:
    """A drafter's random tables, without a target: some rows are unknown, and many log-probabilities are equal."""

    def __init__(self, seed: int, device: str, mode: str, vocabulary: int = 30) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (1 if mode == "shared" else 4, vocabulary + 1, CANDIDATES)
        tokens = torch.randint(0, vocabulary, shape, dtype=torch.int32, generator=generator)
        chances = (-torch.rand(shape, generator=generator) * 8).round() / 4
        known = torch.rand(shape[:2], generator=generator) < 0.9
        chances = chances.sort(-1, descending=True).values.where(known.unsqueeze(-1), -torch.inf)
        self.table = CandidateTable(tokens.to(device), chances.to(device))
        self.template = rank_template(0.75, torch.device(device))


def check_walk(seed: int, device: str, nodes: int, mode: str, noisy: bool) -> None:
    """With noise, one slot is still greedy, and no two log-probabilities are equal: topk could take either."""
    from foreword.ops.drafting.recycle import walked  # noqa: PLC0415

    given, truth = (Tables(seed, where, mode) for where in (device, "cpu"))
    asked, exact_state = (Round.random(seed, where, 2).state for where in (device, "cpu"))
    if noisy:
        settings = {slot: SlotOptions(Sampling(one, seed=seed + slot)) for slot, one in enumerate((0.8, 0.0, 0.3, 1.3))}
        exact_state.table.set_all(settings, torch.arange(4))
        for one in (given, truth):
            one.table.chances.sub_(torch.arange(CANDIDATES, device=one.table.chances.device) / 64)
    slots, columns, own = exact_state.slots % 4, exact_state.table.columns, mode != "shared"
    noise = SlotNoise(exact_state.lengths, columns["key"], columns["temperature"]) if noisy else None
    exact = walked_by_torch(truth.table, truth.template, slots, exact_state.roots, nodes, own, noise)
    there = None if noise is None else SlotNoise(*(part.to(device) for part in noise))
    found = walked(given.table, given.template, slots.to(device), asked.roots, nodes, own, there)
    assert all(map(same, found, exact))


def check_learn(seed: int, device: str, nodes: int, mode: str, accepts: bool) -> None:
    """Check a pass with every token several times, also across sequences, and log-probabilities that are not all finite."""
    from foreword.ops.drafting.recycle import learnt  # noqa: PLC0415

    given, truth = (Tables(seed, where, mode).table for where in (device, "cpu"))
    asked = Round.random(seed, "cpu", nodes)
    accepted, _ = settle(asked.state, asked.draft, asked.choice, asked.peak, asked.places)
    batch = replace(asked.state.batch, slots=torch.randperm(4, generator=torch.Generator().manual_seed(seed)))
    state = replace(asked.state, batch=replace(batch, slots=batch.slots[: asked.choice.shape[0]]))
    generator = torch.Generator().manual_seed(seed)
    ranked = torch.randint(0, 30, (*asked.choice.shape, CANDIDATES), generator=generator)
    chances = -torch.rand(ranked.shape, generator=generator)
    chances = chances.masked_fill(chances > -0.1, torch.nan).masked_fill(chances < -0.9, torch.inf)

    draft, path = asked.draft, (accepted.path, accepted.count) if accepts else None
    learnt_by_torch(truth, state.slots, draft.tokens, draft.size, (ranked, chances), path, mode != "shared")
    learnt(
        given,
        *(part.to(device) for part in (state.slots, draft.tokens, draft.size)),
        (ranked.to(device), chances.to(device)),
        None if path is None else (path[0].to(device), path[1].to(device)),
        mode != "shared",
    )
    assert all(same(one[:, :-1], other[:, :-1]) for one, other in zip(given, truth, strict=True))


# Prompt Lookup -----------------------------------------------------------------------------------------------------------


def check_lookup(seed: int, device: str, nodes: int, match: int, longest: int) -> None:
    """Check sequences of few token ids, so that matches are frequent; the shortest has nothing before its root. Predictions
    are shorter and longer than the sequences, and one slot has none."""
    from foreword.ops.drafting.lookup import looked_up, looked_up_in_both  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    drafter = PromptLookup(rows=nodes, max_match=match, min_match=1 + seed % match)
    drafter.prepare(target(), 5)
    state = State.empty(5, longest, torch.randint(0, longest, (5,), generator=generator), torch.tensor([END]))
    state.lengths[seed % 5] = 0
    state.tokens.copy_(torch.randint(0, 2 + seed % 5, state.tokens.shape, generator=generator))
    state.roots.copy_(state.tokens.gather(1, state.lengths.unsqueeze(1)).squeeze(1))
    state = state.at(Batch.of([3, 0, 4, 1, 2], longest))
    exact = drafter.propose(state)
    given = [part.to(device) for part in (state.tokens, state.slots, state.lengths, drafter._chain(5, False).sizes[0])]
    tokens, size = looked_up(*given, nodes, longest)
    assert same(tokens, exact.tokens) and same(size, exact.size)

    predicted = torch.randint(0, 2 + seed % 5, (5, longest + 7), generator=generator)
    span = torch.randint(0, longest + 7, (5, 2), generator=generator).sort(1).values
    span[(seed + 1) % 5] = 0
    sizes = torch.randint(1, nodes + 1, (match + 1,), generator=generator)
    there = Predictions(*(part.to(device) for part in (predicted, span, sizes)), longest + 7)
    found = looked_up_in_both(*given, nodes, longest, there)
    slow = both_by_torch(*(part.cpu() for part in given), nodes, longest, Predictions(predicted, span, sizes, longest + 7))
    assert all(map(same, found, slow))


# The trained methods -----------------------------------------------------------------------------------------------------


def check_cosine_attention(seed: int, device: str, heads: int, width: int, dtype: torch.dtype, silu: bool) -> None:
    """Compare with torch in double precision; one key is all zeros."""
    from foreword.ops.drafting.cosine_attention import add_cosine_attention  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    state, *parts = torch.randn(4, 2, 3, heads * width, generator=generator).to(dtype)
    parts[1][0, 0] = 0
    found = add_cosine_attention(state.to(device), torch.cat(parts, dim=-1).to(device), heads, silu)
    query, key, value = (part.double().unflatten(-1, (heads, width)) for part in parts)
    seen = (functional.cosine_similarity(query, key, dim=-1).unsqueeze(-1) * value).flatten(-2)
    exact = state.double() + (functional.silu(seen) if silu else seen)
    torch.testing.assert_close(found.cpu(), exact.to(dtype))


def check_int8_linear(device: str, rows: int, columns: int, k: int, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
    """Compare with torch in double precision, with the same rounded weights; one weight row is 0."""
    from foreword.ops.drafting.int8_linear import int8_linear  # noqa: PLC0415

    generator = torch.Generator().manual_seed(rows)
    given, weight = torch.randn(1, rows, k, generator=generator).to(dtype), torch.randn(columns, k, generator=generator)
    weight[0] = 0
    codes, scales = int8_codes(weight)
    bias = torch.randn(columns, generator=generator).to(dtype) if rows % 2 else None
    given_on = (None if part is None else part.to(device) for part in (given, codes, scales, bias))
    found = int8_linear(*given_on, tiles=tiles)
    exact = given.double() @ (codes.double() * scales.double()).t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.cpu(), exact.to(dtype), atol=2e-2, rtol=2e-2)


def check_int8_epilogue(device: str, start: int, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
    """The same with a second input, read by the columns from `start` on or by all; a norm before; and the whole epilogue."""
    from foreword.ops.drafting.int8_linear import Epilogue, SecondInput, int8_linear  # noqa: PLC0415

    generator = torch.Generator().manual_seed(start)
    rows, columns, k = 5, 70, 72
    given, second = torch.randn(2, rows, k, generator=generator).to(dtype)
    codes, scales = int8_codes(torch.randn(columns, k if start else 2 * k, generator=generator))
    bias = torch.randn(columns, generator=generator).to(dtype)
    residual, factor = torch.randn(rows, columns, generator=generator).to(dtype), torch.rand(rows, 1).to(dtype)
    found = int8_linear(
        *(part.to(device) for part in (given, codes, scales, bias)),
        second=SecondInput(second.to(device), start),
        epsilon=1e-3 if start else None,
        epilogue=Epilogue(bool(start % 2), residual.to(device), factor.to(device)),
        tiles=tiles,
    )
    exact = (codes.double() * scales.double()).t()
    if start:
        normed = functional.rms_norm(given.double(), (k,), eps=1e-3)
        exact = torch.cat([normed @ exact[:, :start], second.double() @ exact[:, start:]], dim=-1) + bias.double()
    else:
        exact = torch.cat([given, second], dim=-1).double() @ exact + bias.double()
    exact = factor.double() * (residual.double() + (functional.silu(exact) if start % 2 else exact))
    torch.testing.assert_close(found.cpu(), exact.to(dtype), atol=2e-2, rtol=2e-2)


def check_carried_and_embedded(seed: int, device: str, live: int, count: int, columns: int, dtype: torch.dtype) -> None:
    """Check the rows that a level starts from; one embedding is all zeros."""
    from foreword.ops.round import gather  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    known, table = torch.randn(3, live, columns, generator=generator), 1e-3 * torch.randn(7, columns, generator=generator)
    table[0] = 0
    origin, tokens = (torch.randint(0, most, (3, count), generator=generator) for most in (live, 7))
    known, table = known.to(dtype), table.to(dtype)
    exact = carried_and_embedded(known, origin, table, tokens)
    found = gather.carried_and_embedded(*(part.to(device) for part in (known, origin, table, tokens)))
    assert same(found[0], exact[0])
    torch.testing.assert_close(found[1].cpu(), exact[1])
    alone = gather.unit_rms_embeddings(table.to(device), tokens[:, 0].to(device))
    assert same(alone, found[1][:, 0])


def check_at_slots(seed: int, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check entries of slots in any order, integers or rows."""
    from foreword.ops.round.gather import at_slots  # noqa: PLC0415
    from foreword.ops.round.keep import advance  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    column = torch.randint(-99, 99, (5, *shape), generator=generator).to(dtype)
    slots, count = torch.randperm(5, generator=generator)[: 1 + seed % 5], torch.randint(0, 9, (1 + seed % 5,))
    assert same(at_slots(column.to(device), slots.to(device)), column[slots])
    lengths = torch.randint(0, 99, (5,), generator=generator)
    found = lengths.to(device, copy=True)
    advance(found, slots.to(device), count.to(device))
    assert same(found, lengths.index_add(0, slots, count))


def check_conditioned_on_next(seed: int, device: str, taps: tuple[int, ...], pathed: bool) -> None:
    """Check what clover2 reads. Rows past the count are NaN, and one sequence is at its end. Close, not equal."""
    from foreword.ops.round import gather  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    drafter = Clover2(taps=taps)
    drafter.prepare(target(), 3)
    state = State.empty(3, 9, torch.zeros(3, dtype=torch.long), torch.tensor([END])).at(Batch.of([2, 0], 9))
    state.tokens.copy_(torch.randint(0, 20, state.tokens.shape, generator=generator))
    drafter.stack.cache.length.copy_(torch.tensor([8, 0, 3]))
    hidden, *tapped = torch.randn(1 + len(taps), 2, 5, drafter.target.hidden_size, generator=generator).double()
    path, count = torch.tensor([[0, 2, 4], [0, 1, 3]]) if pathed else None, torch.tensor([seed % 4, 2])
    hidden[0, (path[0, seed % 4 :] if path is not None else slice(seed % 4, None))] = torch.nan
    cached = drafter.stack.cache.length
    exact = conditioned_on_next(hidden, tapped, path, count, drafter.embedding, state, cached)
    there = replace(state.at(Batch.of([2, 0], 9, device)), tokens=state.tokens.to(device))
    rest = (None if part is None else part.to(device) for part in (path, count, drafter.embedding))
    found = gather.conditioned_on_next(
        hidden.to(device), [tap.to(device) for tap in tapped], *rest, there, cached.to(device)
    )
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)


def check_after_live_nodes(seed: int, device: str, width: int, places: int, k: int) -> None:
    """Check the candidates after live nodes. The tables are parts of larger ones, as those of one place of a block are, and
    their rows are the beginnings of longer ones, as those of the torch reference are."""
    from foreword.ops.drafting.transitions import after_live_nodes as by_kernel  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    before = torch.stack([torch.randperm(99, generator=generator)[:places] for _ in range(6)]).view(3, 2, places)
    live = before[:, 1].gather(1, torch.randint(0, places, (3, width), generator=generator))
    tokens = torch.randint(0, 99, (3, 2, places, k + 3), generator=generator)
    log_probs = -torch.rand(3, 2, places, k, generator=generator)
    given = before[:, 1], tokens[:, 1, :, :k], log_probs[:, 1]
    on_device = before.to(device)[:, 1], tokens.to(device)[:, 1, :, :k], log_probs.to(device)[:, 1]
    found = by_kernel(live.to(device), *on_device)
    assert all(same(*pair) for pair in zip(found, after_live_nodes(live, *given), strict=True))


def check_transitions(seed: int, device: str, places: int, count: int, k: int, dtype: torch.dtype) -> None:
    """Check the candidates after each candidate: ties among them, and all NaN after one. Log-probabilities are close."""
    from foreword.ops.drafting.transitions import likeliest_transitions as by_kernel  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    changes = torch.randn(2, places, count, count, generator=generator).to(dtype)
    log_probs = torch.randn(2, places + 1, count + 3, generator=generator).log_softmax(-1)[..., :count]
    for table in (changes, log_probs):
        table[..., count // 2] = table[..., 0]  # equal ones
    changes[0, 0, -1] = torch.nan
    candidates = torch.randint(0, 99, (2, places + 1, count), generator=generator)
    temperature = torch.tensor([0.0, 0.5]) if seed % 2 else None
    exact = likeliest_transitions(changes, candidates, log_probs, temperature, k)
    heat = None if temperature is None else temperature.to(device)
    found = by_kernel(changes.to(device), candidates.to(device), log_probs.to(device), heat, k)
    torch.testing.assert_close(found[1].cpu(), exact[1], atol=1e-5, rtol=1e-5)
    assert same(found[0], exact[0])


def check_remember(seed: int, device: str, columns: int, dtype: torch.dtype) -> None:
    """Check rows along a path or all, with a norm and without; those of a sequence with count 0 are NaN."""
    from foreword.ops.round import gather  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(3, 6, columns, generator=generator).to(dtype), torch.randn(columns, generator=generator)
    expected, slots, count = torch.randn(5, columns).to(dtype), torch.tensor([4, 0, 2]), torch.tensor([2, 0, 4])
    path = torch.tensor([[0, 2, 3, 5], [0, 1, 2, 3], [0, 1, 2, 5]]) if seed % 2 else None
    rows[1] = torch.nan
    norm = torch.nn.RMSNorm(columns, eps=1e-3, dtype=dtype) if seed % 3 else None
    if norm is not None:
        norm.weight.data.copy_(weight)
    found, given = (
        expected.to(device, copy=True),
        [None if part is None else part.to(device) for part in (rows, count, path)],
    )
    gather.remember(found, slots.to(device), *given, None if norm is None else (norm.weight.detach().to(device), 1e-3))
    remember(expected, slots, rows, count, path, norm)
    torch.testing.assert_close(found.cpu(), expected)
    assert same(gather.counted(*given), counted(rows, count, path))


def check_norm_and_gate(device: str, count: int, columns: int, dtype: torch.dtype) -> None:
    """Compare with torch in double precision, rounded where the kernels round."""
    from foreword.ops.layer.norm_and_gate import added_and_normed, gated, normed  # noqa: PLC0415

    generator = torch.Generator().manual_seed(columns)
    rows, added, weight = (torch.randn(count, columns, generator=generator).to(dtype) for _ in range(3))
    norm = weight[0].contiguous().to(device), 1e-3

    def exact(some: Tensor) -> Tensor:
        return functional.rms_norm(some.double(), (columns,), weight[0].double(), 1e-3).to(dtype)

    torch.testing.assert_close(normed(rows.to(device), norm).cpu(), exact(rows))
    total, result = added_and_normed(rows.to(device), added.to(device), norm)
    torch.testing.assert_close(total.cpu(), (rows.double() + added.double()).to(dtype))
    torch.testing.assert_close(result.cpu(), exact(total.cpu()))
    both = torch.cat([8 * rows, added], dim=1)
    torch.testing.assert_close(gated(both.to(device)).cpu(), (functional.silu(8 * rows.double()) * added.double()).to(dtype))


def check_row_positions(
    seed: int, device: str, count: int, scratch: int, shared: bool, grafts: Sequence[Graft] = ()
) -> None:
    """Compare with the stack, for the last rows of the scratch; one sequence is so long that its padding lies beyond."""
    from foreword.ops.layer.row_positions import GraftedRows, row_positions  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    stack, where = target(dtype=torch.float32).layer_stack, torch.device(device)
    cache = stack.allocate(5, 40, scratch)
    slots = torch.randperm(5, generator=generator)[: 1 + seed % 4]
    base = torch.randint(0, 40, slots.shape, generator=generator)
    base[0] = cache.rows - 1
    alike = 1 if shared else len(slots)
    depth = torch.randint(0, scratch, (alike, scratch), generator=generator)
    sees = torch.rand(alike, scratch, scratch, generator=generator)[:, -count:] < 0.5  # a view that is not contiguous
    whole = Rows(base, depth, sees, Batch(slots, tuple(slots.tolist()), 40)).grafted(grafts)
    joined = [count + sum(graft.rows for graft in grafts[:stage]) for stage in range(len(grafts) + 1)]
    anchored = anchors_and_offsets(grafts, where)
    grafted = GraftedRows(*anchored, on_device(tuple(joined), where), tuple(joined)) if grafts else None
    angles, given = stack.rotary_tables[""], (part.to(device) for part in (base, depth, sees, slots))
    found = row_positions(tuple(part.to(device) for part in angles), *given, cache.shape.heads, grafted)
    for places, size in zip(found.places, joined, strict=True):
        part = whole.head(size)
        tables, exact = stack._rotary_and_places(part)
        assert same(places, exact)
        assert all(same(one[:, :size], two) for one, two in zip(found[:2], tables[""], strict=True))
    assert same(found.depth.expand(len(slots), -1), whole.depth.expand(len(slots), -1))
    assert same(found.sees.expand(len(slots), -1, -1), whole.sees.expand(len(slots), -1, -1))


def check_pseudo_rows(device: str, matrix: Projection, rows: int, source: int, dtype: torch.dtype) -> None:
    """Compare with the projection in double precision; of the source rows, one has a NaN and one is 0."""
    from foreword.ops.drafting.pseudo_rows import with_pseudo_rows  # noqa: PLC0415

    generator = torch.Generator().manual_seed(rows)
    size = matrix.linear.out_features
    given, made_of = (torch.randn(2, count, size, generator=generator).to(dtype) for count in (rows, source))
    made_of[0, 0], made_of[1, 0], made_of[0, -1, 0] = 0, torch.inf, torch.nan
    which = torch.randint(0, source, (2 * source,), generator=generator)
    exact = append_step(deepcopy(matrix).double(), given.double(), made_of.double(), which).to(dtype)
    bias = None if matrix.linear.bias is None else matrix.linear.bias.to(device, dtype)
    weights = [weight.to(device, dtype) for weight in matrix.weights]
    found = with_pseudo_rows(given.to(device), made_of.to(device), which.to(device), weights, bias, matrix.norm)
    assert same(found[:, :rows], given)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), exact, rtol=near, atol=near)


def check_carried_on(seed: int, device: str, nodes: int) -> None:
    """Check rows that follow others, as in a pass; some sequences accept nothing."""
    from foreword.ops.drafting.carry import carried_on  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    steps = 1 + seed % 3
    exact, counts = torch.randn(5, steps, 20, generator=generator), integers(9, 5)
    where, carries, path, count = integers(7, nodes, steps), integers(4, nodes), integers(nodes, 3, 4), integers(5, 3)
    slots, rows = torch.randperm(5, generator=generator)[:3], torch.randn(3, 9, 20, generator=generator)
    states, have = (part.to(device, copy=True) for part in (exact, counts))
    given = [part.to(device) for part in (slots, path, count, rows)]
    carried_on(states, have, *given[:3], given[3][:, 2:], where.to(device), carries.to(device))
    carried_by_torch(exact, counts, slots, path, count, rows[:, 2:], where, carries)
    assert same(states, exact) and same(have, counts)


def check_filled_template(seed: int, device: str, nodes: int) -> None:
    """Check candidates for more levels than the template has."""
    from foreword.ops.drafting.growth import filled  # noqa: PLC0415

    growth = StaticTree(target(), greedy_paths([(0.5, 0.25, 0.125), (0.25, 0.5), (0.5,)], nodes - 1))
    given, truth = (Round.random(seed, where, 2).state for where in (device, "cpu"))
    candidates = torch.randint(0, 1000, (len(truth.slots), 5, 4), generator=torch.Generator().manual_seed(seed))[:, :4]
    template = growth.template(len(truth.slots))
    exact = filled_by_torch(truth, candidates, template.ranks)
    assert all(map(same, filled(given, candidates.to(device), template.ranks.to(device)), exact))


def check_paths(seed: int, device: str, kind: str, nodes: int) -> None:
    """Check log-probabilities that are often equal, some NaN; slots have from none to all of the steps."""
    from foreword.ops.drafting.growth import likeliest_paths  # noqa: PLC0415

    generator, rates = torch.Generator().manual_seed(seed), [(0.5, 0.25, 0.25, 0.125), (0.5, 0.25), (0.25, 0.25, 0.125)]
    paths = Candidates(rates, nodes, kind, 4, torch.device("cpu"))  # type: ignore[arg-type]
    paths.usual = paths.usual / math.log(2)  # integers: their sums do not depend on the order
    given, truth = (Round.random(seed, where, 2).state for where in (device, "cpu"))
    tokens = torch.randint(0, 1000, (len(truth.slots), 3, 4), generator=generator)
    odd = torch.rand(tokens.shape, generator=generator)
    chances = ((-odd * 8).round() / 4).masked_fill(odd < 0.05, torch.nan).masked_fill(odd > 0.95, -torch.inf)
    have, likely = torch.randint(0, 4, (5,), generator=generator), chances if kind == "best" else paths.usual
    exact = paths_by_torch(truth, tokens, likely, paths.table, have, nodes)
    table = RankPaths(*(part.to(device) for part in paths.table))
    found = likeliest_paths(given, *(part.to(device) for part in (tokens, likely)), table, have.to(device), nodes)
    assert all(map(same, found, exact))


# Trees that follow the candidates --------------------------------------------------------------------------------------


def random_candidates(seed: int, batch: int, branch: int, device: str) -> NextCandidates:
    """Return random candidates with few distinct log-probabilities, so that many are equal, and some are NaN. With an odd
    seed all live nodes of a level share their candidates, as in Medusa."""

    def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        generator, live = torch.Generator().manual_seed(seed * 10 + level), tokens.shape[1]
        shape = (batch, 1 if seed % 2 else live, branch)
        likely = (-torch.rand(shape, generator=generator) * 8).round() / 4
        odd = torch.rand(shape, generator=generator)
        likely = likely.sort(-1, descending=True).values.masked_fill(odd < 0.05, torch.nan)
        likely = likely.masked_fill(odd > 0.9, -torch.inf).masked_fill(odd > 0.97, torch.inf)
        candidates = torch.randint(0, 1000, shape, generator=generator)
        if seed % 2 == 0:  # candidates depend on the arguments, so that wrong ones show
            candidates = candidates + (tokens + 3 * origin).cpu().unsqueeze(-1)
        return candidates.to(device).expand(-1, live, -1), likely.to(device).expand(-1, live, -1)

    return guess


def check_growth(seed: int, device: str, growth: BestFirst | Budgeted) -> None:
    from foreword.ops.drafting.growth import KernelTrees  # noqa: PLC0415  only where Triton is

    given, truth = (Round.random(seed, where, 2).state for where in (device, "cpu"))
    batch = truth.slots.shape[0]
    shape = growth.shape
    trees = KernelTrees(given, shape.depth, growth.width, growth.branch, growth.budget(shape))
    found = growth.grow(given, random_candidates(seed, batch, growth.branch, device), shape, trees)
    own = TorchTrees(truth, growth.width, growth.budget(shape))
    exact = growth.grow(truth, random_candidates(seed, batch, growth.branch, "cpu"), shape, own)
    assert same(trees.chance, own.chance)
    assert same(found.size, exact.size) and same(found.tokens, exact.tokens)
    assert same(found.tree.parent, exact.tree.parent)


def random_draft(seed: int, nodes: int, device: str, shared: bool = False) -> Draft:
    """Return three trees of so few token ids that a chain often follows one of their paths; siblings differ."""
    generator = torch.Generator().manual_seed(seed)
    parent = random_tree(1 if shared else 3, nodes, generator).parent
    ranks = torch.tensor([[line[1:row].count(line[row]) for row in range(nodes)] for line in parent.tolist()])
    first = torch.randint(0, 3, (3, 1), generator=generator)
    tokens = torch.cat([first + 50, (ranks[:, 1:] + first)], dim=1) if nodes > 1 else first + 50
    size = torch.randint(1, nodes + 1, (3,), generator=generator)
    return Draft(tokens.to(device), Tree(parent.to(device)), size.to(device))


def random_chain(seed: int, tree: Draft, links: int) -> Draft:
    """Return chains from the same roots, of the same few token ids."""
    generator = torch.Generator().manual_seed(seed + 1)
    candidates = torch.randint(0, 4, (3, links - 1), generator=generator).to(tree.tokens.device)
    size = torch.randint(1, links + 1, (3,), generator=generator).to(candidates.device)
    return Draft(torch.cat([tree.tokens[:, :1], candidates], dim=1), Tree.chain(links, candidates.device), size)


def check_with_chain(seed: int, device: str, nodes: int, links: int, shared: bool = False) -> None:
    from foreword.ops.drafting.joining import with_chain  # noqa: PLC0415  only where Triton is

    tree = random_draft(seed, nodes, device, shared)
    chain = random_chain(seed, tree, links)
    found = with_chain((tree.tokens, tree.tree.parent, tree.size), (chain.tokens, chain.size), nodes)
    own = random_draft(seed, nodes, "cpu", shared)
    exact = attach(own, random_chain(seed, own, links), nodes)
    assert all(map(same, found, (exact.tokens, exact.tree.parent, exact.size)))


# Graphs of candidates --------------------------------------------------------------------------------------------------


def random_level(generator: torch.Generator, shape: tuple[int, int, int], tokens: int) -> tuple[Tensor, Tensor]:
    """Return candidates of so few tokens that most repeat, with few log-probabilities: many are equal, and some are NaN."""
    log_probs = ((-torch.rand(shape, generator=generator) * 8).round() / 4).sort(-1, descending=True).values
    odd = torch.rand(shape, generator=generator)
    log_probs = log_probs.masked_fill(odd < 0.04, torch.nan)
    log_probs = log_probs.masked_fill(odd > 0.92, -torch.inf).masked_fill(odd > 0.98, torch.inf)
    found = torch.rand(*shape[:2], max(tokens, shape[2]), generator=generator).argsort(-1)[..., : shape[2]]
    return found, log_probs


def check_candidate_graphs(seed: int, device: str, rule: Rule, depth: int, tokens: int) -> None:
    """Check the graph level by level, then the unrolled draft."""
    from foreword.ops.drafting.candidate_graphs import KernelGraph  # noqa: PLC0415  only where Triton is

    given, truth = (Round.random(seed, where, 2).state for where in (device, "cpu"))
    generator, batch, live = torch.Generator().manual_seed(seed), truth.slots.shape[0], 1
    exact, found = TorchGraph(truth.root, rule), KernelGraph(given.root, rule, depth)
    for _ in range(depth):
        level = random_level(generator, (batch, live, rule.branch), tokens)
        nodes = exact.add(*level)
        assert all(map(same, found.add(*(one.to(device) for one in level)), nodes))
        assert all(map(same, found.candidates, exact.candidates)) and same(found.counts, exact.counts)
        live = nodes[0].shape[1]
    for rows, width in ((2, 1), (20, 3), (64, 16)):
        levels = min(depth + 2, rows - 1)
        assert all(map(same, found.unrolled(given, levels, width, rows), exact.unrolled(truth, levels, width, rows)))


# A small draft model -----------------------------------------------------------------------------------------------------


def check_catch_up(seed: int, device: str, count: int) -> None:
    from foreword.ops.drafting.catch_up import catch_up  # noqa: PLC0415  only where Triton is

    given, truth = (Round.random(seed, where, 2).state for where in (device, "cpu"))
    cache = SlotCache(CacheShape(1, 1, 16, torch.float32), 5, 20, 1, "cpu")
    cache.length.copy_(torch.randint(0, 25, (5,), generator=torch.Generator().manual_seed(seed)))
    found, exact = catch_up(given, cache.length.to(device), count), unread(truth, cache.length, count)
    assert all(map(same, found, exact))


# A looped model ---------------------------------------------------------------------------------------------------------


def random_flights(seed: int, repeats: int, width: int, dtype: torch.dtype) -> FlightColumns:
    """Return tokens in flight of five slots, each with any number of them; their repeats fall from row to row."""
    generator = torch.Generator().manual_seed(seed)
    columns = FlightColumns.empty(5, repeats, width, dtype, torch.device("cpu"))
    for slot in range(5):
        count = int(torch.randint(1, repeats + 1, (1,), generator=generator))
        entered = torch.randperm(repeats, generator=generator)[:count].sort(descending=True).values
        columns.repeat[slot, :count] = entered
    columns.tokens.copy_(torch.randint(0, TOKENS, columns.tokens.shape, generator=generator))
    columns.hidden.copy_(torch.randn(columns.hidden.shape, generator=generator))
    return columns


def check_flights(seed: int, device: str, repeats: int, width: int, dtype: torch.dtype, every: bool, gated: bool) -> None:
    """Check what a round runs, then where its tokens are, for predictions that are right half of the time."""
    from foreword.ops.round import flights as kernels  # noqa: PLC0415  only where Triton is

    given, truth = (Round.random(seed, where, 2).state for where in (device, "cpu"))
    exact_columns = random_flights(seed, repeats, width, dtype)
    columns = FlightColumns(*(column.to(device, copy=True) for column in exact_columns))
    found, exact = kernels.board(columns, given, repeats, 40), board(exact_columns, truth, repeats, 40)
    assert all(map(same, found[:-1], exact[:-1]))
    assert same(found.deciding[given.slots], exact.deciding[truth.slots])
    generator, batch = torch.Generator().manual_seed(seed), truth.slots.shape[0]
    embedded = torch.randn(batch, repeats, width, generator=generator).to(dtype)
    hidden = continued(exact_columns.hidden, truth.slots, exact.repeat, embedded)
    assert same(kernels.continued(columns.hidden, given.slots, found.repeat, embedded.to(device)), hidden)

    lies = torch.randint(0, TOKENS, exact.tokens.shape, generator=generator)
    predicted = torch.where(torch.rand(lies.shape, generator=generator) < 0.5, exact.tokens.roll(-1, 1), lies)
    sure = torch.rand(lies.shape, generator=generator) < 0.7
    emission = Emission.in_a_block(batch, 1, torch.device("cpu"))
    emission.broken.copy_(torch.rand(batch, generator=generator) < 0.2)
    through = exact.deciding[truth.slots] & (exact.repeat[:, 0] == repeats) & ~emission.broken
    emission.count.copy_(through)
    own = Emission.in_a_block(batch, 1, torch.device(device))
    for name in ("count", "broken"):
        getattr(own, name).copy_(getattr(emission, name))
    read = slice(None) if every else slice(2)
    plan = predicted[:, read], sure[:, read] if gated else None
    move(exact_columns, truth, Flight(exact.tokens, exact.repeat, hidden), *plan, every, emission)
    theirs = (None if one is None else one.to(device) for one in plan)
    kernels.move(columns, given, Flight(found.tokens, found.repeat, hidden.to(device)), *theirs, every, own)
    counting = exact_columns.repeat != NONE
    assert same(columns.repeat, exact_columns.repeat) and same(own.drafted, emission.drafted)
    assert same(columns.tokens.cpu()[counting], exact_columns.tokens[counting])
    assert same(columns.hidden.cpu()[counting], exact_columns.hidden[counting])


def check_next_level(seed: int, device: str, widths: tuple[int, ...]) -> None:
    """Check levels that follow each other; the first follows the root, whose ancestors all sequences share."""
    from foreword.ops.round import tree as kernels  # noqa: PLC0415  only where Triton is

    generator = torch.Generator().manual_seed(seed)
    sees, above = Tree.chain(1).ancestors, 1
    for width in widths:
        parent = torch.randint(0, above, (3, width), generator=generator)
        found, sees, above = kernels.next_level(sees.to(device), parent.to(device)), next_level(sees, parent), width
        assert same(found, sees)
