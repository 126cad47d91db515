"""SlotCache: keep, advance and rewind against lists of rows; free memory is checked before it is allocated."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.state import Batch
from foreword.errors import CapacityError
from foreword.model.cache import SPARE, CacheShape, SharedCacheMemory, SlotCache
from foreword.ops.device import free_memory

SHAPE = CacheShape(layers=2, heads=3, width=4, dtype=torch.float64)
SLOTS, CONTEXT, SCRATCH = 4, 10, 6


def filled(lengths: list[int]) -> SlotCache:
    """Return a cache in which every value is different."""
    cache = SlotCache(SHAPE, SLOTS, CONTEXT, SCRATCH, "cpu")
    for i, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000 * i)
    cache.length.copy_(torch.tensor(lengths))
    return cache


def tensors(cache: SlotCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*cache.keys, *cache.values)]


@st.composite
def commits(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    """Generate some slots in any order, for each a rising path of scratch rows, root first, and how many of them to keep."""
    ids = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    width = draw(st.integers(1, SCRATCH))
    paths = []
    for _ in ids:
        others = draw(st.lists(st.integers(1, SCRATCH - 1), unique=True, max_size=width - 1).map(sorted))
        paths.append([0, *others] + [0] * (width - 1 - len(others)))
    counts = [draw(st.integers(0, 1 + sum(row > 0 for row in path))) for path in paths]
    return ids, paths, counts


@given(commits(), st.lists(st.integers(0, CONTEXT - SCRATCH), min_size=SLOTS, max_size=SLOTS))
def test_keep_moves_the_path_to_the_front(commit: tuple[list[int], list[list[int]], list[int]], lengths: list[int]) -> None:
    ids, paths, counts = commit
    cache = filled(lengths)
    before = tensors(cache)
    cache.keep(Batch.of(ids, CONTEXT), torch.tensor(paths), torch.tensor(counts))
    for slot in range(SLOTS):
        base = lengths[slot]
        rows = list(range(base))
        if slot in ids:
            index = ids.index(slot)
            rows += [base + row for row in paths[index][: counts[index]]]
        assert int(cache.length[slot]) == len(rows)
        for old, new in zip(before, tensors(cache), strict=True):
            assert torch.equal(new[slot, :, : len(rows)], old[slot][:, rows])
            if slot not in ids:
                assert torch.equal(new[slot], old[slot])


def test_advance_commits_rows_without_moving_them() -> None:
    cache = filled([1, 2, 3, 4])
    before = tensors(cache)
    cache.advance(Batch.of([2, 0], 3), torch.tensor([5, 1]))
    assert cache.length.tolist() == [2, 2, 8, 4]
    assert all(torch.equal(old, new) for old, new in zip(before, tensors(cache), strict=True))


def test_rewind_drops_rows() -> None:
    cache = filled([5, 6, 7, 8])
    cache.rewind(Batch.of([3, 1], 8), torch.tensor([2, 0]))
    assert cache.length.tolist() == [5, 0, 7, 2]


@pytest.mark.parametrize("ids", [[0, 1], [1, 2, 3], [2], [3, 0], [0, 2]])
def test_rows_are_read_where_they_were_written(ids: list[int]) -> None:
    """Adjacent slots give a view, others a copy, with the same rows."""
    cache, batch = filled([0] * SLOTS), Batch.of(ids, 0)
    rows = torch.tensor([[1, 4, 2], [0, 5, 9], [7, 8, 3]])[: len(ids)]
    key, value = torch.randn(2, len(ids), 3, 3, 4, dtype=torch.float64)
    cache.layers[1].store(cache.places(batch, rows), key, value)
    keys, values = cache.layers[1].view(batch, 10)
    for index, slot in enumerate(ids):
        assert torch.equal(keys[index][:, rows[index]], key[index])
        assert torch.equal(values[index][:, rows[index]], value[index])
        assert torch.equal(cache.keys[1][slot][:, rows[index]], key[index])
    assert keys.shape == (len(ids), 3, 10, 4)
    assert torch.equal(cache.keys[0], filled([0] * SLOTS).keys[0])


def test_rows_beyond_the_slot_go_to_its_waste_row() -> None:
    """Never to the next slot."""
    cache = filled([0] * SLOTS)
    before = tensors(cache)
    places = cache.places(Batch.of([1], 0), torch.tensor([[cache.rows - 1, cache.rows, cache.rows + 5]]))
    assert len(set(places.tolist())) == SHAPE.heads
    cache.layers[0].store(places, *torch.zeros(2, 1, 3, 3, 4).double())
    assert torch.equal(cache.keys[0][:, :, :-1], before[0][:, :, :-1])
    assert torch.equal(cache.keys[0][[0, 2, 3]], before[0][[0, 2, 3]])


def test_there_is_room_for_a_pass_after_a_full_sequence() -> None:
    cache = filled([0] * SLOTS)
    assert cache.rows > CONTEXT + SCRATCH and cache.slots == SLOTS  # at least one more, the waste row


def test_bytes_are_those_of_the_tensors() -> None:
    cache = filled([0] * SLOTS)
    assert cache.bytes == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))


def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated() -> None:
    """2**40 tokens are petabytes: torch would raise an error of its own."""
    with pytest.raises(CapacityError, match=r"3 slots x 1099511627776 tokens .* lower max_context or slots"):
        SlotCache(SHAPE, 3, 2**40, 1, "cpu")


def test_free_memory_is_known_here() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["keys", "values"])
def test_a_slot_with_values_that_are_not_finite_is_not_sound(place: str, value: float) -> None:
    """A masked row is still summed: 0 x infinity is NaN, and so is 0 x NaN."""
    cache = filled([0] * SLOTS)
    getattr(cache, place)[1][2, 1, 3, 0] = value
    assert [cache.is_sound(slot, 5) for slot in range(SLOTS)] == [True, True, False, True]
    assert cache.is_sound(2, 3)
    before = tensors(cache)
    cache.wipe(2)
    assert cache.is_sound(2, cache.rows)
    assert all(torch.equal(old[[0, 1, 3]], new[[0, 1, 3]]) for old, new in zip(before, tensors(cache), strict=True))


def test_wiping_the_scratch_keeps_committed_rows() -> None:
    cache = SlotCache(SHAPE, slots=2, context=8, scratch=4, device="cpu")
    cache.held.fill_(math.nan)
    cache.held[:, :, 1, :, :3] = 5
    cache.length[1] = 3
    cache.wipe_scratch(1)
    assert (cache.held[:, :, 1, :, :3] == 5).all() and (cache.held[:, :, 1, :, 3:] == 0).all()
    assert cache.held[:, :, 0].isnan().all()


def shared(memory: SharedCacheMemory, scratch: int, slots: int = SLOTS) -> SlotCache:
    return SlotCache(SHAPE, slots, CONTEXT, scratch, "cpu", memory)


def test_shared_memory_is_cleared_when_another_cache_claims_it() -> None:
    memory = SharedCacheMemory()
    plain, wide = shared(memory, 1), shared(memory, SPARE)
    assert plain.rows < wide.rows and plain.held.data_ptr() == wide.held.data_ptr()
    assert plain.claim() and not plain.claim()
    plain.held.fill_(math.nan)
    plain.length.fill_(3)
    assert wide.claim() and plain.claim()
    assert not plain.held.any() and not plain.length.any()


def test_a_cache_too_large_for_shared_memory_gets_a_new_allocation() -> None:
    memory = SharedCacheMemory()
    small, large = shared(memory, 1), shared(memory, 2 * SPARE)
    assert small.held.data_ptr() != large.held.data_ptr() == shared(memory, SPARE).held.data_ptr()


def test_a_cache_in_memory_of_its_own_is_never_cleared_by_a_claim() -> None:
    cache = filled([1, 2, 3, 4])
    assert not cache.claim() and cache.held.any() and cache.length.tolist() == [1, 2, 3, 4]


def test_shared_memory_is_checked_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedCacheMemory()
    held = shared(memory, 1)
    monkeypatch.setattr("foreword.model.cache.free_memory", lambda _: 0)
    assert shared(memory, 2).held.data_ptr() == held.held.data_ptr()  # nothing new is needed
    with pytest.raises(CapacityError, match="80 slots x 10 tokens needs"):
        shared(memory, 1, slots=20 * SLOTS)


def test_keep_of_single_layers_equals_keep_of_all_layers() -> None:
    together, alone = filled([2, 5, 0, 3]), filled([2, 5, 0, 3])
    slots, path, count = torch.tensor([3, 1]), torch.tensor([[0, 2, 4], [0, 1, 3]]), torch.tensor([3, 2])
    for layer in alone.layers:
        layer.keep(slots, alone.length, path, count)
    together.keep(Batch(slots, (3, 1), CONTEXT), path, count)
    assert torch.equal(alone.held, together.held)


def test_wiping_a_layer_changes_no_other_and_no_snapshot() -> None:
    cache = filled([2] * SLOTS)
    first, other = cache.layers[0], tensors(cache)[1]
    kept, before = first.snapshot(1, 2), first.keys[1, :, :2].clone()
    first.wipe(1)
    assert not first.keys[1].any() and not first.values[1].any() and first.keys[0].any()
    assert torch.equal(kept[0], before) and torch.equal(cache.keys[1], other) and cache.reusable


def test_a_tree_larger_than_the_scratch_is_refused() -> None:
    """The rows too many would all be written to the waste row once the sequence fills the context."""
    cache = filled([0] * SLOTS)
    cache.check_room(SCRATCH)
    with pytest.raises(CapacityError, match=f"{SCRATCH + 1} draft rows .* allocated with {SCRATCH}"):
        cache.check_room(SCRATCH + 1)


def test_the_last_rows_are_put_back_bit_for_bit() -> None:
    """Also if something fails in between."""
    cache = filled([9, 5, 10, 0])
    held = cache.held.clone()
    with pytest.raises(KeyError), cache.without_last(Batch.of([2, 0], 10), 4):
        assert cache.length.tolist() == [5, 5, 6, 0]
        cache.held[:, :, 0, :, 5:9] = cache.held[:, :, 2, :, 6:10] = 7
        raise KeyError
    assert cache.length.tolist() == [9, 5, 10, 0]
    assert torch.equal(cache.held, held)


def test_rows_are_copied_to_another_slot() -> None:
    """The first rows, in all layers; the others of that slot stay scratch, and the source is as before."""
    cache = SlotCache(CacheShape(2, 2, 4, torch.float64), slots=3, context=16, scratch=4, device="cpu")
    cache.held.normal_()
    cache.length[:] = torch.tensor([9, 5, 2])
    before = cache.held.clone()
    cache.copy(0, 2, 4)
    assert torch.equal(cache.held[:, :, 2, :, :4], before[:, :, 0, :, :4])
    assert torch.equal(cache.held[:, :, 2, :, 4:], before[:, :, 2, :, 4:]) and torch.equal(
        cache.held[:, :, :2], before[:, :, :2]
    )
    assert cache.length.tolist() == [9, 5, 4]
    cache.copy(1, 2, 7)
    assert cache.length.tolist() == [9, 5, 5], "a small model's cache may have fewer rows"
    layer = cache.layers[1]
    layer.copy(0, 1, 3)
    assert torch.equal(layer.keys[1, :, :3], before[0, 1, 0, :, :3]) and torch.equal(
        layer.values[1, :, 3:], before[1, 1, 1, :, 3:]
    )
