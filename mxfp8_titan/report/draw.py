"""Pictures of runs."""

from pathlib import Path

from mxfp8_titan.report.comparison import BASELINE, Logged, Row
from mxfp8_titan.report.run_log import Step


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
    """Median tokens per second of each run as bars, whiskers from the slowest to the fastest interval."""
    pyplot, _ = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.55 * len(rows)), dpi=120)
    names = [row.name for row in rows][::-1]
    medians = [row.median_tps for row in rows][::-1]
    spread = [
        [row.median_tps - row.min_tps for row in rows][::-1],
        [row.max_tps - row.median_tps for row in rows][::-1],
    ]
    colours = ["tab:gray" if name.startswith(BASELINE) else "tab:blue" for name in names]
    axes.barh(names, medians, xerr=spread, color=colours, capsize=3, height=0.6, error_kw={"alpha": 0.6})
    labels = [f"{row.median_tps:,.0f}  ({row.speedup:.3f}x)" for row in rows][::-1]
    for row, (fastest, label) in enumerate(zip([r.max_tps for r in rows][::-1], labels, strict=True)):
        axes.annotate(label, (fastest, row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlabel("tokens/s per device, median after warm-up; whiskers: slowest to fastest interval")
    axes.set_xlim(0, max(row.max_tps for row in rows) * 1.3)
    _save(figure, (axes,), path)


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


def _save(figure, all_axes, path: Path) -> None:
    pyplot, _ = _pyplot()
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
