import copy

import pytest
import torch
from torch import nn
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts

from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import RECIPES
from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from tests.oracles import sqnr

RECIPE = RECIPES["mxfp8_emulated_rceil"]


def _experts(experts=4, dim=64, hidden=96, device="cpu"):
    plain = GroupedExperts(dim, hidden, experts, use_grouped_mm=False).to(device)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    return plain, MXFP8GroupedExperts.from_experts(copy.deepcopy(plain), RECIPE, REFERENCE)


def _moe(device, experts=4, top_k=1, score_before_experts=True):
    args = MoEArgs(num_experts=experts, top_k=top_k, use_grouped_mm=False, score_before_experts=score_before_experts)
    plain = MoE(args, dim=64, hidden_dim=96).to(device)
    with torch.no_grad():
        plain.init_weights(init_std=0.1, buffer_device=torch.device(device))
    mx = copy.deepcopy(plain)
    MXFP8GroupedExperts.from_experts(mx.experts, RECIPE, REFERENCE)
    return plain, mx


def test_conversion_keeps_the_module_and_its_parameters():
    experts = GroupedExperts(64, 96, 4, use_grouped_mm=True)
    parameters = dict(experts.named_parameters())
    converted = MXFP8GroupedExperts.from_experts(experts, RECIPE, REFERENCE)
    assert converted is experts
    assert isinstance(converted, GroupedExperts)
    assert [(n, id(p)) for n, p in converted.named_parameters()] == [(n, id(p)) for n, p in parameters.items()]
    assert "num_experts=4, dim=64, hidden_dim=96, recipe=mxfp8_emulated_rceil" in repr(converted)


@pytest.mark.parametrize("counts", [[40, 0, 7, 53], [0, 0, 0, 0], [0, 0, 0, 100], [25, 25, 25, 25]])
def test_output_and_gradients_are_near_bf16_s_for_any_routing(counts, device):
    plain, mx = _experts(device=device)
    x = torch.randn(sum(counts), 64, device=device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    dy = torch.randn(sum(counts), 64, device=device)
    tokens = torch.tensor(counts, device=device)
    for module, inp in zip((plain, mx), inputs, strict=True):
        module(inp, tokens).backward(dy)
    got, want = mx(x, tokens), plain(x, tokens)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    for name, parameter in mx.named_parameters():
        grad, want_grad = parameter.grad, plain.get_parameter(name).grad
        assert grad.isfinite().all()
        for expert, count in enumerate(counts):
            if count == 0:
                assert (grad[expert] == 0).all()
            else:
                assert sqnr(grad[expert], want_grad[expert]) > 18
    if sum(counts):
        assert sqnr(got, want) > 22
        assert sqnr(inputs[1].grad, inputs[0].grad) > 20


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_a_whole_moe_layer_trains_like_bf16_s(top_k, score_before_experts, device):
    plain, mx = _moe(device, top_k=top_k, score_before_experts=score_before_experts)
    x = torch.randn(2, 125, 64, device=device)
    for module in (plain, mx):
        module(x).square().mean().backward()
    assert sqnr(mx(x), plain(x)) > 20
    for name, parameter in mx.named_parameters():
        assert sqnr(parameter.grad, plain.get_parameter(name).grad) > 12, name


def test_every_group_that_reaches_the_gemm_is_a_multiple_of_32(device):
    seen = []

    def recording_y(x, w, group_ends, rounding, out_dtype):
        seen.append(group_ends.diff(prepend=group_ends.new_zeros(1)).tolist())
        return REFERENCE.grouped_y(x, w, group_ends, rounding, out_dtype)

    backend = Backend(**{**vars(REFERENCE), "grouped_y": recording_y})
    args = MoEArgs(num_experts=8, top_k=1, use_grouped_mm=False)
    moe = MoE(args, dim=64, hidden_dim=96).to(device)
    with torch.no_grad():
        moe.init_weights(init_std=0.1, buffer_device=torch.device(device))
    MXFP8GroupedExperts.from_experts(moe.experts, RECIPE, backend)
    moe(torch.randn(1, 1000, 64, device=device))
    assert len(seen) == 3
    assert all(count % 32 == 0 for counts in seen for count in counts)


def test_the_host_s_group_alignment_is_its_own_again_after_every_call(device):
    _, mx = _experts(device=device)
    before = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    x, tokens = torch.randn(10, 64, device=device), torch.tensor([10, 0, 0, 0], device=device)
    mx(x, tokens)
    assert before == moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    with pytest.raises(RuntimeError):
        mx(x[:, :32], tokens)
    assert before == moe_utils.TOKEN_GROUP_ALIGN_SIZE_M


def test_a_larger_alignment_set_by_the_user_is_kept(device):
    _, mx = _experts(device=device)
    x, tokens = torch.randn(200, 64, device=device), torch.tensor([90, 30, 80, 0], device=device)
    want = mx(x, tokens)
    moe_utils.set_token_group_alignment_size_m(128)
    try:
        assert torch.equal(mx(x, tokens), want)
        assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == 128
    finally:
        moe_utils.set_token_group_alignment_size_m(8)


def test_frozen_w1_and_w3_cost_no_weight_gradient(device):
    ran = []

    def recording_dw(*args):
        ran.append("grouped_dw")
        return REFERENCE.grouped_dw(*args)

    backend = Backend(**{**vars(REFERENCE), "grouped_dw": recording_dw})
    plain = GroupedExperts(64, 96, 4, use_grouped_mm=False).to(device)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    mx = MXFP8GroupedExperts.from_experts(plain, RECIPE, backend)
    mx.w1.requires_grad_(False)
    mx.w3.requires_grad_(False)
    mx(torch.randn(32, 64, device=device), torch.tensor([32, 0, 0, 0], device=device)).sum().backward()
    assert ran == ["grouped_dw"]
    assert (mx.w1.grad, mx.w3.grad) == (None, None)


def test_under_autocast_the_output_keeps_the_input_s_dtype(device):
    _, mx = _experts(device=device)
    x = torch.randn(10, 64, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = mx(x, torch.tensor([10, 0, 0, 0], device=device))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert mx.w1.grad.dtype == torch.float32
