"""Counts leave forward and backward as the gradient of a probe, and change nothing else."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mxfp8_titan.autograd.health import SAMPLES, Health, observe
from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.alignment_counts import alignment_counts
from mxfp8_titan.backends.reference import REFERENCE
from tests.oracles import RCEIL_RECIPE


def _health(device, operands=3):
    probe = torch.zeros(operands, SAMPLES, 4, device=device, requires_grad=True)
    return Health(probe, torch.tensor(7, device=device))


def _layer(x, w, ends, health):
    y = LinearFunction.apply(x, w, ends, RCEIL_RECIPE, REFERENCE, x.dtype)
    return y if health is None else observe(y, x, (w,), ends, RCEIL_RECIPE, health)


def _run(x, w, dy, ends, health, how=_layer):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = how(x, w, ends, health)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def _tensors(grouped, device, tokens=160):
    w = torch.randn(4, 96, 64, device=device) if grouped else torch.randn(96, 64, device=device)
    ends = torch.tensor([32, 32, 64, tokens - 32], dtype=torch.int32, device=device) if grouped else None
    x, dy = (torch.randn(tokens, size, device=device) for size in (64, 96))
    # Losses of each kind, more in dy.
    for t, rows in ((x, 5), (dy, 3)):
        t[::rows, 0] = 448 * 2.0**12
    return x, w, dy, ends


@pytest.mark.parametrize("grouped", [False, True])
def test_the_probe_s_gradient_is_the_counts_and_all_else_stays(grouped, device):
    x, w, dy, ends = _tensors(grouped, device)
    health = _health(device)
    got, want = _run(x, w, dy, ends, health), _run(x, w, dy, ends, None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    operands = (x, ends), (w, None), (dy, ends)
    counts = [alignment_counts(*operand, health.phase, RCEIL_RECIPE.rounding, SAMPLES) for operand in operands]
    assert torch.equal(health.probe.grad, torch.stack(counts))
    assert (health.probe.grad[2].sum(0) > 0).all()
    assert not health.probe.any()


def test_microbatches_add_up_and_a_checkpointed_layer_counts_once(device):
    x, w, dy, _ = _tensors(False, device)
    once, twice = _health(device), _health(device)
    _run(x, w, dy, None, once)
    for use_reentrant in (True, False):
        _run(x, w, dy, None, twice, lambda *args, r=use_reentrant: checkpoint(_layer, *args, use_reentrant=r))
    assert torch.equal(twice.probe.grad, 2 * once.probe.grad)


def test_without_gradients_nothing_is_looked_at(device, monkeypatch):
    monkeypatch.setattr("mxfp8_titan.autograd.health.alignment_counts", None)
    x, w, _, _ = _tensors(False, device)
    with torch.no_grad():
        assert _layer(x, w, None, _health(device)).grad_fn is None


@pytest.mark.parametrize("grouped", [False, True])
def test_one_graph_serves_all_layers_and_steps(grouped, device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    compiled = torch.compile(_layer, fullgraph=True, backend=counter)
    for _ in range(2):
        health = _health(device)
        for _ in range(3):
            x, w, dy, ends = _tensors(grouped, device)
            health.probe.grad = None
            want = _run(x, w, dy, ends, health), health.probe.grad
            health.probe.grad = None
            got = _run(x, w, dy, ends, health, compiled), health.probe.grad
            assert all(torch.equal(a, b) for a, b in zip((*got[0], got[1]), (*want[0], want[1]), strict=True))
            health.phase.add_(40503)
    assert counter.frame_count == 1


def test_the_op_passes_pytorch_s_checks_of_custom_ops(device):
    x, w, _, ends = _tensors(True, device)
    phase = torch.tensor(7, device=device)
    for operand, group_ends in ((x, ends), (w, None)):
        args = operand, group_ends, phase, RCEIL_RECIPE.rounding, SAMPLES
        torch.library.opcheck(alignment_counts, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu():
    x, w, dy, ends = _tensors(True, "cuda")
    health = _health("cuda")
    operands = x.requires_grad_(), w.requires_grad_()
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            y = operands[0] @ operands[1][0].t()
            observe(y, *operands[:1], operands[1:], ends, RCEIL_RECIPE, health).backward(dy)
            health.phase.add_(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
