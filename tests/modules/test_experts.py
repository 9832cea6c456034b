import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import RECIPES
from mxfp8_titan.modules.experts import MXFP8GroupedExperts

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


class _ExpertByExpert(nn.Module):
    """The same experts as dense MXFP8 products, one expert after another, each over its own tokens only."""

    def __init__(self, experts):
        super().__init__()
        self.w1, self.w2, self.w3, self.num_experts = experts.w1, experts.w2, experts.w3, experts.num_experts

    def forward(self, x, num_tokens_per_expert):
        outs = []
        for e, rows in enumerate(x.split(num_tokens_per_expert.int().tolist())):
            a, b = (LinearFunction.apply(rows, w[e], None, RECIPE, REFERENCE, x.dtype) for w in (self.w1, self.w3))
            outs.append(LinearFunction.apply(F.silu(a) * b, self.w2[e], None, RECIPE, REFERENCE, x.dtype))
        return torch.cat(outs)


@pytest.mark.parametrize("counts", [[40, 0, 7, 53], [0, 0, 0, 0], [0, 0, 0, 100], [25, 25, 25, 25]])
def test_output_and_gradients_are_those_of_each_expert_alone(counts, device):
    _, mx = _experts(device=device)
    alone = _ExpertByExpert(copy.deepcopy(mx))
    x, dy = torch.randn(sum(counts), 64, device=device), torch.randn(sum(counts), 64, device=device)
    tokens = torch.tensor(counts, device=device)
    results = []
    for module in (mx, alone):
        inp = x.clone().requires_grad_()
        y = module(inp, tokens)
        y.backward(dy)
        results.append((y, inp.grad, module.w1.grad, module.w2.grad, module.w3.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for expert, count in enumerate(counts):
        assert (mx.w1.grad[expert] == 0).all() == (count == 0)


def test_experts_on_a_mesh_without_names_give_what_plain_ones_do(tmp_path):
    _, plain = _experts()
    on_mesh = copy.deepcopy(plain)
    x, counts = torch.randn(100, 64), torch.tensor([40, 0, 7, 53])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name, w in list(on_mesh.named_parameters()):
            setattr(on_mesh, name, nn.Parameter(distribute_tensor(w.detach(), mesh)))
        assert torch.equal(on_mesh(x, counts), plain(x, counts))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_a_whole_moe_layer_equals_one_that_runs_expert_by_expert(top_k, score_before_experts, device):
    _, mx = _moe(device, top_k=top_k, score_before_experts=score_before_experts)
    alone = copy.deepcopy(mx)
    alone.experts = _ExpertByExpert(alone.experts)
    x = torch.randn(2, 125, 64, device=device)
    outputs = []
    for module in (mx, alone):
        outputs.append(module(x))
        outputs[-1].square().mean().backward()
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for name, parameter in mx.named_parameters():
        torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alignment", [1, 32])
def test_groups_reach_the_gemm_in_multiples_of_what_the_backend_asks_for(alignment, device):
    seen = []

    def recording_y(rows, weights, group_ends, *rest):
        seen.append(group_ends.diff(prepend=group_ends.new_zeros(1)).tolist())
        return REFERENCE.y(rows, weights, group_ends, *rest)

    backend = Backend(**{**vars(REFERENCE), "y": recording_y, "group_alignment": alignment})
    args = MoEArgs(num_experts=8, top_k=1, use_grouped_mm=False)
    moe = MoE(args, dim=64, hidden_dim=96).to(device)
    with torch.no_grad():
        moe.init_weights(init_std=0.1, buffer_device=torch.device(device))
    MXFP8GroupedExperts.from_experts(moe.experts, RECIPE, backend)
    moe(torch.randn(1, 1000, 64, device=device))
    assert len(seen) == 2
    assert all(count % alignment == 0 for counts in seen for count in counts)
    assert all((sum(counts) == 1000) == (alignment == 1) for counts in seen)


@pytest.mark.parametrize("counts", [[40, 0, 7, 53], [0, 0, 0, 100]])
def test_padding_the_groups_changes_nothing_but_the_order_of_sums(counts, device):
    _, mx = _experts(device=device)
    padded = copy.deepcopy(mx)
    padded.backend = Backend(**{**vars(REFERENCE), "group_alignment": 32})
    x, tokens = torch.randn(100, 64, device=device), torch.tensor(counts, device=device)
    results = []
    for module in (mx, padded):
        inp = x.clone().requires_grad_()
        y = module(inp, tokens)
        y.square().sum().backward()
        results.append((y, inp.grad, module.w1.grad, module.w2.grad, module.w3.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_bf16_weight_gradients_leave_the_other_products_as_they_are(device):
    _, mx = _experts(device=device)
    bf16_dw = copy.deepcopy(mx)
    bf16_dw.recipe = replace(RECIPE, wgrad_in_mxfp8=False)
    x, tokens = torch.randn(100, 64, device=device), torch.tensor([40, 0, 7, 53], device=device)
    results = []
    for module in (mx, bf16_dw):
        inp = x.clone().requires_grad_()
        y = module(inp, tokens)
        y.square().sum().backward()
        results.append((y, inp.grad, module.w2.grad))
    (y, dx, dw2), (other_y, other_dx, other_dw2) = results
    torch.testing.assert_close(y, other_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, other_dx, rtol=1e-5, atol=1e-5)
    assert not torch.equal(dw2, other_dw2)
    torch.testing.assert_close(dw2, other_dw2, rtol=0.2, atol=0.1 * dw2.abs().max().item())


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
    mx.backend = Backend(**{**vars(REFERENCE), "group_alignment": 32})
    x, tokens = torch.randn(200, 64, device=device), torch.tensor([90, 30, 80, 0], device=device)
    want = mx(x, tokens)
    before = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    moe_utils.set_token_group_alignment_size_m(128)
    try:
        assert torch.equal(mx(x, tokens), want)
        assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == 128
    finally:
        moe_utils.set_token_group_alignment_size_m(before)


def test_frozen_w1_and_w3_cost_no_weight_gradient(device):
    ran = []

    def recording_dw(*args):
        ran.append("dw")
        return REFERENCE.dw(*args)

    backend = Backend(**{**vars(REFERENCE), "dw": recording_dw})
    plain = GroupedExperts(64, 96, 4, use_grouped_mm=False).to(device)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    mx = MXFP8GroupedExperts.from_experts(plain, RECIPE, backend)
    mx.w1.requires_grad_(False)
    mx.w3.requires_grad_(False)
    mx(torch.randn(32, 64, device=device), torch.tensor([32, 0, 0, 0], device=device)).sum().backward()
    assert ran == ["dw"]
    assert (mx.w1.grad, mx.w3.grad) == (None, None)


def test_under_autocast_the_output_keeps_the_input_s_dtype(device):
    _, mx = _experts(device=device)
    x = torch.randn(10, 64, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = mx(x, torch.tensor([10, 0, 0, 0], device=device))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert mx.w1.grad.dtype == torch.float32


def test_groups_larger_than_the_tokens_that_are_left_are_padded_to_the_user_s_multiple(device):
    # 90 of 100 tokens go to one expert: its next multiple of 128 is more than there are tokens.
    seen = []

    def recording_y(rows, weights, group_ends, *rest):
        seen.append(group_ends.diff(prepend=group_ends.new_zeros(1)).tolist())
        return REFERENCE.y(rows, weights, group_ends, *rest)

    _, mx = _experts(experts=2, device=device)
    alone = copy.deepcopy(mx)
    mx.backend = Backend(**{**vars(REFERENCE), "y": recording_y, "group_alignment": 32})
    moe_utils.set_token_group_alignment_size_m(128)
    try:
        x, counts = torch.randn(100, 64, device=device), torch.tensor([90, 10], device=device)
        torch.testing.assert_close(mx(x, counts), alone(x, counts), rtol=1e-5, atol=1e-5)
    finally:
        moe_utils.set_token_group_alignment_size_m(8)
    assert seen == [[128, 128]] * 2


def test_token_0_gets_nothing_of_the_padding(device):
    _, mx = _experts(device=device)
    padded = copy.deepcopy(mx)
    padded.backend = Backend(**{**vars(REFERENCE), "group_alignment": 32})
    x, counts = torch.randn(100, 64, device=device), torch.tensor([40, 0, 7, 53], device=device)
    got = []
    for module in (mx, padded):
        inp = x.clone().requires_grad_()
        y = module(inp, counts)
        y.backward(torch.ones_like(y))
        got.append((y[0], inp.grad[0]))
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def test_compiled_experts_take_any_tokens_none_too(device):
    torch._dynamo.reset()
    counting = CompileCounterWithBackend("inductor" if device == "cuda" else "eager")
    _, eager = _experts(device=device)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled._run, backend=counting, fullgraph=True, dynamic=True)
    for counts in ([40, 0, 7, 53], [0, 0, 0, 0], [0, 0, 0, 100], [1, 2, 3, 4], [64, 64, 0, 0]):
        counts = torch.tensor(counts, device=device)
        results = []
        for module, call in ((eager, eager._run), (compiled, run)):
            module.zero_grad()
            x = torch.linspace(-1, 1, int(counts.sum()) * 64, device=device).view(-1, 64).requires_grad_()
            y = call(module.w1, module.w2, module.w3, x, counts)
            y.sum().backward()
            results.append((y, x.grad, module.w1.grad, module.w2.grad, module.w3.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counting.frame_count <= 2
