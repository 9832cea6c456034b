import subprocess
import sys

import pytest
import torch

from mxfp8_titan.bench.memory import Live, peak_of, where
from tests.train.harness import DEBUG, ROOT


def _event(action, addr, size, *lines):
    frames = [{"filename": f"/x/{name}", "line": line, "name": "f"} for name, line in lines]
    return {"action": action, "addr": addr, "size": size, "frames": frames}


def test_the_peak_is_what_lives_at_the_moment_of_most_memory():
    x, y = ("mxfp8_titan/autograd/a.py", 1), ("torchtitan/models/b.py", 2)
    events = [
        _event("alloc", 1, 100, x),
        _event("alloc", 2, 100, x),
        _event("free_requested", 1, 100),
        _event("free_completed", 1, 100),
        _event("free_completed", 90, 30),  # from before the step
        _event("alloc", 3, 500, y),
        _event("segment_alloc", 9, 4096),
        _event("alloc", 4, 100, x),
        _event("free_completed", 3, 500),
        _event("alloc", 5, 200, y),
    ]
    peak = peak_of(events, before=1000)
    assert peak.allocated == 1000 + 100 - 30 + 500 + 100
    assert (peak.before, peak.older) == (1000, 970)
    assert peak.live == [Live("models/b.py:2 f", 500, 1), Live("autograd/a.py:1 f", 100, 2)]
    assert peak.older + sum(group.bytes * group.count for group in peak.live) == peak.allocated


def test_a_step_that_only_frees_has_its_peak_before():
    peak = peak_of([_event("free_completed", 1, 10)], before=50)
    assert (peak.allocated, peak.older, peak.live) == (50, 50, [])


def test_an_allocation_is_known_by_three_frames_of_ours_and_torchtitan_s_innermost_first():
    names = (
        "torch/nn/module.py",
        "mxfp8_titan/kernels/launch.py",
        "mxfp8_titan/a.py",
        "torchtitan/b.py",
        "mxfp8_titan/c.py",
    )
    frames = [{"filename": f"/x/{name}", "line": 7, "name": "f"} for name in names]
    assert where(frames) == "kernels/launch.py:7 f < mxfp8_titan/a.py:7 f < torchtitan/b.py:7 f"
    assert where([]) == "autograd"


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a machine without a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "mxfp8_titan.bench.memory", "--job.config_file", str(DEBUG)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "error: this records a GPU's allocator, and there is no GPU")


@pytest.mark.gpu
@pytest.mark.train
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_debug_job_is_recorded(ranks, tmp_path):
    out = tmp_path / "memory.json"
    command = [
        sys.executable, "-m", "mxfp8_titan.bench.memory", f"--ranks={ranks}", "--step=2", f"--json={out}", "--commit=x",
        "--job.config_file", str(DEBUG), "--training.steps=3", "--training.seq_len=64", f"--job.dump_folder={tmp_path}",
        "--model.converters=mx", "--mx.moe_fqns_prototype=experts",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert '"allocated"' in out.read_text()
    # FSDP2's gathered weights are there when there is something to gather.
    assert ("_fully_shard/" in done.stdout) == (ranks > 1)
