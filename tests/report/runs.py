"""Finished runs, made up."""

from mxfp8_titan.report.comparison import Run
from mxfp8_titan.report.inventory import Inventory
from mxfp8_titan.report.metrics import Logged
from mxfp8_titan.report.trace import GPU, Breakdown

H200 = "1 x NVIDIA H200"


def steps_of(speeds, first=10.0, losses=None, every=5, compiled=(), loading=0.01):
    """Step 1, and one logged step for each speed; `compiled` are the steps whose interval compiled something."""
    numbers = [1, *(every * (i + 1) for i in range(len(speeds)))]
    losses = losses or [8.0] * len(numbers)
    return [
        Logged(n, loss, tps, tps / 1000, 50.0 + n, 40.0, loading, 1 if n in compiled else 0, 1.5)
        for n, loss, tps in zip(numbers, losses, [first, *speeds], strict=True)
    ]


def inventory_of(dense=0, experts=0, backend="hopper", wgrad="mxfp8", routing="real"):
    """A model of 4 linears with 100 weights and 1 expert module with 200, of which some are converted."""
    converted = bool(dense or experts)
    return Inventory(
        flops_per_token=6 * 600.0 + 400.0,
        dense={name: (n, 100 * n) for name, n in (("MXFP8Linear", dense), ("Linear", 4 - dense)) if n},
        experts={"MXFP8GroupedExperts" if experts else "GroupedExperts": (1, 200)},
        recipe="mxfp8_hopper" if converted else "",
        backend=backend if converted else "",
        gemm="auto" if converted else "",
        wgrad=wgrad if converted else "",
        routing=routing,
    )


def breakdown_of(**shown):
    """100 ms a step, idle in what `shown` leaves."""
    return Breakdown(GPU, 3, 100.0, dict(shown), dict(shown), 100.0 - sum(shown.values()), {"odd_kernel": 1.5})


def run_of(name, steps, inventory=None, breakdown=None):
    """20 tokens a step on two devices: 100 ms where each makes 100 tokens a second."""
    return Run(name, f"train {name}", steps, inventory or inventory_of(), 20, 2, breakdown)
