"""The steps that a run recorded with --mx.metrics_file, and which of them say how fast it trains."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Logged:
    """One logged step of a run. tokens_per_second is per device, over the steps since the last logged one."""

    step: int
    loss: float
    tokens_per_second: float
    tflops: float
    reserved_gib: float
    active_gib: float
    loading_share: float
    """Part of the time since the last logged step that the host spent in the data loader, whether or not the device
    waited for it."""
    compilations: int = 0
    """Graphs and kernels compiled since the last logged step, autotuning's included."""
    imbalance: float | None = None
    """Tokens of the busiest expert over the mean, in the worst layer, of the first rank; None without experts."""


def read_metrics(path: Path, last_step: int) -> list[Logged]:
    """The steps recorded in `path` up to `last_step`, in order; later ones were traced.

    Raises: ValueError when they are not those of one run from step 1 on.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    numbers = [line["step"] for line in lines]
    if numbers[:1] != [1] or any(after <= before for before, after in pairwise(numbers)):
        raise ValueError(f"{path} has the steps {numbers}, needs those of one run that began at step 1")
    return [
        Logged(
            step=line["step"],
            loss=line["loss_metrics/global_avg_loss"],
            tokens_per_second=line["throughput(tps)"],
            tflops=line["tflops"],
            reserved_gib=line["memory/max_reserved(GiB)"],
            active_gib=line["memory/max_active(GiB)"],
            loading_share=line["time_metrics/data_loading(%)"] / 100,
            compilations=line.get("compile/count", 0),
            imbalance=line.get("routing/max_over_mean"),
        )
        for line in lines
        if line["step"] <= last_step
    ]


def after_warm_up(steps: list[Logged], warm_up: int) -> list[Logged]:
    """The intervals that lie wholly after step `warm_up`. An interval reaches from the step logged before it, so the
    first one after step 1 is left out by warm_up >= 1."""
    return [step for before, step in pairwise(steps) if before.step >= warm_up]


def steady(steps: list[Logged], warm_up: int) -> list[Logged]:
    """The intervals after `warm_up` in which nothing was compiled or autotuned.

    Raises: ValueError when none is left.
    """
    kept = [step for step in after_warm_up(steps, warm_up) if not step.compilations]
    if not kept:
        last = steps[-1].step if steps else 0
        compiled = ", ".join(str(step.step) for step in after_warm_up(steps, warm_up))
        why = f"; those that end at {compiled} compiled something" if compiled else ""
        raise ValueError(f"no interval to measure after warm-up step {warm_up}: the run ended at step {last}{why}")
    return kept
