"""Pictures of runs."""

from pathlib import Path

from mxfp8_titan.report import kernel_kinds as kinds
from mxfp8_titan.report.comparison import BASELINE, Row
from mxfp8_titan.report.kernel_kinds import TITLES
from mxfp8_titan.report.metrics import Logged
from mxfp8_titan.report.run_log import Step
from mxfp8_titan.report.trace import Breakdown

COLOURS = {
    kinds.GEMM_DENSE: "#1f4e8c",
    kinds.GEMM_GROUPED: "#5b9bd5",
    kinds.GEMM_OWN: "#17becf",
    kinds.ATTENTION: "#7b4ea3",
    kinds.QUANTIZATION: "#d9541e",
    kinds.COMMUNICATION: "#f2b134",
    kinds.OPTIMIZER: "#3c8d5a",
    kinds.ELEMENTWISE: "#9ccb86",
    kinds.COPIES: "#a9a9a9",
    kinds.OTHER: "#dcdcdc",
}
DARK = (kinds.GEMM_DENSE, kinds.ATTENTION, kinds.QUANTIZATION, kinds.OPTIMIZER)
"""Kinds whose colour asks for white text."""


def draw_run(steps: list[Step], title: str, path: Path) -> None:
    """Loss and tokens per second over steps, as a PNG at `path`."""
    pyplot, locator = _pyplot()
    figure, (loss, speed) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), dpi=120)
    marker = "o" if len(steps) <= 50 else None
    loss.plot([s.step for s in steps], [s.loss for s in steps], color="tab:blue", marker=marker, markersize=4)
    loss.set_ylabel("loss")
    loss.set_title(title, fontsize=10)
    timed = [s for s in steps if s.step != 1]
    speed.plot([s.step for s in timed], [s.tokens_per_second for s in timed], color="tab:green", marker=marker, ms=4)
    speed.set_ylabel("tokens/s per device")
    speed.set_ylim(0, 1.1 * max((s.tokens_per_second for s in timed), default=1))
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.set_xlabel("step")
    speed.xaxis.set_major_locator(locator(integer=True))
    _save(figure, (loss, speed), path)


def draw_speeds(rows: list[Row], path: Path) -> None:
    """Median tokens per second of each run as bars, whiskers from the slowest to the fastest interval, and a dashed
    line where the run's limit is."""
    pyplot, _ = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.55 * len(rows)), dpi=120)
    rows = rows[::-1]
    base = next(row.median_tps for row in rows if row.name == BASELINE)
    limits = [row.limit.free_casts * base if row.limit else 0 for row in rows]
    spread = [[row.median_tps - row.min_tps for row in rows], [row.max_tps - row.median_tps for row in rows]]
    colours = ["tab:gray" if row.converted == "nothing" else "tab:blue" for row in rows]
    names = [row.name for row in rows]
    axes.barh(names, [row.median_tps for row in rows], xerr=spread, color=colours, capsize=3, height=0.6,
              error_kw={"alpha": 0.6})  # fmt: skip
    scale = max(max(row.max_tps for row in rows), *limits)
    for at, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        label = f"{row.median_tps:,.0f}  ({row.speedup:.3f}x)"
        labels = {row.max_tps: label}
        if limit:
            axes.vlines(limit, at - 0.4, at + 0.4, color="tab:red", linestyle="--", linewidth=1.5)
            its_label = f"limit {row.limit.free_casts:.3f}x"
            # Between the bar and its limit where there is room for it.
            has_room = limit - row.max_tps > 0.3 * scale
            labels = {**labels, limit: its_label} if has_room else {max(row.max_tps, limit): f"{label}  {its_label}"}
        for x, text in labels.items():
            axes.annotate(text, (x, at), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    if any(limits):
        handle = pyplot.Line2D(
            [], [], color="tab:red", linestyle="--", label="limit: GEMMs at FP8 rates, all else as in bf16"
        )
        figure.legend(handles=[handle], loc="upper right", frameon=False, fontsize=9)
    axes.set_xlabel("tokens/s per device, median after warm-up; whiskers: slowest to fastest interval")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(0, scale * (1.5 if any(limits) else 1.3))
    _save(figure, (axes,), path, top=0.93 if any(limits) else 1, grid="x")


def draw_breakdowns(breakdowns: dict[str, Breakdown], path: Path) -> None:
    """Milliseconds of a step by kind of kernel: one stacked bar a run, as long as the step."""
    pyplot, _ = _pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 2.2 + 0.6 * len(breakdowns)), dpi=120)
    names = list(breakdowns)[::-1]
    longest = max(b.wall_ms for b in breakdowns.values())
    left = dict.fromkeys(names, 0.0)
    parts = [(kind, title, COLOURS[kind]) for kind, title in TITLES.items()]
    for kind, title, colour in [*parts, (None, "idle", "white")]:
        widths = [breakdowns[name].shown_ms.get(kind, 0.0) if kind else breakdowns[name].idle_ms for name in names]
        if not any(widths):
            continue
        axes.barh(names, widths, left=[left[name] for name in names], height=0.65, color=colour, label=title,
                  edgecolor="tab:gray" if kind is None else "white", linewidth=0.6,
                  hatch="////" if kind is None else None)  # fmt: skip
        for at, (name, width) in enumerate(zip(names, widths, strict=True)):
            if width > 0.045 * longest:
                dark = kind in DARK
                axes.text(left[name] + width / 2, at, f"{width:,.0f}" if longest >= 100 else f"{width:,.1f}",
                          ha="center", va="center", fontsize=8, color="white" if dark else "black",
                          bbox=None if kind else {"color": "white", "pad": 1})  # fmt: skip
            left[name] += width
    for at, name in enumerate(names):
        b = breakdowns[name]
        text = f"{b.wall_ms:,.0f} ms\nsum {sum(b.summed_ms.values()):,.0f}"
        axes.annotate(text, (left[name], at), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    first = next(iter(breakdowns.values()))
    axes.set_xlabel(f"ms per step ({first.source}, {first.steps} steps, each moment once; sum: overlaps counted twice)")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlim(0, 1.14 * longest)
    figure.legend(*axes.get_legend_handles_labels(), loc="upper center", ncols=5, frameon=False, fontsize=9)
    _save(figure, (axes,), path, top=1 - 0.6 / figure.get_figheight(), grid="x")


def draw_losses(steps: dict[str, list[Logged]], path: Path) -> None:
    """Loss curves of all runs, and below them each run's difference to the baseline at equal steps."""
    pyplot, locator = _pyplot()
    figure, (loss, gap) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), dpi=120)
    base = {step.step: step.loss for step in steps[BASELINE]}
    for name, logged in steps.items():
        style = {"color": "black", "linewidth": 2.5, "alpha": 0.5} if name == BASELINE else {"linewidth": 1.2}
        loss.plot([s.step for s in logged], [s.loss for s in logged], label=name, **style)
        if name != BASELINE:
            shared = [s for s in logged if s.step in base]
            gap.plot([s.step for s in shared], [s.loss - base[s.step] for s in shared], label=name, linewidth=1.2)
    loss.set_ylabel("loss")
    loss.legend(frameon=False)
    gap.axhline(0, color="black", linewidth=0.8)
    gap.set_ylabel(f"loss minus {BASELINE}'s")
    gap.set_xlabel("step")
    gap.xaxis.set_major_locator(locator(integer=True))
    _save(figure, (loss, gap), path)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    return pyplot, MaxNLocator


def _save(figure, all_axes, path: Path, top: float = 1, grid: str = "both") -> None:
    pyplot, _ = _pyplot()
    for axes in all_axes:
        axes.grid(alpha=0.3, axis=grid)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(path)
    pyplot.close(figure)
