import signal

import pytest

from mxfp8_titan.report.finish import finish
from tests.log_lines import log_line


def _finish(tmp_path, text, code=0):
    log = tmp_path / "run.log"
    log.write_text(text)
    return finish(log, code)


def test_a_good_run_ends_with_the_two_lines(tmp_path, capsys):
    assert _finish(tmp_path, log_line(1) + log_line(2, tps=50) + log_line(3, tps=70)) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Median Tokens/Second (excluding step 1): 60.0",
        "Max Memory Usage: 10.00 GiB",
    ]
    assert (tmp_path / "run.png").exists()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (log_line(1), 3, "training failed with exit code 3"),
        (log_line(1) + log_line(2, loss=float("nan")), 0, "the loss is nan at step 2"),
        ("nothing\n", 0, "no training step was logged"),
        ("[rank0]:error: mx.wgrad is 'x'\n", 2, "mx.wgrad is 'x'"),
        ("[rank0]:torch.OutOfMemoryError: CUDA out of memory.\n", 1, "CUDA out of memory"),
        (
            "[rank0]:[rank0]: AssertionError: global batch\nx.errors.ChildFailedError: \n",
            1,
            "AssertionError: global batch",
        ),
        ("[rank1]:[rank1]: AssertionError\n", 1, "AssertionError"),
        ("", -9, "exit code 137"),
    ],
)
def test_a_failed_run_says_why_and_ends_non_zero_without_the_two_lines(text, code, message, tmp_path, capsys):
    assert _finish(tmp_path, text, code) > 0
    out = capsys.readouterr().out
    assert message in out
    assert "Median" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_told_to_end_did_not_fail(number, tmp_path, capsys):
    text = log_line(1) + "torch.distributed.elastic.multiprocessing.api.SignalException: got signal: 15\n"
    assert _finish(tmp_path, text, -number) == 128 + number
    out = capsys.readouterr().out
    assert out == f"stopped by {number.name}. Log: {tmp_path / 'run.log'}\n"


def test_a_seed_checkpoint_is_no_failure(tmp_path, capsys):
    assert _finish(tmp_path, "[rank0]:[titan] x - root - INFO - Created seed checkpoint\n") == 0
    assert "seed checkpoint written" in capsys.readouterr().out
