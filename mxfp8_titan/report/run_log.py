"""The metric lines of a torchtitan 0.2.2 log, and what a run comes down to."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# "validate step:" lines look alike and are no training steps.
_METRICS = re.compile(
    r"(?<!validate )step:\s+(?P<step>\d+)\s+loss:\s+(?P<loss>\S+)\s+grad_norm:\s+(?P<grad_norm>\S+)\s+"
    r"memory:\s+(?P<memory>[\d.]+)GiB\S*\s+tps:\s+(?P<tps>[\d,]+)"
)


@dataclass(frozen=True)
class Step:
    """One logged step. tokens_per_second is per device, over the steps since the last logged one."""

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    memory_gib: float
    """Peak reserved memory of the first rank since the last logged step."""


def read_steps(log: Path) -> list[Step]:
    """The training steps in `log`, in order; of several ranks that log the same step, the first."""
    steps: dict[int, Step] = {}
    for line in log.read_text(errors="replace").splitlines():
        match = _METRICS.search(_ANSI.sub("", line))
        if match:
            try:
                step = Step(
                    step=int(match["step"]),
                    loss=float(match["loss"]),
                    grad_norm=float(match["grad_norm"]),
                    tokens_per_second=float(match["tps"].replace(",", "")),
                    memory_gib=float(match["memory"]),
                )
            except ValueError:
                # Two ranks wrote into one line.
                continue
            steps.setdefault(step.step, step)
    return list(steps.values())


def first_non_finite(steps: list[Step]) -> Step | None:
    """The first step whose loss is NaN or Inf."""
    return next((step for step in steps if not math.isfinite(step.loss)), None)


def closing_lines(steps: list[Step]) -> list[str]:
    """The two lines that a run ends with. Step 1 is left out of the median: it holds start-up and compilation.

    Raises: ValueError when nothing was logged.
    """
    if not steps:
        raise ValueError("the log has no training step; was --metrics.log_freq larger than the run?")
    measured = [step.tokens_per_second for step in steps if step.step != 1]
    speed = (
        f"{median(measured):.1f}"
        if measured
        else "n/a (only step 1 was logged: train more steps, or lower --metrics.log_freq)"
    )
    return [
        f"Median Tokens/Second (excluding step 1): {speed}",
        f"Max Memory Usage: {max(step.memory_gib for step in steps):.2f} GiB",
    ]
