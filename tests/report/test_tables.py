import json

from mxfp8_titan.report.comparison import make_rows
from mxfp8_titan.report.draw import draw_breakdowns, draw_losses, draw_speeds
from mxfp8_titan.report.limits import GemmSpeedUps
from mxfp8_titan.report.tables import as_json, as_markdown, as_text, breakdown_table, speed_table
from tests.report.runs import H200, breakdown_of, inventory_of, run_of, steps_of

RATES = GemmSpeedUps(2.0, 2.0, "measured by a test")


def _runs(**both):
    split = {"gemm_dense": 50.0, "communication": 20.0}
    return [
        run_of("bf16", steps_of([1, 100, 100], losses=[8, 7, 6, 5]), breakdown=breakdown_of(**split)),
        run_of("bf16_again", steps_of([1, 102, 102], losses=[8, 7, 6.01, 5]), breakdown=breakdown_of(**split)),
        run_of(
            "both",
            **{
                "steps": steps_of([1, 120, 120]),
                "inventory": inventory_of(dense=4, experts=1),
                "breakdown": breakdown_of(gemm_dense=25.0, quantization=5.0),
                **both,
            },
        ),
    ]


def _markdown(runs, device=H200, rates=RATES):
    return as_markdown(runs, make_rows(runs, 5, device, rates), {"gpu": device}, rates)


def test_the_report_states_facts_noise_limits_conversion_and_commands():
    text = _markdown(_runs())
    for part in (
        "- gpu: 1 x NVIDIA H200",
        "differs by 2.0 % in speed and by up to 0.0100 in loss",
        "2.00 (dense) and 2.00 (grouped) times as fast",
        "FP8 rates over bf16: measured by a test",
        "4 of 4 linears, 1 of 1 expert modules",
        "| real | 1.50 |",
        "twice that of the two bf16 runs",
        "`train both`",
    ):
        assert part in text


def test_a_run_past_its_limit_is_named_and_why():
    past = "Faster than the limit with free casts: both."
    # Half of the 50 ms of GEMMs gone makes 1.33.
    assert past not in _markdown(_runs(steps=steps_of([1, 133, 133])))
    assert past in _markdown(_runs(steps=steps_of([1, 134, 134])))


def test_a_trace_that_is_not_of_the_measured_step_gives_no_limit_and_says_so():
    # 25 of the 50 ms of GEMMs would go, of a step that took 20.
    runs = _runs(steps=steps_of([1, 500, 500]))
    runs[0] = run_of("bf16", steps_of([1, 500, 500]), breakdown=breakdown_of(gemm_dense=50.0))
    said = _markdown(runs)
    assert "No limit, because traced GEMMs would save more than the measured step: both." in said
    assert "has no trace" not in said


def test_a_run_whose_host_is_slow_at_loading_data_is_named():
    said = "Part of the time that the host spends loading data: "
    assert f"{said}both 12 %. After each" in _markdown(_runs(steps=steps_of([1, 120, 120], loading=0.12)))
    assert said not in _markdown(_runs(steps=steps_of([1, 120, 120], loading=0.1)))


def test_short_runs_are_not_to_be_judged_by_their_losses():
    warning = "Too short to judge losses by: 100 steps or more say something."
    for steps, warned in ((95, True), (100, False)):
        speeds = [100] * (steps // 5)
        runs = [run_of(name, steps_of(speeds)) for name in ("bf16", "bf16_again")]
        assert (warning in _markdown(runs)) == warned


def test_the_breakdown_has_the_wall_time_the_sums_and_the_unknown_kernels():
    header, bf16, _, both = breakdown_table(_runs())
    cells = dict(zip(header, bf16, strict=True))
    assert (cells["GEMM, dense"], cells["idle"], cells["wall"], cells["sum of durations"]) == (
        "50.0 (50.0)", "30.0", "100.0", "70.0",
    )  # fmt: skip
    assert dict(zip(header, both, strict=True))["communication"] == "0.0 (0.0)"
    text = _markdown(_runs())
    assert "Largest in other, both: `odd_kernel` 1.50 ms" in text
    assert "overlaps counted twice" in text


def test_what_is_missing_is_said():
    untraced = [run_of(run.name, run.steps, run.inventory) for run in _runs()]
    assert "No trace was made" in _markdown(untraced)
    assert "No limits: the bf16 run has no trace" in _markdown(untraced)
    assert "no FP8 GEMM rates of this device were found" in _markdown(_runs(), rates=None)
    assert "there is no noise to hold it against" in _markdown([_runs()[0], _runs()[2]])
    assert "| n/a | unknown device |" in _markdown(_runs(), device="none, 2 CPU cores")


def test_more_than_the_peak_is_flagged_and_intervals_left_out_are_counted():
    over = _markdown(_runs(steps=steps_of([1, 2.5e6, 2.5e6], compiled=(10,))))
    assert "**Above 100 % of the peak, so something is measured wrongly: both.**" in over
    assert "because something was compiled in them: both 1." in over
    assert "Above 100 %" not in _markdown(_runs())


def test_columns_line_up_and_json_and_pictures_hold_every_run(tmp_path):
    runs = _runs()
    rows = make_rows(runs, 5, H200, RATES)
    lines = as_text(speed_table(rows)).splitlines()
    assert len({line.index(speed) for line, speed in zip(lines[1:], ("100", "102", "120"), strict=True)}) == 1
    data = json.loads(as_json(runs, rows, {"commit": "abc"}, RATES))
    assert data["commit"] == "abc"
    assert [row["name"] for row in data["rows"]] == ["bf16", "bf16_again", "both"]
    assert len(data["steps"]["both"]) == 4
    assert data["breakdowns"]["both"]["shown_ms"]["quantization"] == 5.0
    assert data["rows"][2]["limit"]["free_casts"] > 1
    draw_speeds(rows, tmp_path / "speed.png")
    draw_losses({run.name: run.steps for run in runs}, tmp_path / "loss.png")
    draw_breakdowns({run.name: run.breakdown for run in runs}, tmp_path / "breakdown.png")
    pictures = [path.read_bytes() for path in tmp_path.glob("*.png")]
    assert [picture[:4] for picture in pictures] == [b"\x89PNG"] * 3
