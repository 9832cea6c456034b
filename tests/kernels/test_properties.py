"""Kernels against their references for random shapes, group splits, strides, dtypes and exponents down to 2**-133."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import mxfp8_titan.kernels.quantize_aligned as aligned_k
import mxfp8_titan.kernels.quantize_aligned_t as aligned_t
import mxfp8_titan.kernels.scale_swizzle as swizzle
from mxfp8_titan.format import BLOCKED, PLAIN
from mxfp8_titan.kernels.dot_scaled_gemm import gemm_of_rows, gemm_over_t
from mxfp8_titan.reference import quantize_aligned as ref_aligned
from mxfp8_titan.reference import scale_swizzle as ref_swizzle
from tests.kernels import test_dot_scaled_gemm, test_quantize, test_quantize_aligned, test_quantize_aligned_weights
from tests.kernels import test_quantize_32x32 as squares
from tests.kernels.conftest import INTERPRETED
from tests.strategies import ROUNDINGS, derandomized, ends_of, group_sizes, strided, values

EXAMPLES = 3 if INTERPRETED else 60
LAYOUTS = st.sampled_from([PLAIN, BLOCKED])


def _tokens(data, device, sizes, tail, features):
    """(T, K) of any strides and exponents, whose last rows belong to nobody and are NaN."""
    rows = sum(sizes) + tail
    assume(rows > 0)
    x = data.draw(strided(data.draw(values((rows, features)))))
    x[sum(sizes) :] = float("nan")
    return x.to(device)


@derandomized(EXAMPLES)
@given(data=st.data(), split=group_sizes(multiple=32), rounding=ROUNDINGS, layout=LAYOUTS, blocks=st.integers(1, 5))
def test_tokens_are_quantized_as_the_reference_does(device, data, split, rounding, layout, blocks):
    x = _tokens(data, device, *split, 32 * blocks)
    test_quantize.check_all(x, rounding, layout, ends_of(split[0], device))


@derandomized(EXAMPLES)
@given(
    data=st.data(),
    rounding=ROUNDINGS,
    layout=LAYOUTS,
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 3)),
)
def test_weights_are_quantized_as_the_references_do(device, data, rounding, layout, sizes):
    experts, n, k = sizes
    w = data.draw(strided(data.draw(values((experts, 32 * n, 32 * k))))).to(device)
    test_quantize.check_all(w, rounding, layout)
    assert squares.same(squares.quantize_32x32_both(w, rounding, layout), squares.expected(w, rounding, layout))
    test_quantize_aligned_weights.check([w, w * 0.5], rounding)


@derandomized(EXAMPLES)
@given(data=st.data(), split=group_sizes(), rounding=ROUNDINGS, blocks=st.integers(1, 5))
def test_aligned_tokens_equal_the_reference(device, data, split, rounding, blocks):
    x, ends = _tokens(data, device, *split, 32 * blocks), ends_of(split[0], device)
    same, zeroed = test_quantize_aligned.same, test_quantize_aligned.owned(x, ends)
    quantized = ref_aligned.quantize_aligned_along_k(zeroed, rounding)
    amax = ref_aligned.column_amax(zeroed, ends)
    assert same(aligned_k.quantize_aligned_along_k_with_amax(x, rounding, ends), (*quantized, amax))
    assert same(
        aligned_t.quantize_aligned_along_t(x, rounding, ends),
        ref_aligned.quantize_aligned_along_t(zeroed, ends, rounding),
    )
    assert same(
        aligned_t.requantize_aligned_along_t(*quantized, amax, rounding, ends),
        test_quantize_aligned.reference_requantize(quantized, amax, rounding, ends),
    )


@derandomized(EXAMPLES)
@given(data=st.data(), split=group_sizes(multiple=32, most=320), other=st.integers(1, 300))
def test_scales_are_swizzled_as_the_reference_does(device, data, split, other):
    sizes, tail = split
    ends, tokens = ends_of(sizes, device), sum(sizes) + tail
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    for shape, kernel, reference in (
        ((tokens, other % 40 + 1), swizzle.swizzle_t_groups, ref_swizzle.swizzle_t_groups),
        ((other, tokens // 32), swizzle.swizzle_k_groups, ref_swizzle.swizzle_k_groups),
    ):
        scale = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scale = data.draw(strided(scale)) if 0 not in shape else scale
        assert torch.equal(kernel(scale.to(device), ends), reference(scale.to(device), ends))


@derandomized(EXAMPLES)
@given(split=group_sizes(multiple=32), n=st.integers(1, 5), k=st.integers(1, 6), rounding=ROUNDINGS)
def test_block_scaled_products_equal_the_reference(device, split, n, k, rounding):
    pair, ends, want, bound = test_dot_scaled_gemm.rows_case(device, split[0], 32 * n, 32 * k, rounding)
    out = torch.full_like(want, float("nan"))
    gemm_of_rows([pair], ends, out)
    test_dot_scaled_gemm.check(out, want, bound)
    operands, ends, want, bound = test_dot_scaled_gemm.over_t_case(device, split[0], 32 * n, 32 * k)
    out = torch.full_like(want, float("nan"))
    gemm_over_t(*operands, ends, out)
    test_dot_scaled_gemm.check(out, want, bound)
