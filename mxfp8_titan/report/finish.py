"""How a run ended: its two closing lines, or the reason it failed."""

import re
import signal
from pathlib import Path

from mxfp8_titan.report.draw import draw_run
from mxfp8_titan.report.run_log import closing_lines, first_non_finite, read_steps

# Both torch's excepthook and torchrun prefix the rank. A traceback ends with the exception's name at the line's start.
_ERROR = re.compile(r"^\s*(\[rank\d+\]:\s*)*(error( \(rank \d+\))?|[\w.]*(Error|Exception))(:|$)")
_TORCHRUN_ECHO = "ChildFailedError"
_SEED_CHECKPOINT = "Created seed checkpoint"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which somebody ends a run."""


def finish(log: Path, code: int) -> int:
    """Print how the run in `log` went; its two closing lines last, and a loss curve beside the log.

    code: the launcher's exit code, negative for a signal
    returns the exit code for the whole: `code` as a shell spells it, or 1 for a run that ended well but whose loss
        is not finite, or that logged no step (unless it was there to make a seed checkpoint)
    """
    if -code in STOPS:
        print(f"stopped by {signal.Signals(-code).name}. Log: {log}")
        return 128 - code
    code = 128 - code if code < 0 else code
    steps = read_steps(log)
    bad = first_non_finite(steps)
    if bad:
        print(f"error: the loss is {bad.loss} at step {bad.step}. Log: {log}")
        return code or 1
    text = log.read_text(errors="replace")
    if code:
        errors = [line for line in text.splitlines() if _ERROR.search(line) and _TORCHRUN_ECHO not in line]
        print("\n".join([f"error: training failed with exit code {code}. Log: {log}", *errors[:1]]))
        return code
    if not steps and _SEED_CHECKPOINT in text:
        print(f"seed checkpoint written, nothing trained. Log: {log}")
        return 0
    if not steps:
        print(f"error: no training step was logged. Log: {log}")
        return 1
    picture = log.with_suffix(".png")
    # Logs of a comparison are all called run; their folders have the names.
    draw_run(steps, log.parent.name if log.stem == "run" else log.stem, picture)
    print(f"loss curve: {picture}\nlog: {log}")
    print("\n".join(closing_lines(steps)), flush=True)
    return 0
