import math

import pytest

from mxfp8_titan.report.draw import draw_run
from mxfp8_titan.report.run_log import closing_lines, first_non_finite, read_steps
from tests.log_lines import log_line

VALIDATE = "[titan] x - root - INFO - \x1b[33mvalidate step:  2  \x1b[32mloss:  9.0000  memory:  9.00GiB(1%)  tps: 7\n"


def _log(tmp_path, lines):
    path = tmp_path / "run.log"
    path.write_text("noise\n" + "".join(lines))
    return path


def test_steps_are_read_through_colours_and_beside_validation(tmp_path):
    steps = read_steps(
        _log(tmp_path, [log_line(1, tps=5), VALIDATE, log_line(2, tps=65611, memory=109.22), log_line(100)])
    )
    assert [s.step for s in steps] == [1, 2, 100]
    assert (steps[1].tokens_per_second, steps[1].memory_gib, steps[1].loss) == (65611.0, 109.22, 5.0)


def test_ranks_that_log_the_same_step_count_once(tmp_path):
    assert len(read_steps(_log(tmp_path, [log_line(1), log_line(1), log_line(2), log_line(2)]))) == 2


def test_the_closing_lines_leave_out_step_1_and_take_the_largest_memory(tmp_path):
    lines = [
        log_line(1, tps=1, memory=109.22),
        log_line(10, tps=60000),
        log_line(20, tps=65611),
        log_line(30, tps=70000),
    ]
    assert closing_lines(read_steps(_log(tmp_path, lines))) == [
        "Median Tokens/Second (excluding step 1): 65611.0",
        "Max Memory Usage: 109.22 GiB",
    ]


def test_a_run_that_logged_only_step_1_has_no_median_and_says_what_to_change(tmp_path):
    median, _ = closing_lines(read_steps(_log(tmp_path, [log_line(1)])))
    assert "n/a" in median
    assert "--metrics.log_freq" in median


def test_an_empty_log_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no training step"):
        closing_lines(read_steps(_log(tmp_path, [])))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_found(bad, tmp_path):
    steps = read_steps(_log(tmp_path, [log_line(1), log_line(2, loss=bad), log_line(3, loss=bad)]))
    assert first_non_finite(steps).step == 2
    assert first_non_finite(steps[:1]) is None


def test_a_run_is_drawn(tmp_path):
    steps = read_steps(_log(tmp_path, [log_line(1), log_line(2), log_line(3)]))
    draw_run(steps, "run", tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("broken", ["loss: abc", "loss:  5.1[rank1]:x", "memory: 1.2.3GiB", "tps: ,"])
def test_a_line_that_two_ranks_wrote_into_is_left_out(broken, tmp_path):
    key = broken.split(":")[0]
    line = "step:  2  loss:  5.0  grad_norm:  1.0  memory: 10.00GiB(3%)  tps: 1,000  tflops: 1  mfu: 1%\n"
    start = line.index(key)
    end = line.index("  ", start + len(key) + 4) if "  " in line[start + len(key) + 4 :] else len(line)
    mixed = line[:start] + broken + line[end:]
    assert [s.step for s in read_steps(_log(tmp_path, [log_line(1), mixed, log_line(3)]))] == [1, 3]
