"""dB that Hopper's products lose against exact 1x32 emulation, both with bf16 outputs, by length of the sum."""

import torch
from torch import Tensor

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.hopper import HOPPER
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.bench.results import Row, print_table
from mxfp8_titan.job_config import MX, RECIPES, Recipe, recipe_from

LENGTHS = (2048, 5120, 32768, 131072)
OTHER = 1024
"""The two dims that are not summed over."""

LONGEST_ROW = 32768
"""Features are at most this many; only tokens, the sum of dw, are more."""


def measure() -> list[Row]:
    """Prints SQNR against float64 of y, dx and dw, full and fast accumulation, and returns the worst gaps."""
    table, gaps = [], {0.0: [], 1.0: []}
    choices = {
        "1x32": (REFERENCE, RECIPES["mxfp8_emulated_rceil"]),
        "library": (HOPPER, recipe_from(MX(gemm="library"), "mxfp8_hopper")),
        "own": (HOPPER, recipe_from(MX(gemm="own"), "mxfp8_hopper")),
        "fast": (HOPPER, recipe_from(MX(fast_accumulation=True), "mxfp8_hopper")),
    }
    for mean in gaps:
        for length in LENGTHS:
            for product in ("y", "dx", "dw"):
                if product != "dw" and length > LONGEST_ROW:
                    continue
                found = {name: _sqnr_of(product, length, mean, *choice) for name, choice in choices.items()}
                table.append((f"normal + {mean:g}" if mean else "normal", product, length, *found.values()))
                gaps[mean].append((found["1x32"] - min(found["library"], found["own"]), product, length))
    print_table(["data", "product", "summed over", *choices], table)
    rows = []
    for (_, worst), (id, target) in zip(
        gaps.items(), (("sqnr_gap_normal", "<= 0.05"), ("sqnr_gap_mean", "<= 0.3")), strict=True
    ):
        gap, product, length = max(worst)
        rows.append(Row(id, round(gap, 3), "dB", target, f"{product}, sum over {length}, library and own GEMMs"))
    return rows


def sqnr(actual: Tensor, exact: Tensor) -> float:
    """Signal to noise in dB of a result beside the exact one, fp64."""
    return 20 * torch.log10(exact.norm() / (actual.double() - exact).norm()).item()


def _sqnr_of(product: str, length: int, mean: float, backend: Backend, recipe: Recipe) -> float:
    """Of y, dx or dw, whose sum has this length."""
    summed = {"y": "k", "dx": "n", "dw": "t"}[product]
    t, n, k = (length if dim == summed else OTHER for dim in "tnk")
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device="cuda", generator=generator) + mean).bfloat16()

    x, w, dy = random(t, k), random(n, k), random(t, n)
    x, w = x.requires_grad_(product == "dw"), w.requires_grad_(product == "dw")
    if product == "dx":
        x = x.requires_grad_()
    y = LinearFunction.apply(x, w, None, recipe, backend, torch.bfloat16)
    if product != "y":
        y.backward(dy)
    result, exact = {
        "y": lambda: (y, x.double() @ w.double().t()),
        "dx": lambda: (x.grad, dy.double() @ w.double()),
        "dw": lambda: (w.grad, dy.double().t() @ x.double()),
    }[product]()
    return sqnr(result.detach(), exact)
