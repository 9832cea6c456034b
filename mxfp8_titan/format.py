"""The MXFP8 format: blocks of 32 E4M3 elements that share one E8M0 scale byte.

A scale byte b means 2**(b - 127); 255 is NaN, 0 is 2**-127 and not zero. An element e of a block with byte b
stands for e * 2**(b - 127). Blocks run along the dim that the GEMM contracts.

Letters used in every file: T tokens, K in features, N out features, E experts.
`x_along_k` is x quantized in blocks that run along K. `group_ends (E,) int32` holds each expert's exclusive
end row; rows from group_ends[-1] on belong to nobody and may hold anything.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2, 5.4 and 6.3.
"""

BLOCK_SIZE = 32
"""Elements that share one scale."""

E4M3_MAX = 448.0
"""Largest finite E4M3 magnitude, 1.75 * 2**8."""

E4M3_MAX_EXPONENT = 8
"""Exponent of the largest finite E4M3 magnitude."""

FP32_MANTISSA_OF_448 = 0x600000
"""Mantissa field of 448.0 as fp32: an amax with a larger one does not fit below 448 * 2**k."""

E4M3_NAN_BYTE = 0x7F

E8M0_BIAS = 127
E8M0_NAN_BYTE = 255

FLOOR = "floor"
"""Scale exponent = floor(log2 amax) - 8; elements beyond 448 saturate. The rule of the OCP specification."""

RCEIL = "rceil"
"""Scale = amax / 448 rounded up to a power of two; no element saturates."""

ROUNDINGS = (FLOOR, RCEIL)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= n."""
    return (n + multiple - 1) // multiple * multiple


ALIGNMENT_COUNTS = 4
"""What is counted in a sampled row: elements, underflows, zero blocks, saturated elements."""

PHASE_BITS = 16
"""Of the number that says which rows are sampled: a phase counts in steps of 1 / 2**16 of a share."""

PLAIN = "plain"
"""Scales in the order of the blocks they belong to: row-major (rows, blocks of the row)."""

BLOCKED = "blocked"
"""Scales in 512-byte tiles of 128 rows x 4 blocks, the order that block-scaled tensor cores read (SwizzleType
SWIZZLE_32_4_4 of PyTorch). Rows are padded to 128 and blocks to 4, with zero bytes."""

SCALE_LAYOUTS = (PLAIN, BLOCKED)

SCALE_TILE_ROWS = 128
SCALE_TILE_COLS = 4
SCALE_TILE_BYTES = SCALE_TILE_ROWS * SCALE_TILE_COLS

GROUP_TILE = SCALE_TILE_COLS * BLOCK_SIZE
"""Tokens that one scale tile spans, along its rows (blocks along K) and along its columns (blocks along T) alike:
in a blocked buffer every group of tokens starts at a multiple of it."""


def blocked_shape(rows: int, cols: int) -> tuple[int, int]:
    """(rows, cols) of the buffer that holds the blocked layout of a (rows, cols) scale matrix."""
    return round_up(rows, SCALE_TILE_ROWS), round_up(cols, SCALE_TILE_COLS)


def blocked_shape_t_groups(tokens: int, cols: int, groups: int) -> tuple[int, int]:
    """The same for scales (tokens, cols) whose rows are split into `groups` groups of any sizes.

    Enough for every split of the tokens, so that nobody has to read the group sizes on the host.
    """
    return tokens + SCALE_TILE_ROWS * groups, round_up(cols, SCALE_TILE_COLS)


def blocked_shape_k_groups(rows: int, cols: int, groups: int) -> tuple[int, int]:
    """The same for scales (rows, cols) whose columns are split into `groups` groups of any sizes."""
    return round_up(rows, SCALE_TILE_ROWS), cols + SCALE_TILE_COLS * groups


def blocked_index(row, col, cols: int):
    """Where scale (row, col) of a matrix with `cols` columns lies in its blocked layout, in bytes.

    512 * (tile row * tiles per row + tile column) + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4

    row, col: ints or integer tensors
    Source: NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    tile = row // SCALE_TILE_ROWS * (round_up(cols, SCALE_TILE_COLS) // SCALE_TILE_COLS) + col // SCALE_TILE_COLS
    in_tile = row % 32 * 16 + row % SCALE_TILE_ROWS // 32 * 4 + col % SCALE_TILE_COLS
    return tile * SCALE_TILE_BYTES + in_tile
