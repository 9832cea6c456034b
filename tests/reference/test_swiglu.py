"""The SwiGLU formulas against autograd in float64."""

import torch

from mxfp8_titan.reference.swiglu import swiglu, swiglu_backward


def test_gradients_equal_autograd():
    dh, h1, h3 = (torch.randn(8, 16, dtype=torch.float64) for _ in range(3))
    a, b = h1.clone().requires_grad_(), h3.clone().requires_grad_()
    h = torch.nn.functional.silu(a) * b
    h.backward(dh)
    torch.testing.assert_close(swiglu(h1, h3), h.detach().float())
    dh1, dh3 = swiglu_backward(dh, h1, h3)
    torch.testing.assert_close(dh1, a.grad.float())
    torch.testing.assert_close(dh3, b.grad.float())
