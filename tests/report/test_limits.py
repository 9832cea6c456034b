import json

import pytest

from mxfp8_titan.report.limits import GemmSpeedUps, limit, parse_speed_ups, read_speed_ups
from tests.report.runs import H200, breakdown_of, inventory_of

TWICE = GemmSpeedUps(2.0, 4.0, "a test")
BF16 = breakdown_of(gemm_dense=40.0, gemm_grouped=20.0, attention=30.0)


def test_the_converted_part_of_the_gemms_takes_its_fp8_time_and_nothing_else_changes():
    # Three quarters of 40 ms at twice the rate save 15 of 100 ms; 20 ms at four times save 15.
    assert limit(100.0, BF16, None, inventory_of(dense=3), TWICE).free_casts == pytest.approx(100 / 85)
    assert limit(100.0, BF16, None, inventory_of(experts=1), TWICE).free_casts == pytest.approx(100 / 85)
    assert limit(100.0, BF16, None, inventory_of(dense=3, experts=1), TWICE).free_casts == pytest.approx(100 / 70)


def test_the_run_s_own_quantization_can_be_added():
    both = limit(100.0, BF16, breakdown_of(quantization=10.0), inventory_of(dense=3, experts=1), TWICE)
    assert both.own_casts == pytest.approx(100 / 80)
    assert limit(100.0, BF16, None, inventory_of(dense=3), TWICE).own_casts is None


def test_the_measured_step_counts_and_not_the_profiler_s_share_of_the_traced_one():
    # 30 of the 80 ms that a step takes unwatched.
    assert limit(80.0, BF16, None, inventory_of(dense=3, experts=1), TWICE).free_casts == pytest.approx(80 / 50)
    assert limit(25.0, BF16, None, inventory_of(dense=3, experts=1), TWICE) is None


def test_a_run_that_converts_nothing_has_no_limit():
    assert limit(100.0, BF16, BF16, inventory_of(), TWICE) is None


def _results(tmp_path, **values):
    rows = [{"id": id, "value": value} for id, value in values.items()]
    path = tmp_path / "gemm.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "commit": "abc", "rows": rows}))
    return path


def test_rates_come_from_the_benchmark_of_the_same_gpu(tmp_path):
    path = _results(tmp_path, gemm_y=2.0, gemm_dx=2.0, gemm_dw=1.0)
    found = read_speed_ups(path, H200)
    # Equal FLOPs: 1/2 + 1/2 + 1 of three.
    assert (found.dense, found.grouped) == pytest.approx((1.5, 1.5))
    assert "gemm.json of commit abc, the worst shapes (grouped, used for dense ones too)" in found.source
    assert read_speed_ups(path, "1 x NVIDIA B200") is None
    assert read_speed_ups(tmp_path / "absent.json", H200) is None


def test_dense_rates_are_used_where_they_were_measured_and_a_missing_row_means_no_limit(tmp_path):
    dense = {f"dense_gemm_{gemm}": 3.0 for gemm in ("y", "dx", "dw")}
    assert read_speed_ups(_results(tmp_path, gemm_y=2, gemm_dx=2, gemm_dw=2, **dense), H200).dense == pytest.approx(3)
    assert read_speed_ups(_results(tmp_path, gemm_y=2, gemm_dx=2), H200) is None


def test_rates_can_be_given_and_are_called_given():
    given = parse_speed_ups("dense=1.6,grouped=1.75")
    assert (given.dense, given.grouped) == (1.6, 1.75)
    assert "not measured here" in given.source


@pytest.mark.parametrize("text", ["1.6", "dense=1.6", "dense=x,grouped=1", "dense=0,grouped=1", "a=1,b=2"])
def test_rates_that_cannot_be_used_are_refused(text):
    with pytest.raises(ValueError, match="needs dense=NUMBER,grouped=NUMBER"):
        parse_speed_ups(text)
