"""Stack: decoder layers with a cache of their own, walked whole or in part. The target has one; so may a drafter.

In: hidden rows, and `Rows`, which says where they stand and whom they see. Out: the rows after the last layer walked, with
taps and grafted rows where asked. The layers are those of transformers, called one by one, or fused ones that compute the
same. With a cache, the keys and values of the rows land in its scratch; without, rows see each other only, and gradients
flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foreword.core.draft import Tree
from foreword.core.needs import Graft, Join, Joined, Skip, on_device
from foreword.core.state import Batch
from foreword.model.attention import Held, Pass, has_kernel, mask_of, within
from foreword.model.cache import CacheShape, SharedCacheMemory, SlotCache
from foreword.model.families import Family, Sight
from foreword.model.fused.cuda import CudaLayer
from foreword.model.fused.layers import fused_layers
from foreword.model.linears import unpacked
from foreword.ops.dispatch import kernels

# Attention reads keys up to a multiple of this, so that shapes repeat from round to round.
SPAN_STEP = 64


@dataclass(frozen=True)
class Rows:
    """The n rows of a pass: `base` [b] committed rows before them, `depth` [b or 1, m] behind base, and `sees`.

    `sees` [b or 1, n, m] says which of the m scratch rows each row may look at; the rows themselves are the last n of
    those m, so a pass over part of a tree leaves the scratch rows before it in place. `depth` is that of all m: a layer
    with a window asks how far away a scratch row is.
    """

    base: Tensor
    depth: Tensor
    sees: Tensor
    batch: Batch | None = None
    chain: bool = False  # every row sees itself and all before it
    causal: bool = True  # no row sees a later one; a block whose rows see each other has to say that it is not

    @staticmethod
    def whole_sequences(count: int, device: torch.device) -> Rows:
        """Whole texts from their first token on: every row sees itself and those before it, in all texts alike."""
        sees = torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
        depth = torch.arange(count, device=device).unsqueeze(0)
        return Rows(torch.zeros(1, dtype=torch.long, device=device), depth, sees, chain=True)

    @staticmethod
    def behind(base: Tensor, count: int, batch: Batch) -> Rows:
        """A chain of so many rows behind the committed ones."""
        chain = Tree.chain(count, base.device)
        return Rows(base, chain.depth, chain.ancestors, batch, chain=True)

    @staticmethod
    def alongside(length: int, anchor: Tensor, joins: Sequence[Join]) -> Rows:
        """Those that joined texts of `length` rows behind the anchors [b, A], join by join."""
        count, device = anchor.shape[1], anchor.device
        place = torch.arange(length, device=device)
        ahead = [anchor + join.offset for join in joins]
        known = tuple(int(i == j or j in one.sees) for i, one in enumerate(joins) for j in range(len(joins)))
        same = torch.eye(count, dtype=torch.bool, device=device)
        whose = on_device(known, device).bool().view(len(joins), 1, -1, 1)
        own = (whose & same.view(1, count, 1, -1)).flatten(2).flatten(0, 1)
        text = (place <= anchor.unsqueeze(2)).repeat(1, len(joins), 1)
        sees = torch.cat([text, own.expand(anchor.shape[0], -1, -1)], dim=2)
        depth = torch.cat([place.expand(anchor.shape[0], -1), *ahead], dim=1)
        return Rows(torch.zeros(anchor.shape[0], dtype=torch.long, device=device), depth, sees)

    @property
    def count(self) -> int:
        return self.sees.shape[1]

    @property
    def first(self) -> int:
        return self.sees.shape[2] - self.count

    @property
    def sight(self) -> Tensor:
        """`sees`, without what a causal pass does not see whatever `sees` says: the same for a mask as for the kernel."""
        return self.sees.tril(self.first) if self.causal and not self.chain else self.sees

    @property
    def position(self) -> Tensor:
        return self.base.unsqueeze(1) + self.depth[:, self.first :]

    def grafted(self, grafts: Sequence[Graft]) -> Rows:
        """These rows with those of all grafts behind them. Real rows see none of them; a grafted one sees what its anchor
        sees, its elders and itself."""
        if not grafts:
            return self
        anchor, offset = _hung(grafts, self.base.device)
        depth = torch.cat([self.depth, self.depth[:, self.first + anchor] + offset], dim=1)
        batch, count, _ = self.sees.shape
        elders = (anchor.unsqueeze(1) == anchor).tril().expand(batch, -1, -1)
        top = torch.cat([self.sees, self.sees.new_zeros(batch, count, len(anchor))], dim=2)
        bottom = torch.cat([self.sees[:, anchor], elders], dim=2)
        return Rows(self.base, depth, torch.cat([top, bottom], dim=1), self.batch, causal=self.causal)

    def head(self, count: int) -> Rows:
        """The first `count` of them, which see none of the rest."""
        if count == self.count:
            return self
        scratch = self.first + count
        return replace(self, depth=self.depth[:, :scratch], sees=self.sees[:, :count, :scratch])


@dataclass(frozen=True)
class Walked:
    rows: Tensor  # [b, n + R, H]: those that were given, then those that were grafted
    real: int  # n
    taps: dict[int, Tensor] = field(default_factory=dict)

    @property
    def hidden(self) -> Tensor:
        return self.rows[:, : self.real]

    @property
    def grafted(self) -> Tensor | None:
        return self.rows[:, self.real :] if self.rows.shape[1] > self.real else None


class Stack:
    def __init__(self, model: PreTrainedModel, family: Family, layers: nn.ModuleList) -> None:
        self.model = model
        self.family = family
        self.layers = layers
        self.cache: SlotCache | None = None
        self.sights = [family.sight(layer) for layer in layers]
        self.windows, self.tables = ({getattr(sight, name) for sight in self.sights} for name in ("window", "table"))
        self.fused = fused_layers(layers) if family.fused else None
        self.turns: dict[str, Any] = {}  # rotary angles of every row a text may have, by table

    @staticmethod
    def copied(model: PreTrainedModel, family: Family, layers: int, init: int | range | None) -> Stack:
        """New layers of the same kind: copies of layer `init`, or of several in their order, or freshly initialised as the
        family does it."""
        places = init if isinstance(init, range) else [-1 if init is None else init] * layers
        assert len(places) == layers, "a range names a layer for each"
        fresh = nn.ModuleList(unpacked(family.layers(model)[place]) for place in places).requires_grad_(True)
        if init is None:
            fresh.apply(model._init_weights)
        return Stack(model, family, fresh)

    def allocate(self, slots: int, context: int, scratch: int = 64, memory: SharedCacheMemory | None = None) -> SlotCache:
        """Give the stack a cache. The bytes are checked before any is taken; if they do not fit, the old one stays."""
        device = next(self.model.parameters()).device
        self.cache = SlotCache(self.cache_shape(), slots, context, scratch, device, memory)
        self.fused = fused_layers(self.layers) if self.family.fused else None  # new ones: the old look at the old cache
        self.turns = self._positions(torch.arange(self.cache.rows, device=self.cache.length.device).unsqueeze(0))
        return self.cache

    def free(self) -> None:
        self.cache = self.fused = None
        self.turns = {}

    def cache_shape(self) -> CacheShape:
        config = self.model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return CacheShape(len(self.layers), config.num_key_value_heads, width, self.model.dtype)

    def read(self, hidden: Tensor, batch: Batch, count: Tensor, skip: Skip | None = None) -> Tensor:
        """Rows [b, n, H] of a text, behind those that are cached: walked as a chain, and the first `count` [b] committed."""
        assert self.cache is not None
        rows = Rows.behind(batch.take(self.cache.length), hidden.shape[1], batch)
        walked = self.walk(hidden, rows, skip=skip).hidden
        self.cache.advance(batch, count)
        return walked

    def restart(self, batch: Batch, length: Tensor) -> None:
        """Sequences enter whose slots hold their first `length` [b] rows. What lies behind is cleared: it may be NaN."""
        assert self.cache is not None
        self.cache.rewind(batch, length)
        for slot in batch.ids:
            self.cache.wipe_scratch(slot)

    def over(self, hidden: Tensor, skip: Skip | None = None) -> Tensor:
        """Whole texts [b, n, H] from their first row on, without a cache: how the layers are trained."""
        alone = Stack(self.model, self.family, self.layers)
        return alone.walk(hidden, Rows.whole_sequences(hidden.shape[1], hidden.device), skip=skip).hidden

    def walk(
        self,
        hidden: Tensor,
        rows: Rows,
        start: int = 0,
        stop: int | None = None,
        skip: Skip | None = None,
        grafts: tuple[Graft, ...] = (),
        taps: tuple[int, ...] = (),
    ) -> Walked:
        """Take rows [b, n, H] from after layer `start` to after layer `stop`."""
        stop = len(self.layers) if stop is None else stop
        real, kept = rows.count, {}
        # A tensor of its own, for which no earlier walk handed anything on: so a norm is launched between the kernel that
        # says where rows stand and the product that asks for it before its turn.
        hidden = hidden[:]
        counts = {real + sum(graft.rows for graft in grafts if graft.layer <= layer) for layer in range(start, stop)}
        if self.cache is not None and not rows.chain:
            self.cache.check_room(rows.sees.shape[2] + sum(graft.rows for graft in grafts))
        views = self._views(rows, grafts, tuple(sorted(counts)), hidden.dtype)
        for layer in range(start, stop + 1):
            if layer in taps:
                kept[layer] = hidden[:, :real]
            for graft in grafts:
                if graft.layer == layer:
                    hidden = graft.onto(hidden, real)
            if layer < stop:
                hidden = self._layer(layer, hidden, views[hidden.shape[1]], skip)
        return Walked(hidden, real, kept)

    def alongside(self, hidden: Tensor, start: int, anchor: Tensor, joins: Sequence[Join]) -> Iterator[Joined]:
        """Whole texts [b, n, H] from after layer `start` on, without gradients, and the rows that join behind the anchors
        [b, A], with them: as they leave every layer."""
        held, count = Held(), anchor.shape[1]
        text, side = self._view(Rows.whole_sequences(hidden.shape[1], hidden.device), hidden.dtype), None
        text = replace(text, shared=text.shared._replace(held=held))
        rows: tuple[Tensor, ...] = ()
        for layer in range(start, len(self.layers) + 1):
            for join in (join for join in joins if join.layer == layer):
                rows, side = (*rows, join.make(hidden.gather(1, _across(anchor, hidden)), rows)), None
            yield Joined(layer, hidden, rows)
            if layer == len(self.layers):
                return
            with torch.no_grad():
                hidden = self._layer(layer, hidden, text, None)
            if rows:
                if side is None:
                    side = self._view(Rows.alongside(hidden.shape[1], anchor, joins[: len(rows)]), hidden.dtype)
                    side = replace(side, shared=side.shared._replace(alongside=held))
                rows = self._layer(layer, torch.cat(rows, dim=1), side, None).split(count, dim=1)

    def _layer(self, index: int, hidden: Tensor, view: _View, skip: Skip | None) -> Tensor:
        layer = self.layers[index]
        skip = skip or Skip()
        if index not in skip.attention and index not in skip.mlp:
            fused = None if self.fused is None else self.fused[index]
            if fused is not None and self.cache is not None:
                return fused(hidden, view.tables[self.sights[index].table], view.own(index))
            if isinstance(fused, CudaLayer) and view.causal and not torch.is_grad_enabled():
                return fused.whole(hidden, view.tables[self.sights[index].table], view.shared.held)
            return layer(hidden, attention_mask=None, **view.options(index))
        if index not in skip.attention:
            hidden = self.family.attention_half(layer, hidden, **view.options(index))
        if index not in skip.mlp:
            hidden = self.family.mlp_half(layer, hidden)
        return hidden

    def _views(self, rows: Rows, grafts: tuple[Graft, ...], counts: tuple[int, ...], dtype: torch.dtype) -> dict[int, _View]:
        """What layers share that are walked with equally many rows, by how many these are."""
        if counts and self.cache is not None and has_kernel(self.cache):
            return self._views_by_kernel(rows, grafts, counts)
        whole = rows.grafted(grafts)
        return {count: self._view(whole.head(count), dtype) for count in counts}

    def _view(self, rows: Rows, dtype: torch.dtype) -> _View:
        """Positions, sights, places in the cache."""
        rows = replace(rows, sees=rows.sight)
        seen = {window: within(rows.sees, rows.depth, window) for window in self.windows}
        if self.cache is None:
            tables = self._positions(rows.position)
            causal = rows.chain and not any(sight.window or sight.softcap for sight in self.sights)
            alone = {} if causal else self._masks(torch.zeros_like(rows.base), rows, rows.sees.shape[2], dtype)
            return _View(self.sights, tables, rows, seen, alone, Pass(rows.base, rows.depth, rows.sees), causal=causal)
        assert rows.batch is not None
        tables, places = self._standing(rows)
        reach = min(-(-(rows.batch.span + rows.sees.shape[2]) // SPAN_STEP) * SPAN_STEP, self.cache.rows)
        shared = Pass(rows.base, rows.depth, rows.sees, batch=rows.batch, places=places, reach=reach)
        return _View(self.sights, tables, rows, seen, self._masks(rows.base, rows, reach, dtype), shared, self.cache)

    def _standing(self, rows: Rows) -> tuple[dict[str, Any], Tensor]:
        """How rows are turned, by table, and where their keys and values go."""
        assert self.cache is not None and rows.batch is not None
        known = rows.position.clamp(max=self.cache.rows - 1)  # padding may lie beyond
        tables = {name: tuple(part[0, known] for part in turn) for name, turn in self.turns.items()}
        order = torch.arange(rows.first, rows.sees.shape[2], device=known.device)
        return tables, self.cache.places(rows.batch, rows.base.unsqueeze(1) + order)

    def _views_by_kernel(self, rows: Rows, grafts: tuple[Graft, ...], counts: tuple[int, ...]) -> dict[int, _View]:
        assert self.cache is not None and rows.batch is not None
        by_kernel = kernels("layer.standing")
        device, heads = rows.base.device, self.cache.shape.heads
        grafted = by_kernel.Grafted(*_hung(grafts, device), on_device(counts, device), counts) if grafts else None
        where = rows.base, rows.depth, rows.sees, rows.batch.slots, heads, grafted
        found = {name: by_kernel.standing(turn, *where) for name, turn in self.turns.items()}
        one = next(iter(found.values()))
        views = {}
        for count, places in zip(counts, one.places, strict=True):
            part = replace(rows, depth=one.depth, sees=one.sees).head(count)
            seen = {window: within(part.sees, part.depth, window) for window in self.windows}
            tables = {name: (stood.cosine[:, :count], stood.sine[:, :count]) for name, stood in found.items()}
            chain = rows.chain and not grafts
            shared = Pass(part.base, part.depth, part.sees, chain, rows.causal, batch=part.batch, places=places)
            views[count] = _View(self.sights, tables, part, seen, {}, shared, self.cache)
        return views

    def _positions(self, position: Tensor) -> dict[str, Any]:
        """What each rotary table says of positions [b, n]."""
        like = torch.empty(0, dtype=self.model.dtype, device=position.device)
        return {table: self.family.positions(self.model, like, position, table) for table in self.tables}

    def _masks(self, base: Tensor, rows: Rows, reach: int, dtype: torch.dtype) -> dict[int, Tensor]:
        """A mask for each window among the layers."""
        config = self.model.config
        groups = config.num_attention_heads // config.num_key_value_heads
        return {window: mask_of(base, rows.sees, reach, groups, dtype, window, rows.depth) for window in self.windows}

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.layers.parameters()


def _hung(grafts: Sequence[Graft], device: torch.device) -> tuple[Tensor, Tensor]:
    """Anchors and offsets of the rows of all grafts."""
    anchor, offset = (tuple(one for graft in grafts for one in getattr(graft, name)) for name in ("anchor", "offset"))
    return on_device(anchor, device), on_device(offset, device)


def _across(places: Tensor, rows: Tensor) -> Tensor:
    """Places [b, A] as an index that gathers whole rows."""
    return places.unsqueeze(-1).expand(-1, -1, rows.shape[-1])


@dataclass(frozen=True)
class _View:
    sights: list[Sight]
    tables: dict[str, Any]  # rotary positions, by `Sight.table`
    rows: Rows
    seen: dict[int, Tensor]  # which scratch rows, by `Sight.window`
    masks: dict[int, Tensor]  # the same as masks over all keys, where attention is torch's own
    shared: Pass
    cache: SlotCache | None = None
    causal: bool = False  # rows see one another as in whole texts, and no mask says so

    def own(self, layer: int) -> Pass:
        sight, cache = self.sights[layer], self.cache
        cached = None if cache is None else cache.layers[layer]
        seen, mask = self.seen[sight.window], self.masks.get(sight.window)
        return self.shared._replace(sight=sight, sees=seen, mask=mask, cached=cached)

    def options(self, layer: int) -> dict[str, Any]:
        table = self.tables[self.sights[layer].table]
        return {"position_embeddings": table, "position_ids": self.rows.position, "foreword_pass": self.own(layer)}
