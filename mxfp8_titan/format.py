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

E4M3_MAX_MANTISSA_BITS = 0x600000
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
