"""Device functions for one block of MXFP8: magnitude, scale byte, element.

Everything is done on the bits of fp32 numbers. Integer comparison orders magnitudes as floats do, with Inf above every
number and NaN above Inf, so a plain integer maximum keeps NaN, which `tl.max` on floats drops.
"""

import triton
import triton.language as tl

from mxfp8_titan.format import E8M0_BIAS

# The interpreter of Triton 3.6 to 3.8 rounds fp32 -> E4M3 wrongly (ties go up, a carry out of the mantissa is lost) and
# turns bf16 subnormals into zeros, so there both casts are done by integer arithmetic. To be dropped once it doesn't.
CAST_BY_HAND = tl.constexpr(triton.knobs.runtime.interpret)

_FP32_INF = tl.constexpr(0x7F800000)
_FP32_NAN = tl.constexpr(0x7FC00000)
_ABOVE_448_MANTISSA = tl.constexpr(0x1FFFFF)
_MULTIPLIER_BYTE = tl.constexpr(2 * E8M0_BIAS)


@triton.jit
def to_fp32(x):
    """x as fp32, exactly."""
    if CAST_BY_HAND and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - Triton compiles one of the two branches, not the code after them
        return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, x fp32 (int32). Their maximum over a block is the block's amax, NaN kept."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def pair_to_fp32(words):
    """(..., 2) fp32: the two bf16 numbers in each int32 word, lower half first."""
    return tl.join(words << 16, words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def pair_to_fp32_again(words):
    """The same from words that were unpacked before.

    Picked out of the words by another instruction, so that the compiler does not see the common value and keep it in
    twice the registers from one use to the next.
    """
    if CAST_BY_HAND:
        return pair_to_fp32(words)
    else:  # noqa: RET505
        low = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x1044;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
        high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3244;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.join(low, high).to(tl.float32, bitcast=True)


@triton.jit
def max_in_pairs(words, axis: tl.constexpr):
    """Along an axis, the maximum of the lower and of the upper 16 bits of words, both taken as 15-bit magnitudes.

    One instruction compares both halves; the interpreter, which doesn't know it, takes two.
    """
    if CAST_BY_HAND:
        return (tl.max((words << 16) & 0x7FFF0000, axis) >> 16) | tl.max(words & 0x7FFF0000, axis)
    else:  # noqa: RET505
        return tl.reduce(words & 0x7FFF7FFF, axis, _max_s16x2)


@triton.jit
def max_of_pairs(words, axis: tl.constexpr):
    """Along an axis, the bits of the largest magnitudes, as fp32, of the lower and of the upper bf16 numbers."""
    pairs = max_in_pairs(words, axis)
    return pairs << 16, pairs & 0x7FFF0000


@triton.jit
def _max_s16x2(a, b):
    return tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def e8m0_from_bits(amax, ROUNDING: tl.constexpr):
    """The E8M0 byte (int32) of a block whose amax has these bits.

    RCEIL adds 2**23 - 1 - 0x600000 first, which carries into the exponent just when amax > 1.75 * 2**k.
    """
    exponent_source = amax + _ABOVE_448_MANTISSA if ROUNDING == "rceil" else amax
    byte = tl.maximum((exponent_source >> 23) - 8, 0)
    return tl.where(amax >= _FP32_INF, 255, byte)


@triton.jit
def inv_scale_from_e8m0(byte):
    """2**(127 - byte) in fp32, NaN for byte 255: what elements are multiplied by."""
    bits = tl.where(byte == 255, _FP32_NAN, (_MULTIPLIER_BYTE - byte) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_from_e8m0(byte):
    """2**(byte - 127) in fp32, subnormal for byte 0, NaN for byte 255."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, _FP32_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(y):
    """y (fp32) as E4M3: nearest even, saturating at +-448, NaN to 0x7f."""
    if CAST_BY_HAND:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Normal numbers: add half of the last kept place (less one if it is even), cut, rebias 127 -> 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 the grid is 2**-9: adding 2**14 leaves just that in the fp32 mantissa, rounded to nearest even.
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        code = tl.minimum(code, 0x7E) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude > _FP32_INF, 0x7F, code)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:  # noqa: RET505
        return y.to(tl.float8e4nv)
