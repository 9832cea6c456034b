"""--mx.health_every in whole training runs: what the metrics file holds, and what it does not cost."""

import json

import pytest
import torch

from tests.train.harness import MX, TINY, train

pytestmark = pytest.mark.train

STEPS = ("--training.steps=3", "--debug.seed=1", "--metrics.log_freq=1", *MX, *TINY)
COMPILED = "--compile.enable"
MODULES = 12 + 3 + 3 + 3
"""Attention linears, dense MLPs, shared experts and experts of MoE layers."""


def _run(folder, *flags):
    run = train(folder, *STEPS, f"--mx.metrics_file={folder / 'metrics.jsonl'}", *flags)
    return run, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _shares(step):
    return {name: value for name, value in step.items() if name.startswith("mx/")}


def _check(shares):
    assert all(0 <= value <= 1 for value in shares.values())
    assert any(value > 0 for name, value in shares.items() if name.endswith("gradient_saturated"))
    modules = {name.split("/")[1] for name in shares}
    assert len(modules) == MODULES
    assert {"layers.0.feed_forward", "layers.1.moe.experts", "layers.5.attention.wo"} <= modules


def test_an_eager_run_with_checkpointed_layers_logs_every_step(tmp_path):
    run, steps = _run(tmp_path, "--activation_checkpoint.mode=full", "--mx.health_every=1")
    assert len(steps) == len(run.steps) == 3
    for step in steps:
        _check(_shares(step))


def test_a_compiled_run_logs_all_modules_and_is_otherwise_the_one_that_counts_nothing(tmp_path):
    counting, steps = _run(tmp_path / "counting", COMPILED, "--mx.health_every=2")
    plain, plain_steps = _run(tmp_path / "plain", COMPILED)
    shares = [_shares(step) for step in steps]
    assert not shares[0]
    assert not shares[2]
    _check(shares[1])
    assert counting.output.count("MXFP8 health, the worst of 21 modules: underflow") == 1
    # On a GPU two equal runs differ by what atomic additions round.
    tolerance = 0.01 if torch.cuda.is_available() else 0
    assert counting.losses() == pytest.approx(plain.losses(), rel=0, abs=tolerance)
    assert not any(_shares(step) for step in plain_steps)
    # As many graphs as without, all of them in the first step.
    assert [step["compile/count"] for step in steps] == [step["compile/count"] for step in plain_steps]
    assert [step["compile/count"] for step in steps[1:]] == [0, 0]
