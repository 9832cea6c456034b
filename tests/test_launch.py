import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mxfp8_titan.launch import MXFP8_EVERYWHERE, Job, Machine, check_all, make_job
from tests.train.harness import import_paths

CPU = Machine(gpus=0, gpu_gib=0, cores=8)
H200 = Machine(gpus=1, gpu_gib=139, cores=16)
TWO_H100 = Machine(gpus=2, gpu_gib=79, cores=16)
ONE_H100 = Machine(gpus=1, gpu_gib=79, cores=16)


def _flags(env, machine=CPU, flags=()):
    command = make_job(env, list(flags), machine).command
    return command[command.index("mxfp8_titan.train") + 1 :]


def test_without_extra_args_it_trains_mxfp8_dense_and_moe():
    assert _flags({})[-2:] == list(MXFP8_EVERYWHERE)
    assert _flags({}, flags=["--training.steps=5"])[-3:] == [*MXFP8_EVERYWHERE, "--training.steps=5"]


@pytest.mark.parametrize("extra", ["", "--training.steps=100"])
def test_with_extra_args_only_what_they_say_is_converted(extra):
    assert not any("converters" in flag or "moe_fqns" in flag for flag in _flags({"EXTRA_ARGS": extra}))


def test_the_published_command_s_inner_quotes_are_no_part_of_the_names():
    extra = (
        '--model.converters="mx" --mx.recipe_name="mxfp8_cublas" --mx.filter_fqns="output,router.gate,wk,wv" '
        '--mx.moe_fqns_prototype="experts" --model.print-after-conversion'
    )
    assert _flags({"EXTRA_ARGS": extra})[-5:] == [
        "--model.converters=mx",
        "--mx.recipe_name=mxfp8_cublas",
        "--mx.filter_fqns=output,router.gate,wk,wv",
        "--mx.moe_fqns_prototype=experts",
        "--model.print-after-conversion",
    ]


def test_quoted_blanks_stay_inside_one_flag_and_nothing_is_expanded():
    flags = _flags({"EXTRA_ARGS": "--job.description='a b' --x=$(touch /tmp/never) --y=*"})
    assert flags[-4:] == ["--job.description=a b", "--x=$(touch", "/tmp/never)", "--y=*"]


def test_later_flags_win_so_extra_args_come_after_steps():
    flags = _flags({"STEPS": "7", "EXTRA_ARGS": "--training.steps=9"}, flags=["--training.steps=11"])
    assert [f for f in flags if "steps" in f] == ["--training.steps=7", "--training.steps=9", "--training.steps=11"]


@pytest.mark.parametrize(
    ("machine", "env", "config", "processes"),
    [
        (CPU, {}, "llama4_debug.toml", 2),
        (H200, {}, "llama4_scout_2layer.toml", 1),
        (TWO_H100, {}, "llama4_scout_2layer.toml", 2),
        (TWO_H100, {"NGPU": "1"}, "llama4_debug.toml", 1),
        (ONE_H100, {}, "llama4_debug.toml", 1),
        (CPU, {"NGPU": "1"}, "llama4_debug.toml", 1),
        (Machine(gpus=8, gpu_gib=15, cores=16), {}, "llama4_debug.toml", 8),
        (Machine(gpus=5, gpu_gib=23.6, cores=16), {}, "llama4_debug.toml", 5),
    ],
)
def test_config_and_processes_suit_the_machine(machine, env, config, processes):
    command = make_job(env, [], machine).command
    assert f"--nproc-per-node={processes}" in command
    assert command[command.index("--job.config_file") + 1].endswith(f"configs/{config}")


def test_a_relative_config_file_is_taken_from_where_the_user_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my job.toml").write_text("")
    assert str(tmp_path / "my job.toml") in _flags({"CONFIG_FILE": "my job.toml"})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NGPU": "two"}, "NGPU='two', needs a whole number from 1 up"),
        ({"NGPU": "0"}, "NGPU='0', needs"),
        ({"STEPS": "-1"}, "STEPS='-1', needs"),
        ({"CONFIG_FILE": "/no/such.toml"}, "CONFIG_FILE=/no/such.toml is not a file"),
        ({"EXTRA_ARGS": "--a='b"}, "EXTRA_ARGS cannot be split into flags .*--a='b"),
        ({"TORCHTITAN_ROOT": "/no/such"}, "TORCHTITAN_ROOT=/no/such is no torchtitan checkout"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(env, message):
    with pytest.raises(ValueError, match=message):
        make_job(env, [], CPU)


def test_more_processes_than_gpus_are_refused():
    with pytest.raises(ValueError, match="NGPU=4 but 1 GPUs are visible"):
        make_job({"NGPU": "4"}, [], H200)


def test_a_checkout_goes_before_the_installed_torchtitan(tmp_path):
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "train.py").write_text("")
    paths = make_job({"TORCHTITAN_ROOT": str(tmp_path), "PYTHONPATH": "/mine"}, [], CPU).env["PYTHONPATH"].split(":")
    assert paths[1:] == [str(tmp_path), "/mine"]


def test_a_checkout_of_another_version_is_refused(tmp_path):
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "train.py").write_text("")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "version.txt").write_text("0.3.0\n")
    with pytest.raises(ValueError, match=r"is torchtitan 0.3.0, needs 0.2.2"):
        make_job({"TORCHTITAN_ROOT": str(tmp_path)}, [], CPU)


def test_cores_are_shared_out_and_the_user_s_own_setting_wins():
    assert make_job({}, [], CPU).env["OMP_NUM_THREADS"] == "4"
    assert make_job({"OMP_NUM_THREADS": "1"}, [], CPU).env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("env", "flags", "shown"),
    [
        ({}, [], "0"),
        ({"LOG_RANK": "0,3"}, [], "0,3"),
        ({}, ["--parallelism.pipeline_parallel_degree=2"], "2"),
        ({}, ["--parallelism.pipeline-parallel-degree", "4"], "3"),
        ({"EXTRA_ARGS": "--parallelism.pipeline_parallel_degree=4"}, [], "3"),
    ],
)
def test_the_rank_that_knows_the_loss_is_shown(env, flags, shown):
    assert f"--local-ranks-filter={shown}" in make_job({"NGPU": "4", **env}, flags, CPU).command


def test_pipeline_stages_in_the_toml_count_too(tmp_path):
    config = tmp_path / "job.toml"
    config.write_text("[parallelism]\npipeline_parallel_degree = 2\n")
    assert "--local-ranks-filter=2" in make_job({"NGPU": "4", "CONFIG_FILE": str(config)}, [], CPU).command


@pytest.mark.parametrize("rank", ["2", "abc", "0,", "-1"])
def test_ranks_that_do_not_exist_are_refused(rank):
    with pytest.raises(ValueError, match="LOG_RANK=.* needs ranks between 0 and 1"):
        make_job({"NGPU": "2", "LOG_RANK": rank}, [], CPU)


def test_a_log_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="LOG_DIR=.* is a file, needs a folder"):
        make_job({"LOG_DIR": str(tmp_path / "file")}, [], CPU)


def _sleeper(tmp_path, code="import time; print('ready', flush=True); time.sleep(60)"):
    """A launcher in a process of its own whose job is `code`; and that job's process number, once it runs."""
    script = tmp_path / "launcher.py"
    script.write_text(
        "import os, sys; from pathlib import Path; from mxfp8_titan.launch import Job, run\n"
        f"sys.exit(run(Job([sys.executable, '-c', {code!r}], dict(os.environ), Path({str(tmp_path / 'log.txt')!r}))))"
    )
    env = {**os.environ, "PYTHONPATH": import_paths()}
    launcher = subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.PIPE, text=True)
    for line in launcher.stdout:
        if line.startswith("ready"):
            break
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return launcher, int(children[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_alone_ends_the_job(number, tmp_path):
    launcher, child = _sleeper(tmp_path)
    launcher.send_signal(number)
    assert launcher.wait(timeout=20) == 128 + number
    assert not Path(f"/proc/{child}").exists()


def test_ctrl_c_while_the_job_is_checked_ends_quietly(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "from pathlib import Path; from mxfp8_titan import launch\n"
        "check = ['sh', '-c', 'echo ready; exec sleep 60']\n"
        f"job = launch.Job(['false'], {{}}, Path({str(tmp_path / 'log.txt')!r}), check=check)\n"
        "launch.make_job = lambda *_: job\n"
        "launch.main()"
    )
    env = {**os.environ, "PYTHONPATH": import_paths()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    launcher = subprocess.Popen([sys.executable, script], env=env, start_new_session=True, **pipes)
    assert launcher.stdout.readline() == "ready\n"
    # As a terminal does: to all processes at once.
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=20) == 128 + signal.SIGINT
    assert "Traceback" not in launcher.stderr.read()


def test_a_check_that_is_interrupted_while_it_imports_says_nothing():
    env = {**os.environ, "PYTHONPATH": import_paths()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    checking = subprocess.Popen([sys.executable, "-m", "mxfp8_titan.check"], env=env, **pipes)
    maps = Path(f"/proc/{checking.pid}/maps")
    while "libtorch" not in maps.read_text():
        assert checking.poll() is None
        time.sleep(0.01)
    checking.send_signal(signal.SIGINT)
    assert checking.communicate(timeout=20)[0] == ""
    assert checking.returncode == -signal.SIGINT


def test_a_reader_that_goes_away_ends_the_job(tmp_path):
    code = "import time\nfor i in range(600): print('ready', flush=True); time.sleep(0.1)"
    launcher, child = _sleeper(tmp_path, code)
    launcher.stdout.close()
    assert launcher.wait(timeout=20) == 128 + signal.SIGPIPE
    assert not Path(f"/proc/{child}").exists()


def test_checks_run_side_by_side_and_their_outputs_do_not_mix(tmp_path):
    # Each waits for the other to have begun.
    code = (
        "import sys, time; from pathlib import Path; here, other, end = sys.argv[1:]; print(end, flush=True); "
        "Path(here).touch(); until = time.monotonic() + 20\n"
        "while not Path(other).exists():\n  if time.monotonic() > until: sys.exit('alone')\n  time.sleep(0.01)\n"
        "sys.exit(end)"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    checks = [[sys.executable, "-c", code, *args] for args in ((a, b, "first"), (b, a, "second"))]
    jobs = [Job(["false"], dict(os.environ), tmp_path / "run.log", check=check) for check in checks]
    jobs.append(Job(["false"], {}, tmp_path / "run.log"))
    assert check_all(jobs) == [(1, "first\nfirst\n"), (1, "second\nsecond\n"), (0, "")]
