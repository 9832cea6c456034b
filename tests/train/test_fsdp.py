"""The debug model on local text under FSDP2, two processes: losses of MXFP8 against bf16 from the same weights."""

import pytest

from tests.train.harness import MX, train

pytestmark = pytest.mark.train

STEPS = ("--training.steps=20", "--training.local_batch_size=2", "--debug.seed=1")


@pytest.fixture(scope="module")
def seed_checkpoint(tmp_path_factory):
    # torch gives every CPU rank the same initial shard; one process writes distinct ones.
    folder = tmp_path_factory.mktemp("seed")
    train(folder, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--debug.seed=1")
    return ("--checkpoint.enable", f"--checkpoint.initial_load_path={folder}/checkpoint/step-0")


@pytest.fixture(scope="module")
def bf16(seed_checkpoint, tmp_path_factory):
    return train(tmp_path_factory.mktemp("bf16"), *STEPS, *seed_checkpoint, processes=2)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--activation_checkpoint.mode=full",),
        ("--parallelism.expert_parallel_degree=2",),
    ],
    ids=["fsdp", "activation_checkpointing", "expert_parallel"],
)
def test_mxfp8_loss_falls_and_stays_within_0_05_of_bf16(flags, bf16, seed_checkpoint, tmp_path):
    mx = train(tmp_path, *STEPS, *seed_checkpoint, *MX, *flags, processes=2)
    assert "30 linears and 3 expert modules converted" in mx.output
    assert len(mx.steps) == len(bf16.steps) == 20
    assert mx.losses()[0] - mx.losses()[-1] >= 1.0
    gaps = [abs(a - b) for a, b in zip(mx.losses(5), bf16.losses(5), strict=True)]
    assert max(gaps) <= 0.05, gaps
    # MXFP8 is really there: its losses are not bf16's.
    assert max(gaps) > 0
