"""The whole converter on a CPU through the Blackwell backend: Llama 4, dense and experts, forward and backward."""

import copy

import pytest
import torch
from torch import nn
from torchtitan.config import ConfigManager
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.llama4.model.model import Transformer
from torchtitan.protocols.model_converter import build_model_converters

from mxfp8_titan import plugin  # noqa: F401 - registers the converter
from mxfp8_titan.backends.blackwell import own_kernel_multiplies_experts
from mxfp8_titan.backends.select import Device
from tests.backends import blackwell_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a CPU: references stand in for kernels")

FLAGS = ("--mx.moe_fqns_prototype=experts", "--mx.filter_fqns=output,router.gate,wk,wv")


@pytest.fixture
def a_b200(request, monkeypatch):
    """A machine that says it has a B200, with a PyTorch that can (the parameter is True) or cannot multiply groups."""
    device = Device("NVIDIA B200", (10, 0))
    monkeypatch.setattr("mxfp8_titan.backends.select.current_device", lambda: device)
    monkeypatch.setattr("mxfp8_titan.converter.current_device", lambda: device)
    library = blackwell_on_cpu.install(monkeypatch, build_has_grouped_mm=request.param)
    yield
    library._destroy()
    own_kernel_multiplies_experts.cache_clear()


def _losses_and_gradients(*flags):
    args = copy.deepcopy(llama4_args["debugmodel"])
    args.n_layers, args.vocab_size, args.max_seq_len, args.moe_args.use_grouped_mm = 2, 256, 32, False
    torch.manual_seed(0)
    model = Transformer(args)
    if flags:
        hook = "--job.custom_config_module=mxfp8_titan.job_config"
        config = ConfigManager().parse_args([hook, "--model.name=llama4", "--model.converters=mx", *FLAGS, *flags])
        build_model_converters(config, None).convert(model)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    tokens = torch.randint(0, 256, (2, 33))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def plain():
    return _losses_and_gradients()


@pytest.mark.parametrize(
    ("recipe", "a_b200"),
    [("mxfp8_cublas", True), ("mxfp8_cublas_rceil", True), ("mxfp8_cublas_rceil", False)],
    indirect=["a_b200"],
)
def test_loss_and_gradients_are_close_to_the_plain_model_s(recipe, a_b200, plain):
    loss, grads = _losses_and_gradients(f"--mx.recipe_name={recipe}")
    plain_loss, plain_grads = plain
    assert loss == pytest.approx(plain_loss, rel=2e-3)
    assert grads.keys() == plain_grads.keys()
    norms = [torch.stack([g.norm() for g in each.values()]).norm().item() for each in (grads, plain_grads)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    for name, grad in grads.items():
        assert torch.isfinite(grad).all(), name
