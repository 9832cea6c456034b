"""--mx.health_every from the converter to the metrics."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.tools import utils

from mxfp8_titan import health
from mxfp8_titan.autograd.health import SAMPLES
from mxfp8_titan.converter import MXConverter
from mxfp8_titan.job_config import MX
from mxfp8_titan.model_specs import FiniteLossMetrics

DEVICE = utils.device_type


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(64, 96, bias=False)
        self.experts = GroupedExperts(64, 32, 2, use_grouped_mm=False)
        self.unused = nn.Linear(64, 64)
        self.router = nn.Linear(64, 2)
        for p in self.experts.parameters():
            nn.init.normal_(p)

    def forward(self, x):
        return self.wq(x) + self.experts(x, torch.tensor([24, 40], device=x.device)).sum(-1, keepdim=True)


def _converter(health_every):
    what = {"moe_fqns_prototype": "experts", "filter_fqns": "router"}
    mx = MX(recipe_name="mxfp8_emulated_rceil", health_every=health_every, **what)
    parallelism = SimpleNamespace(tensor_parallel_degree=1, expert_parallel_degree=1)
    config = SimpleNamespace(mx=mx, model=SimpleNamespace(name="llama4"), parallelism=parallelism)
    return MXConverter(config, None)


def _converted(health_every=1):
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])}).to(DEVICE)
    converter = _converter(health_every)
    converter.convert(model)
    return model, converter


def _step(model):
    x = torch.randn(64, 64, device=DEVICE)
    for block in model["layers"]:
        y = block(x)
        dy = torch.randn_like(y)
        dy[:, 0] = 2.0**22
        y.backward(dy)


def _ops(block):
    """Names of all that a compiled forward and backward of `block` run."""
    names = []

    def record(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda g, i: make_boxed_func(record(g, i)))
    torch.compile(block.wq, fullgraph=True, backend=backend)(torch.randn(64, 64, device=DEVICE)).sum().backward()
    return names


def test_off_leaves_no_trace():
    model, converter = _converted(0)
    assert not any(m.__dict__.get("health") for m in model.modules())
    assert not list(model.buffers())
    converter.post_optimizer_hook([model])
    _step(model)
    assert health.read([model]) == []
    off = _ops(model["layers"][0])
    assert not any("alignment_counts" in name for name in off)
    on = _ops(_converted(1)[0]["layers"][0])
    assert sum("alignment_counts" in name for name in on) == 3
    # What is on besides: the counts put together, y as a view.
    more = "alignment_counts", "stack", "cat", "unsqueeze", "view", "detach"
    assert [n for n in on if not any(m in n for m in more)] == [n for n in off if not any(m in n for m in more)]


def test_parameters_buffers_and_state_dict_are_those_of_a_model_that_does_not_count():
    on, off = _converted(1)[0], _converted(0)[0]
    assert list(on.state_dict()) == list(off.state_dict())
    assert [name for name, _ in on.named_parameters()] == [name for name, _ in off.named_parameters()]
    assert not list(on.buffers())


def test_shares_are_read_by_name_once_and_start_again():
    model, _ = _converted()
    model["layers"][1] = checkpoint_wrapper(model["layers"][1])
    model["layers"][0].wq = torch.compile(model["layers"][0].wq, backend="eager")
    _step(model)
    shares = health.read([model])
    fqns = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("wq", "experts")]
    operands = {"wq": ("input", "weight", "gradient"), "experts": ("input", "w1", "w2", "w3", "gradient")}
    assert [(s.fqn, s.operand) for s in shares] == [(f, o) for f in fqns for o in operands[f.rpartition(".")[2]]]
    by_name = {(s.fqn, s.operand): s for s in shares}
    gradient = by_name["layers.1.wq", "gradient"]
    # One element of 96 makes zeros of all others; those of its own block would be zeros in any case.
    assert gradient.zero_blocks == pytest.approx(2 / 3)
    assert gradient.underflow == pytest.approx(2 / 3, rel=0.01)
    assert by_name["layers.1.wq", "input"].underflow < 0.01
    assert health.read([model]) == []


def test_a_step_s_counts_are_of_other_rows_than_the_last_one_s():
    model, converter = _converted()
    phase = model["layers"][0].wq.health.phase
    assert all(m.health.phase is phase for m in model.modules() if hasattr(m, "observed"))
    converter.post_optimizer_hook([model])
    converter.post_optimizer_hook(model)
    assert phase.item() == 2 * health.PHASE_STEP


def test_a_copied_model_counts_for_itself():
    model, converter = _converted()
    other = copy.deepcopy(model)
    converter.post_optimizer_hook([other])
    assert model["layers"][0].wq.health.phase.item() == 0
    _step(other)
    assert health.read([model]) == []
    assert len(health.read([other])) == 16


def test_scalars_and_summary_name_modules_and_operands():
    shares = [
        health.Shares("layers.0.wq", "input", 0.25, 0.0, 0.5),
        health.Shares("layers.1.wq", "gradient", 0.125, 0.0, 0.75),
    ]
    assert health.scalars(shares)["mx/layers.1.wq/gradient_underflow"] == 0.125
    assert len(health.scalars(shares)) == 6
    assert health.summary(shares) == (
        "MXFP8 health, the worst of 2 modules: underflow 2.50e-01 (layers.0.wq input), zero_blocks 0.00e+00, "
        "saturated 7.50e-01 (layers.1.wq gradient)"
    )


def _metrics(model, every):
    metrics = object.__new__(FiniteLossMetrics)
    metrics.model_parts = [model]
    metrics.parallel_dims = SimpleNamespace(dp_cp_enabled=False)
    metrics.job_config = SimpleNamespace(
        metrics=SimpleNamespace(log_freq=100),
        checkpoint=SimpleNamespace(enable=False),
        training=SimpleNamespace(steps=1000),
        mx=MX(health_every=every),
    )
    return metrics


def test_the_steps_asked_for_are_logged_with_all_scalars(monkeypatch, caplog):
    logged = {}
    monkeypatch.setattr(
        "torchtitan.components.metrics.MetricsProcessor.log", lambda self, step, *a: logged.update({step: a[-1]})
    )
    model, _ = _converted()
    metrics = _metrics(model, 3)
    with caplog.at_level(logging.INFO):
        for step in range(1, 8):
            _step(model)
            if metrics.should_log(step):
                metrics.log(step, 2.0, 2.0, 1.0)
    counted = {step: sum(name.startswith("mx/") for name in scalars) for step, scalars in logged.items()}
    assert counted == {1: 0, 3: 48, 6: 48}
    assert sum("MXFP8 health, the worst of 4 modules" in message for message in caplog.messages) == 2


def test_off_logs_no_other_steps():
    metrics = _metrics(nn.Linear(2, 2), 0)
    assert [step for step in range(1, 201) if metrics.should_log(step)] == [1, 100, 200]


@pytest.mark.parametrize("value", [-1, 2.5, "3", True, None])
def test_another_number_of_steps_is_refused(value):
    with pytest.raises(ValueError, match="mx.health_every is .*, needs a whole number of steps from 1 up, or 0"):
        MX(health_every=value)


def test_every_probe_has_room_for_its_operands():
    model, _ = _converted()
    assert model["layers"][0].wq.health.probe.shape == (3, SAMPLES, 4)
    assert model["layers"][0].experts.health.probe.shape == (5, SAMPLES, 4)
