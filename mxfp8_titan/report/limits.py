"""How fast a run could be if its converted GEMMs took what FP8 GEMMs were measured to take, all else as in bf16."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from mxfp8_titan.report.inventory import Inventory
from mxfp8_titan.report.kernel_kinds import GEMM_DENSE, GEMM_GROUPED, QUANTIZATION
from mxfp8_titan.report.trace import Breakdown

_GEMMS = ("y", "dx", "dw")


@dataclass(frozen=True)
class GemmSpeedUps:
    """How many times faster than bf16 the FP8 GEMMs alone are, operands already quantized; and where that is from."""

    dense: float
    grouped: float
    source: str


@dataclass(frozen=True)
class Limit:
    """x bf16, tokens per second."""

    free_casts: float
    """Converted GEMMs at the measured FP8 rate, nothing else changed."""
    own_casts: float | None
    """The same with the quantization kernels of this run added; None without a trace of it."""


def read_speed_ups(path: Path, device: str) -> GemmSpeedUps | None:
    """From the results of `scripts/bench.py`: rows gemm_y, gemm_dx and gemm_dw, in multiples of bf16, and
    dense_gemm_y, ... where they exist; each is the worst of its shapes. A layer's three GEMMs have equal FLOPs, so
    their times are averaged.
    None when the file, a row or the device is missing: no limit is better than another device's."""
    if not path.exists():
        return None
    results = json.loads(path.read_text())
    if str(results.get("gpu")) not in device:
        return None
    values = {row["id"]: row["value"] for row in results.get("rows", [])}
    grouped = _mean_speed_up(values, "gemm_")
    if grouped is None:
        return None
    own_dense = _mean_speed_up(values, "dense_gemm_")
    what = "dense and grouped" if own_dense else "grouped, used for dense ones too"
    source = f"{path.name} of commit {results.get('commit')}, the worst shapes ({what})"
    return GemmSpeedUps(own_dense or grouped, grouped, source)


def _mean_speed_up(values: dict[str, float], prefix: str) -> float | None:
    found = [values.get(prefix + gemm) for gemm in _GEMMS]
    return len(found) / sum(1 / value for value in found) if all(found) else None


def parse_speed_ups(text: str) -> GemmSpeedUps:
    """'dense=1.6,grouped=1.7', as --gemm-speed-ups takes it.

    Raises: ValueError for anything else.
    """
    try:
        items = [item.split("=") for item in text.split(",")]
        given = {name: float(value) for name, value in items}
    except ValueError:
        items, given = [], {}
    if sorted(name for name, *_ in items) != ["dense", "grouped"] or not all(0 < v < math.inf for v in given.values()):
        raise ValueError(f"--gemm-speed-ups {text!r}, needs dense=NUMBER,grouped=NUMBER, such as dense=1.6,grouped=1.7")
    return GemmSpeedUps(**given, source="given by --gemm-speed-ups, not measured here")


def limit(
    step_ms: float, bf16: Breakdown, run: Breakdown | None, inventory: Inventory, speed_ups: GemmSpeedUps
) -> Limit | None:
    """The limit of a run with `inventory`, from the measured step and the breakdown of the bf16 run.

    The step is the measured one and not the traced one, whose wall time holds the profiler's cost too. The converted
    part of GEMM time is taken as the converted part of GEMM FLOPs.
    None for a run that converts nothing, and where the traced GEMMs would save as much as the measured step takes.
    """
    saved = 0.0
    for kind, modules, speed_up in (
        (GEMM_DENSE, inventory.dense, speed_ups.dense),
        (GEMM_GROUPED, inventory.experts, speed_ups.grouped),
    ):
        saved += bf16.shown_ms.get(kind, 0.0) * inventory.converted_share(modules) * (1 - 1 / speed_up)
    if inventory.converted == "nothing":
        return None
    free = step_ms - saved
    if free <= 0:
        return None
    own = free + run.shown_ms.get(QUANTIZATION, 0.0) if run else None
    return Limit(step_ms / free, step_ms / own if own else None)
