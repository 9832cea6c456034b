"""The products of whichever recipes this GPU has: checked against emulation, timed beside bf16.

python -m mxfp8_titan.bench.products check | gemms | grouped [--quick]

Prints one Markdown table, line by line. What is timed is what select.py says runs here. Shapes of the grouped table
are those of docs/backends.md.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends.blackwell import BLACKWELL
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.backends.select import current_device, select
from mxfp8_titan.bench.accuracy import sqnr
from mxfp8_titan.bench.shapes import GROUPED
from mxfp8_titan.bench.timing import device_us, forward_and_backward
from mxfp8_titan.format import BLOCKED, RCEIL
from mxfp8_titan.job_config import MX, RECIPES, Recipe, recipe_from
from mxfp8_titan.kernels.dot_scaled_gemm import gemm_of_rows, gemm_over_t
from mxfp8_titan.kernels.quantize import quantize_along_k, quantize_along_t
from mxfp8_titan.reference import dot_scaled_gemm as ref

GEMMS = [(16384, 8192, 5120, 0), (16384, 8192, 5120, 8), (16384, 5120, 8192, 0), (16384, 1536, 5120, 0)]
"""(T, N, K, E), 0 experts for dense."""

LOST_DB = 0.3
"""Signal to noise, dB, that a product may lose against emulation: results are rounded to bf16."""

FP32_ERROR = 2.0**-16
"""Of the sum of the products' magnitudes, for the same operands added in another order."""


@dataclass(frozen=True)
class Check:
    """One line of the correctness table."""

    what: str
    ok: bool
    detail: str


def fast_recipes() -> list[tuple[Recipe, Backend]]:
    """Every recipe with tensor cores for this GPU, with each choice of GEMMs that its backend takes."""
    device = current_device()
    names = [name for name, recipe in RECIPES.items() if device.capability in recipe.capabilities]
    return [
        (recipe_from(MX(gemm=gemm), name), select(name, device).backend)
        for name in names
        for gemm in ("library", "own")
    ]


def check_all() -> Iterator[Check]:
    """The dot_scaled kernels and the backend made of them, native or emulated, then this GPU's own recipes."""
    if current_device().capability < (8, 9):
        yield Check("tl.dot_scaled kernels", True, f"skipped: Triton has no E4M3 for {current_device()}")
        return
    for grouped in (False, True):
        yield _check_own_kernel(grouped)
    recipes = fast_recipes()
    if BLACKWELL not in [backend for _, backend in recipes]:
        recipes.append((recipe_from(MX(gemm="own"), "mxfp8_cublas_rceil"), BLACKWELL))
    for recipe, backend in recipes:
        for grouped in (False, True):
            for name, function in (("linear", _linear), ("SwiGLU MLP", _mlp)):
                what = f"{recipe.name}, gemm={recipe.gemm}: {'experts' if grouped else 'dense'}, {name}"
                try:
                    yield _check_recipe(what, function, recipe, backend, grouped)
                except (ValueError, RuntimeError) as error:
                    yield Check(what, False, f"{type(error).__name__}: {error}".splitlines()[0])


def _check_own_kernel(grouped: bool) -> Check:
    ends = torch.tensor([160, 160, 2208, 3296], dtype=torch.int32, device="cuda") if grouped else None
    x = torch.randn(3328, 1376, device="cuda")
    w = torch.randn(*((4,) if grouped else ()), 544, 1376, device="cuda")
    a, b = quantize_along_k(x, RCEIL, BLOCKED, ends), quantize_along_k(w, RCEIL, BLOCKED)
    out = torch.empty(3328, 544, device="cuda")
    gemm_of_rows([(*a, *b)], ends, out)
    bound = x.abs() @ w.abs().flatten(0, -2).t()
    bound = bound.unflatten(1, (-1, 544)).amax(1)
    worst = ((out - ref.gemm_of_rows(*a, *b, ends, torch.float32)).abs() / bound).max().item()
    a, b = quantize_along_t(out, RCEIL, BLOCKED, ends), quantize_along_t(x, RCEIL, BLOCKED, ends)
    dw = torch.empty_like(w)
    gemm_over_t(*a, *b, ends, dw)
    bound = out.abs().t() @ x.abs()
    worst = max(worst, ((dw - ref.gemm_over_t(*a, *b, ends, torch.float32)).abs() / bound).max().item())
    what = f"tl.dot_scaled kernels: {'experts' if grouped else 'dense'}, y and dw"
    return Check(what, worst <= FP32_ERROR, f"worst error 2^{math.log2(max(worst, 2.0**-30)):.1f} of the magnitudes")


def _linear(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *how) -> Tensor:
    return LinearFunction.apply(x, w1, *how)


def _mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *how) -> Tensor:
    return SwiGLUMLPFunction.apply(x, w1, w2, w3, *how)


def _check_recipe(what: str, function: Callable[..., Tensor], recipe: Recipe, backend: Backend, grouped: bool) -> Check:
    experts = (4,) if grouped else ()
    shapes = (1024, 512), (*experts, 768, 512), (*experts, 512, 768), (*experts, 768, 512)
    tensors = [(torch.randn(shape, device="cuda") * 0.3).bfloat16() for shape in shapes]
    ends = torch.tensor([128, 128, 480, 992], dtype=torch.int32, device="cuda") if grouped else None
    if grouped:
        tensors[0][992:] = float("nan")

    def run(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        y = call(*leaves)
        y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    got = run(lambda *leaves: function(*leaves, ends, recipe, backend, torch.bfloat16), torch.bfloat16)
    emulated = run(lambda *leaves: function(*leaves, ends, recipe, REFERENCE, torch.bfloat16), torch.bfloat16)
    exact = run(lambda *leaves: _exactly(function is _mlp, ends, *leaves), torch.float64)
    lost = max(sqnr(e, x) - sqnr(g, x) for g, e, x in zip(got, emulated, exact, strict=True))
    zeros = not grouped or all((t[992:] == 0).all().item() for t in got[:2])
    return Check(what, lost <= LOST_DB and zeros, f"{lost:+.2f} dB lost at most{'' if zeros else ', tail not zero'}")


def _exactly(mlp: bool, ends: Tensor | None, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    def layer(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT if mlp else x @ w1.mT

    if ends is None:
        return layer(x, w1, w2, w3)
    bounds = zip([0, *ends.tolist()], ends.tolist(), strict=False)
    parts = [layer(x[start:end], w1[e], w2[e], w3[e]) for e, (start, end) in enumerate(bounds)]
    rest = x.new_zeros((x.shape[0] - int(ends[-1]), parts[0].shape[1]))
    return torch.cat([*parts, rest])


def gemm_table(shapes: list[tuple[int, int, int, int]]) -> Iterator[tuple]:
    """(shape, product, GEMMs, TFLOP/s of bf16, TFLOP/s here) of operands that are already quantized."""
    for shape in shapes:
        for recipe, backend in _timed_recipes():
            yield from _time_products(*shape, recipe, backend)


def _timed_recipes() -> list[tuple[Recipe, Backend]]:
    """Both roundings cost the same GEMMs: the first recipe of each choice."""
    return list({recipe.gemm: (recipe, backend) for recipe, backend in reversed(fast_recipes())}.values())[::-1]


def _tensors(tokens: int, n: int, k: int, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    experts = (groups,) if groups else ()
    x, w, dy = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, k), (*experts, n, k), (tokens, n))
    )
    if not groups:
        return x, w, dy, None
    sizes = torch.full((groups,), tokens // groups // 32 * 32)
    sizes[0] += tokens - sizes.sum()
    return x, w, dy, sizes.cumsum(0).to(torch.int32).cuda()


def _time_products(tokens: int, n: int, k: int, groups: int, recipe: Recipe, backend: Backend) -> list[tuple]:
    x, w, dy, ends = _tensors(tokens, n, k, groups)
    how = ends, recipe
    xq, dyq = (backend.quantize_tokens(t, ends, recipe, True) for t in (x, dy))
    wq = backend.quantize_weights([w], recipe, True)
    w_for_dx = backend.quantize_weights_for_dx([w], wq.kept, recipe)
    products = {
        "y": (lambda: backend.y(xq.rows, wq.y, *how, torch.bfloat16), lambda: _bf16(x, w.mT, ends)),
        "dx": (lambda: backend.dx(dyq.rows, w_for_dx, *how, torch.bfloat16), lambda: _bf16(dy, w, ends)),
        "dw": (lambda: backend.dw(dyq.dw, xq.dw, *how, 1, torch.bfloat16), lambda: _bf16(dy.t(), x, ends)),
    }
    flop = 2 * tokens * n * k / 1e6
    shape = f"({tokens}, {n}, {k})" + (f" x {groups}" if groups else "")
    return [
        (shape, name, recipe.gemm, round(flop / device_us(bf16)), round(flop / device_us(here)))
        for name, (here, bf16) in products.items()
    ]


def _bf16(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    return torch.mm(a, b) if ends is None else torch._grouped_mm(a, b, offs=ends)


def grouped_table(shapes: list[tuple[int, int, int, int]]) -> Iterator[tuple]:
    """(tokens, n, k, experts, GEMMs, us of bf16, us here, speed-up) of forward plus backward, quantization included."""
    for shape in shapes:
        x, w, dy, ends = _tensors(*shape)
        x.requires_grad_()
        w.requires_grad_()
        bf16 = _step_us(lambda x=x, w=w, ends=ends: _bf16(x, w.mT, ends), dy, x, w)
        for recipe, backend in _timed_recipes():
            how = ends, recipe, backend, torch.bfloat16
            here = _step_us(lambda x=x, w=w, how=how: LinearFunction.apply(x, w, *how), dy, x, w)
            yield *shape, recipe.gemm, round(bf16), round(here), round(bf16 / here, 2)


def _step_us(forward: Callable[[], Tensor], dy: Tensor, x: Tensor, w: Tensor) -> float:
    return device_us(lambda: forward_and_backward(forward, dy, x, w))


def main() -> int:
    """0, or 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["check", "gemms", "grouped"])
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.table == "check":
        rows = ((check.what, "ok" if check.ok else "WRONG", check.detail) for check in check_all())
        return 1 if "WRONG" in [row[1] for row in _printed(("product", "result", "detail"), rows)] else 0
    if not fast_recipes():
        print(f"no recipe uses the tensor cores of {current_device()} for MX or FP8: nothing to time")
    elif given.table == "gemms":
        columns = "shape", "product", "gemm", "bf16 TFLOP/s", "here TFLOP/s"
        _printed(columns, gemm_table(GEMMS[:2] if given.quick else GEMMS))
    else:
        columns = "M", "N", "K", "experts", "gemm", "bf16 us", "here us", "speed-up"
        _printed(columns, grouped_table(GROUPED[3:12:4] if given.quick else GROUPED))
    return 0


def _printed(columns: tuple, rows: Iterator[tuple]) -> list[tuple]:
    """The rows, each printed as it comes: what is known so far outlives a crash."""
    for line in (columns, ["---"] * len(columns)):
        print(f"| {' | '.join(line)} |")
    done = []
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        done.append(row)
    return done


if __name__ == "__main__":
    sys.exit(main())
