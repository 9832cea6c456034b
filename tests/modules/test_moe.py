import copy

import pytest
import torch
from torchtitan.models.moe import MoE, MoEArgs

from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import RECIPES
from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from mxfp8_titan.modules.moe import MXFP8MoE, speed_up_token_moves

ORDER_OF_SUMS = 1e-5
"""Of fp32 results around 1: a row's 64 products, or its two choices, are summed in another order, which costs 2**-24 an
addition, 4e-6 at most, and half as much again in what is made of the sums."""

BF16_STEP = 2.0**-7
"""Between neighbours, relative: a sum that differs in fp32 may round to the next one. x's gradient adds up parts of
around 1/2, so that one that cancels is off by a step of theirs."""


def _pair(device, **args):
    """A layer with the host's moves and MXFP8 experts, and the same with ours."""
    host = MoE(MoEArgs(num_experts=4, use_grouped_mm=False, **args), dim=64, hidden_dim=96).to(device)
    with torch.no_grad():
        host.init_weights(init_std=0.1, buffer_device=torch.device(device))
    MXFP8GroupedExperts.from_experts(host.experts, RECIPES["mxfp8_emulated_rceil"], REFERENCE)
    ours = copy.deepcopy(host)
    speed_up_token_moves(ours)
    assert type(ours) is MXFP8MoE
    return host, ours


def _results(moe, x):
    x = x.clone().requires_grad_()
    y = moe(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=x.device).view_as(y).to(y.dtype))
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in moe.named_parameters()}


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_one_expert_a_token_the_output_is_the_host_s_bit_for_bit(shared, dtype, device):
    host, ours = (m.to(dtype) for m in _pair(device, num_shared_experts=shared))
    x = torch.randn(2, 50, 64, device=device, dtype=dtype)
    want, got = _results(host, x), _results(ours, x)
    assert torch.equal(got["y"], want["y"])
    assert torch.equal(ours.tokens_per_expert, host.tokens_per_expert)
    for name, value in want.items():
        # The router's gradient sums a row in another order, and x's includes it.
        rtol, atol = (BF16_STEP, BF16_STEP / 2) if dtype == torch.bfloat16 else (ORDER_OF_SUMS, ORDER_OF_SUMS)
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol)


def test_with_two_experts_a_token_results_agree_to_rounding(device):
    host, ours = _pair(device, top_k=2)
    x = torch.randn(2, 50, 64, device=device)
    want, got = _results(host, x), _results(ours, x)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=ORDER_OF_SUMS, atol=ORDER_OF_SUMS)


def test_scores_after_the_experts_go_the_host_s_way(device):
    host, ours = _pair(device, score_before_experts=False)
    x = torch.randn(2, 50, 64, device=device)
    want, got = _results(host, x), _results(ours, x)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_hooks_on_the_reorderer_still_run(device):
    _, ours = _pair(device)
    called = []
    ours.reorderer.register_forward_hook(lambda *args: called.append(1))
    ours(torch.randn(1, 50, 64, device=device))
    assert called == [1]


def test_fp32_weights_under_autocast_give_the_host_s_output(device):
    host, ours = _pair(device)
    x = torch.randn(2, 50, 64, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        want, got = host(x), ours(x)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_another_kind_of_moe_keeps_its_own_moves():
    class OtherMoE(MoE):
        pass

    moe = OtherMoE(MoEArgs(num_experts=4), dim=64, hidden_dim=96)
    speed_up_token_moves(moe)
    assert type(moe) is OtherMoE
