import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mxfp8_titan import compare
from mxfp8_titan.launch import Machine
from tests.train.harness import ROOT

CPU = Machine(gpus=0, gpu_gib=0, cores=2)
START = (
    "[rank0]:x - Trainer is initialized with local batch size 2, global batch size 8, gradient accumulation steps 2, "
)
SUMMARY = "[titan] x - INFO - MXFP8: 30 linears and 3 expert modules converted, recipe=mxfp8_emulated_rceil (rceil)"


def test_the_runs_are_bf16_twice_dense_experts_and_both():
    assert compare.parse([]).variants == {
        "bf16": "",
        "bf16_again": "",
        "dense": "--model.converters=mx",
        "experts": "--model.converters=mx --mx.moe_fqns_prototype=experts --mx.no-dense",
        "both": "--model.converters=mx --mx.moe_fqns_prototype=experts",
    }


def test_runs_can_be_added_and_chosen():
    variants = compare.parse(
        ["--variant", "bf16_wgrad=--model.converters=mx --mx.wgrad=bf16", "--only", "bf16_wgrad"]
    ).variants
    assert variants == {"bf16": "", "bf16_wgrad": "--model.converters=mx --mx.wgrad=bf16"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--variant", "nameless"], "needs NAME=FLAGS"),
        (["--variant", "a/b=--x"], "needs NAME=FLAGS"),
        (["--only", "fast"], "--only names fast; runs are bf16"),
        (["--steps", "12"], "leaves no two intervals of 5 after warm-up 10"),
        (["--log-freq", "0"], "leaves no two intervals"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(args, message, capsys):
    with pytest.raises(SystemExit):
        compare.parse(args)
    assert message in capsys.readouterr().err


def test_conversion_and_tokens_are_read_back_from_the_log_and_not_from_the_flags():
    log = f"{START}sequence length 64, total steps 14 (warmup 2)\n{SUMMARY}\n"
    assert compare.tokens_per_step(log) == 2 * 2 * 64
    assert compare.converted_in(log) == "30 linears, 3 expert modules"
    assert compare.converted_in("") == "nothing"


def test_a_run_is_kept_only_for_the_same_command_commit_machine_and_versions(tmp_path):
    settings = replace(compare.parse([]), out=tmp_path)
    facts = {"commit": "abc", "gpu": "g", "date": "today"}

    def print_of(name="both", flags=("--a",), **changed):
        return compare.fingerprint(compare.variant_job(settings, CPU, name, list(flags)), facts | changed, settings)

    assert print_of() == print_of(date="tomorrow")
    assert (
        len({print_of(), print_of(commit="def"), print_of(gpu="h"), print_of(flags=("--b",)), print_of("dense")}) == 5
    )


def test_a_failed_run_stops_the_comparison_without_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "run", lambda job: 3)
    monkeypatch.setattr(compare, "gather_facts", lambda machine: {})
    settings = replace(compare.parse([]), out=tmp_path)
    assert compare.compare(settings, Machine(gpus=1, gpu_gib=139, cores=2)) == 3
    assert "bf16 failed; no report" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()


@pytest.mark.train
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a machine without a GPU")
def test_two_processes_are_compared_from_one_seed_checkpoint_and_finished_runs_are_kept(tmp_path):
    command = [
        ROOT / "scripts" / "compare.sh", "--only", "both", "--steps", "4", "--log-freq", "1", "--warm-up", "2",
        "--flags", "--training.seq_len=64 --training.local_batch_size=2", "--out", tmp_path / "out",
    ]  # fmt: skip
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHON": sys.executable, "NGPU": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        outputs.append(done.stdout)
    assert "writing a seed checkpoint" in outputs[0]
    assert "both: 4 steps" in outputs[0]
    assert "both: kept from" in outputs[1]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    bf16, both = report["rows"]
    assert (bf16["name"], both["name"], both["converted"]) == ("bf16", "both", "30 linears, 3 expert modules")
    assert 0 < both["largest_loss_gap"] < 0.05
    assert [len(steps) for steps in report["steps"].values()] == [4, 4]
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"speed.png", "loss.png"}
