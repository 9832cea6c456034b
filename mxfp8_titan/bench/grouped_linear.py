"""A training step of grouped experts, MXFP8 on Hopper against bf16: quantization and all three products.

Everything a step pays on the device is timed: x, w and dy are bf16 when the clock starts, y, dx and dw are bf16 when it
stops. Each version is a CUDA graph, because a training step is queued ahead of the device; the host's own time for a
call is printed. The limit is the three FP8 GEMMs alone, each by the faster of the library (full accumulation) and this
project's kernel, plus every byte of quantization moved once at copy bandwidth: x, w and dy read in bf16 and written in
FP8 for two products.
"""

import csv
import math
import statistics
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends import hopper
from mxfp8_titan.backends.hopper import HOPPER
from mxfp8_titan.bench.results import Row, print_table, version
from mxfp8_titan.bench.shapes import GROUPED, random_ends
from mxfp8_titan.bench.timing import copy_gbps, forward_and_backward, graphed, host_us, in_turns_us
from mxfp8_titan.job_config import MX, Recipe, recipe_from

LARGE = (128000, 8192, 5120)

SMALL = (131072, 1408, 2048, 8)
"""(T, N, K, E) of DeepSeek-V3 16B's experts, 8 of them: users reported MXFP8 0.95 times as fast as bf16 there
(pytorch/torchtitan#2086)."""

GEMMS = ("library", "own")

TURNS_US = 20_000
"""Time that each version of a case gets; they take turns, because clocks depend on what ran before."""


@dataclass(frozen=True)
class Case:
    """One row of the table. Times in us; `scaled` is what `recipe` names: MXFP8 and whose GEMMs it ran, or the peer."""

    M: int
    N: int
    K: int
    G: int
    recipe: str
    bf16_fwd_bwd_us: float
    scaled_fwd_bwd_us: float
    scaled_fwd_bwd_speedup: float
    bf16_fwd_us: float
    scaled_fwd_us: float
    scaled_fwd_speedup: float
    limit_us: float
    share_of_limit: float


def recipe(gemm: str) -> Recipe:
    """mxfp8_hopper with the GEMMs named."""
    return recipe_from(MX(gemm=gemm), "mxfp8_hopper")


def measure(csv_path: Path | None = None, gemms: tuple[str, ...] = ("library", "auto")) -> list[Row]:
    """Prints the 24 cases for each choice of GEMMs; the figures are those of the last one.

    csv_path: where to write all of them
    """
    copy = copy_gbps()
    cases = []
    for shape in GROUPED:
        cases += _measure_case(*shape, gemms, copy)
        torch.cuda.empty_cache()
    print(f"host: {_host_us():.0f} us a forward and backward of mxfp8_hopper, {_host_us(bf16=True):.0f} of bf16")
    columns = [field.name for field in fields(Case)]
    print_table(columns, [astuple(case) for case in cases])
    if csv_path:
        with csv_path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(astuple(case) for case in cases)
    return _rows(cases, gemms)


def measure_small() -> list[Row]:
    """Prints SMALL with `auto`'s GEMMs, and torchao's where installed; the first as a row."""
    cases = _measure_case(*SMALL, ("auto",), copy_gbps())
    print_table([field.name for field in fields(Case)], [astuple(case) for case in cases])
    return [_worst("grouped_small", "", cases[:1], "scaled_fwd_bwd_speedup", "x bf16, fwd+bwd")]


def _rows(cases: list[Case], gemms: tuple[str, ...]) -> list[Row]:
    rows = []
    for gemm, id, target in ((gemms[0], "grouped_large_library", ">= 1.35"), (gemms[-1], "grouped_large", ">= 1.5")):
        large = [c for c in cases if c.recipe.endswith(gemm) and (c.M, c.N, c.K) == LARGE]
        rows.append(_worst(id, target, large, "scaled_fwd_bwd_speedup", "x bf16, fwd+bwd"))
    last = [case for case in cases if case.recipe.endswith(gemms[-1])]
    geomean = math.exp(statistics.fmean(math.log(case.scaled_fwd_bwd_speedup) for case in last))
    rows.append(Row("grouped_geomean", round(geomean, 3), "x bf16, fwd+bwd", ">= 1.35", f"{len(last)} shapes"))
    rows.append(_worst("grouped_worst", ">= 1.0", last, "scaled_fwd_bwd_speedup", "x bf16, fwd+bwd"))
    rows.append(_worst("share_of_limit", ">= 0.80", last, "share_of_limit", "limit / time"))
    return rows


def _worst(id: str, target: str, cases: list[Case], field: str, unit: str) -> Row:
    case = min(cases, key=lambda c: getattr(c, field))
    detail = (
        f"({case.M}, {case.N}, {case.K}, {case.G}) {case.recipe}: bf16 {case.bf16_fwd_bwd_us:.0f} us, "
        f"here {case.scaled_fwd_bwd_us:.0f}, limit {case.limit_us:.0f}"
    )
    return Row(id, getattr(case, field), unit, target, detail)


def _measure_case(tokens: int, n: int, k: int, groups: int, gemms: tuple[str, ...], copy: float) -> list[Case]:
    ends = random_ends(tokens, groups, seed=tokens + groups)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16) / 64).requires_grad_()
    dy = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)
    forwards = [lambda: torch._grouped_mm(x, w.mT, offs=ends)]
    names = [f"mxfp8_hopper {gemm}" for gemm in gemms]
    for gemm in gemms:
        how = recipe(gemm)
        forwards.append(lambda how=how: LinearFunction.apply(x, w, ends, how, HOPPER, torch.bfloat16))
    if peer := _peer():
        names.append(f"torchao {version('torchao')}")
        forwards.append(lambda: peer(x, w.mT, ends, pad_token_groups_for_grouped_mm=False))
    products = _products(x.detach(), w.detach(), dy, ends)
    steps = [lambda forward=forward: forward_and_backward(forward, dy, x, w) for forward in forwards]
    memory = torch.cuda.graph_pool_handle()
    times = in_turns_us([graphed(call, memory) for call in (*forwards, *steps, *products)], TURNS_US)
    fwd, both = times[: len(forwards)], times[len(forwards) : 2 * len(forwards)]
    alone = times[2 * len(forwards) :]
    limit = sum(map(min, zip(alone[:3], alone[3:], strict=True)))
    limit += 4 * (x.numel() + w.numel() + dy.numel()) / copy / 1000
    return [
        Case(
            tokens, n, k, groups, name,
            *(round(us, 1) for us in (both[0], both[i])), round(both[0] / both[i], 3),
            *(round(us, 1) for us in (fwd[0], fwd[i])), round(fwd[0] / fwd[i], 3),
            round(limit, 1), round(limit / both[i], 3),
        )
        for i, name in enumerate(names, 1)
    ]  # fmt: skip


def _peer() -> Callable[..., Tensor] | None:
    """torchao's FP8 row-wise grouped layer, fast accumulation, if torchao is installed."""
    try:
        from torchao.prototype.moe_training import fp8_grouped_mm
    except ImportError:
        return None
    return fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm


def _host_us(bf16: bool = False) -> float:
    """The host's time for one forward and backward, on tensors so small that the device waits for it."""
    ends = random_ends(256, 2)
    x, w, dy = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((256, 256), (2, 256, 256), (256, 256)))
    x, w, how = x.requires_grad_(), w.requires_grad_(), recipe("auto")

    def forward() -> Tensor:
        if bf16:
            return torch._grouped_mm(x, w.mT, offs=ends)
        return LinearFunction.apply(x, w, ends, how, HOPPER, torch.bfloat16)

    return host_us(lambda: forward_and_backward(forward, dy, x, w))


def _products(x: Tensor, w: Tensor, dy: Tensor, ends: Tensor) -> list[Callable[[], object]]:
    """y, dx and dw alone from quantized operands: the library's three, then ours."""
    how = recipe("library")
    tokens, grads = (HOPPER.quantize_tokens(t, ends, how, True) for t in (x, dy))
    weights = HOPPER.quantize_weights([w], how, True)
    for_dx = HOPPER.quantize_weights_for_dx([w], weights.kept, how)
    x_along_t, dy_along_t = (hopper.along_t(operand.dw, ends, how) for operand in (tokens, grads))
    calls = []
    for gemm in GEMMS:
        calls += [
            lambda gemm=gemm: hopper.rows_times(*tokens.rows, *weights.y, ends, gemm, False, torch.bfloat16),
            lambda gemm=gemm: hopper.rows_times(*grads.rows, *for_dx, ends, gemm, False, torch.bfloat16),
            lambda gemm=gemm: hopper.over_t(*dy_along_t, *x_along_t, ends, 1, gemm, False, torch.bfloat16),
        ]
    return calls
