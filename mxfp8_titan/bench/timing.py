"""Times in microseconds: of the device in a CUDA graph, of eager calls, of the host alone."""

import statistics
import time
from collections.abc import Callable

import torch
import triton
from torch import Tensor

CALLS_IN_GRAPH = 20
"""Calls captured back to back, so that the gap between two graph launches does not count."""


def device_us(call: Callable[[], object]) -> float:
    """Median device time of one call between two events, the L2 cache flushed before each. For long kernels."""
    return 1000 * triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median")


def graph_us(call: Callable[[], object]) -> float:
    """Median time of one call out of CALLS_IN_GRAPH in a CUDA graph, caches as the calls leave them."""

    def calls() -> None:
        for _ in range(CALLS_IN_GRAPH):
            call()

    replay = graphed(calls)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / CALLS_IN_GRAPH)
    return statistics.median(times)


def graphed(call: Callable[[], object], memory: tuple[int, int] | None = None) -> Callable[[], None]:
    """What replays one call, captured in a CUDA graph after two for warming up.

    memory: a pool that graphs share whose results nobody reads
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        call()
    return graph.replay


def in_turns_us(calls: list[Callable[[], object]], total_us: float = 60_000) -> list[float]:
    """Median time of each call, which take turns until each has run about total_us, twice in a row each turn."""
    times = [[] for _ in calls]
    while min(map(sum, times)) < total_us or len(times[0]) < 5:
        for call, measured in zip(calls, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            start.record()
            call()
            end.record()
            end.synchronize()
            measured.append(1000 * start.elapsed_time(end))
    return [statistics.median(measured) for measured in times]


def forward_and_backward(forward: Callable[[], Tensor], dy: Tensor, *leaves: Tensor) -> None:
    """A step to be timed: gradients of the leaves are made anew, none is added to."""
    for leaf in leaves:
        leaf.grad = None
    forward().backward(dy)


def eager_us(call: Callable[[], object], calls: int = 100) -> float:
    """Median over 10 bursts of the time per call, from the first call to an idle device."""
    times = []
    for _ in range(11):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


def host_us(call: Callable[[], object], calls: int = 100) -> float:
    """Median over 10 bursts of the host's time per call, not waiting for the device."""
    times = []
    for _ in range(11):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times[1:])


def copy_gbps(nbytes: int = 2**30) -> float:
    """GB/s, read plus written, of a device-to-device copy of nbytes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * nbytes / device_us(lambda: target.copy_(source)) / 1000
