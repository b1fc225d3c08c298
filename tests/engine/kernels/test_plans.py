"""How many-row products are cut: every output once, within the scratch memory, and the same for as many rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import cuda_attention, cuda_attention_one, cuda_int4, cuda_int4_fp8
from engine.kernels.cuda_int4_many import (
    CUTS,
    SHARED_BYTES,
    TileCut,
    TilePlan,
    choose_plan,
    fit_stages,
    plan_cut,
    shared_bytes,
)
from engine.kernels.workspace import (
    MOST_SHARES,
    NUM_COUNTERS,
    PART_BYTES_PER_SM,
    PARTIAL_BYTES_PER_SM,
    count_runs,
)

Product = tuple[int, int, int, int]
# Activation rows, blocks and units of weights, multiprocessors.
SHAPES = st.tuples(st.integers(33, 4096), st.integers(1, 500), st.integers(1, 240), st.integers(1, 160))


def owners(tiles: int, units: int, grid: int) -> int:
    """Most thread blocks that have a part of one tile, as ``Shares`` of the programs deals units out."""
    each, extra = divmod(tiles * units, grid)
    starts = [block * each + min(block, extra) for block in range(grid)]
    counts = [sum(1 for start in starts if tile * units < start < (tile + 1) * units) for tile in range(tiles)]
    return 1 + max(counts, default=0)


@given(st.integers(1, 500), st.integers(1, 240), st.integers(1, 160))
def test_few_thread_blocks_share_an_output_of_few_rows(row_blocks: int, units: int, multiprocessors: int) -> None:
    assert owners(row_blocks, units, count_runs(row_blocks, units, multiprocessors)) <= MOST_SHARES + 1


@given(SHAPES, st.sampled_from(CUTS + cuda_int4_fp8.CUTS))
def test_a_plan_covers_the_product_and_keeps_every_thread_block_busy(shape: Product, cut: TileCut) -> None:
    rows, blocks, units, multiprocessors = shape
    plan = plan_cut(cut, *shape)
    assert plan.x_tiles * 8 * cut.tiles >= rows > (plan.x_tiles - 1) * 8 * cut.tiles
    assert plan.tiles // plan.x_tiles * cut.blocks >= blocks
    assert 0 < plan.grid <= multiprocessors
    split = plan.tiles - plan.whole
    assert owners(split, units, plan.grid) <= MOST_SHARES + 1
    # A thread block without a unit of its own would name no owner, and one that misses a round would wait for none.
    assert split == 0 or (split * units >= plan.grid and plan.whole % plan.grid == 0)


@given(SHAPES)
def test_of_the_cuts_the_soonest_is_chosen(shape: Product) -> None:
    assert choose_plan(*shape).us == min(plan_cut(cut, *shape).us for cut in CUTS)


@pytest.mark.parametrize(("least", "most"), [(33, 64), (65, 96), (97, 128)])
def test_as_many_rows_are_cut_alike(least: int, most: int) -> None:
    def plans(rows: int) -> list[TilePlan]:
        return [choose_plan(rows, blocks, units, 132) for blocks in (24, 64, 448) for units in (24, 64, 224)]

    for rows in range(least, most):
        assert plans(rows) == plans(most)


def test_a_large_product_is_split_where_a_last_round_would_idle_most() -> None:
    cut = TileCut(16, 2, 1.6, 1.7, 5.2)
    assert plan_cut(cut, 512, 80, 64, 132).whole < plan_cut(cut, 512, 80, 64, 132).tiles == 160  # 1.2 rounds
    assert plan_cut(cut, 512, 64, 64, 132).whole == plan_cut(cut, 512, 64, 64, 132).tiles == 128  # nearly one


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_cut_fits_the_chip_and_the_workspace(cut: TileCut, groups: int) -> None:
    stages, shared = shared_bytes(cut, groups)
    assert stages >= 2
    assert shared <= SHARED_BYTES
    sums = 8 * cut.tiles * 128 * cut.blocks * 4
    assert 2 * sums <= PART_BYTES_PER_SM


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("tiles", "row_tiles"),
    [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)],
)
def test_every_cut_of_few_rows_fits_the_chip_and_the_workspace(tiles: int, row_tiles: int, groups: int) -> None:
    for kib in (cuda_int4.SHARED_KIB, cuda_int4.EXCLUSIVE_KIB):
        stages, shared = cuda_int4.fit_stages(tiles, row_tiles, groups, kib)
        assert stages >= cuda_int4.MIN_STAGES
        assert shared <= SHARED_BYTES
        assert 16 * stages <= cuda_int4.CONTROL_BYTES  # two barriers a stage
    by_groups = tiles >= cuda_int4.GROUP_TILES
    resident = 1 if by_groups else 2
    part = 8 * tiles * 128 * cuda_int4.blocks_at_once(tiles, row_tiles) * 4
    assert 2 * part * resident <= PART_BYTES_PER_SM


@pytest.mark.parametrize("cut", cuda_int4_fp8.CUTS)
def test_every_cut_of_8_bit_rows_fits_the_chip_and_the_workspace(cut: TileCut) -> None:
    stages, shared = fit_stages(cuda_int4_fp8.stage_bytes(cut))
    assert stages >= 3
    assert shared <= SHARED_BYTES
    assert 2 * 8 * cut.tiles * 128 * cut.blocks * 4 <= PART_BYTES_PER_SM


@given(st.integers(1, 2000))
def test_the_threads_that_round_a_row_hold_all_of_it(units: int) -> None:
    chunks, threads = cuda_int4_fp8.count_chunks(units)
    assert threads % 32 == 0
    assert threads <= cuda_int4_fp8.CHUNK_THREADS
    assert chunks * threads * cuda_int4_fp8.CHUNK >= 128 * units


@given(st.integers(1, 160), st.data())
def test_parts_of_a_decodes_attention_fit_the_workspace(num_sms: int, data: st.DataObject) -> None:
    pairs = data.draw(st.integers(1, cuda_attention_one.PER_SM * num_sms))
    cut = cuda_attention_one.choose_cut(pairs, num_sms)
    splits = cuda_attention_one.num_splits(cut, pairs, num_sms)
    assert 1 <= splits <= cuda_attention_one.MOST_SPLITS
    largest = max(cuda_attention_one.part_bytes(dim, 8) for dim in cuda_attention.DIMS)
    assert pairs * splits * largest <= num_sms * PARTIAL_BYTES_PER_SM
    assert pairs <= NUM_COUNTERS
