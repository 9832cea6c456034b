"""The Blackwell backend with its real kernels, quantizers included: interpreted, or on any GPU, emulated in bf16."""

import pytest
import torch

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends.blackwell import BLACKWELL
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.job_config import MX, recipe_from
from tests.oracles import sqnr

ENDS = [32, 32, 128]
"""Of 160 tokens."""


def run(function, tensors, *how):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = function(*leaves, *how)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_linear_equals_emulation(device, grouped, rounding):
    recipe = recipe_from(MX(gemm="own"), "mxfp8_cublas" if rounding == FLOOR else "mxfp8_cublas_rceil")
    tensors = [torch.randn(s, device=device) for s in ((160, 160), (3, 96, 160) if grouped else (96, 160))]
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device) if grouped else None
    if grouped:
        tensors[0][128:] = float("nan")
    got = run(LinearFunction.apply, tensors, ends, recipe, BLACKWELL, torch.float32)
    want = run(LinearFunction.apply, tensors, ends, recipe, REFERENCE, torch.float32)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4 * w.abs().max().item())


@pytest.mark.parametrize("grouped", [False, True])
def test_a_swiglu_mlp_is_as_close_to_emulation_as_one_rounding_more(device, grouped):
    recipe = recipe_from(MX(gemm="own"), "mxfp8_cublas_rceil")
    experts = (3,) if grouped else ()
    shapes = (160, 64), (*experts, 96, 64), (*experts, 64, 96), (*experts, 96, 64)
    tensors = [torch.randn(s, device=device) * 0.3 for s in shapes]
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device) if grouped else None
    got = run(SwiGLUMLPFunction.apply, tensors, ends, recipe, BLACKWELL, torch.float32)
    want = run(SwiGLUMLPFunction.apply, tensors, ends, recipe, REFERENCE, torch.float32)
    assert all(sqnr(g, w) > 40 for g, w in zip(got, want, strict=True))
