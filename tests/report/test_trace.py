import gzip
import json

import pytest

from mxfp8_titan.report.trace import CPU, GPU, read_trace


def _event(name, start, duration, category="kernel", thread=7):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "pid": 0}


def _write(path, events, **about):
    trace = {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}
    path.write_text(json.dumps(trace | ({"mxfp8_titan": about} if about else {})))
    return path


def _gpu_trace(tmp_path):
    # Two steps of 1000 us. Stream 7 computes; on stream 9 a gather runs beside a GEMM and then alone.
    events = [
        _event("nvjet_tst_a", 0, 400),
        _event("ncclDevKernel_AllGather_RING_LL", 300, 300, thread=9),
        _event("quantize_kernel", 700, 200),
        _event("Memcpy DtoD (Device -> Device)", 800, 200, "gpu_memcpy", thread=11),
        _event("unheard_of", 1100, 60),
        _event("unheard_of", 1200, 40),
        _event("aten::mm", 0, 2000, "cpu_op"),
        _event("ProfilerStep#1", 0, 2000, "gpu_user_annotation"),
    ]
    return _write(tmp_path / "trace.json", events, steps=2, wall_s=2000e-6)


def test_durations_are_summed_by_kind_and_divided_by_the_steps(tmp_path):
    breakdown = read_trace(_gpu_trace(tmp_path))
    assert (breakdown.source, breakdown.steps, breakdown.wall_ms) == (GPU, 2, pytest.approx(1.0))
    assert breakdown.summed_ms == pytest.approx(
        {"gemm_dense": 0.2, "communication": 0.15, "quantization": 0.1, "copies": 0.1, "other": 0.05}
    )


def test_each_moment_counts_once_and_communication_only_where_it_is_alone(tmp_path):
    breakdown = read_trace(_gpu_trace(tmp_path))
    # The gather's 100 us beside the GEMM are hidden; the kernels that overlap share theirs.
    assert breakdown.shown_ms == pytest.approx(
        {"gemm_dense": 0.2, "communication": 0.1, "quantization": 0.075, "copies": 0.075, "other": 0.05}
    )
    assert breakdown.idle_ms + sum(breakdown.shown_ms.values()) == pytest.approx(breakdown.wall_ms)


def test_unknown_kernels_are_named_the_five_longest_first(tmp_path):
    events = [_event(f"mystery{i}", 100 * i, 10 + i) for i in range(7)]
    unknown = read_trace(_write(tmp_path / "t.json", events)).unknown_ms
    assert list(unknown) == ["mystery6", "mystery5", "mystery4", "mystery3", "mystery2"]
    assert unknown["mystery6"] == pytest.approx(0.016)


def test_without_kernels_operators_count_less_what_runs_inside_them(tmp_path):
    events = [
        _event("LinearFunction", 0, 1000, "cpu_op"),
        _event("mxfp8_titan::reference_y", 100, 800, "cpu_op"),
        _event("aten::abs", 200, 300, "cpu_op"),
        _event("aten::mm", 500, 200, "cpu_op"),
        _event("aten::mul", 1000, 100, "cpu_op"),
        _event("aten::copy_", 1000, 100, "cpu_op", thread=8),
    ]
    breakdown = read_trace(_write(tmp_path / "t.json", events, steps=1, wall_s=1200e-6))
    assert breakdown.source == CPU
    # Inside an emulated product all but the product itself is quantization.
    assert breakdown.summed_ms == pytest.approx(
        {"gemm_dense": 0.2, "quantization": 0.6, "elementwise": 0.1, "copies": 0.1, "other": 0.2}
    )
    assert breakdown.shown_ms["elementwise"] == pytest.approx(0.05)
    assert breakdown.idle_ms == pytest.approx(0.1)


def test_a_compressed_trace_reads_alike_and_without_our_seconds_its_span_is_the_wall_time(tmp_path):
    text = _write(tmp_path / "t.json", [_event("nvjet_a", 50, 100), _event("nvjet_b", 250, 100)]).read_text()
    with gzip.open(tmp_path / "t.json.gz", "wt") as file:
        file.write(text)
    breakdown = read_trace(tmp_path / "t.json.gz")
    assert (breakdown.wall_ms, breakdown.idle_ms) == pytest.approx((0.3, 0.1))


def test_a_trace_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no GPU kernel and no CPU operator"):
        read_trace(_write(tmp_path / "t.json", []))
