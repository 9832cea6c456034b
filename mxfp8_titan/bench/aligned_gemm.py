"""Times of the FP8 GEMMs for Hopper, beside torch's bf16 grouped GEMM and its FP8 row-wise one.

FP8 and bf16 GEMMs run the card into its power limit, and its clock then depends on what ran before. So all versions of
a case take turns, and a speed-up is that of the medians of many turns.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mxfp8_titan.bench.results import Row, print_table
from mxfp8_titan.bench.shapes import random_ends
from mxfp8_titan.bench.timing import in_turns_us
from mxfp8_titan.format import BLOCK_SIZE, GROUP_TILE, round_up
from mxfp8_titan.kernels.aligned_gemm import aligned_gemm, aligned_gemm_over_t
from mxfp8_titan.reference import aligned_gemm as ref
from mxfp8_titan.reference.quantize_aligned import Aligned

TARGETS = {"y": ">= 1.60", "dx": ">= 1.60", "dw": ">= 1.50"}
"""Speed-up over bf16 that the worst of TARGET_CASES must reach."""

TARGET_CASES = [(tokens, 8192, 5120, groups) for tokens in (16384, 65536) for groups in (8, 16)]
"""(T, N, K, groups)"""

MORE_CASES = [
    (tokens, n, k, groups)
    for n, k in ((1536, 5120), (2048, 7168))
    for tokens in (16384, 128000)
    for groups in (1, 2, 4, 8)
]

DENSE = {"y": (65536, 8192, 5120), "dx": (65536, 5120, 8192), "dw": (8192, 5120, 65536)}
"""(rows, columns, length of the sum) of the three products of a dense layer."""

ALLOWED_ERROR = 2.0**-8
"""Norm of the difference from the reference, relative to the reference: both round to bf16 once."""


@dataclass(frozen=True)
class Versions:
    """One product in three versions, without arguments, and the FP8 reference of ours."""

    bf16: Callable[[], Tensor]
    library: Callable[[], Tensor]
    ours: Callable[[], Tensor]
    reference: Callable[[], Tensor]


def random_operand(*shape: int) -> Aligned:
    """Normal elements, random powers of two as scales."""
    data = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return Aligned(data, torch.randint(-4, 4, shape[:-1], device="cuda").float().exp2())


def rows_times_matrices(tokens: int, n: int, k: int, ends: Tensor) -> Versions:
    """(T, k) times the (n, k) matrix of each group: y, and dx with n and k exchanged."""
    a, b = random_operand(tokens, k), random_operand(ends.shape[0], n, k)
    a_bf16, b_bf16 = a.data.bfloat16(), b.data.bfloat16().mT
    return Versions(
        lambda: torch._grouped_mm(a_bf16, b_bf16, offs=ends),
        lambda: torch._scaled_grouped_mm(
            a.data, b.data.mT, a.scale, b.scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
        ),
        lambda: aligned_gemm(*a, *b, ends),
        lambda: ref.aligned_gemm(a, b, ends),
    )


def over_tokens(tokens: int, n: int, k: int, ends: Tensor) -> Versions:
    """dw of each group. Ours reads groups padded to 128 tokens; the others, which need no padding, the same tokens."""
    groups = ends.shape[0]
    columns = round_up(tokens, BLOCK_SIZE) + GROUP_TILE * groups
    a, b = (random_operand(rows, columns).data for rows in (n, k))
    plain = [torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16) for rows in (n, k)]
    starts = [0, *ends.tolist()]
    for (first, last), start, end in zip(ref.padded_bounds(ends, columns), starts, starts[1:], strict=False):
        for x, out in zip((a, b), plain, strict=True):
            x.view(torch.uint8)[:, first + end - start : last] = 0
            out[start:end] = x[:, first : first + end - start].bfloat16().t()
    a_scale, b_scale = (torch.randint(-4, 4, (groups, rows), device="cuda").float().exp2() for rows in (n, k))
    packed_a, packed_b = (x.t().contiguous().to(torch.float8_e4m3fn) for x in plain)
    return Versions(
        lambda: torch._grouped_mm(plain[0].t(), plain[1], offs=ends),
        lambda: torch._scaled_grouped_mm(
            packed_a, packed_b.t(), a_scale.view(-1), b_scale.view(-1), offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=False,
        ),
        lambda: aligned_gemm_over_t(a, a_scale, b, b_scale, ends)[0],
        lambda: ref.aligned_gemm_over_t(Aligned(a, a_scale), Aligned(b, b_scale), ends)[0],
    )  # fmt: skip


def dense(tokens: int, n: int, k: int) -> Versions:
    """(T, k) times one (n, k) matrix."""
    a, b = random_operand(tokens, k), random_operand(n, k)
    a_bf16, b_bf16 = a.data.bfloat16(), b.data.bfloat16().t()
    return Versions(
        lambda: torch.mm(a_bf16, b_bf16),
        lambda: torch._scaled_mm(
            a.data, b.data.t(), a.scale.view(-1, 1), b.scale.view(1, -1), out_dtype=torch.bfloat16,
            use_fast_accum=False,
        ),
        lambda: aligned_gemm(*a, *b),
        lambda: ref.aligned_gemm(a, b),
    )  # fmt: skip


def product(name: str, tokens: int, n: int, k: int, groups: int) -> Versions:
    """y, dx or dw of experts with weights (n, k), in groups of uneven random sizes."""
    ends = random_ends(tokens, groups)
    if name == "dw":
        return over_tokens(tokens, n, k, ends)
    return rows_times_matrices(tokens, *((n, k) if name == "y" else (k, n)), ends)


def check(versions: Versions, case: str) -> None:
    """Raises: AssertionError when ours is not the reference's product."""
    ours, expected = versions.ours().double(), versions.reference().double()
    error = ((ours - expected).norm() / expected.norm()).item()
    assert error <= ALLOWED_ERROR, f"{case}: relative error {error}"


def line(name: str, shape: tuple[int, ...], versions: Versions) -> tuple:
    """What the table says of one case: TFLOP/s of each version, speed-ups of the library's FP8 and of ours."""
    bf16, library, ours = in_turns_us([versions.bf16, versions.library, versions.ours])
    operations = 2 * shape[0] * shape[1] * shape[2] / 1e6
    return name, str(shape), operations / bf16, operations / library, operations / ours, bf16 / library, bf16 / ours


def measure() -> list[Row]:
    """Prints every case; returns the worst speed-up of y, dx and dw over bf16."""
    table, worst = [], {}
    for shape in TARGET_CASES:
        for name in TARGETS:
            versions = product(name, *shape)
            check(versions, f"{name} {shape}")
            table.append(line(name, shape, versions))
            if name not in worst or table[-1][-1] < worst[name][-1]:
                worst[name] = table[-1]
    for shape in MORE_CASES:
        table += [line(name, shape, product(name, *shape)) for name in TARGETS]
    dense_lines = {name: line(f"dense {name}", shape, dense(*shape)) for name, shape in DENSE.items()}
    table += dense_lines.values()
    print_table(["product", "T, N, K, groups", "bf16", "library FP8", "ours", "library / bf16", "ours / bf16"], table)
    print("TFLOP/s and speed-ups; library FP8 is row-wise with full accumulation")
    grouped_rows = [
        Row(
            f"gemm_{name}",
            round(found[-1], 3),
            "x bf16",
            TARGETS[name],
            f"worst of {len(TARGET_CASES)}: {_rates(found)}",
        )
        for name, found in worst.items()
    ]
    # Dense layers run the library's, see backends.hopper.
    dense_rows = [
        Row(f"dense_gemm_{name}", round(found[-2], 3), "x bf16", "", f"library FP8 over bf16: {_rates(found)}")
        for name, found in dense_lines.items()
    ]
    return grouped_rows + dense_rows


def _rates(found: tuple) -> str:
    _, shape, bf16, library, ours, *_ = found
    return f"{shape}; ours {ours:.0f} TFLOP/s, bf16 {bf16:.0f}, library FP8 {library:.0f}"
