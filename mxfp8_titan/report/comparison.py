"""What several runs of one job come down to beside each other: speed, memory, loss, and the noise of equal runs."""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

BASELINE = "bf16"

# NVIDIA's dense bf16 figures, without sparsity, in FLOP/s.
BF16_PEAKS = {"H100": 989e12, "H200": 989e12, "B200": 2.25e15, "A100": 312e12}


@dataclass(frozen=True)
class Logged:
    """One logged step of a run. tokens_per_second is per device, over the steps since the last logged one."""

    step: int
    loss: float
    tokens_per_second: float
    tflops: float
    reserved_gib: float
    active_gib: float


@dataclass(frozen=True)
class Row:
    """One run of the comparison. Speeds are tokens/s per device over the intervals after warm-up."""

    name: str
    median_tps: float
    min_tps: float
    max_tps: float
    speedup: float
    """median_tps over the baseline's."""
    tflops: float
    peak_percent: float | None
    """tflops over the device's bf16 peak; None for a device without a known one."""
    reserved_gib: float
    active_gib: float
    first_step_s: float
    final_loss: float
    largest_loss_gap: float
    """Largest difference to the baseline's loss at an equal step."""
    converted: str


def read_metrics(path: Path) -> list[Logged]:
    """The steps that --mx.metrics_file recorded in `path`, in order."""
    logged = []
    for line in path.read_text().splitlines():
        metrics = json.loads(line)
        logged.append(
            Logged(
                step=metrics["step"],
                loss=metrics["loss_metrics/global_avg_loss"],
                tokens_per_second=metrics["throughput(tps)"],
                tflops=metrics["tflops"],
                reserved_gib=metrics["memory/max_reserved(GiB)"],
                active_gib=metrics["memory/max_active(GiB)"],
            )
        )
    return logged


def after_warm_up(steps: list[Logged], warm_up: int) -> list[Logged]:
    """The intervals that lie wholly after step `warm_up`: compilation and autotuning happen before it.

    An interval reaches from the step logged before it, so the first one after step 1 is left out by warm_up >= 1.
    Raises: ValueError when no interval is left.
    """
    kept = [step for before, step in pairwise(steps) if before.step >= warm_up]
    if not kept:
        last = steps[-1].step if steps else 0
        raise ValueError(f"no logged interval lies after warm-up step {warm_up}; the run ended at step {last}")
    return kept


def bf16_peak(device: str) -> tuple[str, float] | None:
    """(name, FLOP/s) of the device's dense bf16 peak, or None: no peak is better than another device's."""
    return next(((name, peak) for name, peak in BF16_PEAKS.items() if name in device), None)


def make_row(
    name: str,
    steps: list[Logged],
    baseline: list[Logged],
    warm_up: int,
    tokens_per_step: int,
    device: str,
    converted: str,
) -> Row:
    """The row of a run with `steps`, against the run with the steps `baseline`.

    tokens_per_step: per device, to turn the first step's speed into its seconds
    """
    speeds = [step.tokens_per_second for step in after_warm_up(steps, warm_up)]
    base = median(step.tokens_per_second for step in after_warm_up(baseline, warm_up))
    base_losses = {step.step: step.loss for step in baseline}
    tflops = median(step.tflops for step in after_warm_up(steps, warm_up))
    peak = bf16_peak(device)
    return Row(
        name=name,
        median_tps=median(speeds),
        min_tps=min(speeds),
        max_tps=max(speeds),
        speedup=median(speeds) / base,
        tflops=tflops,
        peak_percent=100 * tflops * 1e12 / peak[1] if peak else None,
        reserved_gib=max(step.reserved_gib for step in steps),
        active_gib=max(step.active_gib for step in steps),
        first_step_s=tokens_per_step / steps[0].tokens_per_second,
        final_loss=steps[-1].loss,
        largest_loss_gap=max(abs(s.loss - base_losses[s.step]) for s in steps if s.step in base_losses),
        converted=converted,
    )


COLUMNS = (
    "run", "tokens/s per device", "min to max", "x bf16", "TFLOP/s", "% of bf16 peak", "reserved GiB",
    "active GiB", "first step s", "final loss", "largest loss gap", "converted",
)  # fmt: skip


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """Header and cells."""
    cells = [
        (
            row.name, f"{row.median_tps:,.0f}", f"{row.min_tps:,.0f} to {row.max_tps:,.0f}", f"{row.speedup:.3f}",
            f"{row.tflops:,.2f}", "n/a" if row.peak_percent is None else f"{row.peak_percent:.1f}",
            f"{row.reserved_gib:.2f}", f"{row.active_gib:.2f}", f"{row.first_step_s:.1f}",
            f"{row.final_loss:.4f}", f"{row.largest_loss_gap:.4f}", row.converted,
        )
        for row in rows
    ]  # fmt: skip
    return [COLUMNS, *cells]


def as_text(rows: list[Row]) -> str:
    """The table for a terminal."""
    lines = table(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def as_markdown(rows: list[Row], facts: dict[str, str], commands: dict[str, str]) -> str:
    """report.md: facts, table, what to keep in mind, pictures, command lines."""
    header, *body = table(rows)
    lines = ["# Comparison", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    lines += [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(f"| {' | '.join(line)} |" for line in body),
        "",
    ]
    lines += [*notes(rows), "", "![tokens per second](speed.png)", "", "![loss](loss.png)", "", "## Commands", ""]
    lines += [f"- {name}: `{command}`" for name, command in commands.items()]
    return "\n".join(lines) + "\n"


def notes(rows: list[Row]) -> list[str]:
    """Sentences that the numbers call for."""
    said = ["Memory is the first rank's peak, reserved and active. Speeds leave out the intervals up to warm-up."]
    again = next((row for row in rows if row.name == f"{BASELINE}_again"), None)
    if again:
        said.append(
            f"Noise: the same bf16 run twice differs by {100 * abs(again.speedup - 1):.1f} % in speed and by up to "
            f"{again.largest_loss_gap:.4f} in loss; smaller differences mean nothing."
        )
    over = [row.name for row in rows if row.peak_percent is not None and row.peak_percent > 100]
    if over:
        said.append(f"Above 100 % of the bf16 peak, which MXFP8 may be and bf16 may not: {', '.join(over)}.")
    return said


def as_json(rows: list[Row], steps: dict[str, list[Logged]], facts: dict[str, str], commands: dict[str, str]) -> str:
    """report.json: all of it, every logged step included."""
    return json.dumps(
        {
            **facts,
            "commands": commands,
            "rows": [asdict(row) for row in rows],
            "steps": {name: [asdict(step) for step in logged] for name, logged in steps.items()},
        },
        indent=1,
    )
