"""Checkpoints of one process: resumed bit for bit, and interchangeable between bf16 and MXFP8."""

import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from mxfp8_titan.preflight import meta_model, parse
from tests.train.harness import MX, TINY, entry_args, environment, only_step, read_checkpoint, train

pytestmark = pytest.mark.train

SAVE = (
    *TINY,
    "--checkpoint.enable",
    "--checkpoint.interval=5",
    "--debug.seed=1",
    "--checkpoint.no-last_save_model_only",
)
PRECISIONS = {"bf16": (), "mx": MX}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Ten uninterrupted steps in each precision, saved at 5 and 10."""
    runs = {}
    for name, flags in PRECISIONS.items():
        folder = tmp_path_factory.mktemp(name)
        runs[name] = folder, train(folder, *SAVE, *flags, "--training.steps=10")
    return runs


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(name, saved, tmp_path):
    folder, whole = saved[name]
    resumed = train(only_step(folder, 5, tmp_path), *SAVE, *PRECISIONS[name], "--training.steps=10")
    assert resumed.steps[0].step == 6
    assert resumed.losses() == whole.losses(6)
    a, b = read_checkpoint(folder, 10), read_checkpoint(tmp_path, 10)
    assert a.keys() == b.keys()
    assert any("exp_avg_sq" in key for key in a)
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def loaded_ahead(tmp_path_factory):
    """The same ten steps with text loaded as the Scout configurations do, and the flags for it."""
    folder = tmp_path_factory.mktemp("ahead")
    flags = (*SAVE, *MX, "--training.dataloader.num_workers=1", "--training.steps=10")
    return folder, train(folder, *flags), flags


def test_text_that_a_worker_loads_ahead_changes_no_loss(saved, loaded_ahead):
    assert loaded_ahead[1].losses() == saved["mx"][1].losses()


def test_text_loaded_ahead_goes_on_where_it_was_after_a_resume(saved, loaded_ahead, tmp_path):
    folder, _, flags = loaded_ahead
    assert train(only_step(folder, 5, tmp_path), *flags).losses() == saved["mx"][1].losses(6)


def test_another_number_of_workers_begins_the_text_anew_and_keeps_the_rest(saved, tmp_path):
    folder, whole = saved["mx"]
    other = (*SAVE, *MX, "--training.dataloader.num_workers=1", "--training.steps=7")
    refused = train(only_step(folder, 5, tmp_path), *other, fails=True)
    assert "num_workers is 1 and" in refused.output
    assert not refused.steps
    anew = train(tmp_path, *other, "--checkpoint.exclude_from_loading=dataloader")
    assert [step.step for step in anew.steps] == [6, 7]
    assert anew.losses() != whole.losses(6)[:2]


def _kill_while_it_saves(folder, step):
    """Starts a run and kills it with SIGKILL as soon as the first bytes of `step`'s checkpoint are written."""
    command = [sys.executable, *entry_args(*SAVE, *MX, "--training.steps=10")]
    command.append(f"--job.dump_folder={folder}")
    with open(folder / "killed.txt", "w") as log:
        job = subprocess.Popen(command, env=environment(processes=1), stdout=log, stderr=subprocess.STDOUT)
        saving = folder / "checkpoint" / f"step-{step}"
        give_up = time.monotonic() + 200
        while not any(path.stat().st_size for path in saving.glob("*.distcp")):
            assert job.poll() is None, (folder / "killed.txt").read_text()[-3000:]
            assert time.monotonic() < give_up
            time.sleep(0.002)
        job.kill()
        assert job.wait() == -signal.SIGKILL
    return saving


def test_a_run_killed_while_it_saves_goes_on_from_the_last_whole_checkpoint(saved, tmp_path):
    folder, whole = saved["mx"]
    half = _kill_while_it_saves(tmp_path, 10)
    assert not (half / ".metadata").exists(), "it was killed too late: the checkpoint is whole"
    resumed = train(tmp_path, *SAVE, *MX, "--training.steps=10")
    assert resumed.steps[0].step == 6
    assert resumed.losses() == whole.losses(6)
    # Two runs of the same seed, one of them in two parts: the same bits.
    a, b = read_checkpoint(folder, 10), read_checkpoint(tmp_path, 10)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("writer", "reader"), [("bf16", "mx"), ("mx", "bf16")])
def test_each_precision_resumes_from_the_other_s_checkpoint_with_optimizer_state(writer, reader, saved, tmp_path):
    folder, whole = saved[writer]
    resumed = train(only_step(folder, 5, tmp_path), *SAVE, *PRECISIONS[reader], "--training.steps=10")
    assert resumed.steps[0].step == 6
    gaps = [abs(a - b) for a, b in zip(resumed.losses(), whole.losses(6), strict=True)]
    # With lost optimizer state or weights the next losses would be off by tenths.
    assert 0 < max(gaps) < 0.05
    assert read_checkpoint(folder, 10).keys() == read_checkpoint(tmp_path, 10).keys()


def test_checkpoints_of_both_precisions_hold_the_same_names_shapes_and_dtypes(saved):
    described = [
        {key: (value.shape, value.dtype) for key, value in read_checkpoint(saved[name][0], 5).items()}
        for name in PRECISIONS
    ]
    assert described[0] == described[1]


def test_a_hugging_face_export_equals_the_plain_model_s_and_comes_back():
    config = parse(["--job.custom_config_module=mxfp8_titan.job_config", "--model.name=llama4", *MX])
    plain, mx = meta_model(config), meta_model(config)
    build_model_converters(config, None).convert(mx)
    spec = get_train_spec("llama4")
    adapter = spec.state_dict_adapter(spec.model_args["debugmodel"], None)
    exports = []
    for model in (plain, mx):
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        exports.append(adapter.to_hf(model.state_dict()))
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(exports[0][key], exports[1][key]) for key in exports[0])
    read = safetensors.torch.load(safetensors.torch.save(exports[1]))
    back, state = adapter.from_hf(read), plain.state_dict()
    assert "layers.1.moe.experts.w1" in back
    assert all(torch.equal(back[key], state[key]) for key in back)
