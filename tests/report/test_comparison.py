import json

import pytest

from mxfp8_titan.report.comparison import Logged, after_warm_up, as_json, as_markdown, as_text, make_row, read_metrics
from mxfp8_titan.report.draw import draw_losses, draw_speeds

H200 = "1 x NVIDIA H200"


def _steps(speeds, first=10.0, losses=None, every=5):
    numbers = [1, *(every * (i + 1) for i in range(len(speeds)))]
    losses = losses or [8.0] * len(numbers)
    return [
        Logged(n, loss, tps, tps / 1000, 50.0 + n, 40.0)
        for n, loss, tps in zip(numbers, losses, [first, *speeds], strict=True)
    ]


def _row(name, steps, baseline, device=H200):
    return make_row(name, steps, baseline, warm_up=5, tokens_per_step=1000, device=device, converted="nothing")


def test_intervals_that_begin_before_the_end_of_warm_up_are_left_out():
    # Logged at 1, 5, 10, 15: the interval up to 10 begins at 5.
    assert [s.step for s in after_warm_up(_steps([1, 2, 3]), warm_up=5)] == [10, 15]
    assert [s.step for s in after_warm_up(_steps([1, 2, 3]), warm_up=6)] == [15]
    assert [s.step for s in after_warm_up(_steps([1, 2, 3]), warm_up=1)] == [5, 10, 15]
    with pytest.raises(ValueError, match="no logged interval lies after warm-up step 15; the run ended at step 15"):
        after_warm_up(_steps([1, 2, 3]), warm_up=15)


def test_a_row_has_medians_of_measured_intervals_and_the_gap_at_equal_steps():
    baseline = _steps([1, 100, 110, 90], losses=[8, 7, 6, 5, 4])
    row = _row("both", _steps([9999, 120, 130, 140], losses=[8, 7, 6.5, 5.1, 4]), baseline)
    assert (row.median_tps, row.min_tps, row.max_tps) == (130, 120, 140)
    assert row.speedup == pytest.approx(1.3)
    assert row.largest_loss_gap == pytest.approx(0.5)
    assert row.first_step_s == 100
    assert row.reserved_gib == 70


def test_the_share_of_the_peak_is_named_only_for_a_known_device_and_flagged_above_100():
    baseline = _steps([1, 100, 100])
    assert _row("bf16", baseline, baseline, "none, 2 CPU cores").peak_percent is None
    over = _row("both", _steps([1, 1.2e6, 1.2e6]), baseline)
    assert over.peak_percent == pytest.approx(100 * 1200 / 989)
    assert "Above 100 % of the bf16 peak" in as_markdown([over], {}, {})
    assert "| 121.3 |" in as_markdown([over], {}, {})
    assert "| n/a |" in as_markdown([_row("bf16", baseline, baseline, "none, 2 CPU cores")], {}, {})


def test_the_noise_between_equal_runs_is_stated():
    baseline = _steps([1, 100, 100], losses=[8, 7, 6, 5])
    again = _row("bf16_again", _steps([1, 102, 102], losses=[8, 7, 6.01, 5]), baseline)
    text = as_markdown([_row("bf16", baseline, baseline), again], {"gpu": "g"}, {"bf16": "cmd"})
    assert "differs by 2.0 % in speed and by up to 0.0100 in loss" in text
    assert "- gpu: g" in text
    assert "`cmd`" in text


def test_table_json_and_pictures_hold_every_run(tmp_path):
    steps = {"bf16": _steps([1, 100, 100]), "both": _steps([1, 50, 60])}
    rows = [_row(name, logged, steps["bf16"]) for name, logged in steps.items()]
    assert len({line.index("0.5") for line in as_text(rows).splitlines()[2:]}) == 1
    data = json.loads(as_json(rows, steps, {"commit": "abc"}, {}))
    assert data["commit"] == "abc"
    assert [row["name"] for row in data["rows"]] == ["bf16", "both"]
    assert len(data["steps"]["both"]) == 4
    draw_speeds(rows, tmp_path / "speed.png")
    draw_losses(steps, tmp_path / "loss.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("speed.png", "loss.png"))


def test_metrics_are_read_as_they_were_recorded(tmp_path):
    recorded = {
        "step": 5, "loss_metrics/global_avg_loss": 7.123456, "throughput(tps)": 100.5, "tflops": 2.0,
        "memory/max_reserved(GiB)": 3.0, "memory/max_active(GiB)": 2.5, "lr": 1e-4,
    }  # fmt: skip
    (tmp_path / "m.jsonl").write_text(json.dumps(recorded) + "\n")
    assert read_metrics(tmp_path / "m.jsonl") == [Logged(5, 7.123456, 100.5, 2.0, 3.0, 2.5)]
