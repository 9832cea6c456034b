"""Calls every launcher of mxfp8_titan.kernels at awkward sizes, for compute-sanitizer to watch. Compares nothing.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --padding 4096 --report-api-errors no \\
        python -m tests.kernels.every_kernel [--sizes first] [--only SUBSTRING] [--skip SUBSTRING] [--seconds N]

That variable makes each tensor an allocation of its own. Without it tensors are pieces of blocks of 2 MB or more, and
memcheck sees only what leaves a block. `--planted` shows that it sees: it must report 192 bytes written past a tensor.
Run once without the sanitizer before, so that Triton's cache is filled: `--part 3/16`, in 16 processes at once, takes
every sixteenth case.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mxfp8_titan.format import (
    BLOCK_SIZE,
    BLOCKED,
    GROUP_TILE,
    PLAIN,
    RCEIL,
    blocked_shape,
    blocked_shape_k_groups,
    blocked_shape_t_groups,
    round_up,
)
from mxfp8_titan.kernels.aligned_gemm import aligned_gemm, aligned_gemm_over_t
from mxfp8_titan.kernels.alignment_counts import alignment_counts
from mxfp8_titan.kernels.dot_scaled_gemm import gemm_of_rows, gemm_over_t
from mxfp8_titan.kernels.launch import launch
from mxfp8_titan.kernels.permute import gather_rows, gather_rows_backward, sum_rows
from mxfp8_titan.kernels.quantize import quantize_along_k, quantize_along_t, quantize_both
from mxfp8_titan.kernels.quantize_32x32 import quantize_32x32_both
from mxfp8_titan.kernels.quantize_aligned import quantize_aligned_along_k, quantize_aligned_along_k_with_amax
from mxfp8_titan.kernels.quantize_aligned_t import (
    column_amax,
    padded_group_ends,
    quantize_aligned_along_t,
    requantize_aligned_along_t,
)
from mxfp8_titan.kernels.quantize_aligned_weights import quantize_aligned_weights, quantize_aligned_weights_along_n
from mxfp8_titan.kernels.scale_swizzle import swizzle, swizzle_k_groups, swizzle_t_groups
from mxfp8_titan.kernels.scale_unswizzle import (
    unswizzle,
    unswizzle_k_groups,
    unswizzle_per_expert,
    unswizzle_t_groups,
)
from mxfp8_titan.kernels.swiglu import swiglu, swiglu_backward
from mxfp8_titan.kernels.swiglu_aligned import swiglu_aligned, swiglu_aligned_backward
from mxfp8_titan.kernels.zero_groups import zero_empty_groups
from mxfp8_titan.kernels.zero_rows import BLOCK, NUM_WARPS, zero_rows_kernel, zero_rows_past

HOPPER_ONLY = {"aligned_gemm", "aligned_gemm_over_t"}

Case = tuple
"""(variant, launcher, *its arguments)"""


@dataclass(frozen=True)
class Size:
    """Shapes of a set of cases, and the dtype and strides of what is quantized."""

    tokens: int
    k: int
    n: int
    experts: int
    dtype: torch.dtype
    form: str
    """contiguous, sliced (32 unused elements before each row, so that the last row ends the memory) or transposed"""

    def __str__(self) -> str:
        return f"T{self.tokens} K{self.k} N{self.n} E{self.experts}"


SIZES = [
    Size(97, 96, 160, 3, torch.bfloat16, "contiguous"),
    Size(300, 1376, 320, 33, torch.bfloat16, "sliced"),
    Size(1, 32, 96, 1, torch.float32, "contiguous"),
    Size(161, 160, 32, 3, torch.float16, "transposed"),
    Size(33, 9376, 96, 3, torch.bfloat16, "contiguous"),
]
"""The second has many tiles in every direction, the last one rows that take the configurations of long ones."""


def group_ends(size: Size, multiple: int, device: str) -> Tensor:
    """Sizes 0 : 3 : 2 : 1 : 0 ... in multiples of `multiple`, and rows past the last group where there are 16 rows."""
    weights = torch.tensor([3 * e % 4 for e in range(size.experts)])
    used = size.tokens - size.tokens // 16
    ends = used * weights.cumsum(0) // max(int(weights.sum()), 1)
    ends[-1] = used
    return (ends // multiple * multiple).to(torch.int32).to(device)


class Inputs:
    """What the launchers take at one size."""

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, device
        self.t, self.k, self.n, self.e = size.tokens, size.k, size.n, size.experts
        self.ends, self.whole_ends = (group_ends(size, multiple, device) for multiple in (1, BLOCK_SIZE))
        self.x, self.w = self.source(self.t, self.k), self.source(self.e, self.n, self.k)

    def source(self, *shape: int) -> Tensor:
        """Numbers to quantize."""
        *outer, rows, cols = shape
        if self.size.form == "transposed":
            return torch.randn(*outer, cols, rows, device=self.device).to(self.size.dtype).mT
        more = BLOCK_SIZE if self.size.form == "sliced" else 0
        return torch.randn(*outer, rows, cols + more, device=self.device).to(self.size.dtype)[..., more:]

    def fp8(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(torch.float8_e4m3fn)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)

    def scale_bytes(self, *shape: int) -> Tensor:
        return torch.full(shape, 127, dtype=torch.uint8, device=self.device).view(torch.float8_e8m0fnu)

    def empty(self, *shape: int) -> Tensor:
        """An output in the dtype of the source."""
        return torch.empty(shape, dtype=self.size.dtype, device=self.device)


def quantizers(i: Inputs) -> Iterator[Case]:
    for layout in (PLAIN, BLOCKED):
        for quantize in (quantize_along_k, quantize_along_t, quantize_both):
            ends = i.ends if quantize is quantize_along_k else i.whole_ends
            yield layout, quantize, i.x, RCEIL, layout
            yield f"{layout} groups", quantize, i.x, RCEIL, layout, ends
            yield f"{layout} experts", quantize, i.w, RCEIL, layout
        yield layout, quantize_32x32_both, i.w, RCEIL, layout
    phase = torch.tensor(40503, device=i.device)
    for variant, x, ends in (("", i.x, None), ("groups", i.x, i.ends), ("experts", i.w, None)):
        yield variant, alignment_counts, x, ends, phase, RCEIL, 11


def aligned_quantizers(i: Inputs) -> Iterator[Case]:
    for variant, x, ends in (("", i.x, None), ("groups", i.x, i.ends), ("experts", i.w, None)):
        yield variant, quantize_aligned_along_k, x, RCEIL, ends
        yield variant, quantize_aligned_along_k_with_amax, x, RCEIL, ends
        yield variant, quantize_aligned_along_t, x, RCEIL, ends
        yield variant, column_amax, x, ends
        amax = i.ones(1 if variant == "" else i.e, i.k)
        yield f"{variant} known maxima", quantize_aligned_along_t, x, RCEIL, ends, amax
        yield variant, requantize_aligned_along_t, i.fp8(*x.shape), i.ones(*x.shape[:-1]), amax, RCEIL, ends
    yield "", padded_group_ends, i.ends
    parts = [("two", [i.w, i.w]), ("cut", [i.w[:, :17], i.w[:, 17:]]), ("dense", [i.w[0]])]
    for variant, ws in parts:
        yield variant, quantize_aligned_weights, ws, RCEIL
        amax = i.ones(1 if variant == "dense" else i.e, i.k)
        yield variant, quantize_aligned_weights_along_n, ws, amax, RCEIL


def swiglus(i: Inputs) -> Iterator[Case]:
    dh, h1, h3 = (i.source(i.t, i.k) for _ in range(3))
    for along_k, along_t in ((True, False), (False, True), (True, True)):
        along = f"along{' k' * along_k}{' t' * along_t}"
        for variant, *how in (("", PLAIN, None), ("blocked groups", BLOCKED, i.whole_ends)):
            yield f"{along} {variant}", swiglu, h1, h3, RCEIL, along_k, along_t, *how
            yield f"{along} {variant}", swiglu_backward, dh, h1, h3, RCEIL, along_k, along_t, *how
    h13 = i.source(i.t, 2 * i.k)
    for variant, ends in (("", None), ("groups", i.ends)):
        yield variant, swiglu_aligned, h13, RCEIL, ends
        yield variant, swiglu_aligned_backward, dh, h13, RCEIL, ends


def swizzles(i: Inputs) -> Iterator[Case]:
    # Rows of whole 32-bit words and others take different paths, and so do columns.
    for cols, rows in {(i.k // BLOCK_SIZE, i.t), (round_up(i.k // BLOCK_SIZE, 4), round_up(i.t, 4))}:
        by_rows, by_columns = i.scale_bytes(rows, cols), i.scale_bytes(cols, rows).t()
        for variant, scale in (("", by_rows), ("column-major", by_columns)):
            yield f"{variant} {rows}x{cols}", swizzle, scale
            yield f"{variant} {rows}x{cols}", swizzle_t_groups, scale, i.ends
        yield f"experts {rows}x{cols}", swizzle, i.scale_bytes(i.e, rows, cols)
    blocks = round_up(i.t, BLOCK_SIZE) // BLOCK_SIZE
    for cols in {blocks, round_up(blocks, 4)}:
        by_rows, by_columns = i.scale_bytes(i.k, cols), i.scale_bytes(cols, i.k).t()
        yield f"{i.k}x{cols}", swizzle_k_groups, by_rows, i.whole_ends
        yield f"column-major {i.k}x{cols}", swizzle_k_groups, by_columns, i.whole_ends
        yield f"one program {i.k}x{cols}", swizzle_k_groups, by_rows, i.whole_ends, False
    cols = i.k // BLOCK_SIZE
    size = math.prod(blocked_shape(i.n, cols))
    of_t = i.scale_bytes(*blocked_shape_t_groups(i.t, cols, i.e))
    of_k = i.scale_bytes(*blocked_shape_k_groups(i.k, blocks, i.e))
    yield "", unswizzle, i.scale_bytes(*blocked_shape(i.t, cols)), i.t, cols
    yield "", unswizzle_per_expert, i.scale_bytes(i.e, size), i.n, cols
    yield "", unswizzle_t_groups, of_t, i.ends, i.t, cols
    yield "", unswizzle_k_groups, of_k, i.whole_ends, i.k, blocks


def moves(i: Inputs) -> Iterator[Case]:
    yield "", zero_rows_past, i.empty(i.t, i.n), i.ends
    yield "", zero_empty_groups, i.empty(i.e, i.n, i.k), i.ends
    for top_k in (1, 3):
        slot = torch.randperm(i.t * top_k, device=i.device)
        row, rows, scale = slot.argsort(), i.source(i.t * top_k, i.k), i.ones(i.t * top_k)
        yield f"top {top_k}", gather_rows, i.x, slot, top_k, None
        yield f"top {top_k} scaled", gather_rows, i.x, slot, top_k, scale
        yield f"top {top_k} based", sum_rows, rows, row, top_k, None, i.x
        yield f"top {top_k} scaled", sum_rows, rows, row, top_k, scale, None
        yield f"top {top_k}", gather_rows_backward, rows, i.x, row, top_k, scale


def aligned_gemms(i: Inputs) -> Iterator[Case]:
    for out_dtype in (torch.bfloat16, torch.float32):
        for product, n, k in (("y", i.n, i.k), ("dx", i.k, i.n)):
            a = i.fp8(i.t, k), i.ones(i.t)
            b = i.fp8(i.e, n, k), i.ones(i.e, n)
            yield f"{product} {out_dtype}", aligned_gemm, *a, b[0][0].clone(), b[1][0].clone(), None, out_dtype
            yield f"{product} {out_dtype} groups", aligned_gemm, *a, *b, i.ends, out_dtype
        for variant, ends in (("dw", None), ("dw groups", i.ends)):
            experts = 1 if ends is None else i.e
            cols = round_up(i.t, BLOCK_SIZE) + (0 if ends is None else GROUP_TILE * i.e)
            b = i.fp8(i.k, cols), i.ones(experts, i.k)
            for parts in (1, 2):
                a = i.fp8(parts * i.n, cols), i.ones(experts, parts * i.n)
                yield f"{variant} {out_dtype} in {parts}", aligned_gemm_over_t, *a, *b, ends, parts, out_dtype


def dot_scaled_gemms(i: Inputs) -> Iterator[Case]:
    def operand(rows: int, cols: int, shape: tuple[int, int], experts: int = 0) -> tuple[Tensor, Tensor]:
        outer = (experts,) if experts else ()
        return i.fp8(*outer, rows, cols), i.scale_bytes(*outer, math.prod(shape))

    for product, n, k in (("y", i.n, i.k), ("dx", i.k, i.n)):
        cols = k // BLOCK_SIZE
        for variant, ends, e in ((product, None, 0), (f"{product} groups", i.ends, i.e)):
            of_rows = blocked_shape_t_groups(i.t, cols, e) if e else blocked_shape(i.t, cols)
            pairs = [(*operand(i.t, k, of_rows), *operand(n, k, blocked_shape(n, cols), e)) for _ in range(2)]
            yield variant, gemm_of_rows, pairs[:1], ends, i.empty(i.t, n)
            yield f"{variant}, two", gemm_of_rows, pairs, ends, i.empty(i.t, n)
    tokens = round_up(i.t, BLOCK_SIZE)
    for variant, ends, e in (("dw", None, 0), ("dw groups", i.whole_ends, i.e)):
        shape = (lambda *s, e=e: blocked_shape_k_groups(*s, e)) if e else blocked_shape
        a, b = (operand(rows, tokens, shape(rows, tokens // BLOCK_SIZE)) for rows in (i.n, i.k))
        yield variant, gemm_over_t, *a, *b, ends, i.empty(*((e,) if e else ()), i.n, i.k)


def cases(size: Size, device: str) -> Iterator[Case]:
    """All cases of one size. Making them launches no kernel of ours."""
    i = Inputs(size, device)
    families = quantizers, aligned_quantizers, swiglus, swizzles, moves, aligned_gemms, dot_scaled_gemms
    return chain.from_iterable(family(i) for family in families)


def run(device: str, sizes: list[Size], wanted: Callable[[int, str], bool] = lambda number, name: True) -> int:
    """Runs the cases that are wanted by number and name, each named before it runs, and returns how many did."""
    on_gpu = device == "cuda"
    hopper = on_gpu and torch.cuda.get_device_capability() == (9, 0)
    done = number = 0
    for size in sizes:
        for variant, launcher, *arguments in cases(size, device):
            number += 1
            name = " ".join(filter(None, (launcher.__name__, variant, f"@ {size}")))
            if not wanted(number, name) or (launcher.__name__ in HOPPER_ONLY and not hopper):
                continue
            print(name, flush=True)
            launcher(*arguments)
            if on_gpu:
                torch.cuda.synchronize()
            done += 1
    return done


def write_past_the_end() -> None:
    """One row more than there is: 192 bytes of another tensor, or here of what an allocation is rounded up to."""
    out = torch.empty(33, 96, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([33], dtype=torch.int32, device="cuda")
    launch(zero_rows_kernel, 1, (out, ends), (34, 96, 1, 1), (BLOCK,), NUM_WARPS)
    torch.cuda.synchronize()


def main() -> int:
    """0; a fault of a kernel is an exception, or what the sanitizer reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=["first", "all"], default="all")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of the names of cases to run")
    parser.add_argument("--skip", default=None, metavar="SUBSTRING", help="of the names of cases not to run")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth case, for N processes at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after so many")
    parser.add_argument("--planted", action="store_true", help="only write past the end of a tensor, on purpose")
    given = parser.parse_args()
    if given.planted:
        write_past_the_end()
        print("192 bytes written past the end")
        return 0
    part, parts = map(int, given.part.split("/"))
    end = time.monotonic() + given.seconds
    late = 0

    def wanted(number: int, name: str) -> bool:
        nonlocal late
        chosen = given.only in name and (given.skip is None or given.skip not in name) and number % parts == part
        late += chosen and time.monotonic() >= end
        return chosen and time.monotonic() < end

    torch.manual_seed(0)
    done = run("cuda", SIZES[:1] if given.sizes == "first" else SIZES, wanted)
    print(f"{done} launches done" + (f", {late} not started: out of time" if late else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
