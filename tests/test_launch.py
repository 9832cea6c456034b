from pathlib import Path

import pytest

from mxfp8_titan.launch import MXFP8_EVERYWHERE, Machine, finish, make_job
from tests.log_lines import log_line

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
        ("", -9, "exit code 137"),
    ],
)
def test_a_failed_run_says_why_and_ends_non_zero_without_the_two_lines(text, code, message, tmp_path, capsys):
    assert _finish(tmp_path, text, code) > 0
    out = capsys.readouterr().out
    assert message in out
    assert "Median" not in out
