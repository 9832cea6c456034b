import json

import pytest

from mxfp8_titan.report.metrics import Logged, after_warm_up, read_metrics, steady
from tests.report.runs import steps_of

RECORDED = {
    "step": 1, "loss_metrics/global_avg_loss": 7.123456, "throughput(tps)": 100.5, "tflops": 2.0,
    "memory/max_reserved(GiB)": 3.0, "memory/max_active(GiB)": 2.5,
    "time_metrics/data_loading(%)": 12.5, "lr": 1e-4,
}  # fmt: skip


def test_metrics_are_read_as_they_were_recorded_and_traced_steps_left_out(tmp_path):
    extra = {"compile/count": 2, "routing/max_over_mean": 1.25}
    lines = [RECORDED, RECORDED | {"step": 8} | extra, RECORDED | {"step": 12}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path / "m.jsonl", last_step=8) == [
        Logged(1, 7.123456, 100.5, 2.0, 3.0, 2.5, 0.125, 0, None),
        Logged(8, 7.123456, 100.5, 2.0, 3.0, 2.5, 0.125, 2, 1.25),
    ]


@pytest.mark.parametrize("numbers", [[9, 10], [1, 5, 1, 10, 5], [1, 5, 5], []])
def test_steps_of_more_than_one_run_are_refused(numbers, tmp_path):
    # Two runs that write into one file at once, or one that goes on from another's checkpoint.
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(RECORDED | {"step": n}) + "\n" for n in numbers))
    with pytest.raises(ValueError, match="needs those of one run that began at step 1"):
        read_metrics(tmp_path / "m.jsonl", last_step=10)


def test_intervals_that_begin_before_the_end_of_warm_up_are_left_out():
    # Logged at 1, 5, 10, 15: the interval up to 10 begins at 5.
    assert [s.step for s in after_warm_up(steps_of([1, 2, 3]), warm_up=5)] == [10, 15]
    assert [s.step for s in after_warm_up(steps_of([1, 2, 3]), warm_up=6)] == [15]
    assert [s.step for s in after_warm_up(steps_of([1, 2, 3]), warm_up=1)] == [5, 10, 15]


def test_intervals_in_which_something_was_compiled_are_left_out():
    assert [s.step for s in steady(steps_of([1, 2, 3], compiled=(1, 10)), warm_up=1)] == [5, 15]


def test_a_run_without_an_interval_to_measure_is_an_error():
    with pytest.raises(ValueError, match="no interval to measure after warm-up step 15: the run ended at step 15$"):
        steady(steps_of([1, 2, 3]), warm_up=15)
    with pytest.raises(ValueError, match="those that end at 10, 15 compiled something"):
        steady(steps_of([1, 2, 3], compiled=(10, 15)), warm_up=5)
