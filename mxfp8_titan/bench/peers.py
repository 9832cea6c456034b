"""The quantizers beside what others do for the same result: torch.compile of plain PyTorch, and torchao.

Every version gets the same random bf16 tensor, writes RCEIL and plain scales, and is timed as the kernel is. Before
that its outputs are compared with the kernel's, so that no version is timed at less work or at other work.

torch.compile: Inductor's code for this project's reference functions as they stand. An output that ends in a bitcast
it may write twice.

torchao (read in 0.18.0): `to_mx` through torch.compile, as its users run it. It does what the kernels do, with two
differences that no random tensor shows: a block with an Inf becomes byte 254, not a block of NaN, and a block whose
byte is 0 is not scaled. Along T it needs the transposed tensor contiguous: that copy is compiled with it and counts.
SwiGLU and its gradient, which it has not, are put ahead of it as a bf16 model has them. For one scale per row it has a
Triton kernel, which is run as it is. Its own kernels for MXFP8 (triton_to_mxfp8_dim0 and _dim1, mxfp8_quantize_cuda,
CuTe DSL) refuse every GPU below compute capability 10.0, so on an H200 they are no peers.
"""

import time
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor
from torch.nn.functional import silu

from mxfp8_titan.bench.quantize import OPS, Op, median_us
from mxfp8_titan.bench.results import Row
from mxfp8_titan.format import BLOCK_SIZE, RCEIL
from mxfp8_titan.reference import swiglu as ref_swiglu
from mxfp8_titan.reference.quantize import quantize_along_k

SECONDS = 100
"""After so many no further op is begun: each version has to be compiled."""

MOST_DIFFERING = 1 / 8
"""Share of an output's bytes. bf16 keeps 4 bits more than E4M3, so 1 in 16 SwiGLU products rounded to bf16 lies
halfway between two, and half of those go the other way: 4 % of data, 0.4 % of scale bytes on random tensors (CPU).
Other blocks or another order move nearly all."""

FAILURES = (ImportError, RuntimeError, AssertionError, ValueError, TypeError, triton.TritonError)
"""What a missing package, an unsupported GPU, a failed compilation or a wrong answer raise."""

Version = Callable[..., tuple[Tensor, ...]]


def _swiglu(dh: Tensor, h1: Tensor, h3: Tensor, rounding: str) -> tuple[Tensor, ...]:
    return quantize_along_k(ref_swiglu.swiglu(h1, h3), rounding)


def _swiglu_backward(dh: Tensor, h1: Tensor, h3: Tensor, rounding: str) -> tuple[Tensor, ...]:
    dh1, dh3 = ref_swiglu.swiglu_backward(dh, h1, h3)
    return *quantize_along_k(dh1, rounding), *quantize_along_k(dh3, rounding)


COMPILED = (
    "quantize_along_k",
    "quantize_along_t",
    "quantize_both",
    "quantize_3d_along_n",
    "quantize_3d_both",
    "quantize_aligned_along_k",
    "quantize_32x32_both",
)
"""Ops whose reference is timed as it stands: one of each kind, because a compilation takes seconds."""

REFERENCES: dict[str, Version] = {op.name: op.expected for op in OPS if op.name in COMPILED} | {
    "swiglu_forward": _swiglu,
    "swiglu_backward": _swiglu_backward,
}
"""By op: (*arguments, rounding) -> outputs."""


def compiled(function: Version) -> Version:
    """One graph, compiled for the shapes of the first call."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def torchao() -> dict[str, Version]:
    """By op: (*arguments) -> outputs under RCEIL, the kernel's or the first of them.

    Raises: ImportError without torchao, or with one that has no such functions.
    """
    from torchao.prototype.moe_training.kernels.float8_rowwise import triton_fp8_rowwise_2d_scale_and_cast
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def along_k(x: Tensor) -> tuple[Tensor, ...]:
        scale, data = to_mx(x.contiguous(), torch.float8_e4m3fn, BLOCK_SIZE, ScaleCalculationMode.RCEIL)
        return data, scale

    def along_t(x: Tensor) -> tuple[Tensor, ...]:
        return along_k(x.mT)

    def both(x: Tensor) -> tuple[Tensor, ...]:
        return *along_k(x), *along_t(x)

    def swiglu(dh: Tensor, h1: Tensor, h3: Tensor) -> tuple[Tensor, ...]:
        return along_k(silu(h1) * h3)

    def swiglu_backward(dh: Tensor, h1: Tensor, h3: Tensor) -> tuple[Tensor, ...]:
        return *along_k(torch.ops.aten.silu_backward(dh * h3, h1)), *along_k(dh * silu(h1))

    def aligned_along_k(x: Tensor) -> tuple[Tensor, ...]:
        # Its scale is the inverse of the kernel's.
        return triton_fp8_rowwise_2d_scale_and_cast(x, round_scales_to_power_of_2=True)[:1]

    return {
        "quantize_along_k": compiled(along_k),
        "quantize_along_t": compiled(along_t),
        "quantize_both": compiled(both),
        "quantize_3d_along_n": compiled(along_t),
        "quantize_3d_both": compiled(both),
        "quantize_aligned_along_k": aligned_along_k,
        "swiglu_forward": compiled(swiglu),
        "swiglu_backward": compiled(swiglu_backward),
    }


def check(outs: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> None:
    """Raises: ValueError when outs are not the kernel's, or the first of them, but for bytes that rounding moves."""
    if not outs:
        raise ValueError("returns nothing")
    for index, (out, mine) in enumerate(zip(outs, ours, strict=False)):
        what, needs = ((t.dtype, tuple(t.shape), t.stride()) for t in (out, mine))
        if what != needs:
            raise ValueError(f"output {index} is {what}, the kernel's is {needs}")
        share = (out.view(torch.uint8) != mine.view(torch.uint8)).sum().item() / max(mine.nbytes, 1)
        if share > MOST_DIFFERING:
            raise ValueError(f"output {index}: {share:.0%} of its bytes are not the kernel's")


def beside(op: Op, device: str = "cuda") -> Row | None:
    """The op on the first of its shapes beside each version that runs here; None where none does.

    Says for each version that doesn't, why.
    """
    arguments = op.prepare(torch.randn(op.shapes[0], device=device, dtype=torch.bfloat16))

    def ours() -> tuple[Tensor, ...]:
        return op.run(*arguments, RCEIL, *op.layouts[:1])

    def by_torch_compile() -> Callable[[], tuple[Tensor, ...]]:
        reference = compiled(REFERENCES[op.name])
        return lambda: reference(*arguments, RCEIL)

    def by_torchao() -> Callable[[], tuple[Tensor, ...]]:
        cast = torchao().get(op.name)
        if cast is None:
            raise NotImplementedError("it has no such function")
        return lambda: cast(*arguments)

    times = {"here": round(median_us(ours), 1)}
    for name, prepare in (("torch.compile", by_torch_compile), ("torchao", by_torchao)):
        times[name] = None
        try:
            call = prepare()
            check(call(), ours())
            times[name] = round(median_us(call), 1)
        except FAILURES as error:
            why = " ".join(str(error).split())[:200]
            print(f"{op.name} by {name}: not measured, {type(error).__name__}: {why}", flush=True)
    torch.compiler.reset()
    others = [us for name, us in times.items() if name != "here" and us is not None]
    if not others:
        return None
    case = " ".join(("x".join(map(str, op.shapes[0])), *op.layouts[:1]))
    speedup = round(min(others) / times["here"], 2)
    return Row(f"{op.name}_beside", speedup, "x the faster other", "", f"{case}, RCEIL", times)


def measure(ops: list[Op], seconds: float = SECONDS) -> Iterator[Row]:
    """Rows of ops that are in REFERENCES, each as soon as it is measured."""
    end = time.monotonic() + seconds
    for op in ops:
        if time.monotonic() > end:
            print(f"{op.name} by others: not measured, the {seconds:.0f} s for that are over")
        elif row := beside(op):
            yield row
