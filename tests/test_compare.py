import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mxfp8_titan import compare, compare_runs
from mxfp8_titan.launch import Job, Machine
from tests.train.harness import ROOT


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


@pytest.mark.parametrize("flags", ["--compile.enable", "--compile.enable --training.seq_len=64", ""])
def test_flags_of_every_run_may_be_one_word_or_more(flags):
    assert compare.parse(["--flags", flags, "--seed", "7"]).common == flags
    assert compare.parse([f"--flags={flags}"]).common == flags


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--variant", "nameless"], "needs NAME=FLAGS"),
        (["--variant", "a/b=--x"], "needs NAME=FLAGS"),
        (["--only", "fast"], "--only names fast; runs are bf16"),
        (["--steps", "12"], "--steps 12, needs 20 or more: --warm-up 10 and two intervals of --log-freq 5"),
        (["--log-freq", "0"], "--log-freq and --warm-up need whole numbers from 1 up"),
        (["--step", "60"], "unrecognized arguments: --step 60"),
        (["--flags", "--training.steps=8"], "--flags sets training.steps, which the comparison sets: use --steps"),
        (["--variant", "long=--debug.seed 7"], "--variant long sets debug.seed, which the comparison sets: use --seed"),
        (["--flags", "--job.description='"], """--flags "--job.description='": No closing quotation"""),
        (["--variant", "bf16=--model.converters=mx"], "bf16 is a name of the comparison's own"),
        (["--variant", "seed-42="], "seed-42 is a name of the comparison's own"),
        (["--trace-steps", "-1"], "--trace-steps needs a whole number from 0 up"),
        (["--gemm-speed-ups", "2"], "needs dense=NUMBER,grouped=NUMBER"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(args, message, capsys):
    with pytest.raises(SystemExit):
        compare.parse(args)
    assert message in capsys.readouterr().err


@pytest.fixture
def made_up(monkeypatch):
    """Jobs that pass their check, end as they are made to, on a machine without facts."""
    monkeypatch.setattr(compare, "check_all", lambda jobs: [(0, "") for job in jobs])
    monkeypatch.setattr(compare_runs, "finish", lambda log, code: code)
    monkeypatch.setattr(compare, "gather_facts", lambda *a: {})


def test_traced_steps_come_after_the_measured_ones_and_can_be_turned_off(tmp_path, monkeypatch, made_up):
    started = []
    monkeypatch.setattr(compare_runs, "execute", lambda job, keep_open: started.append(job) or 1)
    gpu = Machine(gpus=1, gpu_gib=139, cores=2)
    for args in ([], ["--trace-steps", "0"]):
        compare.compare(replace(compare.parse(args), out=tmp_path), gpu)
    with_trace, without = ([arg.partition("=") for arg in job.command] for job in started)
    assert ("--training.steps", "=", "54") in with_trace
    assert ("--mx.trace_steps", "=", "3") in with_trace
    assert ("--training.steps", "=", "50") in without
    assert not any(name.startswith("--mx.trace") for name, _, _ in without)


def test_a_job_that_cannot_start_stops_the_comparison_before_any_run_and_removes_nothing(
    tmp_path, monkeypatch, made_up, capsys
):
    # A typo among the flags once cost the finished runs of the same folder.
    kept = [tmp_path / "bf16" / name for name in ("done-of-other-flags", "metrics.jsonl", "run.log")]
    kept[0].parent.mkdir()
    for file in kept:
        file.write_text("hours of GPU time")

    def checked(jobs):
        converted = ["--model.converters=mx" in job.command for job in jobs]
        return [(2, "error: what is wrong\n") if mx else (0, "warning: of bf16\n") for mx in converted]

    monkeypatch.setattr(compare, "check_all", checked)
    monkeypatch.setattr(compare_runs, "execute", lambda job, keep_open: pytest.fail("something was run"))
    settings = replace(compare.parse([]), out=tmp_path)
    assert compare.compare(settings, Machine(gpus=1, gpu_gib=139, cores=2)) == 2
    assert all(file.read_text() == "hours of GPU time" for file in kept)
    said = capsys.readouterr().err
    assert "warning: of bf16" in said
    assert said.count("error: what is wrong") == 1
    assert "dense cannot start. Nothing was run" in said


def test_a_failed_run_stops_the_comparison_with_its_log_s_tail_and_without_a_report(
    tmp_path, monkeypatch, made_up, capsys
):
    def fail(job, keep_open):
        job.log.parent.mkdir(parents=True)
        job.log.write_text("".join(f"line {i}\n" for i in range(100)))
        return 3

    monkeypatch.setattr(compare_runs, "execute", fail)
    (tmp_path / "report.md").write_text("of last month")
    settings = replace(compare.parse([]), out=tmp_path)
    assert compare.compare(settings, Machine(gpus=1, gpu_gib=139, cores=2)) == 3
    said = capsys.readouterr().err
    assert "bf16 failed; no report" in said
    assert "line 99" in said
    assert "line 70" not in said
    assert not (tmp_path / "report.md").exists()


def test_a_comparison_that_is_stopped_did_not_fail(tmp_path, monkeypatch, made_up, capsys):
    monkeypatch.setattr(compare_runs, "execute", lambda job, keep_open: 128 + signal.SIGINT)
    settings = replace(compare.parse([]), out=tmp_path)
    assert compare.compare(settings, Machine(gpus=1, gpu_gib=139, cores=2)) == 128 + signal.SIGINT
    said = capsys.readouterr()
    assert "bf16 is not finished; no report. The same command goes on" in said.out
    assert "failed" not in said.out + said.err


def test_no_seed_checkpoint_is_written_for_runs_that_cannot_start(tmp_path, monkeypatch, made_up):
    monkeypatch.setattr(compare, "check_all", lambda jobs: [(2, "error: a typo\n") for _ in jobs])
    monkeypatch.setattr(compare, "execute", lambda *_: pytest.fail("something was run"))
    settings = replace(compare.parse([]), out=tmp_path)
    assert compare.compare(settings, Machine(gpus=0, gpu_gib=0, cores=2)) == 2


def test_a_run_that_hangs_failed_and_its_error_is_shown(tmp_path, monkeypatch, capsys):
    code = "print('[rank1]:RuntimeError: out of memory', flush=True); import time; time.sleep(600)"
    job = Job([sys.executable, "-c", code], dict(os.environ), tmp_path / "bf16" / "run.log")
    settings = replace(compare.parse(["--hang-after=2"]), out=tmp_path)
    assert compare_runs.run_variant(job, settings, ()) == 1
    *_, failed, why = capsys.readouterr().out.splitlines()
    assert failed.startswith("error: training failed with exit code 1. Log: ")
    assert why == "[rank1]:RuntimeError: out of memory"


def test_checkpoints_that_a_run_will_remove_do_not_stop_it(tmp_path, monkeypatch):
    # Weights alone, which no job goes on from.
    dcp.save({"model": torch.ones(1)}, checkpoint_id=tmp_path / "bf16" / "checkpoint" / "step-54", no_dist=True)
    started = []
    monkeypatch.setattr(compare_runs, "execute", lambda job, keep_open: started.append(job) or 1)
    monkeypatch.setattr(compare_runs, "finish", lambda log, code: code)
    monkeypatch.setattr(compare, "gather_facts", lambda *a: {})
    monkeypatch.setenv("CONFIG_FILE", str(ROOT / "configs" / "llama4_debug.toml"))
    settings = replace(compare.parse(["--flags=--checkpoint.enable", "--only=bf16"]), out=tmp_path)
    assert compare.compare(settings, Machine(gpus=1, gpu_gib=139, cores=2)) == 1
    assert len(started) == 1


def test_a_toml_edited_while_runs_go_on_stops_the_comparison_and_the_run_does_not_count(
    tmp_path, monkeypatch, made_up, capsys
):
    toml = tmp_path / "job.toml"
    toml.write_text("[optimizer]\nlr = 1e-4\n")
    monkeypatch.setenv("CONFIG_FILE", str(toml))

    def run_and_edit(job, keep_open):
        job.log.parent.mkdir(parents=True)
        toml.write_text("[optimizer]\nlr = 1e-1\n")
        return 0

    monkeypatch.setattr(compare_runs, "execute", run_and_edit)
    settings = replace(compare.parse([]), out=tmp_path / "out")
    assert compare.compare(settings, Machine(gpus=1, gpu_gib=139, cores=2)) == 1
    assert "changed before bf16 ended" in capsys.readouterr().err
    assert list((tmp_path / "out").rglob("done-*")) == []


@pytest.mark.parametrize("name", ["STEPS", "EXTRA_ARGS"])
def test_variables_of_the_launcher_that_do_not_count_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv(name, "8")
    with pytest.raises(ValueError, match=f"{name} set, for llama4.sh; compare.sh takes --steps and --flags"):
        compare.compare(replace(compare.parse([]), out=tmp_path), Machine(1, 139, 2))


@pytest.mark.train
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a machine without a GPU")
def test_two_processes_are_compared_from_one_seed_checkpoint_and_finished_runs_are_kept(tmp_path):
    command = [
        ROOT / "scripts" / "compare.sh", "--only", "both", "--steps", "4", "--log-freq", "1", "--warm-up", "2",
        "--trace-steps", "1", "--gemm-speed-ups", "dense=1.6,grouped=1.6",
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
    assert "both: 4 steps and 2 for the trace" in outputs[0]
    assert "both: kept from" in outputs[1]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    bf16, both = report["rows"]
    assert (bf16["name"], both["name"]) == ("bf16", "both")
    assert both["converted"] == "30 of 46 linears, 3 of 3 expert modules"
    assert both["runs_on"] == "mxfp8_emulated_rceil on reference"
    assert 0 < both["largest_loss_gap"] < 0.05
    assert (both["routing"], both["intervals"]) == ("real", 2)
    assert both["imbalance"] >= 1
    assert both["limit"]["free_casts"] > 1
    assert [len(steps) for steps in report["steps"].values()] == [4, 4]
    quantization = {name: split["summed_ms"].get("quantization", 0) for name, split in report["breakdowns"].items()}
    assert quantization["both"] > quantization["bf16"] == 0
    for split in report["breakdowns"].values():
        assert {"gemm_dense", "attention", "communication", "optimizer"} <= set(split["summed_ms"])
        assert split["idle_ms"] + sum(split["shown_ms"].values()) == pytest.approx(split["wall_ms"])
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"speed.png", "loss.png", "breakdown.png"}
