"""Two steps of the debug model under torchtitan's other ways to run it."""

import json

import pytest

from tests.train import shared_gpu
from tests.train.harness import MX, OP_CHECKPOINTING, TINY, train

pytestmark = pytest.mark.train

TWO = "--training.steps=2"


@pytest.mark.parametrize(
    "flags",
    [
        ("--parallelism.expert_parallel_degree=2", *OP_CHECKPOINTING),
        pytest.param(
            ("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"),
            marks=pytest.mark.skipif(shared_gpu.used(2), reason="a pipeline needs a GPU for each process, or a CPU"),
        ),
        ("--parallelism.fsdp_reshard_after_forward=never", "--training.global_batch_size=8"),
        ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"),
    ],
    ids=["expert_parallel_selective_ac", "pipeline", "no_reshard_accumulated", "ddp"],
)
def test_two_processes_train_and_log_both_steps(flags, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    logged = (f"--mx.metrics_file={metrics}", "--metrics.log_freq=1")
    run = train(tmp_path, *MX, *TINY, TWO, *logged, *flags, processes=2)
    assert "30 linears and 3 expert modules converted" in run.output
    assert len(run.steps) == 2
    microbatches = 2 if "--training.global_batch_size=8" in flags else 1
    if "pipeline" not in flags[0]:
        # The rate counts every microbatch once: times the step's seconds it is a rank's 2 rows of 64 tokens for each.
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        tokens = [step["throughput(tps)"] * step["time_metrics/end_to_end(s)"] for step in steps]
        assert tokens == pytest.approx([2 * 64 * microbatches] * 2)
    if "pipeline" not in flags[0]:
        # Under pipelining the loss is on the last stage, and the first rank is the one shown.
        assert all(7 < loss < 9 for loss in run.losses())


def test_more_shards_than_experts_and_replicas_beside_them_in_a_dry_run(tmp_path, monkeypatch):
    # 16 shards of 8 experts, twice: every rank holds a part of each expert, of no multiple of 32, until it is gathered.
    monkeypatch.setenv("NGPU", "32")
    degrees = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=16")
    run = train(tmp_path, *MX, *TINY, "--training.steps=1", *degrees, "--comm.mode=fake_backend")
    assert "30 linears and 3 expert modules converted" in run.output
    assert "Training completed" in run.output


def test_tensor_parallel_losses_and_gradient_norms_are_those_of_bf16(tmp_path):
    flags = (*TINY, TWO, "--debug.seed=1", "--parallelism.tensor_parallel_degree=2")
    bf16, mx = (train(tmp_path / str(len(more)), *flags, *more, processes=2) for more in ((), MX))
    assert mx.losses() == pytest.approx(bf16.losses(), abs=0.01)
    assert [s.grad_norm for s in mx.steps] == pytest.approx([s.grad_norm for s in bf16.steps], rel=0.01)
    assert mx.losses() != bf16.losses()


def test_activation_checkpointing_does_not_change_the_losses(tmp_path):
    flags = (*MX, *TINY, "--training.steps=3", "--debug.seed=1")
    plain = train(tmp_path / "none", *flags)
    for name, mode in {"op": OP_CHECKPOINTING, "full": ("--activation_checkpoint.mode=full",)}.items():
        assert train(tmp_path / name, *flags, *mode).losses() == plain.losses(), name


def test_compiled_blocks_train_and_agree_with_eager(tmp_path):
    flags = (*MX, *TINY, TWO, "--debug.seed=1")
    eager, compiled = train(tmp_path / "eager", *flags), train(tmp_path / "compiled", *flags, "--compile.enable")
    assert "Compiling each TransformerBlock" in compiled.output
    assert compiled.losses() == pytest.approx(eager.losses(), abs=0.02)


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(tmp_path):
    # The last step is neither the first nor a multiple of log_freq, and the only one that saves.
    flags = ("--training.steps=4", "--metrics.log_freq=10", "--optimizer.lr=1e30", "--training.max_norm=1e30")
    run = train(tmp_path, *MX, *TINY, *flags, "--checkpoint.enable", "--lr_scheduler.warmup_steps=0", fails=True)
    assert "NonFiniteLossError" in run.output
    assert not list(tmp_path.glob("checkpoint/step-*"))
