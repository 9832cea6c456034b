"""Times of the scale swizzles, beside torchao's kernels where torchao is installed."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from mxfp8_titan.bench.results import Row, print_table
from mxfp8_titan.bench.shapes import random_ends
from mxfp8_titan.bench.timing import eager_us, graph_us
from mxfp8_titan.kernels.scale_swizzle import swizzle, swizzle_k_groups, swizzle_t_groups
from mxfp8_titan.reference import scale_swizzle as ref

ROWS = (5120, 8192, 7168, 2048)
COLS = (512, 4096)
GROUPS = (8, 16)


def torchao_kernels() -> dict[str, Callable]:
    """torchao's Triton swizzles by case; empty when it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    from torchao.prototype.moe_training.kernels import mxfp8

    return {
        "k_groups": mxfp8.triton_mx_block_rearrange_2d_K_groups,
        "t_groups": mxfp8.triton_mx_block_rearrange_2d_M_groups,
        "3d": mxfp8.triton_mx_block_rearrange_per_group_3d,
    }


def random_scales(*shape: int) -> Tensor:
    return torch.randint(1, 255, shape, dtype=torch.uint8, device="cuda")


def measure_k_groups() -> list[Row]:
    """Prints times of the loop version and the parallel version; returns the rows of the speed-ups and eager time."""
    peer = torchao_kernels().get("k_groups")
    table, speedups, eager = [], {cols: [] for cols in COLS}, []
    for cols in COLS:
        for rows in ROWS:
            for groups in GROUPS:
                ends = random_ends(cols * 32, groups)
                plain = random_scales(rows, cols)
                assert torch.equal(swizzle_k_groups(plain, ends), ref.swizzle_k_groups(plain, ends)), "wrong bytes"
                moved = 2 * plain.numel()
                torch_us = eager_us(lambda s=plain, e=ends: ref.swizzle_k_groups(s, e), calls=5)
                for order, scale in (("row-major", plain), ("column-major", plain.t().contiguous().t())):
                    case = f"({rows}, {cols}) G={groups} {order}"
                    parallel = graph_us(lambda s=scale, e=ends: swizzle_k_groups(s, e))
                    loop = graph_us(lambda s=scale, e=ends: swizzle_k_groups(s, e, columns_in_parallel=False))
                    host = eager_us(lambda s=scale, e=ends: swizzle_k_groups(s, e))
                    detail = f"{case}: eager {host:.1f} us - 1.2 x graph {parallel:.2f} us"
                    eager.append((host - 1.2 * parallel, detail))
                    for version, us in (("loop", loop), ("parallel", parallel)):
                        table.append(
                            (version, case, torch_us, us, moved / torch_us / 1000, moved / us / 1000, torch_us / us)
                        )
                    if peer is not None:
                        columns = ends // 32
                        peer_us = graph_us(lambda s=scale, e=columns: peer(s, e))
                        table.append(
                            ("torchao", case, torch_us, peer_us, moved / torch_us / 1000, moved / peer_us / 1000,
                             torch_us / peer_us)
                        )  # fmt: skip
                        detail = f"{case}: torchao {peer_us:.2f} us, here {parallel:.2f} us, in a graph"
                        speedups[cols].append((peer_us / parallel, detail))
    print_table(
        ["kernel version", "input_shape", "torch_time_us", "triton_time_us", "torch_mem_bw_gbps", "triton_mem_bw_gbps",
         "triton_speedup"],
        table,
    )  # fmt: skip
    out = []
    for cols, target in zip(COLS, (">= 2.0", ">= 4.0"), strict=True):
        if speedups[cols]:
            value, detail = min(speedups[cols])
            out.append(Row(f"swizzle_k_groups_{cols}", round(value, 2), "speed-up", target, detail))
    value, detail = max(eager)
    out.append(Row("swizzle_k_groups_eager", round(value, 1), "us", "<= 15", detail))
    return out


def _against_torchao(row_id: str, target: str, case: str, ours: Callable, theirs: Callable | None) -> list[Row]:
    us = graph_us(ours)
    if theirs is None:
        print(f"{row_id} {case}: {us:.2f} us in a graph")
        return []
    peer_us = graph_us(theirs)
    print(f"{row_id} {case}: {us:.2f} us in a graph, torchao {peer_us:.2f} us")
    return [
        Row(row_id, round(peer_us / us, 2), "speed-up", target, f"{case}: torchao {peer_us:.1f} us, here {us:.2f} us")
    ]


def measure_t_groups() -> list[Row]:
    """Speed-up over torchao for (131072, 160): uneven random groups for the row, equal ones printed beside it."""
    scale, theirs = random_scales(131072, 160), torchao_kernels().get("t_groups")
    rows = []
    for kind, ends in (
        ("equal", torch.arange(1, 9, dtype=torch.int32, device="cuda") * 16384),
        ("uneven", random_ends(131072, 8)),
    ):
        assert torch.equal(swizzle_t_groups(scale, ends), ref.swizzle_t_groups(scale, ends)), "wrong bytes"
        rows = _against_torchao(
            "swizzle_t_groups_graph", ">= 10.0", f"(131072, 160), 8 {kind} groups",
            lambda e=ends: swizzle_t_groups(scale, e), theirs and (lambda e=ends: theirs(scale, e)),
        )  # fmt: skip
    return rows


def measure_3d() -> list[Row]:
    """Speed-up over torchao for (16, 8192, 160)."""
    scale, theirs = random_scales(16, 8192, 160), torchao_kernels().get("3d")
    assert torch.equal(swizzle(scale), ref.swizzle_per_expert(scale)), "wrong bytes"
    return _against_torchao(
        "swizzle_3d_graph", ">= 2.0", "(16, 8192, 160)", lambda: swizzle(scale), theirs and (lambda: theirs(scale))
    )
