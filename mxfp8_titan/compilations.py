"""How often this process has compiled: a step in which it did says nothing about the speed of training."""

import sys

import triton

_seen = {"triton": 0}


def listen() -> None:
    """Count Triton kernels from now on. A listener that is there already is still called."""
    other = triton.knobs.compilation.listener
    if getattr(other, "counts", None) is _seen:
        return

    def listener(**compiled) -> None:
        _seen["triton"] += 1
        if other is not None:
            other(**compiled)

    listener.counts = _seen
    triton.knobs.compilation.listener = listener


def count() -> int:
    """Graphs of torch.compile and, since `listen`, kernels that Triton compiled or read from its cache; autotuning
    compiles each of its candidates."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
    return graphs + _seen["triton"]
