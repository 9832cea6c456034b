import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe import moe
from torchtitan.models.qwen3.model import model as qwen3

from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import RECIPES
from mxfp8_titan.modules.feed_forward import _MXFP8FeedForward, fuse_feed_forwards
from mxfp8_titan.modules.linear import MXFP8Linear

RECIPE = RECIPES["mxfp8_emulated_rceil"]
ORDER_OF_SUMS = 4 * 256 * 2.0**-24
"""A GPU may sum the joined product of w1 and w3 in another order than each alone: up to 256 terms, 2**-24 an addition,
of partial sums that exceed the result a few times. On a CPU the results are equal."""

MAKERS = {
    "llama3": lambda: llama3.FeedForward(64, 256, 32, None),
    "llama4": lambda: llama4.FeedForward(64, 256, 32, None),
    "qwen3": lambda: qwen3.FeedForward(64, 192),
    "shared experts": lambda: moe.FeedForward(64, 192),
}


def _converted(maker, device, recipe=RECIPE, linears=("w1", "w2", "w3")):
    mlp = maker().to(device)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.1)
    for name in linears:
        MXFP8Linear.from_linear(getattr(mlp, name), recipe, REFERENCE)
    layer_by_layer = copy.deepcopy(mlp)
    fuse_feed_forwards(mlp)
    return mlp, layer_by_layer


def _gradients(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_every_model_s_mlp_gives_what_its_linears_give_one_by_one(maker, device):
    fused, layer_by_layer = _converted(maker, device)
    assert isinstance(fused, (type(layer_by_layer), _MXFP8FeedForward))
    x = torch.randn(2, 33, 64, device=device)
    for got, want in zip(_gradients(fused, x), _gradients(layer_by_layer, x), strict=True):
        torch.testing.assert_close(got, want, rtol=ORDER_OF_SUMS, atol=ORDER_OF_SUMS)


def test_parameters_names_and_initialisation_are_the_original_s(device):
    fused, layer_by_layer = _converted(MAKERS["shared experts"], device)
    assert list(fused.state_dict()) == list(layer_by_layer.state_dict())
    with torch.no_grad():
        fused.init_weights(init_std=0.02)
    assert pickle.loads(pickle.dumps(fused)).w1.backend is REFERENCE


def test_an_mlp_with_a_linear_kept_in_bf16_stays_as_it_is(device):
    mlp, layer_by_layer = _converted(MAKERS["llama4"], device, linears=("w1", "w3"))
    assert type(mlp) is type(layer_by_layer)


def test_hooks_on_a_linear_still_run(device):
    fused, _ = _converted(MAKERS["llama4"], device)
    called = []
    fused.w1.register_forward_hook(lambda *args: called.append(1))
    fused(torch.randn(4, 64, device=device))
    assert called == [1]


def test_bf16_weight_gradients_go_through_the_linears(device):
    fused, layer_by_layer = _converted(MAKERS["llama4"], device, replace(RECIPE, wgrad_in_mxfp8=False))
    x = torch.randn(32, 64, device=device)
    for got, want in zip(_gradients(fused, x), _gradients(layer_by_layer, x), strict=True):
        assert torch.equal(got, want)


def test_compiles_into_one_graph(device):
    fused, _ = _converted(MAKERS["shared experts"], device)
    compiled = torch.compile(fused, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    x = torch.randn(4, 64, device=device)
    for got, want in zip(_gradients(compiled, x), _gradients(fused, x), strict=True):
        torch.testing.assert_close(got, want, rtol=ORDER_OF_SUMS, atol=ORDER_OF_SUMS)
