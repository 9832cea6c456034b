"""On GPUs, one process and two (on one GPU where there is no second, see shared_gpu.py): repeated runs, resumed runs,
memory over many steps, recomputation under torch.compile."""

import json

import pytest
import torch

from tests.train.harness import MX, OP_CHECKPOINTING, TINY, only_step, read_checkpoint, train

pytestmark = [pytest.mark.gpu, pytest.mark.train, pytest.mark.timeout(580)]

SAME = ("--debug.seed=1", "--debug.deterministic", "--metrics.log_freq=1")
PROCESSES = [1, 2]
COMPILE = {"compiled": "--compile.enable", "eager": "--compile.no-enable"}


@pytest.fixture(params=["mxfp8_emulated_rceil", "auto"])
def mx(request):
    return (*MX, f"--mx.recipe_name={request.param}")


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("compile_flag", COMPILE.values(), ids=COMPILE)
def test_the_same_seed_twice_gives_the_same_twenty_losses_and_norms(compile_flag, processes, mx, tmp_path):
    flags = (*mx, *TINY, *SAME, "--training.steps=20", compile_flag)
    a, b = (train(tmp_path / name, *flags, processes=processes) for name in "ab")
    assert [(s.loss, s.grad_norm) for s in a.steps] == [(s.loss, s.grad_norm) for s in b.steps]
    assert len(a.steps) == 20


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(processes, mx, tmp_path):
    flags = (*mx, *TINY, *SAME, "--training.steps=10", "--checkpoint.enable", "--checkpoint.interval=5",
             "--checkpoint.no-last_save_model_only")  # fmt: skip
    whole = train(tmp_path / "whole", *flags, processes=processes)
    resumed = train(only_step(tmp_path / "whole", 5, tmp_path / "resumed"), *flags, processes=processes)
    assert resumed.losses() == whole.losses(6)
    a, b = (read_checkpoint(tmp_path / name, 10) for name in ("whole", "resumed"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("processes", PROCESSES)
def test_memory_is_flat_over_two_hundred_steps(processes, mx, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    flags = (*mx, *TINY, "--training.steps=200", "--metrics.log_freq=10", f"--mx.metrics_file={metrics}")
    train(tmp_path, *flags, processes=processes)
    active = [json.loads(line)["memory/max_active(GiB)"] for line in metrics.read_text().splitlines()]
    # Routing moves from step to step, and with it what is live at the peak.
    assert max(active[2:]) <= 1.02 * max(active[1:4])


@pytest.mark.parametrize(
    "mode",
    [("--activation_checkpoint.mode=full",), OP_CHECKPOINTING, ("--activation_checkpoint.mode=none",)],
    ids=["full", "op", "none"],
)
@pytest.mark.parametrize("optimizer", ["fused", "foreach", "for-loop"])
def test_compiled_layers_recompute_what_they_computed(mode, optimizer, mx, tmp_path):
    flags = (*mx, *TINY, *SAME, "--training.steps=20", "--compile.enable", f"--optimizer.implementation={optimizer}")
    run = train(tmp_path, *flags, *mode)
    assert len(run.steps) == 20
    assert run.losses()[-1] < run.losses()[0]
