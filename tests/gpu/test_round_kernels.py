"""The kernels around the pass on a CUDA device: equal to their torch references, and safe to capture."""

import pytest
import torch

from doubles import random_tree, target
from foreword.core.choosing import likeliest
from foreword.core.draft import Shape, Tree
from foreword.core.needs import Graft
from foreword.drafting.transfer import Transfer
from foreword.drafting.trees import BestFirst, Budgeted
from foreword.model.family import embedded
from foreword.ops.candidate_graphs import Rule
from foreword.ops.top import top
from foreword.ops.trees import lineage as lineage_of
from rounds import (
    check_after_live_nodes,
    check_at_slots,
    check_candidate_graphs,
    check_carried_and_embedded,
    check_carried_on,
    check_catch_up,
    check_conditioned_on_next,
    check_cosine_attention,
    check_filled_template,
    check_filtered,
    check_fit,
    check_flights,
    check_growth,
    check_int8_epilogue,
    check_int8_linear,
    check_keep,
    check_learn,
    check_lookup,
    check_next_level,
    check_norm_and_gate,
    check_paths,
    check_pseudo_rows,
    check_remember,
    check_row_positions,
    check_settle,
    check_top,
    check_transitions,
    check_vocabulary,
    check_walk,
    check_with_chain,
    same,
    scores_with_ties,
)
from tiers import slow

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_DTYPES = (torch.float32, torch.bfloat16, slow(torch.float16))


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "k"), [(3, 40, 8), (64, 49152, 8), slow(1, 1, 1), slow(1, 49152, 1), slow(3, 128256, 16)]
)
def test_the_largest_are_those_of_the_stable_sort(rows: int, width: int, k: int, dtype: torch.dtype) -> None:
    check_top(scores_with_ties(width + k, rows, width, dtype), k, "cuda")


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 49152), slow(64, 49152), slow(3, 300), slow(2, 151936)])
def test_filters_keep_what_those_of_torch_keep(rows: int, width: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        check_filtered(seed, rows, width, dtype, "cuda")


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
def test_a_draft_vocabulary_has_the_noise_of_its_tokens(dtype: torch.dtype) -> None:
    check_vocabulary(dtype, "cuda")


@pytest.mark.parametrize("nodes", [1, 64, 81, slow(2), slow(16), slow(130)])
def test_a_tree_knows_its_lineage(nodes: int) -> None:
    tree = random_tree(5, nodes, torch.Generator().manual_seed(nodes))
    assert all(same(*pair) for pair in zip(Tree(tree.parent.cuda()).lineage, lineage_of(tree.parent), strict=True))


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(("repeats", "width"), [(5, 576), slow(2, 64), slow(8, 4096)])
def test_tokens_in_flight_move(repeats: int, width: int, dtype: torch.dtype) -> None:
    for seed in range(12):
        check_flights(seed, "cuda", repeats, width, dtype, seed % 2 == 0, seed % 3 == 0)


@pytest.mark.parametrize("widths", [(4, 8, 8, 8), (3, 1, 5), slow((1,)), slow((10, 64, 64))])
def test_a_level_follows_the_one_above(widths: tuple[int, ...]) -> None:
    check_next_level(len(widths), "cuda", widths)


@pytest.mark.parametrize(
    ("nodes", "links"), [(16, 16), (49, 16), slow(1, 2), slow(8, 8), slow(16, 4), slow(9, 1), slow(100, 30)]
)
def test_a_chain_is_attached_to_a_tree(nodes: int, links: int) -> None:
    for seed in range(10):
        check_with_chain(seed, "cuda", nodes, links, shared=seed % 3 == 0)


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
def test_embeddings_are_those_of_torch(dtype: torch.dtype) -> None:
    """In any shape; with gradients enabled, they have one."""
    table = torch.nn.Embedding(50, 576, device="cuda", dtype=dtype)
    tokens = torch.randint(0, 50, (3, 9), device="cuda")
    with torch.no_grad():
        for some in (tokens, tokens[:, 2:5], tokens[:1], tokens[0]):
            assert same(embedded(table, some), table(some))
    assert embedded(table, tokens).requires_grad


@pytest.mark.parametrize("count", [1, 8, slow(2), slow(50)])
def test_unread_tokens_are_found(count: int) -> None:
    for seed in range(10):
        check_catch_up(seed, "cuda", count)


@pytest.mark.parametrize("nodes", [1, 64, slow(5), slow(16), slow(100)])
def test_rounds_are_fitted_and_settled(nodes: int) -> None:
    for seed in range(30):
        check_fit(seed, "cuda", nodes)
        check_settle(seed, "cuda", nodes, ends=seed % 4, shared=seed % 2 == 0)


@pytest.mark.parametrize("dtype", [*QUICK_DTYPES, slow(torch.float64)], ids=str)
@pytest.mark.parametrize(("nodes", "width"), [(9, 80), (24, 64), slow(2, 16), slow(64, 128)])
def test_only_accepted_rows_move(nodes: int, width: int, dtype: torch.dtype) -> None:
    for seed in range(5):
        check_keep(seed, "cuda", nodes, width, dtype)


@pytest.mark.parametrize("mode", ["shared", "session"])
@pytest.mark.parametrize("nodes", [7, 64, slow(1), slow(81)])
def test_recycling_walks_and_learns(nodes: int, mode: str) -> None:
    for seed in range(10):
        check_walk(seed, "cuda", nodes, mode, noisy=seed % 2 == 1)
        check_learn(seed, "cuda", nodes, mode, accepts=seed % 2 == 0)


@pytest.mark.parametrize(
    ("nodes", "depth", "width", "branch"), [(7, 3, 3, 4), (64, 5, 8, 10), slow(2, 1, 1, 1), slow(64, 4, 64, 10)]
)
def test_trees_follow_the_candidates(nodes: int, depth: int, width: int, branch: int) -> None:
    for seed in range(10):
        check_growth(seed, "cuda", BestFirst(Shape(nodes, depth), width, branch, None))
        check_growth(seed, "cuda", Budgeted(Shape(nodes, depth), width, branch, None, top_p=0.8, floor=0.25))


@pytest.mark.parametrize("repeat", [-1, 1, slow(0), slow(2)])
@pytest.mark.parametrize(("branch", "width"), [(4, 8), slow(1, 1), slow(3, 5), slow(10, 16), slow(4, 64)])
def test_candidates_are_merged(branch: int, width: int, repeat: int) -> None:
    for seed in range(10):
        rule = Rule(branch, repeat, siblings=0.1 * (seed % 2), sure=0.15 * (seed % 3), width=width)
        check_candidate_graphs(seed, "cuda", rule, depth=6, tokens=5 + width)


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(9, 64), (3, 20), slow(1, 1), slow(32, 128)])
def test_a_state_attends_to_a_token(heads: int, width: int, dtype: torch.dtype) -> None:
    check_cosine_attention(heads, "cuda", heads, width, dtype, silu=True)
    check_cosine_attention(width, "cuda", heads, width, dtype, silu=False)


@pytest.mark.parametrize("dtype", QUICK_DTYPES[1:], ids=str)
@pytest.mark.parametrize(("rows", "columns", "k"), [(8, 49152, 576), (5, 130, 1000), slow(1, 1, 16), slow(33, 1000, 4608)])
def test_rows_times_int8_weights(rows: int, columns: int, k: int, dtype: torch.dtype) -> None:
    check_int8_linear("cuda", rows, columns, k, dtype)


@pytest.mark.parametrize("dtype", QUICK_DTYPES[1:], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("start", [0, 16, slow(33)])
def test_a_second_input_a_norm_and_an_epilogue(start: int, splits: int, dtype: torch.dtype) -> None:
    from foreword.ops.layer.tiles import Tiles  # noqa: PLC0415  needs triton

    check_int8_epilogue("cuda", start, dtype, Tiles(16, 32, 64, warps=4, stages=3, splits=splits))


@pytest.mark.parametrize("dtype", QUICK_DTYPES[1:], ids=str)
def test_preloaded_int8_weights(dtype: torch.dtype) -> None:
    from foreword.ops.layer.tiles import Tiles  # noqa: PLC0415  needs triton

    for tiles in (Tiles(16, 16, 64, warps=4, stages=0), Tiles(32, 64, 64, warps=8, stages=0)):
        check_int8_linear("cuda", 8, 1000, 576, dtype, tiles)
        for start in (0, 16, 33):
            check_int8_epilogue("cuda", start, dtype, tiles)


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(("live", "count", "columns"), [(1, 8, 576), (8, 8, 4608), slow(1, 1, 16)])
def test_the_rows_that_a_level_starts_from(live: int, count: int, columns: int, dtype: torch.dtype) -> None:
    check_carried_and_embedded(count, "cuda", live, count, columns, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.long), ((576,), torch.bfloat16), ((3, 4608), torch.float16)], ids=str
)
def test_entries_of_slots(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for seed in range(5):
        check_at_slots(seed, "cuda", shape, dtype)


@pytest.mark.parametrize("pathed", [False, True])
@pytest.mark.parametrize("taps", [(), (0, 1, 2)])
def test_committed_rows_conditioned_on_the_next_token(taps: tuple[int, ...], pathed: bool) -> None:
    for seed in range(4):
        check_conditioned_on_next(seed, "cuda", taps, pathed)


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize("columns", [20, 4608])
def test_the_last_accepted_row_is_remembered(columns: int, dtype: torch.dtype) -> None:
    for seed in range(6):
        check_remember(seed, "cuda", columns, dtype)


@pytest.mark.parametrize(("width", "places", "k"), [(8, 16, 10), slow(1, 1, 1)])
def test_the_candidates_after_live_nodes(width: int, places: int, k: int) -> None:
    for seed in range(4):
        check_after_live_nodes(seed, "cuda", width, places, k)


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(("places", "count", "k"), [(7, 16, 10), slow(1, 1, 1), slow(3, 32, 32)])
def test_the_candidates_after_each_candidate(places: int, count: int, k: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        check_transitions(seed, "cuda", places, count, k, dtype)


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(("count", "columns"), [(3, 48), (64, 4608), slow(1, 1)])
def test_norms_residuals_and_gates(count: int, columns: int, dtype: torch.dtype) -> None:
    check_norm_and_gate("cuda", count, columns, dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(4, 9), (64, 64), slow(1, 1)])
def test_rows_have_the_positions_that_the_stack_computes(count: int, scratch: int, shared: bool) -> None:
    for seed in range(4):
        check_row_positions(seed, "cuda", count, scratch, shared)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(4, 9), slow(40, 40)])
def test_grafted_rows_come_after_their_anchors(count: int, scratch: int, shared: bool) -> None:
    grafts = [
        Graft.of(1, (0, 3, 3), (1, 1, 2), lambda real, _: real),
        Graft.of(2, (3, 1, 0), (3, 1, 2), lambda real, _: real),
    ]
    for seed in range(4):
        check_row_positions(seed, "cuda", count, scratch, shared, grafts)


@pytest.mark.parametrize("dtype", QUICK_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "squeeze", "norm"), [(3, 1, False), (40, 2, True), slow(0, 1, True), slow(70, 1, True)])
def test_a_step_is_appended_to_the_rows_of_a_pass(rows: int, squeeze: int, norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    options = Transfer(steps=1, layers=(1,), conditioned=False, squeeze=squeeze, norm=norm)
    (matrix,) = options.module(target(dtype=torch.float32))
    for weight in matrix.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    check_pseudo_rows("cuda", matrix, rows, max(rows, 3), dtype)


def test_the_last_right_node_leaves_its_rows() -> None:
    for seed in range(12):
        check_carried_on(seed, "cuda", 1 + seed)


@pytest.mark.parametrize("kind", ["static", "best"])
@pytest.mark.parametrize("nodes", [6, 64, slow(1), slow(40)])
def test_the_likeliest_paths_that_the_steps_reach(nodes: int, kind: str) -> None:
    for seed in range(8):
        check_paths(seed, "cuda", kind, nodes)


@pytest.mark.parametrize("nodes", [1, 9, slow(2)])
def test_a_template_is_filled(nodes: int) -> None:
    for seed in range(8):
        check_filled_template(seed, "cuda", nodes)


@pytest.mark.parametrize("longest", [40, 3000, slow(1)])
def test_the_longest_match_is_continued(longest: int) -> None:
    for seed in range(10):
        check_lookup(seed, "cuda", 1 + seed, 1 + seed % 5, longest)


def test_a_captured_search_reads_the_current_scores() -> None:
    """Although kernels of a graph are launched early, each waits for the previous one."""
    scores = torch.randn(64, 49152, device="cuda")
    likeliest(scores, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        changed = scores * 2 + 1
        places, chances = likeliest(changed, 8)
        again = top(chances, 1)
    for seed in range(5):
        scores.copy_(torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        exact = (scores * 2 + 1).topk(8)
        assert torch.equal(changed.gather(1, places), exact.values) and not again.any()
        torch.testing.assert_close(chances, exact.values - (scores * 2 + 1).logsumexp(-1, keepdim=True))
