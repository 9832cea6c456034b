"""The runs of a comparison: what is kept, what is not, and what two comparisons in one folder do."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from mxfp8_titan import compare, compare_runs
from mxfp8_titan.job_args import flag_values
from mxfp8_titan.launch import Job, Machine, execute
from mxfp8_titan.report.facts import fingerprint, gather_facts, sources_hash
from tests.train.harness import ROOT


def test_the_seed_checkpoint_is_made_on_one_process_whatever_the_parallelism(tmp_path):
    settings = replace(compare.parse(["--flags=--parallelism.expert_parallel_degree=2"]), out=tmp_path)
    job, _ = compare_runs.seed_checkpoint(settings, Machine(0, 0, 2), {})
    assert job.processes == 1
    assert flag_values(job.command, "parallelism.expert_parallel_degree")[-1] == "1"


def test_each_model_has_a_seed_checkpoint_of_its_own_that_is_written_once(tmp_path):
    # One seed's number once stood for all models of a folder.
    def seed(flags):
        settings = replace(compare.parse([f"--flags={flags}"]), out=tmp_path)
        return compare_runs.seed_checkpoint(settings, Machine(0, 0, 2), {})

    (job, start), (other, other_start) = seed(""), seed("--model.name=llama3")
    assert job.log.parent != other.log.parent
    assert start != other_start
    written = job.log.parent / "checkpoint" / "step-0" / ".metadata"
    written.parent.mkdir(parents=True)
    written.touch()
    assert seed("") == (None, start)
    assert seed("--model.name=llama3")[0] is not None


def _tree(root, **files):
    for name, text in files.items():
        path = root / "mxfp8_titan" / name.replace("__", "/")
        path = path.with_name(f"{path.name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sources_hash(root)


def test_a_report_s_commands_are_those_of_any_checkout_s_root():
    command = [
        sys.executable,
        "-m",
        "train",
        f"--job.config_file={ROOT}/configs/a.toml",
        f"{ROOT}/logs",
        f"/data{ROOT}/mine",
    ]
    words = compare_runs.portable(command)
    assert words[1:] == ["-m", "train", "--job.config_file=configs/a.toml", "logs", f"/data{ROOT}/mine"]
    assert words[0] == os.path.basename(sys.executable)


def test_sources_that_only_read_runs_may_change_without_running_again(tmp_path):
    first = _tree(tmp_path, converter="a", report__draw="a", compare="a", compare_runs="a")
    assert _tree(tmp_path, report__draw="b", compare="b", compare_runs="b") == first
    assert _tree(tmp_path, converter="b") != first


def test_a_run_is_kept_only_for_the_same_command_toml_commit_sources_machine_and_versions(tmp_path):
    toml = tmp_path / "job.toml"
    toml.write_text("a")
    facts = {"commit": "abc", "gpu": "g", "date": "today"}

    def print_of(command=("train", "--a"), sources="s", cold=False, **changed):
        return fingerprint(list(command), toml, facts | changed, sources, cold)

    prints = [print_of(), print_of(commit="def"), print_of(gpu="h"), print_of(("train",)), print_of(sources="t")]
    assert print_of(date="tomorrow") == prints[0]
    prints.append(print_of(cold=True))
    toml.write_text("b")
    prints.append(print_of())
    assert len(set(prints)) == 7


def test_a_run_that_falls_silent_is_ended(tmp_path, capsys):
    job = Job(["sh", "-c", "echo started; exec sleep 600"], dict(os.environ), tmp_path / "run.log")
    with compare_runs.ended_when_silent(job.log, 0.5) as hung:
        assert execute(job) == -signal.SIGTERM
    assert hung.is_set()
    assert "no output for 0.5 s: the run hangs" in capsys.readouterr().err


def test_a_run_starts_without_the_checkpoints_that_an_earlier_one_left(tmp_path, monkeypatch):
    # torchtitan goes on from them, with the other settings' weights and from their step.
    (tmp_path / "bf16" / "checkpoint" / "step-8").mkdir(parents=True)
    left = []
    monkeypatch.setattr(
        compare_runs, "execute", lambda job, keep_open: left.extend((tmp_path / "bf16").glob("checkpoint")) or 0
    )
    monkeypatch.setattr(compare_runs, "finish", lambda log, code: code)
    settings = replace(compare.parse(["--flags=--checkpoint.enable --checkpoint.interval=4"]), out=tmp_path)
    job = compare_runs.variant_job(settings, Machine(1, 139, 2), "bf16", compare_runs.flags_of(settings, ""))
    compare_runs.run_variant(job, settings, ())
    assert left == []
    assert flag_values(job.command, "checkpoint.folder") == ["checkpoint"]


def test_what_the_comparison_sets_comes_after_what_the_user_sets(tmp_path):
    settings = compare.parse(["--flags=--optimizer.lr=1 --training.seq_len=64", "--seed=7"])
    flags = compare_runs.flags_of(settings, "--optimizer.lr=2")
    assert flag_values(flags, "optimizer.lr") == ["1", "2"]
    assert flags.index("--debug.seed=7") > flags.index("--optimizer.lr=2")


def test_a_folder_has_one_comparison_at_a_time_and_none_while_a_run_outlives_its_own(tmp_path):
    with compare_runs.alone_in(tmp_path) as keep_open:
        says = "is in use, by another comparison or by a run that a killed one left"
        with pytest.raises(ValueError, match=says), compare_runs.alone_in(tmp_path):
            pass
        orphan = subprocess.Popen(["sleep", "600"], pass_fds=keep_open)
    try:
        with pytest.raises(ValueError, match="is in use"), compare_runs.alone_in(tmp_path):
            pass
    finally:
        orphan.kill()
        orphan.wait()
    with compare_runs.alone_in(tmp_path):
        pass


def test_a_signal_after_a_run_is_the_caller_s_again(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    execute(Job(["true"], dict(os.environ), tmp_path / "run.log"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_another_torchtitan_is_another_run(monkeypatch):
    installed = gather_facts(ROOT, 0, 2, "abc")["torchtitan"]
    monkeypatch.setenv("TORCHTITAN_ROOT", "/checkout")
    assert gather_facts(ROOT, 0, 2, "abc")["torchtitan"] == "/checkout at unknown" != installed


def test_what_cannot_be_read_of_a_run_is_named(tmp_path):
    settings = replace(compare.parse(["--trace-steps=0"]), out=tmp_path)
    job = Job(["train"], {}, tmp_path / "bf16" / "run.log")
    with pytest.raises(ValueError, match="what bf16 left in .*bf16 cannot be read .FileNotFoundError"):
        compare_runs.finished(settings, "bf16", job)
