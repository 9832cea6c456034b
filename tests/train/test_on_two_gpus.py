"""What torch 2.13 itself cannot do on a CPU, on two GPUs, or by two processes on one (shared_gpu.py): three steps of
the debug model."""

import pytest

from tests.train.harness import MX, OP_CHECKPOINTING, TINY, train

pytestmark = [pytest.mark.gpu, pytest.mark.train]

COMPILE = "--compile.enable"
RUNS = {
    "tensor_parallel_compiled": ("--parallelism.tensor_parallel_degree=2", COMPILE),
    "expert_parallel_op_checkpointing_compiled": ("--parallelism.expert_parallel_degree=2", *OP_CHECKPOINTING, COMPILE),
    "context_parallel": ("--parallelism.context_parallel_degree=2",),
    "cpu_offload": ("--training.enable_cpu_offload",),
}


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("recipe", ["mxfp8_emulated_rceil", "auto"])
def test_it_trains(recipe, flags, tmp_path):
    run = train(tmp_path, *MX, f"--mx.recipe_name={recipe}", *TINY, "--training.steps=3", *flags, processes=2)
    assert "30 linears and 3 expert modules converted" in run.output
    assert len(run.steps) == 3
    assert all(7 < loss < 9 for loss in run.losses())
