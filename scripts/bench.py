"""Measures kernels on one GPU: one table per op, and with --json one results file for docs/benchmarks.
Then the quantizers beside torch.compile and torchao, where those run.

python scripts/bench.py --op quantize_both
python scripts/bench.py --op all --json docs/benchmarks/kernels.json
python scripts/bench.py --op grouped_linear --json docs/benchmarks/grouped_linear.json
python scripts/bench.py --op grouped_small layers accuracy aligned_gemm --json docs/benchmarks/gemm.json
"""

import argparse
from pathlib import Path

import torch

from mxfp8_titan.bench import (
    accuracy,
    aligned_gemm,
    grouped_linear,
    host,
    layers,
    peers,
    quantize,
    results,
    swizzle,
    timing,
)


def main() -> None:
    by_bandwidth = {op.name: op for op in quantize.OPS}
    others = {
        "swizzle_k_groups": swizzle.measure_k_groups,
        "swizzle_t_groups": swizzle.measure_t_groups,
        "swizzle_3d": swizzle.measure_3d,
        "launch_overhead": host.measure_launch_overhead,
        "cold_first_step": host.measure_cold_first_step,
    }
    gemms = {
        "aligned_gemm": aligned_gemm.measure,
        "grouped_linear": lambda: grouped_linear.measure(args.json and args.json.with_name("grouped_linear.csv")),
        "grouped_small": grouped_linear.measure_small,
        "layers": layers.measure,
        "accuracy": accuracy.measure,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*by_bandwidth, *others, *gemms]
    what = f"what to measure, of {', '.join(names)}; all (default) leaves out {', '.join(gemms)}"
    parser.add_argument("--op", nargs="+", default=["all"], choices=["all", *names], metavar="NAME", help=what)
    parser.add_argument("--json", type=Path, help="write the results here")
    beside = "leave out what others take for the quantizers' work (torch.compile, torchao), 100 s at most"
    parser.add_argument("--no-peers", dest="peers", action="store_false", help=beside)
    parser.add_argument("--commit", help="what to record when the tree is no git checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: no NVIDIA GPU is visible to PyTorch here, and bench.py measures one\n")
    wanted = [*by_bandwidth, *others] if "all" in args.op else args.op
    if args.json:
        try:
            results.read(args.json)
        except ValueError as error:
            parser.error(f"--json: {error}")

    torch.manual_seed(0)
    environment = results.environment(args.commit)
    print("  ".join(f"{key} {value}" for key, value in environment.items()))
    copy = timing.copy_gbps()
    print(f"device-to-device copy of 1 GiB: {copy:.0f} GB/s, read plus written")
    rows = [results.Row("copy", round(copy), "GB/s", "", "1 GiB device to device, read plus written")]
    for name in wanted:
        print(f"\n{name}", flush=True)
        rows += quantize.measure(by_bandwidth[name], copy) if name in by_bandwidth else (others | gemms)[name]()
        _save(args.json, environment, rows)
    # Last, so that neither their time nor what they leave in this process can cost a measurement above.
    quantizers = [by_bandwidth[name] for name in wanted if name in peers.REFERENCES and args.peers]
    if quantizers:
        print("\nquantizers beside others", flush=True)
    for row in peers.measure(quantizers):
        rows.append(row)
        _save(args.json, environment, rows)
    rows = _worst_ratio_only(rows)
    print()
    cells = [(r.id, f"{r.value:g}", r.unit, r.target, r.detail) for r in rows if r.us is None]
    results.print_table(["id", "value", "unit", "target", "detail"], cells)
    columns, lines = results.beside_others(results.as_dicts(rows))
    if lines:
        print()
        results.print_table(columns, lines)


def _save(path: Path | None, environment: dict[str, str], rows: list[results.Row]) -> None:
    """Called after every op, so that a run that is cut short leaves what it measured."""
    if path:
        results.write(path, environment, _worst_ratio_only(rows))


def _worst_ratio_only(rows: list[results.Row]) -> list[results.Row]:
    """Of the time ratios of RCEIL over FLOOR, which every op has, the largest, at the end."""
    ratios = [row for row in rows if row.id == results.WORST_OF_OPS]
    rows = [row for row in rows if row.id != results.WORST_OF_OPS]
    return [*rows, max(ratios, key=lambda row: row.value)] if ratios else rows


if __name__ == "__main__":
    main()
