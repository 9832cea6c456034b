"""Pictures of runs."""

from pathlib import Path

from mxfp8_titan.report.run_log import Step


def draw_run(steps: list[Step], title: str, path: Path) -> None:
    """Loss and tokens per second over steps, as a PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    figure, (loss, speed) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), dpi=120)
    marker = "o" if len(steps) <= 50 else None
    loss.plot([s.step for s in steps], [s.loss for s in steps], color="tab:blue", marker=marker, markersize=4)
    loss.set_ylabel("loss")
    loss.set_title(title, fontsize=10)
    timed = [s for s in steps if s.step != 1]
    speed.plot([s.step for s in timed], [s.tokens_per_second for s in timed], color="tab:green", marker=marker, ms=4)
    speed.set_ylabel("tokens/s per device")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    speed.set_xlabel("step")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, speed):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
