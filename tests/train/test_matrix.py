"""Ways of training on two processes against each other: see matrix.py, which runs them all in one start."""

import os
import subprocess
import sys

import pytest
import torch

from tests.train.harness import ROOT, import_paths
from tests.train.matrix import MAX_NORM, WATCHED

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

RECIPES = ["mxfp8_emulated_rceil", pytest.param("mxfp8_hopper", marks=pytest.mark.hopper)]


@pytest.fixture(scope="module", params=RECIPES)
def results(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix") / "results.pt"
    env = {**os.environ, "PYTHONPATH": import_paths(), "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", str(ROOT / "tests" / "train" / "matrix.py"), str(path), request.param,
    ]  # fmt: skip
    # A rank that waits for ever is a failure too.
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(path)


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def _error(a, b):
    return max(float((a[key] - b[key]).norm() / b[key].norm()) for key in b)


SAME = ["fsdp_again", "reshard_never", "reshard_always_ac_full", "ac_op", "reshard_always_ac_every_second"]


@pytest.mark.parametrize("name", SAME)
def test_repeating_resharding_and_recomputing_change_no_bit(name, results):
    assert results[name]["losses"] == results["fsdp"]["losses"]
    assert results[name]["norms"] == results["fsdp"]["norms"]
    assert _same(results[name]["grads"], results["fsdp"]["grads"])
    assert _same(results[name]["weights"], results["fsdp"]["weights"])


def test_gradients_are_close_to_bf16_s_and_not_the_same(results):
    mx, bf16 = results["fsdp"], results["bf16"]
    assert mx["losses"] == pytest.approx(bf16["losses"], abs=0.005)
    assert 0 < _error(mx["grads"], bf16["grads"]) < 0.08
    assert mx["norms"] == pytest.approx(bf16["norms"], rel=0.005)


@pytest.mark.parametrize("name", ["ep", "accumulated"])
def test_expert_parallelism_and_microbatches_give_the_gradients_of_the_whole(name, results):
    # Upstream of the experts too: router, attention, embeddings.
    assert set(results[name]["grads"]) == set(WATCHED)
    assert _error(results[name]["grads"], results["fsdp"]["grads"]) < 0.02
    assert results[name]["norms"][0] == pytest.approx(results["fsdp"]["norms"][0], rel=1e-3)
    assert results[name]["losses"] == pytest.approx(results["fsdp"]["losses"], abs=1e-3)


@pytest.mark.parametrize("name", ["fsdp", "ep", "ep_one_expert", "accumulated"])
def test_clipping_sees_the_norm_over_all_meshes(name, results):
    assert results[name]["norms"][0] > MAX_NORM
    assert results[name]["clipped"] == pytest.approx(MAX_NORM, rel=1e-4)


@pytest.mark.parametrize("name", ["ep_foreach", "ep_for_loop_groups_of_128"])
def test_every_adamw_takes_both_meshes_and_gives_fused_s_weights(name, results):
    # From the same gradients: weights that differ in a last bit are other FP8 numbers now and then, and so are theirs.
    # As a whole: AdamW divides single elements by roots of squares that are as small as their rounding.
    assert _error(results[name]["weights"], results["ep"]["weights"]) < 1e-6
    # On a GPU fused AdamW rounds elsewhere, and later losses of equal weights may show it.
    last = 1 if torch.cuda.is_available() else None
    assert results[name]["losses"][:last] == pytest.approx(results["ep"]["losses"][:last], abs=1e-5)


def test_a_rank_whose_experts_get_no_token_trains_with_the_others(results):
    alone, spread = results["one_expert"], results["ep_one_expert"]
    assert _error(spread["grads"], alone["grads"]) < 0.02
    assert (spread["grads"]["layers.1.moe.experts.w2"][1:] == 0).all()
    assert spread["losses"] == pytest.approx(alone["losses"], abs=1e-3)
    assert all(weight.isfinite().all() for weight in spread["weights"].values())


def test_groups_under_expert_parallelism_are_whole_blocks_and_of_the_user_s_multiple(results):
    assert all(size % 32 == 0 for name in ("ep", "ep_one_expert") for size in results[name]["sizes"])
    assert all(size % 128 == 0 for size in results["ep_for_loop_groups_of_128"]["sizes"])


def test_masters_and_their_gradients_are_fp32_everywhere(results):
    assert {dtype for result in results.values() for dtype in result["dtypes"]} == {"torch.float32"}


@pytest.mark.parametrize("name", ["fsdp", "ac_op", "reshard_always_ac_every_second", "ep"])
def test_no_weight_outlives_resharding(name, results):
    assert results[name]["kept"] == 0
    # What is looked for is there when nothing is resharded.
    assert results["reshard_never"]["kept"] > 0


def test_tensor_parallel_layers_still_multiply_in_mxfp8(results):
    assert results["tp"]["ops"] >= results["fsdp"]["ops"] > results["bf16"]["ops"] == 0
