"""Activation checkpointing of a MoE layer whose tokens are hard to tell apart: recomputation routes them as before."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torchtitan.models.moe.moe import MoE, MoEArgs

from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from mxfp8_titan.modules.moe import speed_up_token_moves
from tests.oracles import RCEIL_RECIPE


def _moe(device, experts=16, top_k=1, dtype=torch.float32):
    moe = MoE(MoEArgs(num_experts=experts, top_k=top_k, num_shared_experts=0, use_grouped_mm=False), 64, 96).to(device)
    with torch.no_grad():
        moe.init_weights(0.02, torch.device(device))
    return moe.to(dtype)


def _converted(moe):
    MXFP8GroupedExperts.from_experts(moe.experts, RCEIL_RECIPE, REFERENCE)
    speed_up_token_moves(moe)
    return moe


def _steps(moe, x, recompute, steps=3):
    """Gradients of x and of all weights, and the router's counts, of each step."""
    results = []
    for _ in range(steps):
        leaf = x.clone().requires_grad_()
        moe.zero_grad()
        y = checkpoint(moe, leaf, use_reentrant=False) if recompute else moe(leaf)
        y.square().sum().backward()
        results.append([leaf.grad, *(p.grad.clone() for p in moe.parameters() if p.grad is not None)])
        with torch.no_grad():
            for p in moe.parameters():
                p -= 0.01 * p.grad if p.grad is not None else 0
    return results, moe.tokens_per_expert.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2])
def test_equal_tokens_go_the_same_way_twice(top_k, dtype, device):
    moe = _converted(_moe(device, top_k=top_k, dtype=dtype))
    x = torch.randn(1, 1, 64, device=device, dtype=dtype).expand(2, 64, 64).contiguous()
    plain, _ = _steps(copy.deepcopy(moe), x, False)
    recomputed, _ = _steps(moe, x, True)
    for a, b in zip(plain, recomputed, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_router_counts_tokens_as_often_as_the_host_s_layer_does(recompute, device):
    moe = _moe(device)
    x = torch.randn(2, 64, 64, device=device)
    _, own = _steps(_converted(copy.deepcopy(moe)), x, recompute, steps=1)
    _, host = _steps(moe, x, recompute, steps=1)
    assert torch.equal(own, host)
    assert own.sum() == 128 * (2 if recompute else 1)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_idle_experts_keep_finite_weights_under_every_adamw(implementation, device):
    moe = _converted(_moe(device, experts=4))
    moe.expert_bias = torch.tensor([0.0, 0.0, 0.0, 1e6], device=device)
    kind = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}[implementation]
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2, **kind)
    before = moe.experts.w2.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        moe(torch.randn(2, 128, 64, device=device)).square().sum().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in moe.parameters())
    decay = (1 - 1e-2 * 1e-2) ** 3
    torch.testing.assert_close(moe.experts.w2[:3], before[:3] * decay, rtol=1e-5, atol=1e-8)
    assert (moe.experts.w2[3] != before[3]).any()
