"""FP8 GEMMs with one scale per row against float64. Gluon does not run in the interpreter: only a Hopper GPU shows it.

Without one, these tests show that the reference is what float64 says, and what the arguments must be.
"""

import pytest
import torch

from mxfp8_titan.format import GROUP_TILE, round_up
from mxfp8_titan.kernels.aligned_gemm import aligned_gemm, aligned_gemm_over_t
from mxfp8_titan.reference import aligned_gemm as ref
from mxfp8_titan.reference.quantize_aligned import Aligned

BF16_ROUNDING = 2.0**-8
"""Largest relative error of rounding to bf16."""

FP8_ACCUMULATION = 4 * (32 + 1) * 2.0**-13
"""Largest error of a sum, relative to the sum of its terms' magnitudes, where the tensor cores take 32 products at a
time and cut each of them, and the sum so far, 13 bits below the largest, four times before the sum goes to fp32."""


def random_fp8(*shape, device="cuda", mean=0.0):
    """(data, scale): normal elements and random powers of two."""
    data = (torch.randn(shape, device=device) + mean).to(torch.float8_e4m3fn)
    scale = torch.randint(-6, 6, shape[:-1], device=device).float().exp2()
    return Aligned(data, scale)


def ends_of(sizes, device="cuda"):
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def fill_nan(data):
    data.view(torch.uint8).fill_(0x7F)


def exact_and_magnitude(a, b):
    """a @ b^T in float64, and the same of the magnitudes."""
    a, b = (x.data.double() * x.scale.double().unsqueeze(-1) for x in (a, b))
    return a @ b.mT, a.abs() @ b.abs().mT


def assert_within_rounding(out, a, b):
    exact, magnitude = exact_and_magnitude(a, b)
    budget = FP8_ACCUMULATION * magnitude + (BF16_ROUNDING * exact.abs() if out.dtype == torch.bfloat16 else 0)
    excess = (out.double() - exact).abs() - budget
    assert not out.isnan().any()
    assert excess.max() <= 0, f"{(excess > 0).sum()} of {out.numel()} elements, by up to {excess.max()}"


def padded_columns(rows, sizes, device="cuda", mean=0.0):
    """FP8 (rows, T') whose groups start at multiples of 128, zeros between them, NaN after them; its column bounds."""
    total = round_up(sum(sizes), 32) + GROUP_TILE * len(sizes)
    data = torch.zeros(rows, total, device=device, dtype=torch.float8_e4m3fn)
    first, bounds = 0, []
    for size in sizes:
        data[:, first : first + size] = random_fp8(rows, size, device=device, mean=mean).data
        bounds.append((first, first + size))
        first += round_up(size, GROUP_TILE)
    fill_nan(data[:, first:])
    return data, bounds


GROUPED = {
    "one group": (512, 256, [256], 256),
    "uneven, empty, partial tiles": (256, 512, [32, 0, 96, 0, 160, 224], 512),
    "rows past the end": (160, 256, [64, 128], 301),
    "no rows in any group": (128, 256, [0, 0, 0], 70),
    "short K, odd N": (96, 96, [96, 32], 128),
    "K of one and a quarter blocks": (160, 288, [128, 160], 288),
    "33 experts": (128, 256, [32 * (i % 5) for i in range(33)], 2112),
    "256 experts": (128, 128, [32 * (i % 2) for i in range(256)], 4100),
    "many tiles": (256, 2048, [1504, 32, 2528], 4096),
    "sizes of no multiple": (160, 288, [1, 2, 33, 0, 100, 127, 129, 31], 500),
    "one row a group": (128, 256, [1] * 40, 40),
}
"""name: (K, N, group sizes, T)"""


@pytest.mark.hopper
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", GROUPED)
def test_rows_of_each_group_times_its_matrix(case, out_dtype, poisoned):
    depth, cols, sizes, tokens = GROUPED[case]
    a, b, ends = random_fp8(tokens, depth), random_fp8(len(sizes), cols, depth), ends_of(sizes)
    last = sum(sizes)
    fill_nan(a.data[last:])
    a.scale[last:] = float("nan")

    out = aligned_gemm(*a, *b, ends, out_dtype)

    assert out.shape == (tokens, cols)
    assert out.dtype == out_dtype
    assert torch.equal(out[last:], torch.zeros_like(out[last:]))
    for expert, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        if start < end:
            rows = Aligned(a.data[start:end], a.scale[start:end])
            assert_within_rounding(out[start:end], rows, Aligned(b.data[expert], b.scale[expert]))


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("tokens", "cols", "depth"), [(1, 32, 32), (77, 96, 160), (128, 256, 96), (1000, 1056, 512), (4096, 2048, 1024)]
)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_dense(tokens, cols, depth, out_dtype, poisoned):
    a, b = random_fp8(tokens, depth), random_fp8(cols, depth)
    assert_within_rounding(aligned_gemm(*a, *b, None, out_dtype), a, b)


@pytest.mark.hopper
def test_a_long_contraction_of_operands_with_a_mean_is_as_exact_as_one_of_128_elements(poisoned):
    errors = []
    for depth in (128, 32768):
        a, b = random_fp8(256, depth, mean=1.0), random_fp8(256, depth, mean=1.0)
        exact, _ = exact_and_magnitude(a, b)
        error = aligned_gemm(*a, *b, None, torch.float32).double() - exact
        errors.append((error.norm() / exact.norm()).item())
    assert errors[1] <= 2 * errors[0]


@pytest.mark.hopper
def test_a_nan_stays_in_its_row_and_column(poisoned):
    a, b = random_fp8(256, 256), random_fp8(2, 256, 256)
    a.scale[3], b.scale[0, 5], b.scale[1, 200] = 3 * [float("nan")]
    fill_nan(a.data[40, :1])

    out = aligned_gemm(*a, *b, ends_of([96, 160]))

    expected = torch.zeros(256, 256, dtype=torch.bool, device="cuda")
    expected[3], expected[40], expected[:96, 5], expected[96:, 200] = True, True, True, True
    assert torch.equal(out.isnan(), expected)


OVER_T = {
    "one group": (128, 256, [128]),
    "uneven and empty": (256, 512, [160, 0, 32, 96, 0, 1024]),
    "all empty": (128, 256, [0, 0]),
    "odd N and K": (96, 160, [64, 96, 32]),
    "33 experts": (64, 256, [32 * (i % 5) for i in range(33)]),
    "many tiles": (2048, 2304, [512, 2016]),
    "sizes of no multiple": (128, 256, [1, 2, 33, 0, 100, 127, 129, 31]),
}
"""name: (N, K, group sizes)"""


@pytest.mark.hopper
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", OVER_T)
def test_one_product_per_group_over_its_tokens(case, out_dtype, poisoned):
    rows, cols, sizes = OVER_T[case]
    (a, bounds), (b, _) = padded_columns(rows, sizes), padded_columns(cols, sizes)
    a_scale, b_scale = (torch.randint(-6, 6, (len(sizes), n), device="cuda").float().exp2() for n in (rows, cols))

    (out,) = aligned_gemm_over_t(a, a_scale, b, b_scale, ends_of(sizes), 1, out_dtype)

    assert out.shape == (len(sizes), rows, cols)
    assert out.dtype == out_dtype
    for group, (first, last) in enumerate(bounds):
        left, right = (Aligned(x[:, first:last], s[group]) for x, s in ((a, a_scale), (b, b_scale)))
        assert_within_rounding(out[group], left, right)


@pytest.mark.hopper
def test_parts_are_the_rows_of_one_product_in_order(poisoned):
    (a, _), (b, _) = padded_columns(320, [160, 0, 64]), padded_columns(256, [160, 0, 64])
    a_scale, b_scale = torch.rand(3, 320, device="cuda"), torch.rand(3, 256, device="cuda")
    ends = ends_of([160, 0, 64])

    parts = aligned_gemm_over_t(a, a_scale, b, b_scale, ends, 2)

    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, 1), aligned_gemm_over_t(a, a_scale, b, b_scale, ends)[0])


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [32, 160, 4096])
def test_dense_over_tokens(tokens, poisoned):
    a, b = random_fp8(320, tokens), random_fp8(288, tokens)
    first, second = aligned_gemm_over_t(*a, *b, parts=2)
    assert first.shape == second.shape == (160, 288)
    assert_within_rounding(torch.cat([first, second]), a, b)
    (again,) = aligned_gemm_over_t(a.data, a.scale.view(1, -1), b.data, b.scale.view(1, -1))
    assert torch.equal(again, torch.cat([first, second]))


@pytest.mark.hopper
def test_a_cuda_graph_follows_the_group_ends_in_memory():
    a, b, ends = random_fp8(512, 256), random_fp8(2, 256, 256), ends_of([128, 128])
    aligned_gemm(*a, *b, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = aligned_gemm(*a, *b, ends)
    ends.copy_(ends_of([32, 448]))
    graph.replay()
    assert torch.equal(out, aligned_gemm(*a, *b, ends))


@pytest.mark.hopper
def test_rows_past_2_31_elements_are_reached():
    """T * N is 2.2 * 2**31 elements of output, T * K as many of input."""
    tokens, size = 2**21 + 4096, 2304
    a = Aligned(torch.zeros(tokens, size, device="cuda", dtype=torch.float8_e4m3fn), torch.ones(tokens, device="cuda"))
    a.data[-96:] = random_fp8(96, size).data
    b, ends = random_fp8(2, size, size), ends_of([tokens - 96, 96])
    out = aligned_gemm(*a, *b, ends)
    assert out[:-96].count_nonzero() == 0
    assert_within_rounding(out[-96:], Aligned(a.data[-96:], a.scale[-96:]), Aligned(b.data[1], b.scale[1]))


@pytest.mark.hopper
@pytest.mark.parametrize("experts", [None, 2])
def test_ops_pass_opcheck(experts):
    checks = ("test_autograd_registration", "test_faketensor")  # the others compare inputs, which FP8 cannot
    ends = None if experts is None else ends_of([32, 32])
    a, b = random_fp8(64, 96), random_fp8(*([] if experts is None else [experts]), 64, 96)
    torch.library.opcheck(torch.ops.mxfp8_titan.aligned_gemm.default, (*a, *b, ends), test_utils=checks)
    a, b = (random_fp8(n, 320).data for n in (64, 96))
    scales = torch.ones(experts or 1, 64, device="cuda"), torch.ones(experts or 1, 96, device="cuda")
    arguments = a, scales[0], b, scales[1], ends, 2
    torch.library.opcheck(torch.ops.mxfp8_titan.aligned_gemm_over_t.default, arguments, test_utils=checks)


@pytest.mark.parametrize("sizes", [[64, 0, 96], [0, 0, 160]])
def test_the_reference_is_float64_rounded(sizes):
    a, b = random_fp8(192, 96, device="cpu"), random_fp8(3, 64, 96, device="cpu")
    ends = ends_of(sizes, "cpu")
    out = ref.aligned_gemm(a, b, ends)
    assert not out[160:].any()
    for expert, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        if start < end:
            rows = Aligned(a.data[start:end], a.scale[start:end])
            assert_within_rounding(out[start:end], rows, Aligned(b.data[expert], b.scale[expert]))
    dense = Aligned(b.data[0], b.scale[0])
    assert_within_rounding(ref.aligned_gemm(a, dense, None, torch.float32), a, dense)


def test_the_reference_over_tokens_is_float64_rounded():
    sizes = [160, 0, 32]
    (a, bounds), (b, _) = padded_columns(64, sizes, "cpu"), padded_columns(96, sizes, "cpu")
    a, b = Aligned(a, torch.rand(3, 64)), Aligned(b, torch.rand(3, 96))
    out = torch.cat(ref.aligned_gemm_over_t(a, b, ends_of(sizes, "cpu"), parts=2), 1)
    for group, (first, last) in enumerate(bounds):
        left, right = (Aligned(x.data[:, first:last], x.scale[group]) for x in (a, b))
        assert_within_rounding(out[group], left, right)


def operands(device="cpu"):
    return [*random_fp8(64, 64, device=device), *random_fp8(2, 96, 64, device=device), ends_of([32, 32], device)]


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, torch.zeros(64, 64), TypeError, "a, a_scale are torch.float32, torch.float32, need torch.float8_e4m3fn"),
        (0, torch.zeros(64, 32).to(torch.float8_e4m3fn), ValueError, r"need \(T, K\) and \(E, N, K\) with group_ends"),
        (1, torch.ones(65), ValueError, r"a_scale is \(65,\), needs"),
        (3, torch.ones(2, 96).double(), TypeError, "b, b_scale are torch.float8_e4m3fn, torch.float64"),
        (4, None, ValueError, r"need \(T, K\) and \(N, K\) without group_ends"),
        (4, torch.tensor([32, 64]), TypeError, "group_ends is torch.int64, needs int32"),
        (4, torch.tensor([64], dtype=torch.int32), ValueError, "group_ends has 1 entries, needs one for each of 2"),
    ],
)
def test_arguments_are_checked(position, value, error, message):
    arguments = operands()
    arguments[position] = value
    with pytest.raises(error, match=message):
        aligned_gemm(*arguments)


def test_a_matrix_that_is_not_contiguous_says_so():
    a, a_scale, b, b_scale, ends = operands()
    with pytest.raises(ValueError, match=r"need contiguous tensors, b 16-byte aligned: call \.contiguous"):
        aligned_gemm(a, a_scale, b.transpose(1, 2).contiguous().transpose(1, 2), b_scale, ends)


def test_sizes_must_hold_whole_blocks():
    a, b = random_fp8(64, 48, device="cpu"), random_fp8(96, 48, device="cpu")
    with pytest.raises(ValueError, match="K is 48, needs a multiple of 32, above 0"):
        aligned_gemm(*a, *b)
    with pytest.raises(ValueError, match="T' is 48, needs a multiple of 32"):
        aligned_gemm_over_t(*a, *b)


def test_group_ends_without_a_dim_are_named():
    a, a_scale, b, b_scale, ends = operands()
    with pytest.raises(ValueError, match=r"group_ends is \(\), needs one contiguous dim"):
        aligned_gemm(a, a_scale, b, b_scale, ends[0])
    with pytest.raises(ValueError, match=r"group_ends is \(\), needs one contiguous dim"):
        aligned_gemm_over_t(a, a_scale, a, a_scale, ends[0])


def test_parts_must_be_whole_boxes_of_rows():
    a, b = random_fp8(96, 64, device="cpu"), random_fp8(96, 64, device="cpu")
    with pytest.raises(ValueError, match="parts is 5, needs a divisor of N, which is 96"):
        aligned_gemm_over_t(*a, *b, parts=5)
    with pytest.raises(ValueError, match="N / parts is 48, needs a multiple of 32"):
        aligned_gemm_over_t(*a, *b, parts=2)


def test_a_cpu_tensor_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="needs a CUDA device: this is a Gluon kernel for Hopper"):
        aligned_gemm(*operands())
    a = random_fp8(64, 64, device="cpu")
    with pytest.raises(ValueError, match=r"Elsewhere use mxfp8_titan\.reference\.aligned_gemm"):
        aligned_gemm_over_t(*a, *a)


def test_fakes_have_the_shapes_and_strides_of_the_results():
    with torch._subclasses.FakeTensorMode():
        a, a_scale = torch.empty(70, 64, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(70, device="cuda")
        b, b_scale = torch.empty(2, 96, 64, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(2, 96, device="cuda")
        ends = torch.empty(2, dtype=torch.int32, device="cuda")
        out = torch.ops.mxfp8_titan.aligned_gemm(a, a_scale, b, b_scale, ends)
        assert (out.shape, out.stride(), out.dtype) == ((70, 96), (96, 1), torch.bfloat16)
        a, b = (torch.empty(n, 320, dtype=torch.float8_e4m3fn, device="cuda") for n in (64, 96))
        scales = torch.empty(2, 64, device="cuda"), torch.empty(2, 96, device="cuda")
        parts = torch.ops.mxfp8_titan.aligned_gemm_over_t(a, scales[0], b, scales[1], ends, 2, torch.float32)
        assert [(p.shape, p.stride(), p.dtype) for p in parts] == 2 * [((2, 32, 96), (3072, 96, 1), torch.float32)]
