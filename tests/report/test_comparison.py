import pytest

from mxfp8_titan.report.comparison import make_rows, smoothed
from mxfp8_titan.report.limits import GemmSpeedUps
from tests.report.runs import H200, breakdown_of, inventory_of, run_of, steps_of

CPU = "none, 2 CPU cores"


def _rows(*runs, device=H200, speed_ups=None):
    return make_rows(list(runs), 5, device, speed_ups)


def test_a_row_has_medians_of_measured_intervals_and_the_gap_at_equal_steps():
    base = run_of("bf16", steps_of([1, 100, 110, 90], losses=[8, 7, 6, 5, 4]))
    both = run_of("both", steps_of([9999, 120, 130, 140], losses=[8, 7, 6.5, 5.1, 4]))
    _, row = _rows(base, both)
    assert (row.median_tps, row.min_tps, row.max_tps) == (130, 120, 140)
    assert row.total_tps == 260
    assert row.step_ms == pytest.approx(1000 * 20 / 260)
    assert row.speedup == pytest.approx(1.3)
    assert row.largest_loss_gap == pytest.approx(0.5)
    assert row.first_step_s == 1
    assert (row.reserved_gib, row.active_gib, row.imbalance) == (70, 40, 1.5)


def test_an_interval_with_compilation_is_in_no_median_and_counted():
    base = run_of("bf16", steps_of([1, 100, 100, 100]))
    _, row = _rows(base, run_of("both", steps_of([1, 7, 120, 130], compiled=(10,))))
    assert (row.min_tps, row.intervals, row.left_out) == (120, 2, 1)


def test_a_run_that_cannot_be_measured_is_named():
    base = run_of("bf16", steps_of([1, 100, 100]))
    with pytest.raises(ValueError, match="both: no interval to measure"):
        _rows(base, run_of("both", steps_of([1, 100, 100], compiled=(10, 15))))


def test_the_share_of_the_peak_is_of_the_mix_of_precisions_and_named_only_for_a_known_device():
    base = run_of("bf16", steps_of([1, 100, 100]))
    assert _rows(base, device=CPU)[0].mfu_percent is None
    fast = run_of("both", steps_of([1, 1.2e6, 1.2e6]), inventory_of(dense=3, experts=1))
    row = _rows(base, fast)[1]
    assert row.mfu_percent == pytest.approx(100 * 1200 * (0.75 / 1979 + 0.25 / 989))
    assert "75 % FP8" in row.peak


def test_limits_need_rates_and_the_baseline_s_trace():
    rates = GemmSpeedUps(2.0, 2.0, "a test")
    steps = steps_of([1, 100, 100])
    traced = run_of("bf16", steps, breakdown=breakdown_of(gemm_dense=50.0))
    dense = run_of("dense", steps, inventory_of(dense=4))
    bf16, row = _rows(traced, dense, speed_ups=rates)
    assert bf16.limit is None
    assert row.limit.free_casts == pytest.approx(100 / 75)
    assert _rows(traced, dense)[1].limit is None
    assert _rows(run_of("bf16", steps), dense, speed_ups=rates)[1].limit is None


def test_losses_are_smoothed_over_twenty_steps():
    means = smoothed(steps_of([1] * 6, losses=[9, 8, 7, 6, 5, 4, 3]))
    # Logged at 1, 5, 10, ..., 30; the window of step 20 reaches back to step 1, that of 30 to 15.
    assert means[20] == pytest.approx((9 + 8 + 7 + 6 + 5) / 5)
    assert means[30] == pytest.approx((6 + 5 + 4 + 3) / 4)


def test_the_smoothed_gap_is_held_against_twice_the_noise_of_equal_runs_but_no_less_than_the_least():
    def shifted(by):
        # Before step 50, losses are not compared.
        return steps_of([100] * 20, losses=[8 + 9 * by, *[8 + by] * 20], every=5)

    base, again = run_of("bf16", shifted(0)), run_of("bf16_again", shifted(0))
    rows = _rows(base, again, run_of("both", shifted(-0.01)))
    assert rows[1].loss_gap_over_noise is None
    assert rows[2].loss_gap_over_noise == pytest.approx(rows[2].smoothed_loss_gap / 0.02)
    noisy = _rows(base, run_of("bf16_again", shifted(0.1)), run_of("both", shifted(-0.1)))
    assert noisy[2].loss_gap_over_noise == pytest.approx(0.5)
    assert _rows(base, run_of("both", shifted(0.1)))[1].loss_gap_over_noise is None
    short = [run_of(name, shifted(0.1)[:-1]) for name in ("bf16", "bf16_again", "both")]
    assert _rows(*short)[2].loss_gap_over_noise is None


def test_runs_of_other_lengths_are_not_compared():
    with pytest.raises(ValueError, match="both ended at step 20 and bf16 at 15: they are not the same job"):
        _rows(run_of("bf16", steps_of([1, 100, 100])), run_of("both", steps_of([1, 100, 100, 100])))
