"""A run that is killed while it saves goes on from the last whole checkpoint, to the same weights bit for bit."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.train.harness import DEBUG, MX, ROOT, TINY, read_checkpoint, train

pytestmark = pytest.mark.train

SAVE = (*MX, *TINY, "--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last_save_model_only",
        "--debug.seed=1", "--training.steps=4", "--metrics.log_freq=1")  # fmt: skip


def _kill_while_it_saves(folder, step):
    """Starts a run and kills it with SIGKILL as soon as the first bytes of `step`'s checkpoint are written."""
    command = [sys.executable, "-m", "mxfp8_titan.train", "--job.config_file", str(DEBUG), *SAVE]
    with open(folder / "killed.txt", "w") as log:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1"}
        job = subprocess.Popen([*command, f"--job.dump_folder={folder}"], env=env, stdout=log, stderr=subprocess.STDOUT)
        saving = folder / "checkpoint" / f"step-{step}"
        give_up = time.monotonic() + 200
        while not any(path.stat().st_size for path in saving.glob("*.distcp")):
            assert job.poll() is None, (folder / "killed.txt").read_text()[-3000:]
            assert time.monotonic() < give_up
            time.sleep(0.002)
        job.kill()
        assert job.wait() == -signal.SIGKILL
    return saving


def test_the_last_whole_checkpoint_is_taken_and_the_end_is_that_of_a_run_that_nobody_killed(tmp_path):
    whole = train(tmp_path / "whole", *SAVE)
    killed = tmp_path / "killed"
    killed.mkdir()
    half = _kill_while_it_saves(killed, 4)
    assert not (half / ".metadata").exists(), "it was killed too late: the checkpoint is whole"
    resumed = train(killed, *SAVE)
    assert [step.step for step in resumed.steps] == [3, 4]
    assert resumed.losses() == whole.losses(3)
    a, b = read_checkpoint(tmp_path / "whole", 4), read_checkpoint(killed, 4)
    assert a.keys() == b.keys()
    assert any("exp_avg_sq" in key for key in a)
    assert all(torch.equal(a[key], b[key]) for key in a)
