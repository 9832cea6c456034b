"""What a call costs the host, and what the first step costs while nothing is compiled yet."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from mxfp8_titan.bench.results import Row, print_table
from mxfp8_titan.bench.timing import host_us
from mxfp8_titan.format import BLOCKED, PLAIN, RCEIL
from mxfp8_titan.kernels import (
    quantize,
    quantize_32x32,
    quantize_aligned,
    quantize_aligned_t,
    quantize_aligned_weights,
    scale_swizzle,
    swiglu,
    swiglu_aligned,
    zero_rows,
)


def launchers() -> dict[str, Callable[[], object]]:
    """Every launcher of a training step by name, on small tensors: token groups, experts, both scale layouts."""
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([128, 256], device="cuda", dtype=torch.int32)
    scale = torch.ones(256, 8, device="cuda", dtype=torch.uint8)
    h13 = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    data, row_scale, amax = quantize_aligned.quantize_aligned_along_k_with_amax(x, RCEIL, ends)
    w_amax = quantize_aligned_weights.quantize_aligned_weights([w], RCEIL)[2]
    torch.cuda.synchronize()
    return {
        "quantize_along_k": lambda: quantize.quantize_along_k(x, RCEIL),
        "quantize_along_k groups": lambda: quantize.quantize_along_k(x, RCEIL, BLOCKED, ends),
        "quantize_along_t": lambda: quantize.quantize_along_t(x, RCEIL),
        "quantize_along_t groups": lambda: quantize.quantize_along_t(x, RCEIL, BLOCKED, ends),
        "quantize_both": lambda: quantize.quantize_both(x, RCEIL),
        "quantize_both groups": lambda: quantize.quantize_both(x, RCEIL, BLOCKED, ends),
        "quantize_both experts": lambda: quantize.quantize_both(w, RCEIL, BLOCKED),
        "quantize_aligned_along_k": lambda: quantize_aligned.quantize_aligned_along_k(x, RCEIL, ends),
        "quantize_aligned_along_k_with_amax": lambda: quantize_aligned.quantize_aligned_along_k_with_amax(
            x, RCEIL, ends
        ),
        "requantize_aligned_along_t": lambda: quantize_aligned_t.requantize_aligned_along_t(
            data, row_scale, amax, RCEIL, ends
        ),
        "quantize_aligned_along_t": lambda: quantize_aligned_t.quantize_aligned_along_t(x, RCEIL, ends),
        "padded_group_ends": lambda: quantize_aligned_t.padded_group_ends(ends),
        "quantize_aligned_weights": lambda: quantize_aligned_weights.quantize_aligned_weights([w, w], RCEIL),
        "quantize_aligned_weights_along_n": lambda: quantize_aligned_weights.quantize_aligned_weights_along_n(
            [w, w], w_amax, RCEIL
        ),
        "swiglu_aligned": lambda: swiglu_aligned.swiglu_aligned(h13, RCEIL, ends),
        "swiglu_aligned_backward": lambda: swiglu_aligned.swiglu_aligned_backward(x, h13, RCEIL, ends),
        "zero_rows_past": lambda: zero_rows.zero_rows_past(x, ends),
        "quantize_32x32_both": lambda: quantize_32x32.quantize_32x32_both(w, RCEIL, PLAIN),
        "swizzle": lambda: scale_swizzle.swizzle(scale),
        "swizzle_t_groups": lambda: scale_swizzle.swizzle_t_groups(scale, ends),
        "swizzle_k_groups": lambda: scale_swizzle.swizzle_k_groups(scale, ends),
        "swiglu": lambda: swiglu.swiglu(x, x, RCEIL, True, True),
        "swiglu_backward": lambda: swiglu.swiglu_backward(x, x, x, RCEIL, True, True),
    }


def measure_launch_overhead() -> list[Row]:
    """Prints the host time of one call of each launcher beside that of the allocations it makes."""
    empty = torch.empty(0, device="cuda")
    allocation = host_us(lambda: empty.new_empty((16, 16)))
    times = []
    for name, call in launchers().items():
        call()
        times.append((host_us(call), name))
    print_table(["launcher", "host us"], [(name, us) for us, name in times])
    print(f"one torch allocation: {allocation:.1f} us")
    worst, name = max(times)
    median = sorted(times)[len(times) // 2][0]
    detail = f"{name}; median of {len(times)} launchers {median:.1f} us; one torch allocation here {allocation:.1f} us"
    return [Row("launch_overhead", round(worst, 1), "us", "<= 20", detail)]


def measure_cold_first_step() -> list[Row]:
    """Seconds until every launcher has run once, in a new process with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        out = subprocess.run(
            [sys.executable, "-m", "mxfp8_titan.bench.host"],
            env=os.environ | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    times = json.loads(out.splitlines()[-1])
    print_table(["first call", "s"], list(times.items()))
    slowest = max(times, key=times.get)
    detail = f"{len(times)} launchers one after the other; slowest {slowest} {times[slowest]:.2f} s"
    return [Row("cold_first_step", round(sum(times.values()), 1), "s", "<= 60", detail)]


def _first_calls() -> dict[str, float]:
    """Seconds of each launcher's first call. The aligned kernels that make arguments for others count on their own."""
    times = {}
    start = time.perf_counter()
    for name, call in launchers().items():
        if not times:
            times["arguments"] = time.perf_counter() - start
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times[name] = time.perf_counter() - start
    return times


if __name__ == "__main__":
    print(json.dumps(_first_calls()))
