"""Whole layers of Llama4 Scout on Hopper against bf16: one MoE layer, one linear, what experts save for backward."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe import moe as moe_module
from torchtitan.models.moe.moe import MoE

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends.hopper import HOPPER
from mxfp8_titan.bench.results import Row
from mxfp8_titan.bench.timing import forward_and_backward, in_turns_us
from mxfp8_titan.job_config import RECIPES
from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from mxfp8_titan.modules.feed_forward import fuse_feed_forwards
from mxfp8_titan.modules.linear import MXFP8Linear
from mxfp8_titan.modules.moe import speed_up_token_moves

DIM, HIDDEN, EXPERTS, TOKENS = 5120, 8192, 16, 65536
RECIPE = RECIPES["mxfp8_hopper"]


def measure() -> list[Row]:
    """One row a figure."""
    return [measure_moe_layer(), measure_dense_linear(), measure_saved_bytes()]


def _moe(mxfp8: bool) -> MoE:
    """One layer in bf16, as FSDP2's mixed precision runs it, compiled in the pieces that torchtitan compiles."""
    with torch.device("cuda"):
        moe = MoE(MoEArgs(num_experts=EXPERTS), dim=DIM, hidden_dim=HIDDEN).bfloat16()
    with torch.no_grad():
        moe.init_weights(init_std=0.02, buffer_device=torch.device("cuda"))
    if mxfp8:
        for linear in (moe.shared_experts.w1, moe.shared_experts.w2, moe.shared_experts.w3):
            MXFP8Linear.from_linear(linear, RECIPE, HOPPER)
        MXFP8GroupedExperts.from_experts(moe.experts, RECIPE, HOPPER)
        speed_up_token_moves(moe)
        fuse_feed_forwards(moe)
    for name in ("router", "reorderer", "shared_experts"):
        setattr(moe, name, torch.compile(getattr(moe, name), fullgraph=True))
    return moe


def measure_moe_layer() -> Row:
    """Forward and backward of one MoE layer, router, token moves and shared expert included."""
    x = torch.randn(8, TOKENS // 8, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)
    grouped_mm = moe_module._run_experts_grouped_mm
    try:
        moe_module._run_experts_grouped_mm = torch.compile(grouped_mm, fullgraph=True)
        steps = []
        for mxfp8 in (False, True):
            torch.manual_seed(0)
            moe = _moe(mxfp8)
            leaves = [x, *moe.parameters()]
            steps.append(lambda moe=moe, leaves=leaves: forward_and_backward(lambda: moe(x), dy, *leaves))
        times = in_turns_us(steps)
    finally:
        moe_module._run_experts_grouped_mm = grouped_mm
    return _speedup("moe_layer", ">= 1.30", times, f"{EXPERTS} experts, dim {DIM}, hidden {HIDDEN}, {TOKENS} tokens")


def measure_dense_linear() -> Row:
    """Forward and backward of one linear."""
    x = torch.randn(TOKENS, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(HIDDEN, DIM, device="cuda", dtype=torch.bfloat16) / 64).requires_grad_()
    dy = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    calls: list[Callable[[], Tensor]] = [
        lambda: nn.functional.linear(x, w),
        lambda: LinearFunction.apply(x, w, None, RECIPE, HOPPER, torch.bfloat16),
    ]
    times = in_turns_us([lambda call=call: forward_and_backward(call, dy, x, w) for call in calls])
    return _speedup("dense_linear", ">= 1.5", times, f"{TOKENS} x {DIM} x {HIDDEN}")


def measure_saved_bytes() -> Row:
    """Bytes a token that the experts' function saves for backward, weights aside, over torch.compile's in bf16."""
    tokens, experts, dim, hidden = 4096, 4, DIM, HIDDEN
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    shapes = (experts, hidden, dim), (experts, dim, hidden), (experts, hidden, dim)
    w1, w2, w3 = ((torch.randn(s, device="cuda", dtype=torch.bfloat16) / 64).requires_grad_() for s in shapes)
    counts = torch.full((experts,), tokens // experts, device="cuda")
    ends = counts.cumsum(0, dtype=torch.int32)
    compiled = torch.compile(copy.copy(moe_module._run_experts_grouped_mm), fullgraph=True)
    calls = {
        "bf16": lambda: compiled(w1, w2, w3, x, counts),
        "mxfp8": lambda: SwiGLUMLPFunction.apply(x, w1, w2, w3, ends, RECIPE, HOPPER, torch.bfloat16),
    }
    saved = {name: _saved_bytes(call, (w1, w2, w3)) / tokens for name, call in calls.items()}
    detail = f"mxfp8 {saved['mxfp8']:.0f} bytes a token, compiled bf16 {saved['bf16']:.0f}; dim {dim}, hidden {hidden}"
    return Row("moe_saved_bytes", round(saved["mxfp8"] / saved["bf16"], 3), "ratio", "<= 0.65", detail)


def _saved_bytes(call: Callable[[], Tensor], weights: tuple[Tensor, ...]) -> int:
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    call().sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    for weight in weights:
        storages.pop(weight.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def _speedup(id: str, target: str, times: list[float], shape: str) -> Row:
    bf16, mxfp8 = times
    detail = f"{shape}, fwd+bwd: bf16 {bf16:.0f} us, here {mxfp8:.0f}"
    return Row(id, round(bf16 / mxfp8, 3), "x bf16, fwd+bwd", target, detail)
