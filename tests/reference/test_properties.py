"""What holds for the references whatever the numbers, shapes, strides and group sizes are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mxfp8_titan.format import BLOCK_SIZE, RCEIL
from mxfp8_titan.reference import grouped_gemm, quantize, quantize_aligned, scale_swizzle
from mxfp8_titan.reference.gemm import gemm
from tests.oracles import mx_block
from tests.strategies import ROUNDINGS, derandomized, ends_of, group_sizes, strided, values


@derandomized(60)
@given(st.data(), ROUNDINGS, st.integers(1, 5), st.integers(1, 3))
def test_every_block_is_that_of_exact_arithmetic(data, rounding, rows, blocks):
    x = data.draw(values((rows, 32 * blocks)))
    q = quantize.quantize_along_k(data.draw(strided(x)), rounding)
    row = data.draw(st.integers(0, rows - 1))
    for block in range(blocks):
        part = slice(32 * block, 32 * block + 32)
        want = mx_block(x[row, part].tolist(), rounding)
        assert (q.scale.view(torch.uint8)[row, block].item(), q.data.view(torch.uint8)[row, part].tolist()) == want


@derandomized(60)
@given(st.data(), ROUNDINGS, st.integers(1, 70), st.integers(1, 3))
def test_what_comes_back_is_near_and_quantizing_it_again_changes_no_bit(data, rounding, rows, blocks):
    x = data.draw(values((rows, 32 * blocks)))
    q = quantize.quantize_along_k(x, rounding)
    back = quantize.dequantize(q)
    blocks_of = lambda t: t.double().unflatten(-1, (-1, BLOCK_SIZE))  # noqa: E731
    amax = blocks_of(x).abs().amax(-1, keepdim=True)
    error = (blocks_of(back) - blocks_of(x)).abs()
    # Half a step of 3 mantissa bits; FLOOR clips up to an eighth of the block's maximum.
    share = 2.0**-4 if rounding == RCEIL else 0.125
    smallest = 2.0**-137  # half a subnormal E4M3 step at scale byte 0
    assert (error <= amax * share + smallest).all()
    again = quantize.quantize_along_k(back, rounding)
    assert torch.equal(quantize.dequantize(again), back)


@derandomized(40)
@given(st.data(), ROUNDINGS, st.integers(0, 70), st.integers(1, 3))
def test_along_t_is_along_k_of_the_transpose_and_strides_do_not_matter(data, rounding, rows, blocks):
    x = data.draw(values((max(rows, 1), 32 * blocks)))[:rows]
    q = quantize.quantize_along_t(data.draw(strided(x)), rounding)
    padded = torch.zeros(-(-rows // 32) * 32, x.shape[1], dtype=x.dtype)
    padded[:rows] = x
    want = quantize.quantize_along_k(padded.t().contiguous(), rounding)
    assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(q.scale.view(torch.uint8), want.scale.view(torch.uint8))


@derandomized(40)
@given(st.data(), ROUNDINGS, group_sizes())
def test_grouped_products_are_those_of_each_group_alone(data, rounding, split):
    sizes, tail = split
    rows, experts = sum(sizes) + tail, len(sizes)
    x, dy = data.draw(values((rows or 1, 64), -20, 20))[:rows], data.draw(values((rows or 1, 32), -20, 20))[:rows]
    w = data.draw(values((experts, 32, 64), -20, 20))
    a, b = quantize.quantize_along_k(x, rounding), quantize.quantize_along_k(w, rounding)
    y = grouped_gemm.grouped_gemm(a, b, ends_of(sizes), torch.float32)
    dw = grouped_gemm.grouped_gemm_over_rows(dy, x, ends_of(sizes), rounding, torch.float32)
    start = 0
    for expert, size in enumerate(sizes):
        part = slice(start, start + size)
        alone = gemm(quantize.Quantized(a.data[part], a.scale[part]), quantize.Quantized(*(t[expert] for t in b)),
                     torch.float32)  # fmt: skip
        torch.testing.assert_close(y[part], alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()) if size else 0)
        over_t = [quantize.quantize_along_t(t[part], rounding) for t in (dy, x)]
        want = gemm(*over_t, torch.float32)
        torch.testing.assert_close(dw[expert], want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
        start += size
    assert (y[start:] == 0).all()


@derandomized(40)
@given(st.data(), group_sizes(multiple=32, most=320), st.integers(1, 140), st.booleans())
def test_unswizzling_gives_the_scales_back(data, split, other, along_k):
    sizes, tail = split
    blocks = (sum(sizes) + tail) // 32
    ends = ends_of(sizes)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shape = (32 * blocks, other % 9 + 1) if along_k else (other, blocks)
    scale = torch.randint(1, 255, shape, dtype=torch.uint8, generator=generator)
    swizzle, unswizzle = (
        (scale_swizzle.swizzle_t_groups, scale_swizzle.unswizzle_t_groups)
        if along_k
        else (scale_swizzle.swizzle_k_groups, scale_swizzle.unswizzle_k_groups)
    )
    back = unswizzle(swizzle(scale, ends), ends, *shape)
    last = int(ends[-1])
    owned = (slice(0, last),) if along_k else (slice(None), slice(0, last // 32))
    assert torch.equal(back[owned], scale[owned])


@derandomized(60)
@given(st.data(), ROUNDINGS, st.integers(1, 5), st.integers(1, 4))
def test_aligned_elements_are_the_row_times_one_power_rounded_once(data, rounding, rows, blocks):
    x = data.draw(values((rows, 32 * blocks)))
    q = quantize_aligned.quantize_aligned_along_k(data.draw(strided(x)), rounding)
    row = data.draw(st.integers(0, rows - 1))
    amax = x[row].abs().max()
    # The largest magnitude of a row decides, as if the row were one block of 32 that holds nothing else.
    byte, _ = mx_block([float(amax)] + [0.0] * 31, rounding)
    assert q.scale[row].double().item() == 2.0 ** (byte - 127)
    exact = (x[row].double() * 2.0 ** (127 - byte)).clamp(-448, 448)
    assert torch.equal(q.data[row].float(), exact.float().to(torch.float8_e4m3fn).float())
