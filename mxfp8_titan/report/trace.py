"""What a few steps spent their time on, from a profiler trace in Chrome's format.

Kernels of different streams overlap, so their durations do not add up to the steps' time. Both are kept: `summed_ms`
adds durations; `shown_ms` counts each moment once. A moment with several kernels is shared evenly by those that
compute, and belongs to communication only where nothing else runs. `shown_ms` and `idle_ms` add up to the wall time.
"""

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mxfp8_titan.report import kernel_kinds as kinds

GPU = "GPU kernels"
CPU = "CPU operators"
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_KEY = "mxfp8_titan"
_UNKNOWN_SHOWN = 5


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds per step, of one rank."""

    source: str
    """GPU or CPU: what was timed."""
    steps: int
    wall_ms: float
    """By the host's clock, the device's work awaited before and after. The profiler's own cost is in it."""
    summed_ms: dict[str, float]
    """Kind -> the durations of its kernels."""
    shown_ms: dict[str, float]
    """Kind -> its part of the wall time."""
    idle_ms: float
    """Wall time in which nothing ran."""
    unknown_ms: dict[str, float]
    """Of the kind "other": the five names with the longest durations."""


@dataclass(frozen=True)
class Span:
    """One kernel, or a part of an operator in which none of its inner operators ran. Microseconds."""

    start: float
    end: float
    kind: str
    name: str


def read_trace(path: Path) -> Breakdown:
    """The breakdown of the trace at `path`, gzipped or not.

    Raises: ValueError when it holds neither kernels nor operators.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", errors="replace") as file:
        trace = json.load(file)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    source, spans = GPU, _kernels(events)
    if not spans:
        source, spans = CPU, _operators(events)
    if not spans:
        raise ValueError(f"{path} holds no GPU kernel and no CPU operator: was anything recorded?")
    about = trace.get(_KEY) or {}
    steps = about.get("steps", 1)
    wall_us = about["wall_s"] * 1e6 if about else max(s.end for s in spans) - min(s.start for s in spans)
    return _breakdown(source, spans, steps, wall_us)


def _kernels(events: list[dict]) -> list[Span]:
    kind_of = cache(kinds.kind_of)
    return [
        Span(event["ts"], event["ts"] + event["dur"], kind_of(event["name"]), event["name"])
        for event in events
        if event.get("cat") in _GPU_CATEGORIES
    ]


def _operators(events: list[dict]) -> list[Span]:
    """Each thread's operators without what runs inside them, so that no moment of a thread counts twice."""
    kind_of = cache(lambda name: kinds.kind_of(name, kinds.CPU_OPERATORS))
    threads: dict[object, list[dict]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("tid")].append(event)
    spans: list[Span] = []

    def add(start: float, end: float, operator: tuple[float, str, str, bool]) -> None:
        if end > start:
            spans.append(Span(start, end, operator[2], operator[1]))

    for operators in threads.values():
        # (end, name, kind, whether it or an operator around it casts)
        open_operators: list[tuple[float, str, str, bool]] = []
        now = float("-inf")
        for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
            start, name = event["ts"], event["name"]
            while open_operators and open_operators[-1][0] <= start:
                done = open_operators.pop()
                add(now, done[0], done)
                now = max(now, done[0])
            if open_operators:
                add(now, start, open_operators[-1])
            now = start
            casts = bool(kinds.CASTING_OPERATORS.match(name)) or bool(open_operators and open_operators[-1][3])
            kind = kind_of(name)
            if casts and kind not in (kinds.GEMM_DENSE, kinds.GEMM_GROUPED):
                kind = kinds.QUANTIZATION
            open_operators.append((start + event["dur"], name, kind, casts))
        while open_operators:
            done = open_operators.pop()
            add(now, done[0], done)
            now = max(now, done[0])
    return spans


def _breakdown(source: str, spans: list[Span], steps: int, wall_us: float) -> Breakdown:
    summed: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for span in spans:
        summed[span.kind] += span.end - span.start
        if span.kind == kinds.OTHER:
            unknown[span.name] += span.end - span.start
    shown = _each_moment_once(spans)
    per_step = 1 / 1000 / steps
    return Breakdown(
        source=source,
        steps=steps,
        wall_ms=wall_us * per_step,
        summed_ms={kind: summed[kind] * per_step for kind in kinds.TITLES if kind in summed},
        shown_ms={kind: shown[kind] * per_step for kind in kinds.TITLES if kind in summed},
        idle_ms=max(0.0, wall_us - sum(shown.values())) * per_step,
        unknown_ms={name: us * per_step for name, us in unknown.most_common(_UNKNOWN_SHOWN)},
    )


def _each_moment_once(spans: list[Span]) -> Counter[str]:
    changes = sorted([(s.start, 1, s.kind) for s in spans] + [(s.end, -1, s.kind) for s in spans])
    running: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    before = changes[0][0]
    for now, change, kind in changes:
        if now > before:
            computing = {k: n for k, n in running.items() if n and k != kinds.COMMUNICATION}
            for k, n in computing.items():
                shown[k] += (now - before) * n / sum(computing.values())
            if not computing and running[kinds.COMMUNICATION]:
                shown[kinds.COMMUNICATION] += now - before
        before = now
        running[kind] += change
    return shown
