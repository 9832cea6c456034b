import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp8_titan.format import FLOOR, RCEIL, ROUNDINGS
from mxfp8_titan.reference.quantize import (
    Quantized,
    dequantize,
    e8m0_from_amax,
    e8m0_to_float,
    quantize_along_k,
    quantize_along_n,
    quantize_along_t,
)
from tests.oracles import mx_block

FP32_MAX = torch.finfo(torch.float32).max

# amax of 32 equal values -> (scale byte, element byte) under FLOOR and RCEIL.
CONTRACT = [
    (0.0, (0, 0x00), (0, 0x00)),
    (1.0, (119, 0x78), (119, 0x78)),
    (448.0, (127, 0x7E), (127, 0x7E)),
    (449.0, (127, 0x7E), (128, 0x76)),
    (480.0, (127, 0x7E), (128, 0x77)),
    (255.9, (126, 0x7E), (127, 0x78)),
    (FP32_MAX, (246, 0x7E), (247, 0x78)),
    (2.0**-126, (0, 0x40), (0, 0x40)),
    (2.0**-127, (0, 0x38), (0, 0x38)),
    (2.0**-149, (0, 0x00), (0, 0x00)),
]


def _block(value: float, device: str) -> torch.Tensor:
    return torch.full((1, 32), value, dtype=torch.float32, device=device)


@pytest.mark.parametrize(("amax", "floor", "rceil"), CONTRACT)
def test_a_block_of_equal_values_has_the_contract_s_bytes(amax, floor, rceil, device):
    for rounding, (scale_byte, element_byte) in ((FLOOR, floor), (RCEIL, rceil)):
        for sign in (1, -1):
            q = quantize_along_k(_block(sign * amax, device), rounding)
            want = element_byte | (0x80 if sign < 0 else 0)
            assert q.scale.view(torch.uint8).tolist() == [[scale_byte]]
            assert set(q.data.view(torch.uint8).flatten().tolist()) == {want}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_inf_or_nan_makes_the_whole_block_nan_and_no_other(rounding, bad, dtype, device):
    x = torch.ones(2, 64, dtype=dtype, device=device)
    x[0, 37] = bad
    q = quantize_along_k(x, rounding)
    assert q.scale.view(torch.uint8).tolist() == [[119, 255], [119, 119]]
    assert (q.data.view(torch.uint8)[0, 32:] == 0x7F).all()
    assert dequantize(q)[0, 32:].isnan().all()
    assert (dequantize(q)[0, :32] == 1).all()


def test_floor_does_not_round_an_amax_just_below_a_power_of_two_up(device):
    below = torch.tensor(256.0).nextafter(torch.tensor(0.0)).item()
    assert quantize_along_k(_block(below, device), FLOOR).scale.view(torch.uint8).item() == 126
    assert quantize_along_k(_block(256.0, device), FLOOR).scale.view(torch.uint8).item() == 127


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_exponent_and_the_values_beside_it_equal_exact_arithmetic(rounding, device):
    values = []
    for exponent in range(-149, 128):
        power = torch.tensor(2.0, dtype=torch.float64).pow(exponent).float()
        for base in (power, power * 1.75):
            values += [base, base.nextafter(torch.tensor(torch.inf)), base.nextafter(torch.tensor(0.0))]
    amax = torch.stack(values)
    amax = amax[amax.isfinite()]
    # An element far below its amax, whose own rounding is checked too.
    x = torch.stack([amax, -amax * 0.3, amax * 0.01], dim=1)
    x = torch.cat([x, torch.zeros(len(x), 29)], dim=1).to(device)
    q = quantize_along_k(x, rounding)
    for row, data, scale in zip(x.tolist(), q.data.view(torch.uint8).tolist(), q.scale.view(torch.uint8), strict=True):
        assert (scale.item(), data) == mx_block(row, rounding)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=32, max_size=32),
    st.sampled_from(ROUNDINGS),
)
def test_any_fp32_block_equals_exact_arithmetic(values, rounding):
    q = quantize_along_k(torch.tensor([values], dtype=torch.float32), rounding)
    assert (q.scale.view(torch.uint8).item(), q.data.view(torch.uint8)[0].tolist()) == mx_block(values, rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_gives_the_bytes_of_its_fp32_value(dtype, device):
    x = torch.randn(64, 96, device=device).mul(torch.randn(64, 96, device=device).exp()).to(dtype)
    for rounding in ROUNDINGS:
        low, full = quantize_along_k(x, rounding), quantize_along_k(x.float(), rounding)
        assert torch.equal(low.data.view(torch.uint8), full.data.view(torch.uint8))
        assert torch.equal(low.scale.view(torch.uint8), full.scale.view(torch.uint8))


def test_rceil_never_clips_and_floor_s_loss_is_bounded_by_448_over_512(device):
    x = torch.randn(512, 32, device=device)
    amax = x.abs().amax(1)
    loss = {r: 1 - dequantize(quantize_along_k(x, r)).abs().amax(1) / amax for r in ROUNDINGS}
    assert loss[RCEIL].max() <= 0.0625
    # FLOOR saturates what lies between 448 and 512 times its scale: measured 12.4 % on the worst block here.
    assert 0.0625 < loss[FLOOR].max() <= 0.125


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_along_t_is_the_transpose_quantized_along_k(rounding, device):
    x = torch.randn(96, 70, device=device)
    q, want = quantize_along_t(x, rounding), quantize_along_k(x.t().contiguous(), rounding)
    assert q.data.is_contiguous()
    assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(q.scale.view(torch.uint8), want.scale.view(torch.uint8))


@pytest.mark.parametrize("rows", [0, 1, 31, 33, 50])
def test_along_t_pads_rows_with_zeros_to_whole_blocks(rows, device):
    x = torch.randn(rows, 8, device=device)
    q = quantize_along_t(x, RCEIL)
    padded = (rows + 31) // 32 * 32
    assert q.data.shape == (8, padded)
    assert q.scale.shape == (8, padded // 32)
    assert (q.data[:, rows:].float() == 0).all()


def test_along_n_quantizes_each_expert_s_transpose(device):
    w = torch.randn(3, 64, 40, device=device)
    q = quantize_along_n(w, RCEIL)
    for expert in range(3):
        want = quantize_along_t(w[expert], RCEIL)
        assert torch.equal(q.data[expert].view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(q.scale[expert].view(torch.uint8), want.scale.view(torch.uint8))


def test_strided_and_broadcast_inputs_quantize_as_their_contiguous_copies(device):
    wide = torch.randn(64, 128, device=device)
    for x in (wide[:, ::2], wide.t(), wide[1:, 64:], wide[:1].expand(40, 128), wide[0, 0].expand(40, 64)):
        a, b = quantize_along_k(x, RCEIL), quantize_along_k(x.contiguous(), RCEIL)
        assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
        assert torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))


def test_scale_bytes_decode_to_powers_of_two_down_to_the_subnormal_one():
    bytes_ = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    decoded = e8m0_to_float(bytes_)
    assert decoded[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert decoded[4].isnan()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_dormant_block_of_tiny_values_beside_zeros_stays_finite(rounding, device):
    x = torch.zeros(1, 64, device=device)
    x[0, 3] = 6.3e-38
    q = quantize_along_k(x, rounding)
    assert dequantize(q).isfinite().all()
    assert dequantize(q)[0, 3].item() == pytest.approx(6.3e-38, rel=0.07)
    assert q.scale.view(torch.uint8)[0, 1] == 0


def test_sizes_dtypes_and_roundings_that_do_not_fit_are_refused_with_what_is_needed():
    with pytest.raises(ValueError, match=r"481 elements, needs a multiple of 32"):
        quantize_along_k(torch.zeros(2, 481), RCEIL)
    with pytest.raises(TypeError, match=r"float64, needs float32, bfloat16 or float16"):
        quantize_along_k(torch.zeros(2, 32, dtype=torch.float64), RCEIL)
    with pytest.raises(ValueError, match=r"'even', needs one of floor, rceil"):
        e8m0_from_amax(torch.ones(1), "even")


def test_bf16_holds_every_dequantized_value_from_scale_byte_3_to_246_exactly():
    # fp32 itself overflows above 246: 448 * 2**120.
    data = torch.arange(256, dtype=torch.uint8).view(8, 32)
    data = torch.where((data & 0x7F) == 0x7F, 0, data).view(torch.float8_e4m3fn)
    for byte in range(3, 247):
        q = Quantized(data, torch.full((8, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        assert torch.equal(dequantize(q, torch.bfloat16).float(), dequantize(q))


def test_zero_rows_quantize_to_zero_rows():
    q = quantize_along_k(torch.zeros(0, 64), RCEIL)
    assert q.data.shape == (0, 64)
    assert q.scale.shape == (0, 2)
