"""The kernel of kernels.aligned_gemm: one warp loads, two groups of four multiply, and all find their tiles alone.

Hopper's FP8 tensor cores keep few bits when they accumulate alone, so their partial sums over 128 elements are added
in fp32 registers. That addition is hidden: each group of warps has its own 64 rows of a tile and waits for nothing
but operands, so that one adds while the other multiplies. A tile is done in two halves of 128 columns, so that the
partial sum fits in registers beside the sums.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3.2, for the interval of 128 elements.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mxfp8_titan.format import BLOCK_SIZE, GROUP_TILE


class Sizes(NamedTuple):
    """What the kernel is told about the operands, all int32.

    tokens: T.  rows, cols: of the output, OVER_T of one group's.  depth: K, unused OVER_T
    a_first, a_rows: OVER_T, the rows of a that this output starts at, and of all outputs
    last_group: the last one that has tiles
    """

    tokens: gl.tensor
    rows: gl.tensor
    cols: gl.tensor
    depth: gl.tensor
    a_first: gl.tensor
    a_rows: gl.tensor
    num_groups: gl.tensor
    last_group: gl.tensor


TILE_K = gl.constexpr(GROUP_TILE)
"""Elements of the contraction between two additions in fp32."""

BOX_M = gl.constexpr(BLOCK_SIZE)
"""Rows that the copy engine writes at once, if all of them belong to the group."""

PIECE_M = gl.constexpr(16)
"""Rows of a box cut by the end of its group that the threads write at once."""


@gluon.jit
def _tiles_m(start, end, sizes, OVER_T: gl.constexpr, TILE_M: gl.constexpr):
    """Tiles along M of the group of tokens [start, end)."""
    if OVER_T:
        return gl.cdiv(sizes.rows, TILE_M)
    else:  # noqa: RET505 - one branch is compiled
        return gl.cdiv(end - start, TILE_M)


@gluon.jit
def _next_group(
    tile, group, first_tile, start, end, base, group_ends_ptr, sizes,
    OVER_T: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
):  # fmt: skip
    """(group, first_tile, start, end, base) of the group that owns `tile`, from those of an earlier tile's.

    first_tile  number of the group's first tile
    start, end  its tokens; those after the last group are one more group
    base        blocks of 128 tokens that earlier groups fill in the padded layout
    """
    tiles_n = gl.cdiv(sizes.cols, TILE_N)
    tiles = _tiles_m(start, end, sizes, OVER_T, TILE_M) * tiles_n
    while (tile >= first_tile + tiles) & (group <= sizes.last_group):
        first_tile += tiles
        base += gl.cdiv(end - start, TILE_K)
        start = end
        group += 1
        end = sizes.tokens
        if group_ends_ptr is not None:
            end = gl.load(group_ends_ptr + group, mask=group < sizes.num_groups, other=sizes.tokens)
        tiles = _tiles_m(start, end, sizes, OVER_T, TILE_M) * tiles_n
    return group, first_tile, start, end, base


@gluon.jit
def _first_group(tile, group_ends_ptr, sizes, OVER_T: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """The same, from the start."""
    end = sizes.tokens
    if group_ends_ptr is not None:
        end = gl.load(group_ends_ptr)
    zero = tile * 0
    return _next_group(tile, zero, zero, zero, end, zero, group_ends_ptr, sizes, OVER_T, TILE_M, TILE_N)


@gluon.jit
def _place(
    tile, group, start, end, sizes,
    OVER_T: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """(row in the group, column, length of the contraction) of a group's tile number `tile`: bands, M first in them."""
    tiles_n = gl.cdiv(sizes.cols, TILE_N)
    band = tile // (BAND * tiles_n)
    in_band = tile % (BAND * tiles_n)
    width = gl.minimum(_tiles_m(start, end, sizes, OVER_T, TILE_M) - band * BAND, BAND)
    length = end - start
    if not OVER_T:
        length = gl.where((sizes.num_groups > 0) & (group == sizes.num_groups), 0, sizes.depth)
    return (band * BAND + in_band % width) * TILE_M, in_band // width * TILE_N, length


@gluon.jit
def _load_tiles(
    a_desc, b_desc, a_tiles, b_tiles, ready, empty, group_ends_ptr, sizes,
    OVER_T: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """One warp fills the stages with operand tiles, as they become empty."""
    step = 0
    tile = gl.program_id(0)
    group, first_tile, start, end, base = _first_group(tile, group_ends_ptr, sizes, OVER_T, TILE_M, TILE_N)
    while group <= sizes.last_group:
        row, col, length = _place(tile - first_tile, group, start, end, sizes, OVER_T, TILE_M, TILE_N, BAND)
        if OVER_T:
            row += sizes.a_first
            first_block = base
        else:
            row += start
            col += group * sizes.cols
            first_block = 0
        for block in range(first_block, first_block + gl.cdiv(length, TILE_K)):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (TILE_M + TILE_N) * TILE_K)
            tma.async_copy_global_to_shared(a_desc, [row, block * TILE_K], bar, a_tiles.index(stage))
            tma.async_copy_global_to_shared(b_desc, [col, block * TILE_K], bar, b_tiles.index(stage))
            step += 1
        tile += gl.num_programs(0)
        group, first_tile, start, end, base = _next_group(
            tile, group, first_tile, start, end, base, group_ends_ptr, sizes, OVER_T, TILE_M, TILE_N
        )


@gluon.jit
def _multiply_stage(
    acc0, acc1, zeros, step, a_tiles, b_tiles, ready, empty,
    STAGES: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """(acc0, acc1) with the products of the first DEPTH elements of stage number `step` added, and the stage freed."""
    HALF_M: gl.constexpr = acc0.shape[0]
    HALF_N: gl.constexpr = acc0.shape[1]
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
    a = a_tiles.index(stage).slice(PART * HALF_M, HALF_M, 0).slice(0, DEPTH, 1)
    b = b_tiles.index(stage).slice(0, DEPTH, 1)
    partial = warpgroup_mma(a, b.slice(0, HALF_N, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc0 += warpgroup_mma_wait(0, deps=(partial,))
    partial = warpgroup_mma(a, b.slice(HALF_N, HALF_N, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc1 += warpgroup_mma_wait(0, deps=(partial,))
    mbarrier.arrive(empty.index(stage), count=1)
    return acc0, acc1


@gluon.jit
def _multiply_tiles(
    c_desc, c_ptr, c_tiles, a_tiles, b_tiles, ready, empty, a_scale_ptr, b_scale_ptr, group_ends_ptr, sizes,
    OVER_T: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Four warps multiply, scale and write 64 rows of each tile, upper (PART 0) or lower, 128 columns at a time."""
    HALF_M: gl.constexpr = TILE_M // 2
    HALF_N: gl.constexpr = TILE_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N, 32])
    scales_n: gl.constexpr = gl.SliceLayout(0, layout)
    c_tile = c_tiles.index(PART)
    step = 0
    tile = gl.program_id(0)
    group, first_tile, start, end, base = _first_group(tile, group_ends_ptr, sizes, OVER_T, TILE_M, TILE_N)
    row, col, length = _place(tile - first_tile, group, start, end, sizes, OVER_T, TILE_M, TILE_N, BAND)
    while group <= sizes.last_group:
        blocks = gl.cdiv(length, TILE_K)
        row += PART * HALF_M
        first_row = start
        row_end = end
        if OVER_T:
            first_row = group * sizes.rows
            row_end = first_row + sizes.rows
        row += first_row
        tile += gl.num_programs(0)
        if row < row_end:
            # Past the last group nothing is multiplied, and the scales may be anything.
            scaled_end = gl.where(blocks > 0, row_end, 0)
            scaled_cols = gl.where(blocks > 0, sizes.cols, 0)
            offs_m = row + gl.arange(0, HALF_M, gl.SliceLayout(1, layout))
            a_scale = a_scale_ptr
            if OVER_T:
                a_scale += group * (sizes.a_rows - sizes.rows) + sizes.a_first
            # On their way while the tile is multiplied, in few registers.
            offs_n = col + gl.arange(0, HALF_N, gl.BlockedLayout([1], [32], [4], [0]))
            b_scale = b_scale_ptr + group * sizes.cols + offs_n
            scale_m = gl.load(a_scale + offs_m, mask=offs_m < scaled_end, other=0.0)
            scale_n0 = gl.load(b_scale, mask=offs_n < scaled_cols, other=0.0)
            scale_n1 = gl.load(b_scale + HALF_N, mask=offs_n < scaled_cols - HALF_N, other=0.0)

            acc0 = gl.zeros([HALF_M, HALF_N], gl.float32, layout)
            acc1 = gl.zeros([HALF_M, HALF_N], gl.float32, layout)
            zeros = gl.zeros([HALF_M, HALF_N], gl.float32, layout)
            rest = length % TILE_K
            short = gl.where((rest > 0) & (rest <= TILE_K // 2), 1, 0)
            for s in range(step, step + blocks - short):
                acc0, acc1 = _multiply_stage(acc0, acc1, zeros, s, a_tiles, b_tiles, ready, empty, STAGES, PART, TILE_K)
            if short > 0:
                acc0, acc1 = _multiply_stage(
                    acc0, acc1, zeros, step + blocks - 1, a_tiles, b_tiles, ready, empty, STAGES, PART, TILE_K // 2
                )
            scale_n0 = gl.convert_layout(scale_n0, scales_n)
            _store_half(c_desc, c_ptr, c_tile, acc0, scale_m, scale_n0, row, row_end, col, sizes.cols, OVER_T)
            # While the copy engine reads the first half.
            group, first_tile, start, end, base = _next_group(
                tile, group, first_tile, start, end, base, group_ends_ptr, sizes, OVER_T, TILE_M, TILE_N
            )
            next_row, next_col, length = _place(
                tile - first_tile, group, start, end, sizes, OVER_T, TILE_M, TILE_N, BAND
            )
            scale_n1 = gl.convert_layout(scale_n1, scales_n)
            _store_half(c_desc, c_ptr, c_tile, acc1, scale_m, scale_n1, row, row_end, col + HALF_N, sizes.cols, OVER_T)
        else:
            for s in range(step, step + blocks):
                mbarrier.wait(ready.index(s % STAGES), (s // STAGES) & 1)
                mbarrier.arrive(empty.index(s % STAGES), count=1)
            group, first_tile, start, end, base = _next_group(
                tile, group, first_tile, start, end, base, group_ends_ptr, sizes, OVER_T, TILE_M, TILE_N
            )
            next_row, next_col, length = _place(
                tile - first_tile, group, start, end, sizes, OVER_T, TILE_M, TILE_N, BAND
            )
        row = next_row
        col = next_col
        step += blocks
    tma.store_wait(0)


@gluon.jit
def _store_half(
    c_desc, c_ptr, c_tile, acc, scale_m, scale_n, row, row_end, col, cols, WHOLE_BOXES: gl.constexpr
):  # fmt: skip
    """Writes acc * scale_m * scale_n, 64 x 128, up to row_end, in boxes of 32 rows x 128 bytes.

    A box that row_end cuts would reach into the next group: the threads write its rows, unless WHOLE_BOXES says that
    there is none.
    """
    BOX_N: gl.constexpr = c_desc.block_shape[1]
    BOXES_M: gl.constexpr = acc.shape[0] // BOX_M
    BOXES_N: gl.constexpr = acc.shape[1] // BOX_N
    c = (acc * gl.expand_dims(scale_m, 1) * gl.expand_dims(scale_n, 0)).to(c_tile.dtype)
    tma.store_wait(0)
    c_tile.store(c)
    fence_async_shared()
    gl.thread_barrier()
    boxes = c_tile._reinterpret(c_tile.dtype, [BOXES_M * BOXES_N, BOX_M, BOX_N], c_desc.layout)
    for i in gl.static_range(BOXES_M):
        first = row + i * BOX_M
        last = first + BOX_M
        if WHOLE_BOXES:
            last = first + 1
        if last <= row_end:
            for j in gl.static_range(BOXES_N):
                box = boxes.index(j * BOXES_M + i)
                tma.async_copy_shared_to_global(c_desc, [first, col + j * BOX_N], box)
    if not WHOLE_BOXES:  # noqa: SIM102 - decided when compiled
        if (row_end - row < acc.shape[0]) & ((row_end - row) % BOX_M != 0):
            for i in gl.static_range(acc.shape[0] // PIECE_M):
                first = row + i * PIECE_M
                if (first < row_end) & (row + (i * PIECE_M // BOX_M + 1) * BOX_M > row_end):
                    _store_piece(c_ptr, c_tile.slice(i * PIECE_M, PIECE_M, 0), first, row_end, col, cols)
            # Before another half is written over this one.
            gl.thread_barrier()


@gluon.jit
def _store_piece(c_ptr, piece, row, row_end, col, cols):
    """Writes the rows of `piece`, in shared memory, that lie in front of row_end, and its columns in front of cols."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    offs_m = row + gl.arange(0, piece.shape[0], gl.SliceLayout(1, layout))
    offs_n = col + gl.arange(0, piece.shape[1], gl.SliceLayout(0, layout))
    c_ptrs = c_ptr + gl.expand_dims(offs_m.to(gl.int64) * cols, 1) + gl.expand_dims(offs_n, 0)
    mask = gl.expand_dims(offs_m < row_end, 1) & gl.expand_dims(offs_n < cols, 0)
    gl.store(c_ptrs, piece.load(layout), mask=mask)


@gluon.jit(
    do_not_specialize=["tokens", "rows", "cols", "depth", "a_first", "a_rows", "num_groups", "last_group"],
    do_not_specialize_on_alignment=["a_scale_ptr", "b_scale_ptr", "group_ends_ptr", "c_ptr"],
)
def aligned_gemm_kernel(
    a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, group_ends_ptr, c_ptr,
    tokens, rows, cols, depth, a_first, a_rows, num_groups, last_group,
    OVER_T: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor takes every so-manieth tile of 128 x 256; a group's tiles follow one another.

    Rows and columns past the output are cut off by the copy engine, which also fills reads past K with zeros. Scales
    are masked here. Tokens past the last group are a group without a contraction.
    """
    a_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE_M, TILE_K], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE_N, TILE_K], b_desc.layout)
    c_layout: gl.constexpr = gl.NVMMASharedLayout(128, c_desc.dtype.primitive_bitwidth, 2)
    c_tiles = gl.allocate_shared_memory(c_desc.dtype, [2, TILE_M // 2, TILE_N // 2], c_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    sizes = Sizes(tokens, rows, cols, depth, a_first, a_rows, num_groups, last_group)
    gl.warp_specialize(
        [
            (_multiply_tiles, (
                c_desc, c_ptr, c_tiles, a_tiles, b_tiles, ready, empty, a_scale_ptr, b_scale_ptr, group_ends_ptr, sizes,
                OVER_T, TILE_M, TILE_N, STAGES, BAND, 0,
            )),
            (_multiply_tiles, (
                c_desc, c_ptr, c_tiles, a_tiles, b_tiles, ready, empty, a_scale_ptr, b_scale_ptr, group_ends_ptr, sizes,
                OVER_T, TILE_M, TILE_N, STAGES, BAND, 1,
            )),
            (_load_tiles, (
                a_desc, b_desc, a_tiles, b_tiles, ready, empty, group_ends_ptr, sizes,
                OVER_T, TILE_M, TILE_N, STAGES, BAND,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
