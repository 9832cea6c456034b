"""What several runs of one job come down to beside each other: speed, memory, loss, and the noise of equal runs."""

from dataclasses import dataclass
from statistics import median

from mxfp8_titan.report.inventory import Inventory, peak
from mxfp8_titan.report.limits import GemmSpeedUps, Limit, limit
from mxfp8_titan.report.metrics import Logged, after_warm_up, steady
from mxfp8_titan.report.trace import Breakdown

BASELINE = "bf16"
AGAIN = f"{BASELINE}_again"

LOSS_AFTER = 50
"""Losses of earlier steps fall too steeply to be compared; of runs under 100 steps, the first half is left out."""
LOSS_WINDOW = 20
"""Steps over which a loss is averaged before it is compared."""
LEAST_LOSS_NOISE = 0.02
"""What two equal runs may differ by at least, smoothed, even where the two that were made agree better."""


@dataclass(frozen=True)
class Run:
    """One finished run. tokens_per_step is of all devices."""

    name: str
    command: str
    steps: list[Logged]
    inventory: Inventory
    tokens_per_step: int
    devices: int
    breakdown: Breakdown | None = None


@dataclass(frozen=True)
class Row:
    """One run of the comparison. Speeds are tokens/s over the intervals after warm-up without compilation."""

    name: str
    median_tps: float
    """Per device, as the next two."""
    min_tps: float
    max_tps: float
    total_tps: float
    """Of all devices, median."""
    step_ms: float
    loading_share: float
    """Part of the time that the host spent in the data loader: median over the measured intervals."""
    speedup: float
    """median_tps over the baseline's."""
    limit: Limit | None
    intervals: int
    left_out: int
    """Intervals after warm-up in which something was compiled."""
    tflops: float
    peak: str | None
    """Name and value of the peak for the mix of precisions; None for a device without a known one."""
    mfu_percent: float | None
    reserved_gib: float
    active_gib: float
    first_step_s: float
    final_loss: float
    largest_loss_gap: float
    """Largest difference to the baseline's loss at an equal step."""
    smoothed_loss_gap: float
    """The same of losses averaged over LOSS_WINDOW steps, after the first ones."""
    loss_gap_over_noise: float | None
    """smoothed_loss_gap over max(LEAST_LOSS_NOISE, twice that of the two bf16 runs); None for these two, without a
    second, and for runs too short to judge."""
    routing: str
    imbalance: float | None
    """Tokens of the busiest expert over the mean: median over logged steps of the worst layer."""
    converted: str
    runs_on: str


def make_rows(runs: list[Run], warm_up: int, device: str, speed_ups: GemmSpeedUps | None) -> list[Row]:
    """The rows of `runs`, against the one that is called BASELINE.

    Raises: ValueError when a run has no interval to measure, or another last step than the baseline.
    """
    by_name = {run.name: run for run in runs}
    again = by_name.get(AGAIN)
    base = by_name[BASELINE]
    for run in runs:
        if run.steps[-1].step != base.steps[-1].step:
            raise ValueError(
                f"{run.name} ended at step {run.steps[-1].step} and {BASELINE} at {base.steps[-1].step}: they are not "
                "the same job"
            )
    judged = again and not too_short_to_judge(base.steps)
    noise = max(LEAST_LOSS_NOISE, 2 * smoothed_gap(again.steps, base.steps)) if judged else None
    return [_row(run, base, warm_up, device, noise, speed_ups) for run in runs]


def _row(run: Run, base: Run, warm_up: int, device: str, noise: float | None, speed_ups: GemmSpeedUps | None) -> Row:
    try:
        intervals = steady(run.steps, warm_up)
    except ValueError as error:
        raise ValueError(f"{run.name}: {error}") from None
    speeds = [step.tokens_per_second for step in intervals]
    base_speed = median(step.tokens_per_second for step in steady(base.steps, warm_up))
    base_losses = {step.step: step.loss for step in base.steps}
    tflops = median(step.tflops for step in intervals)
    best = peak(device, run.inventory)
    gap = smoothed_gap(run.steps, base.steps)
    imbalances = [step.imbalance for step in run.steps if step.imbalance is not None]
    return Row(
        name=run.name,
        median_tps=median(speeds),
        min_tps=min(speeds),
        max_tps=max(speeds),
        total_tps=median(speeds) * run.devices,
        step_ms=_step_ms(run, median(speeds)),
        loading_share=median(step.loading_share for step in intervals),
        speedup=median(speeds) / base_speed,
        limit=limit(_step_ms(base, base_speed), base.breakdown, run.breakdown, run.inventory, speed_ups)
        if speed_ups and base.breakdown
        else None,
        intervals=len(intervals),
        left_out=len(after_warm_up(run.steps, warm_up)) - len(intervals),
        tflops=tflops,
        peak=best and best[0],
        mfu_percent=best and 100 * tflops * 1e12 / best[1],
        reserved_gib=max(step.reserved_gib for step in run.steps),
        active_gib=max(step.active_gib for step in run.steps),
        first_step_s=run.tokens_per_step / run.devices / run.steps[0].tokens_per_second,
        final_loss=run.steps[-1].loss,
        largest_loss_gap=max(abs(s.loss - base_losses[s.step]) for s in run.steps if s.step in base_losses),
        smoothed_loss_gap=gap,
        loss_gap_over_noise=gap / noise if noise and run.name not in (BASELINE, AGAIN) else None,
        routing=run.inventory.routing,
        imbalance=median(imbalances) if imbalances else None,
        converted=run.inventory.converted,
        runs_on=run.inventory.runs_on,
    )


def _step_ms(run: Run, tokens_per_second: float) -> float:
    """At that speed of one device."""
    return 1000 * run.tokens_per_step / run.devices / tokens_per_second


def smoothed(steps: list[Logged]) -> dict[int, float]:
    """Step -> the mean of the losses logged in the LOSS_WINDOW steps up to it."""
    means = {}
    for step in steps:
        window = [s.loss for s in steps if step.step - LOSS_WINDOW < s.step <= step.step]
        means[step.step] = sum(window) / len(window)
    return means


def too_short_to_judge(steps: list[Logged]) -> bool:
    """Whether losses still fall so steeply, and are so few, that their gap says nothing about the numerics."""
    return steps[-1].step < 2 * LOSS_AFTER


def loss_compared_after(steps: list[Logged]) -> int:
    """The step after which smoothed losses are compared."""
    return min(LOSS_AFTER, steps[-1].step // 2)


def smoothed_gap(steps: list[Logged], base: list[Logged]) -> float:
    """Largest difference of the smoothed losses at equal steps."""
    ours, theirs = smoothed(steps), smoothed(base)
    after = loss_compared_after(base)
    return max((abs(ours[step] - theirs[step]) for step in ours if step in theirs and step > after), default=0.0)
