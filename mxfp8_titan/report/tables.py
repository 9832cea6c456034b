"""A comparison as text: tables for the terminal and report.md, what to keep in mind, and report.json."""

import json
from dataclasses import asdict

from mxfp8_titan.report import kernel_kinds as kinds
from mxfp8_titan.report.comparison import (
    AGAIN,
    BASELINE,
    LEAST_LOSS_NOISE,
    LOSS_AFTER,
    LOSS_WINDOW,
    Row,
    Run,
    loss_compared_after,
    too_short_to_judge,
)
from mxfp8_titan.report.limits import GemmSpeedUps

Table = list[tuple[str, ...]]
NONE = "n/a"
LOADING_SHARE = 0.1
"""Part of the time that loading data may take the host without a word about it."""


def speed_table(rows: list[Row]) -> Table:
    """Tokens per second and what they are held against."""
    header = (
        "run", "tokens/s per device", "min to max", "intervals", "tokens/s in all", "step ms", "x bf16",
        "limit, casts free", "limit, own casts", "TFLOP/s", "MFU %", "of peak",
    )  # fmt: skip
    return [
        header,
        *(
            (
                row.name, f"{row.median_tps:,.0f}", f"{row.min_tps:,.0f} to {row.max_tps:,.0f}", str(row.intervals),
                f"{row.total_tps:,.0f}", f"{row.step_ms:,.1f}", f"{row.speedup:.3f}",
                _number(row.limit and row.limit.free_casts, "{:.3f}"),
                _number(row.limit and row.limit.own_casts, "{:.3f}"), f"{row.tflops:,.2f}",
                _number(row.mfu_percent, "{:.1f}"), row.peak or "unknown device",
            )
            for row in rows
        ),
    ]  # fmt: skip


def state_table(rows: list[Row]) -> Table:
    """Memory, start, loss, routing and conversion."""
    header = (
        "run", "reserved GiB", "active GiB", "first step s", "final loss", "largest gap", "smoothed gap",
        "over noise", "routing", "busiest expert / mean", "converted", "runs on",
    )  # fmt: skip
    return [
        header,
        *(
            (
                row.name, f"{row.reserved_gib:.2f}", f"{row.active_gib:.2f}", f"{row.first_step_s:.1f}",
                f"{row.final_loss:.4f}", f"{row.largest_loss_gap:.4f}", f"{row.smoothed_loss_gap:.4f}",
                _number(row.loss_gap_over_noise, "{:.2f}"), row.routing, _number(row.imbalance, "{:.2f}"),
                row.converted, row.runs_on,
            )
            for row in rows
        ),
    ]  # fmt: skip


def breakdown_table(runs: list[Run]) -> Table:
    """Milliseconds per step by kind: part of the wall time, and in brackets the sum of durations."""
    traced = [run for run in runs if run.breakdown]
    seen = [kind for kind in kinds.TITLES if any(kind in run.breakdown.summed_ms for run in traced)]
    header = ("run", *(kinds.TITLES[kind] for kind in seen), "idle", "wall", "sum of durations")
    body = []
    for run in traced:
        b = run.breakdown
        cells = [f"{b.shown_ms.get(kind, 0):.1f} ({b.summed_ms.get(kind, 0):.1f})" for kind in seen]
        body.append((run.name, *cells, f"{b.idle_ms:.1f}", f"{b.wall_ms:.1f}", f"{sum(b.summed_ms.values()):.1f}"))
    return [header, *body] if body else []


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def as_text(table: Table) -> str:
    """A table for a terminal."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table)


def as_markdown(runs: list[Run], rows: list[Row], facts: dict[str, str], speed_ups: GemmSpeedUps | None) -> str:
    """report.md: facts, tables, what to keep in mind, pictures, command lines."""
    breakdown = breakdown_table(runs)
    lines = ["# Comparison", "", *(f"- {key}: {value}" for key, value in facts.items()), "", "## Speed", ""]
    lines += [*_markdown_table(speed_table(rows)), "", *_paragraphs(speed_notes(runs, rows, speed_ups))]
    lines += ["![tokens per second](speed.png)", "", "## Memory, loss, routing", ""]
    lines += [*_markdown_table(state_table(rows)), "", *_paragraphs(state_notes(runs)), "![loss](loss.png)", ""]
    lines += ["## Where a step goes", "", *(_markdown_table(breakdown) if breakdown else []), ""]
    lines += _paragraphs(breakdown_notes(runs))
    lines += ["![milliseconds by kind](breakdown.png)", ""] if breakdown else []
    lines += ["## Commands", "", *(f"- {run.name}: `{run.command}`" for run in runs)]
    return "\n".join(lines) + "\n"


def _markdown_table(table: Table) -> list[str]:
    header, *body = table
    return [f"| {' | '.join(line)} |" for line in (header, ("---",) * len(header), *body)]


def _paragraphs(sentences: list[str]) -> list[str]:
    return [line for sentence in sentences for line in (sentence, "")]


def speed_notes(runs: list[Run], rows: list[Row], speed_ups: GemmSpeedUps | None) -> list[str]:
    """Sentences that the speeds call for."""
    said = ["Speeds leave out warm-up, every interval in which something was compiled or autotuned, and traced steps."]
    left_out = [f"{row.name} {row.left_out}" for row in rows if row.left_out]
    if left_out:
        said.append(f"Intervals after warm-up left out because something was compiled in them: {', '.join(left_out)}.")
    again = next((row for row in rows if row.name == AGAIN), None)
    if again:
        said.append(
            f"Noise: the same bf16 run twice differs by {100 * abs(again.speedup - 1):.1f} % in speed and by up to "
            f"{again.largest_loss_gap:.4f} in loss; smaller differences mean nothing."
        )
    else:
        said.append(f"Without a second bf16 run (`{AGAIN}`) there is no noise to hold speeds against.")
    waiting = [f"{row.name} {100 * row.loading_share:.0f} %" for row in rows if row.loading_share > LOADING_SHARE]
    if waiting:
        said.append(
            f"Part of the time that the host spends loading data: {', '.join(waiting)}. After each logged step, at "
            "least, the device waits for it; a larger --training.dataloader.num_workers loads ahead."
        )
    over = [row.name for row in rows if row.mfu_percent is not None and row.mfu_percent > 100]
    if over:
        said.append(f"**Above 100 % of the peak, so something is measured wrongly: {', '.join(over)}.**")
    if any(row.peak for row in rows):
        said.append(
            "MFU counts torchtitan's FLOPs, recomputation not included. Its peak weighs NVIDIA's dense figures by the "
            "FLOPs that run in each precision; emulation counts as bf16."
        )
    if speed_ups is None:
        said.append(
            "No limits: no FP8 GEMM rates of this device were found (docs/benchmarks/gemm.json, rows gemm_y, gemm_dx, "
            "gemm_dw); --gemm-speed-ups gives some."
        )
        return said
    if not next(run for run in runs if run.name == BASELINE).breakdown:
        said.append("No limits: the bf16 run has no trace.")
        return said
    if any(row.limit for row in rows):
        said.append(
            f"Limits, x bf16: the bf16 run's measured step with its converted GEMMs, as traced, {speed_ups.dense:.2f} "
            f"(dense) and {speed_ups.grouped:.2f} (grouped) times as fast, all else as it was; FP8 rates over bf16: "
            f"{speed_ups.source}. With free casts, and with the time of the run's own quantization kernels added."
        )
    without = [row.name for row in rows if row.converted != "nothing" and not row.limit]
    if without:
        said.append(f"No limit, because traced GEMMs would save more than the measured step: {', '.join(without)}.")
    past = [row.name for row in rows if row.limit and row.speedup > row.limit.free_casts]
    if past:
        said.append(
            f"Faster than the limit with free casts: {', '.join(past)}. More than the GEMMs got faster there, or "
            "it is noise: see where a step goes."
        )
    return said


def state_notes(runs: list[Run]) -> list[str]:
    """Sentences that memory, loss and routing call for."""
    base = next(run for run in runs if run.name == BASELINE)
    window = f"Smoothed gap: of losses averaged over {LOSS_WINDOW} steps, after step {loss_compared_after(base.steps)}"
    if not any(run.name == AGAIN for run in runs):
        noise = "; without a second bf16 run there is no noise to hold it against."
    else:
        noise = f"; over noise: over the larger of {LEAST_LOSS_NOISE} and twice that of the two bf16 runs."
    short = too_short_to_judge(base.steps)
    return [
        "Memory is the first rank's peak in a measured step, reserved and active. The first step holds start-up and "
        "compilation.",
        window + noise,
        *([f"Too short to judge losses by: {2 * LOSS_AFTER} steps or more say something."] if short else []),
        "Busiest expert over mean: the first rank's tokens, worst layer, median over logged steps.",
    ]


def breakdown_notes(runs: list[Run]) -> list[str]:
    """How to read the breakdown, or why there is none."""
    traced = [run for run in runs if run.breakdown]
    if not traced:
        return ["No trace was made (--trace-steps 0)."]
    first = traced[0].breakdown
    said = [
        f"Milliseconds per step, mean of {first.steps} traced steps of the first rank after the measured ones; "
        f"{first.source}. Part of the wall time, each moment counted once: shared evenly by what computes, and "
        "communication only where nothing else runs. In brackets the sum of durations, overlaps counted twice. "
        "Communication includes waiting for other ranks. The profiler's own cost is in the wall time."
    ]
    if any(kinds.GEMM_OWN in run.breakdown.summed_ms for run in traced):
        said.append("Our kernel multiplies dense and grouped operands under one name.")
    if first.source == "CPU operators":
        said.append(
            "Experts that multiply in a loop count as dense GEMMs, compiled code and autograd's own work as other."
        )
    for run in traced:
        if run.breakdown.unknown_ms:
            names = ", ".join(f"`{_short(name)}` {ms:.2f} ms" for name, ms in run.breakdown.unknown_ms.items())
            said.append(f"Largest in other, {run.name}: {names}.")
    return said


def _short(name: str) -> str:
    return (name if len(name) <= 100 else f"{name[:97]}...").replace("|", "/").replace("`", "'")


def as_json(runs: list[Run], rows: list[Row], facts: dict[str, str], speed_ups: GemmSpeedUps | None) -> str:
    """report.json: all of it, every logged step included."""
    return json.dumps(
        {
            **facts,
            "gemm_speed_ups": speed_ups and asdict(speed_ups),
            "commands": {run.name: run.command for run in runs},
            "rows": [asdict(row) for row in rows],
            "breakdowns": {run.name: asdict(run.breakdown) for run in runs if run.breakdown},
            "inventories": {run.name: asdict(run.inventory) for run in runs},
            "steps": {run.name: [asdict(step) for step in run.steps] for run in runs},
        },
        indent=1,
    )
