"""scripts/llama4.sh as a user runs it without a GPU: from another folder, in a checkout whose path has a space."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.train.harness import ROOT

pytestmark = [
    pytest.mark.train,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a machine without a GPU"),
]


@pytest.fixture
def llama4(tmp_path):
    checkout = tmp_path / "a checkout"
    for name in ("mxfp8_titan", "configs", "scripts"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)

    def run(extra_args):
        env = {
            **os.environ,
            "PYTHON": sys.executable,
            "NGPU": "1",
            "STEPS": "2",
            "LOG_DIR": str(tmp_path / "my logs"),
            "EXTRA_ARGS": extra_args,
        }
        script = checkout / "scripts" / "llama4.sh"
        done = subprocess.run([script], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        log = next((tmp_path / "my logs").glob("*.log"), None)
        return done.returncode, done.stdout, done.stderr, log and log.read_text()

    return run


def test_it_trains_and_ends_with_its_two_lines(llama4, tmp_path):
    code, out, _, log = llama4("--training.seq_len=64 --model.converters=\"mx\" --mx.moe_fqns_prototype='experts'")
    assert code == 0, out[-3000:]
    assert "30 linears and 3 expert modules converted" in log
    assert out.splitlines()[-2].startswith("Median Tokens/Second (excluding step 1): ")
    assert out.splitlines()[-1].startswith("Max Memory Usage: ")
    assert len(list((tmp_path / "my logs").glob("*.png"))) == 1


def test_a_job_that_is_refused_ends_with_one_line_before_any_process_starts(llama4):
    code, out, error, _ = llama4("--model.converters=mx --mx.filter_fqns=lm_head")
    assert code == 2
    assert [line for line in error.splitlines() if "matches no dense linear" in line] == [error.splitlines()[-1]]
    assert "Traceback" not in out + error
    assert "Median" not in out
