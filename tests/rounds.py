"""Random rounds for the kernels around the pass, and the checks that both devices run: kernels against what they replace.

A check makes everything twice from one seed: on the CPU, for the torch operations that say what is right, and on the device
that is asked for, for the kernels. What comes out has to be equal, not close.
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
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import Batch, State
from foreword.drafting.heads import remember
from foreword.drafting.joining import hang
from foreword.drafting.transfer import Projection, ahead
from foreword.drafting.trees import BestFirst, Budgeted, Guess, StaticTree, choose, greedy_paths
from foreword.engine.accept import settle
from foreword.methods.clover2 import Clover2
from foreword.methods.hidden_transfer import Candidates, HiddenTransfer
from foreword.methods.prompt_lookup import PromptLookup
from foreword.methods.token_recycling import CANDIDATES, TokenRecycling
from foreword.model.cache import CacheShape, SlotCache
from foreword.model.draft_linears import in_eight_bits
from foreword.model.stack import Rows, _hung
from foreword.ops import cached_rows
from foreword.ops.device import synchronize
from foreword.ops.graphs import Rule, TorchGraph
from foreword.ops.growth import filled as filled_by_torch
from foreword.ops.noise import gumbel
from foreword.ops.rounds import fit, write
from foreword.ops.rows import carried_and_embedded, counted
from foreword.ops.trees import lineage as lineage_of
from foreword.ops.trees import next_level
from foreword.ops.unread import unread

if TYPE_CHECKING:
    from foreword.ops.layer.tiles import Tiles

TOKENS = 6  # ids, so few that guesses meet what is chosen
FIELDS = ("tokens", "count", "drafted", "ended", "broken")


@dataclass(frozen=True)
class Round:
    state: State
    draft: Draft
    choice: Tensor
    peak: Tensor
    places: int

    @staticmethod
    def drawn(seed: int, device: str, nodes: int, ends: int = 1, shared: bool = False) -> Round:
        """Slots in any order, of which some are frozen, heed no end, do not speculate, or are near their limit."""
        generator = torch.Generator().manual_seed(seed)

        def whole(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        slots, batch = 5, int(whole(1, 5, 1))
        tree = random_tree(1 if seed % 3 == 0 else batch, nodes, generator)
        lengths = whole(0, 20, slots)
        state = State(
            batch=Batch(torch.randperm(slots, generator=generator)[:batch], tuple(range(batch)), 20),
            roots=whole(0, TOKENS, slots),
            lengths=lengths,
            tokens=whole(0, TOKENS, slots, 60),
            limits=lengths + whole(2, 9, slots),
            **{name: whole(0, 4, slots) > 0 for name in ("heeds_ends", "speculates", "alive_slots")},
            seen=torch.zeros(slots, 0, dtype=torch.int32),
            table=State.empty(slots, 1, lengths, torch.arange(ends)).table,
        )
        size, tokens = whole(1, nodes + 1, batch), whole(0, TOKENS, batch, nodes)
        if seed % 5 == 0:  # one number for all, as a drafter may say it
            size = whole(1, nodes + 1, 1).expand(batch)
        choice = whole(0, TOKENS, batch, nodes)
        peak = torch.randn(batch, nodes, 1 if shared else TOKENS, generator=generator)
        peak = peak.masked_fill(torch.rand(peak.shape, generator=generator) < 0.03, torch.nan)
        places = min(nodes, int(lineage_of(tree.parent)[1].max()) + 1)
        return Round(*_on(device, state, Draft(tokens, tree, size)), choice.to(device), peak.to(device), places)


def _on(device: str, state: State, draft: Draft) -> tuple[State, Draft]:
    columns = {name: part.to(device) for name, part in vars(state).items() if isinstance(part, Tensor)}
    batch = replace(state.batch, slots=state.slots.to(device))
    table = replace(state.table, ends=state.table.ends.to(device))
    tree = Tree(draft.tree.parent.to(device))
    return replace(state, **columns, batch=batch, table=table), Draft(draft.tokens.to(device), tree, draft.size.to(device))


def same(found: Tensor, exact: Tensor) -> bool:
    return found.dtype == exact.dtype and torch.equal(found.cpu(), exact.cpu())


# The kernels of a round --------------------------------------------------------------------------------------------------


def check_fit(seed: int, device: str, nodes: int) -> None:
    from foreword.ops.round.settle import fitted  # noqa: PLC0415  decided by the environment that a test sets first

    given, truth = (Round.drawn(seed, where, nodes) for where in (device, "cpu"))
    tokens, size = fitted(given.state, given.draft.tokens, given.draft.tree.depth, given.draft.size)
    exact, rows = fit(truth.state, truth.draft.tokens, truth.draft.tree.depth, truth.draft.size)
    assert same(tokens, exact) and same(size, rows)


def check_settle(seed: int, device: str, nodes: int, ends: int, shared: bool) -> tuple[Accepted, Emission]:
    """ACCEPT and COMMIT's columns, one after the other, as in a round."""
    from foreword.ops.round.settle import decided, written  # noqa: PLC0415

    given, truth = (Round.drawn(seed, where, nodes, ends, shared) for where in (device, "cpu"))
    accepted, emission = settle(truth.state, truth.draft, truth.choice, truth.peak, truth.places)
    state = given.state
    found = Emission.in_a_block(len(given.choice), given.places, given.choice.device)
    path, last = decided(state, given.draft, given.choice, given.peak, found)
    arrived = found.fetched()
    synchronize(given.choice.device)
    for name in FIELDS:
        assert same(getattr(found, name), getattr(emission, name)), name
        assert same(getattr(arrived, name), getattr(emission, name)), name
    assert same(path, accepted.path) and same(last, accepted.next)

    write(truth.state, emission.tokens, accepted.count, accepted.next, emission.ended)
    written(state, found.tokens, found.count, last, found.ended)
    assert same(state.tokens[:, :-1], truth.state.tokens[:, :-1])
    assert same(state.roots, truth.state.roots) and same(state.alive_slots, truth.state.alive_slots)
    return accepted, emission


def check_keep(seed: int, device: str, nodes: int, width: int, dtype: torch.dtype) -> None:
    from foreword.ops.round.keep import keep_rows  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    caches = [SlotCache(CacheShape(3, 2, width, dtype), 4, 20, nodes, where) for where in (device, "cpu")]
    drawn = torch.randn(caches[0].held.shape, generator=generator).to(dtype)
    length = torch.randint(0, 20, (4,), generator=generator)
    slots = torch.randperm(4, generator=generator)[:3]
    ways = [torch.randperm(nodes - 1, generator=generator)[: nodes // 2].sort().values + 1 for _ in range(3)]
    path = torch.stack([torch.cat([torch.zeros(1, dtype=torch.long), way]) for way in ways])
    count = torch.randint(0, path.shape[1] + 1, (3,), generator=generator)
    for cache in caches:
        cache.held.copy_(drawn)
        cache.length.copy_(length)
    given, truth = caches
    keep_rows(given.held, *(part.to(device) for part in (slots, length, path, count)))
    cached_rows.keep_rows(truth.held, slots, truth.length, path, count)
    assert same(given.held, truth.held)


# The longest rows --------------------------------------------------------------------------------------------------------


def scores_with_ties(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Few values, so that most are met more than once, both zeros and both infinities among them, and NaN of either sign in
    some rows: which sign an operation gives it depends on the machine."""
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


def check_words(dtype: torch.dtype, device: str) -> None:
    """Of a vocabulary of 5000 some tokens, beyond one stretch: the noise is that of the token, not of its column."""
    from foreword.ops.round.top import Noise, top_with_chances  # noqa: PLC0415

    generator = torch.Generator().manual_seed(3)
    words = torch.randperm(5000, generator=generator)[:2500].sort().values
    key, position = torch.tensor([[0x9ABCDEF0, 0x12345678], [7, 7]]), torch.tensor([[3, 70_000], [1, 2]])
    heat = torch.tensor([0.7, 0.0])
    scores = torch.randn(2, 2, 2500, generator=generator).to(dtype)
    wide = scores.float() / torch.where(heat > 0, heat, 1).view(2, 1, 1)
    wide = (wide + gumbel(key, position, words)).where(heat.view(2, 1, 1) > 0, wide)
    places = wide.sort(descending=True, stable=True).indices[..., :6]
    noise = Noise(*(part.to(device) for part in (key, position, heat)))
    tokens, chances = top_with_chances(scores.to(device), 6, noise, words.to(device))
    assert same(tokens, words[places])
    torch.testing.assert_close(chances.cpu(), wide.log_softmax(-1).gather(-1, places), rtol=1e-5, atol=1e-5)
    quiet, _ = top_with_chances(scores.to(device), 6, vocabulary=words.to(device))
    assert same(quiet, words[scores.float().sort(descending=True, stable=True).indices[..., :6]])


def check_lose(logits: Tensor, teacher: Tensor | None, device: str) -> None:
    """Losses, places and gradients against torch's in float64, with rows that do not count; learning or not."""
    from foreword.ops.training.cross_entropy import log_mass, lose  # noqa: PLC0415

    generator = torch.Generator().manual_seed(logits.shape[1])
    labels = logits.float().topk(min(3, logits.shape[1])).indices[:, -1]
    counts = torch.rand(logits.shape[0], generator=generator) < 0.7
    leaf = logits.double().requires_grad_()
    wanted = labels if teacher is None else teacher.double().softmax(-1)
    losses = functional.cross_entropy(leaf, wanted, reduction="none").where(counts, 0)
    losses.sum().backward()
    assert leaf.grad is not None
    larger = (logits > logits.gather(1, labels.unsqueeze(1))).sum(1)
    given, taught = logits.to(device, copy=True), None
    if teacher is not None:
        taught = teacher.to(device), log_mass(teacher.to(device))
    for learns in (False, True):  # the logits are read first, then written over
        found, places = lose(given, labels.to(device), counts.to(device), taught, learns)
        torch.testing.assert_close(found.cpu().double(), losses.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(places.cpu(), larger)
        expected = leaf.grad.to(logits.dtype) if learns else logits
        near = dict(rtol=5e-5, atol=1e-6) if logits.dtype == torch.float32 else dict(rtol=1e-2, atol=1e-6)
        torch.testing.assert_close(given.cpu(), expected, **near)


# Token Recycling ---------------------------------------------------------------------------------------------------------


class Tables:
    """A drafter's tables without a target, filled at random: unknown rows, and chances that are often equal."""

    def __init__(self, seed: int, device: str, mode: str, vocabulary: int = 30) -> None:
        generator = torch.Generator().manual_seed(seed)
        drafter = TokenRecycling(table=mode)  # type: ignore[arg-type]
        drafter.vocabulary = vocabulary
        drafter.bind_template(torch.device(device))
        shape = (1 if mode == "shared" else 4, vocabulary + 1, CANDIDATES)
        drafter.tokens = torch.randint(0, vocabulary, shape, dtype=torch.int32, generator=generator).to(device)
        chances = (-torch.rand(shape, generator=generator) * 8).round() / 4
        known = torch.rand(shape[:2], generator=generator) < 0.9
        drafter.chances = chances.sort(-1, descending=True).values.where(known.unsqueeze(-1), -torch.inf).to(device)
        self.drafter = drafter


def check_walk(seed: int, device: str, nodes: int, mode: str, noisy: bool) -> None:
    """Where there is noise, one slot is greedy all the same, and no two chances are equal: topk would take either."""
    from foreword.ops.drafting.recycle import walked  # noqa: PLC0415

    given, truth = (Tables(seed, where, mode).drafter for where in (device, "cpu"))
    asked, exact_state = (Round.drawn(seed, where, 2).state for where in (device, "cpu"))
    if noisy:
        heats = {slot: (Sampling(heat, seed=seed + slot), 0) for slot, heat in enumerate((0.8, 0.0, 0.3, 1.3))}
        exact_state.table.set_all(heats, torch.arange(4))
        for one in (given, truth):
            one.chances -= torch.arange(CANDIDATES, device=one.chances.device) / 64
    exact_state = replace(exact_state, batch=replace(exact_state.batch, slots=exact_state.slots % 4))
    slots = exact_state.slots.to(device)
    template = given.ways, given.depths, given.parent, given.fading
    table, own = (given.tokens, given.chances), mode != "shared"
    columns = exact_state.table.columns
    drawn = tuple(part.to(device) for part in (exact_state.lengths, columns["key"], columns["temperature"]))
    tokens, parent, size = walked(table, template, slots, asked.roots, nodes, own, drawn if noisy else None)
    exact = choose(*_walked(truth, exact_state), nodes)
    assert same(size, exact.size) and same(tokens, exact.tokens) and same(parent, exact.tree.parent)


def _walked(drafter: TokenRecycling, state: State) -> tuple[Tensor, Tensor, Tensor]:
    tokens, chances = drafter._walk(state)
    return tokens, drafter.parent.unsqueeze(0), chances


def check_learn(seed: int, device: str, nodes: int, mode: str, accepts: bool) -> None:
    """A pass that names every token several times, also across sequences, and chances that are not all finite."""
    from foreword.ops.drafting.recycle import learnt  # noqa: PLC0415

    given, truth = (Tables(seed, where, mode).drafter for where in (device, "cpu"))
    asked = Round.drawn(seed, "cpu", nodes)
    accepted, _ = settle(asked.state, asked.draft, asked.choice, asked.peak, asked.places)
    batch = replace(asked.state.batch, slots=torch.randperm(4, generator=torch.Generator().manual_seed(seed)))
    state = replace(asked.state, batch=replace(batch, slots=batch.slots[: asked.choice.shape[0]]))
    generator = torch.Generator().manual_seed(seed)
    ranked = torch.randint(0, 30, (*asked.choice.shape, CANDIDATES), generator=generator)
    chances = -torch.rand(ranked.shape, generator=generator)
    chances = chances.masked_fill(chances > -0.1, torch.nan).masked_fill(chances < -0.9, torch.inf)

    truth._write(state, asked.draft, accepted if accepts else None, ranked, chances)
    learnt(
        (given.tokens, given.chances),
        *(part.to(device) for part in (state.slots, asked.draft.tokens, asked.draft.size)),
        (ranked.to(device), chances.to(device)),
        (accepted.path.to(device), accepted.count.to(device)) if accepts else None,
        mode != "shared",
    )
    waste = truth.vocabulary
    assert same(given.tokens[:, :waste], truth.tokens[:, :waste])
    assert same(given.chances[:, :waste], truth.chances[:, :waste])


# Prompt Lookup -----------------------------------------------------------------------------------------------------------


def check_look_up(seed: int, device: str, nodes: int, match: int, longest: int) -> None:
    """Texts of few ids, so that matches abound; the shortest has nothing before its root."""
    from foreword.ops.drafting.lookup import looked_up  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    drafter = PromptLookup(rows=nodes, max_match=match, min_match=1 + seed % match)
    drafter.prepare(target(), 5)
    state = State.empty(5, longest, torch.randint(0, longest, (5,), generator=generator), torch.tensor([END]))
    state.lengths[seed % 5] = 0
    state.tokens.copy_(torch.randint(0, 2 + seed % 5, state.tokens.shape, generator=generator))
    state.roots.copy_(state.tokens.gather(1, state.lengths.unsqueeze(1)).squeeze(1))
    state = state.at(Batch.of([3, 0, 4, 1, 2], longest))
    chain, sizes = drafter._settled(5)
    exact = drafter._look_up(state, chain, sizes)
    given = (part.to(device) for part in (state.tokens, state.slots, state.lengths, sizes))
    tokens, size = looked_up(*given, nodes)
    assert same(tokens, exact.tokens) and same(size, exact.size)


# The trained methods -----------------------------------------------------------------------------------------------------


def check_look(seed: int, device: str, heads: int, width: int, dtype: torch.dtype, silu: bool) -> None:
    """Against torch in double precision; a key of zeros is among the rows."""
    from foreword.ops.drafting.look import looked  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    state, *parts = torch.randn(4, 2, 3, heads * width, generator=generator).to(dtype)
    parts[1][0, 0] = 0
    found = looked(state.to(device), torch.cat(parts, dim=-1).to(device), heads, silu)
    query, key, value = (part.double().unflatten(-1, (heads, width)) for part in parts)
    seen = (functional.cosine_similarity(query, key, dim=-1).unsqueeze(-1) * value).flatten(-2)
    exact = state.double() + (functional.silu(seen) if silu else seen)
    torch.testing.assert_close(found.cpu(), exact.to(dtype))


def check_coarse(device: str, rows: int, columns: int, k: int, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
    """Against torch in double precision, with the same rounded weights; one row of these is 0."""
    from foreword.ops.drafting.coarse import coarse_linear  # noqa: PLC0415

    generator = torch.Generator().manual_seed(rows)
    given, weight = torch.randn(1, rows, k, generator=generator).to(dtype), torch.randn(columns, k, generator=generator)
    weight[0] = 0
    codes, scales = in_eight_bits(weight)
    bias = torch.randn(columns, generator=generator).to(dtype) if rows % 2 else None
    given_on = (None if part is None else part.to(device) for part in (given, codes, scales, bias))
    found = coarse_linear(*given_on, tiles=tiles)
    exact = given.double() @ (codes.double() * scales.double()).t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.cpu(), exact.to(dtype), atol=2e-2, rtol=2e-2)


def check_coarse_between(device: str, turn: int, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
    """The same with rows beside, read by the columns from `turn` on or by all; a norm before; and all that comes behind."""
    from foreword.ops.drafting.coarse import Behind, Beside, coarse_linear  # noqa: PLC0415

    generator = torch.Generator().manual_seed(turn)
    rows, columns, k = 5, 70, 72
    given, other = torch.randn(2, rows, k, generator=generator).to(dtype)
    codes, scales = in_eight_bits(torch.randn(columns, k if turn else 2 * k, generator=generator))
    bias = torch.randn(columns, generator=generator).to(dtype)
    residual, times = torch.randn(rows, columns, generator=generator).to(dtype), torch.rand(rows, 1).to(dtype)
    found = coarse_linear(
        *(part.to(device) for part in (given, codes, scales, bias)),
        beside=Beside(other.to(device), turn),
        epsilon=1e-3 if turn else None,
        behind=Behind(bool(turn % 2), residual.to(device), times.to(device)),
        tiles=tiles,
    )
    exact = (codes.double() * scales.double()).t()
    if turn:
        normed = functional.rms_norm(given.double(), (k,), eps=1e-3)
        exact = torch.cat([normed @ exact[:, :turn], other.double() @ exact[:, turn:]], dim=-1) + bias.double()
    else:
        exact = torch.cat([given, other], dim=-1).double() @ exact + bias.double()
    exact = times.double() * (residual.double() + (functional.silu(exact) if turn % 2 else exact))
    torch.testing.assert_close(found.cpu(), exact.to(dtype), atol=2e-2, rtol=2e-2)


def check_level(seed: int, device: str, live: int, count: int, columns: int, dtype: torch.dtype) -> None:
    """A row of zeros is among the embeddings."""
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
    alone = gather.embedded_at_one(table.to(device), tokens[:, 0].to(device))
    assert same(alone, found[1][:, 0])


def check_take(seed: int, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whole numbers or rows, by slots in any order."""
    from foreword.ops.round.gather import at_slots  # noqa: PLC0415
    from foreword.ops.round.keep import advance  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    held = torch.randint(-99, 99, (5, *shape), generator=generator).to(dtype)
    slots, count = torch.randperm(5, generator=generator)[: 1 + seed % 5], torch.randint(0, 9, (1 + seed % 5,))
    assert same(at_slots(held.to(device), slots.to(device)), held[slots])
    lengths = torch.randint(0, 99, (5,), generator=generator)
    found = lengths.to(device, copy=True)
    advance(found, slots.to(device), count.to(device))
    assert same(found, lengths.index_add(0, slots, count))


def check_told(seed: int, device: str, taps: tuple[int, ...], pathed: bool) -> None:
    """What clover2 reads along, against its torch operations. Rows that do not count are NaN; one text is at its end."""
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
    exact = drafter._told(state, Scores(hidden=hidden, taps=dict(zip(taps, tapped, strict=True))), path, count)
    there = replace(state.at(Batch.of([2, 0], 9, device)), tokens=state.tokens.to(device))
    rest = (None if part is None else part.to(device) for part in (path, count, drafter.embedding))
    cached = drafter.stack.cache.length.to(device)
    found = gather.told(hidden.to(device), [tap.to(device) for tap in tapped], *rest, there, cached)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)


def check_remember(seed: int, device: str, columns: int, dtype: torch.dtype) -> None:
    """Rows along a path or all of them, with a norm and without; those that do not count are NaN."""
    from foreword.ops.round import gather  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(3, 6, columns, generator=generator).to(dtype), torch.randn(columns, generator=generator)
    held, slots, count = torch.randn(5, columns).to(dtype), torch.tensor([4, 0, 2]), torch.tensor([2, 0, 4])
    path = torch.tensor([[0, 2, 3, 5], [0, 1, 2, 3], [0, 1, 2, 5]]) if seed % 2 else None
    rows[1] = torch.nan
    norm = torch.nn.RMSNorm(columns, eps=1e-3, dtype=dtype) if seed % 3 else None
    if norm is not None:
        norm.weight.data.copy_(weight)
    there, goal = held.to(device, copy=True), [None if part is None else part.to(device) for part in (rows, count, path)]
    gather.remember(there, slots.to(device), *goal, None if norm is None else (norm.weight.detach().to(device), 1e-3))
    remember(held, slots, rows, count, path, norm)
    torch.testing.assert_close(there.cpu(), held)
    assert same(gather.counted(*goal), counted(rows, count, path))


def check_glue(device: str, count: int, columns: int, dtype: torch.dtype) -> None:
    """Against torch in double precision, rounded where the kernels round."""
    from foreword.ops.layer.glue import added_and_normed, gated, normed  # noqa: PLC0415

    generator = torch.Generator().manual_seed(columns)
    rows, added, weight = (torch.randn(count, columns, generator=generator).to(dtype) for _ in range(3))
    norm = weight[0].contiguous().to(device), 1e-3

    def exact(some: Tensor) -> Tensor:
        return functional.rms_norm(some.double(), (columns,), weight[0].double(), 1e-3).to(dtype)

    torch.testing.assert_close(normed(rows.to(device), norm).cpu(), exact(rows))
    total, ready = added_and_normed(rows.to(device), added.to(device), norm)
    torch.testing.assert_close(total.cpu(), (rows.double() + added.double()).to(dtype))
    torch.testing.assert_close(ready.cpu(), exact(total.cpu()))
    both = torch.cat([8 * rows, added], dim=1)
    torch.testing.assert_close(gated(both.to(device)).cpu(), (functional.silu(8 * rows.double()) * added.double()).to(dtype))


def check_standing(seed: int, device: str, count: int, scratch: int, shared: bool, grafts: Sequence[Graft] = ()) -> None:
    """Against the stack's own, for rows that are the last of the scratch; one text is so long that padding lies beyond."""
    from foreword.ops.layer.standing import Grafted, standing  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    stack, where = target(dtype=torch.float32).layer_stack, torch.device(device)
    cache = stack.allocate(5, 40, scratch)
    slots = torch.randperm(5, generator=generator)[: 1 + seed % 4]
    base = torch.randint(0, 40, slots.shape, generator=generator)
    base[0] = cache.rows - 1
    alike = 1 if shared else len(slots)
    depth = torch.randint(0, scratch, (alike, scratch), generator=generator)
    sees = torch.rand(alike, scratch, scratch, generator=generator)[:, -count:] < 0.5  # a part, which does not lie close
    whole = Rows(base, depth, sees, Batch(slots, tuple(slots.tolist()), 40)).grafted(grafts)
    joined = [count + sum(graft.rows for graft in grafts[:stage]) for stage in range(len(grafts) + 1)]
    hung = _hung(grafts, where)
    grafted = Grafted(*hung, on_device(tuple(joined), where), tuple(joined)) if grafts else None
    angles, given = stack.turns[""], (part.to(device) for part in (base, depth, sees, slots))
    found = standing(tuple(part.to(device) for part in angles), *given, cache.shape.heads, grafted)
    for places, size in zip(found.places, joined, strict=True):
        part = whole.head(size)
        tables, exact = stack._standing(part)
        assert same(places, exact)
        assert all(same(one[:, :size], two) for one, two in zip(found[:2], tables[""], strict=True))
    assert same(found.depth.expand(len(slots), -1), whole.depth.expand(len(slots), -1))
    assert same(found.sees.expand(len(slots), -1, -1), whole.sees.expand(len(slots), -1, -1))


def check_ahead(device: str, matrix: Projection, rows: int, source: int, dtype: torch.dtype) -> None:
    """Against the matrix in double precision; one row that others are made of is no number, and one is 0."""
    from foreword.ops.drafting.ahead import joined_ahead  # noqa: PLC0415

    generator = torch.Generator().manual_seed(rows)
    size = matrix.linear.out_features
    given, made_of = (torch.randn(2, count, size, generator=generator).to(dtype) for count in (rows, source))
    made_of[0, 0], made_of[1, 0], made_of[0, -1, 0] = 0, torch.inf, torch.nan
    which = torch.randint(0, source, (2 * source,), generator=generator)
    exact = ahead(deepcopy(matrix).double(), given.double(), made_of.double(), which).to(dtype)
    bias = None if matrix.linear.bias is None else matrix.linear.bias.to(device, dtype)
    weights = [weight.to(device, dtype) for weight in matrix.weights]
    found = joined_ahead(given.to(device), made_of.to(device), which.to(device), weights, bias, matrix.norm)
    assert same(found[:, :rows], given)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), exact, rtol=near, atol=near)


def check_carry(seed: int, device: str, nodes: int) -> None:
    """Rows that lie behind others, as in a pass; some sequences have decided nothing."""
    from foreword.ops.drafting.carry import carried_on  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    drafter, steps = HiddenTransfer(), 1 + seed % 3
    drafter.states, drafter.have = torch.randn(5, steps, 20, generator=generator), whole(9, 5)
    drafter.where, drafter.carries = whole(7, nodes, steps), whole(4, nodes)
    accepted = Accepted(whole(nodes, 3, 4), whole(5, 3), whole(9, 3))
    slots, rows = torch.randperm(5, generator=generator)[:3], torch.randn(3, 9, 20, generator=generator)
    states, have = (part.to(device, copy=True) for part in (drafter.states, drafter.have))
    given = [part.to(device) for part in (slots, accepted.path, accepted.count, rows)]
    carried_on(states, have, *given[:3], given[3][:, 2:], drafter.where.to(device), drafter.carries.to(device))
    drafter.carry_on(slots, accepted, rows[:, 2:])
    assert same(states, drafter.states) and same(have, drafter.have)


def check_fill(seed: int, device: str, nodes: int) -> None:
    """Guesses for more levels than the template has."""
    from foreword.ops.drafting.growth import filled  # noqa: PLC0415

    growth = StaticTree(target(), greedy_paths([(0.5, 0.25, 0.125), (0.25, 0.5), (0.5,)], nodes - 1))
    given, truth = (Round.drawn(seed, where, 2).state for where in (device, "cpu"))
    guessed = torch.randint(0, 1000, (len(truth.slots), 5, 4), generator=torch.Generator().manual_seed(seed))[:, :4]
    template = growth.template(len(truth.slots))
    exact = filled_by_torch(truth, guessed, template.ranks)
    assert all(map(same, filled(given, guessed.to(device), template.ranks.to(device)), exact))


def check_paths(seed: int, device: str, kind: str, nodes: int) -> None:
    """Of chances that are often equal, and some no number; slots have none to all of the steps."""
    from foreword.ops.drafting.growth import likeliest_paths  # noqa: PLC0415

    generator, rates = torch.Generator().manual_seed(seed), [(0.5, 0.25, 0.25, 0.125), (0.5, 0.25), (0.25, 0.25, 0.125)]
    paths = Candidates(rates, nodes, kind, 4, torch.device("cpu"))  # type: ignore[arg-type]
    paths.usual = paths.usual / math.log(2)  # whole numbers, whose sums do not depend on their order
    given, truth = (Round.drawn(seed, where, 2).state for where in (device, "cpu"))
    tokens = torch.randint(0, 1000, (len(truth.slots), 3, 4), generator=generator)
    odd = torch.rand(tokens.shape, generator=generator)
    chances = ((-odd * 8).round() / 4).masked_fill(odd < 0.05, torch.nan).masked_fill(odd > 0.95, -torch.inf)
    have, likely = torch.randint(0, 4, (5,), generator=generator), chances if kind == "best" else paths.usual
    exact = choose(*paths.reached(truth, tokens, likely, have), nodes)
    table = paths.ways.to(device), paths.parent.to(device)
    found = likeliest_paths(given, *(part.to(device) for part in (tokens, likely)), table, have.to(device), nodes)
    assert all(map(same, found, (exact.tokens, exact.tree.parent, exact.size)))


# Trees that follow the guesses -------------------------------------------------------------------------------------------


def drawn_guesses(seed: int, batch: int, branch: int, device: str) -> Guess:
    """Of few values, so that many chances are equal, and some no number. At odd seeds all live nodes share what a level has,
    as Medusa's do."""

    def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        generator, live = torch.Generator().manual_seed(seed * 10 + level), tokens.shape[1]
        shape = (batch, 1 if seed % 2 else live, branch)
        likely = (-torch.rand(shape, generator=generator) * 8).round() / 4
        odd = torch.rand(shape, generator=generator)
        likely = likely.sort(-1, descending=True).values.masked_fill(odd < 0.05, torch.nan)
        likely = likely.masked_fill(odd > 0.9, -torch.inf).masked_fill(odd > 0.97, torch.inf)
        words = torch.randint(0, 1000, shape, generator=generator)
        if seed % 2 == 0:  # what is handed on shows in what is guessed
            words = words + (tokens + 3 * origin).cpu().unsqueeze(-1)
        return words.to(device).expand(-1, live, -1), likely.to(device).expand(-1, live, -1)

    return guess


def check_grow(seed: int, device: str, growth: BestFirst | Budgeted) -> None:
    from foreword.ops.drafting.growth import KernelTrees  # noqa: PLC0415  only where Triton is

    given, truth = (Round.drawn(seed, where, 2).state for where in (device, "cpu"))
    batch = truth.slots.shape[0]
    shape = growth.shape
    trees = KernelTrees(given, shape.depth, growth.width, growth.branch, growth.budget(shape))
    found = growth.grow(given, drawn_guesses(seed, batch, growth.branch, device), shape, trees)
    exact = growth.grow(truth, drawn_guesses(seed, batch, growth.branch, "cpu"), shape)
    assert same(found.size, exact.size) and same(found.tokens, exact.tokens)
    assert same(found.tree.parent, exact.tree.parent)


def drawn_draft(seed: int, nodes: int, device: str, shared: bool = False) -> Draft:
    """Three trees, of so few words that a chain often goes their way; siblings have tokens of their own."""
    generator = torch.Generator().manual_seed(seed)
    parent = random_tree(1 if shared else 3, nodes, generator).parent
    ranks = torch.tensor([[line[1:row].count(line[row]) for row in range(nodes)] for line in parent.tolist()])
    first = torch.randint(0, 3, (3, 1), generator=generator)
    tokens = torch.cat([first + 50, (ranks[:, 1:] + first)], dim=1) if nodes > 1 else first + 50
    size = torch.randint(1, nodes + 1, (3,), generator=generator)
    return Draft(tokens.to(device), Tree(parent.to(device)), size.to(device))


def drawn_chain(seed: int, tree: Draft, links: int) -> Draft:
    """Chains behind the same roots, of the same few words."""
    generator = torch.Generator().manual_seed(seed + 1)
    guesses = torch.randint(0, 4, (3, links - 1), generator=generator).to(tree.tokens.device)
    size = torch.randint(1, links + 1, (3,), generator=generator).to(guesses.device)
    return Draft(torch.cat([tree.tokens[:, :1], guesses], dim=1), Tree.chain(links, guesses.device), size)


def check_joined(seed: int, device: str, nodes: int, links: int, shared: bool = False) -> None:
    from foreword.ops.drafting.joining import hung  # noqa: PLC0415  only where Triton is

    tree = drawn_draft(seed, nodes, device, shared)
    chain = drawn_chain(seed, tree, links)
    found = hung((tree.tokens, tree.tree.parent, tree.size), (chain.tokens, chain.size), nodes)
    own = drawn_draft(seed, nodes, "cpu", shared)
    exact = hang(own, drawn_chain(seed, own, links), nodes)
    assert all(map(same, found, (exact.tokens, exact.tree.parent, exact.size)))


# Graphs of guesses -------------------------------------------------------------------------------------------------------


def drawn_level(generator: torch.Generator, shape: tuple[int, int, int], words: int) -> tuple[Tensor, Tensor]:
    """Of so few tokens that most come back, and of few chances, so that many are equal; some are no number."""
    likely = ((-torch.rand(shape, generator=generator) * 8).round() / 4).sort(-1, descending=True).values
    odd = torch.rand(shape, generator=generator)
    likely = likely.masked_fill(odd < 0.04, torch.nan).masked_fill(odd > 0.92, -torch.inf).masked_fill(odd > 0.98, torch.inf)
    tokens = torch.rand(*shape[:2], max(words, shape[2]), generator=generator).argsort(-1)[..., : shape[2]]
    return tokens, likely


def check_merge(seed: int, device: str, rule: Rule, depth: int, words: int) -> None:
    """Level by level, and then what is drafted of it."""
    from foreword.ops.drafting.merge import KernelGraph  # noqa: PLC0415  only where Triton is

    given, truth = (Round.drawn(seed, where, 2).state for where in (device, "cpu"))
    generator, batch, live = torch.Generator().manual_seed(seed), truth.slots.shape[0], 1
    exact, found = TorchGraph(truth.root, rule), KernelGraph(given.root, rule, depth)
    for _ in range(depth):
        level = drawn_level(generator, (batch, live, rule.branch), words)
        nodes = exact.add(*level)
        assert all(map(same, found.add(*(one.to(device) for one in level)), nodes))
        assert all(map(same, found.guesses, exact.guesses)) and same(found.counts, exact.counts)
        live = nodes[0].shape[1]
    for rows, width in ((2, 1), (20, 3), (64, 16)):
        levels = min(depth + 2, rows - 1)
        assert all(map(same, found.unrolled(given, levels, width, rows), exact.unrolled(truth, levels, width, rows)))


# A small model that reads along -------------------------------------------------------------------------------------------


def check_catch_up(seed: int, device: str, count: int) -> None:
    from foreword.ops.drafting.catch_up import catch_up  # noqa: PLC0415  only where Triton is

    given, truth = (Round.drawn(seed, where, 2).state for where in (device, "cpu"))
    cache = SlotCache(CacheShape(1, 1, 16, torch.float32), 5, 20, 1, "cpu")
    cache.length.copy_(torch.randint(0, 25, (5,), generator=torch.Generator().manual_seed(seed)))
    found, exact = catch_up(given, cache.length.to(device), count), unread(truth, cache.length, count)
    assert all(map(same, found, exact))


def check_hang(seed: int, device: str, widths: tuple[int, ...]) -> None:
    """Levels that hang on each other, the first on the root that all texts share."""
    from foreword.ops.round.tree import hang  # noqa: PLC0415  only where Triton is

    generator = torch.Generator().manual_seed(seed)
    sees, above = Tree.chain(1).ancestors, 1
    for width in widths:
        parent = torch.randint(0, above, (3, width), generator=generator)
        found, sees, above = hang(sees.to(device), parent.to(device)), next_level(sees, parent), width
        assert same(found, sees)
