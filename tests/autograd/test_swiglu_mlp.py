import itertools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends.reference import REFERENCE
from tests.oracles import RCEIL_RECIPE

HOW = (RCEIL_RECIPE, REFERENCE, torch.float32)


def _layer_by_layer(x, w1, w2, w3, group_ends):
    h1, h3 = (LinearFunction.apply(x, w, group_ends, *HOW) for w in (w1, w3))
    return LinearFunction.apply(F.silu(h1) * h3, w2, group_ends, *HOW)


def _data(grouped, device):
    experts = (3,) if grouped else ()
    shapes = (96, 64), (*experts, 128, 64), (*experts, 64, 128), (*experts, 128, 64)
    ends = torch.tensor([10, 10, 70], dtype=torch.int32, device=device) if grouped else None
    return [torch.randn(shape, device=device) for shape in shapes], ends


def _run(function, tensors, needs, *rest):
    leaves = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    y = function(*leaves, *rest)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def _assert_close(got, want):
    """Joined products add in another order, and a sum next to a rounding boundary moves an element of h by 1/16."""
    for g, w in zip(got, want, strict=True):
        assert w is None or (g - w).norm() <= 1e-3 * w.norm()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=4) if any(n)])
def test_output_and_asked_gradients_equal_those_of_three_layers(grouped, needs, device):
    tensors, ends = _data(grouped, device)
    got = _run(SwiGLUMLPFunction.apply, tensors, needs, ends, *HOW)
    want = _run(_layer_by_layer, tensors, needs, ends)
    assert [g is None for g in got] == [w is None for w in want]
    _assert_close(got, want)


@pytest.mark.parametrize("needs", [(True,) * 4, (True, False, False, False), (False, True, False, False)])
def test_saving_the_input_itself_changes_no_gradient_of_emulation(needs, device):
    tensors, ends = _data(True, device)
    got = _run(lambda *args: SwiGLUMLPFunction.apply(*args, True), tensors, needs, ends, *HOW)
    want = _run(SwiGLUMLPFunction.apply, tensors, needs, ends, *HOW)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kept", [False, True])
def test_h13_is_freed_before_the_weights_gradients_unless_the_graph_is_kept(kept, device):
    h13s, alive = [], []

    def noting_swiglu(h13, *rest):
        h13s.append(weakref.ref(h13.untyped_storage()))
        return REFERENCE.swiglu(h13, *rest)

    def noting_dw(*args):
        alive.append(h13s[0]() is not None)
        return REFERENCE.dw(*args)

    tensors, ends = _data(True, device)
    leaves = [t.requires_grad_() for t in tensors]
    backend = replace(REFERENCE, swiglu=noting_swiglu, dw=noting_dw)
    loss = SwiGLUMLPFunction.apply(*leaves, ends, RCEIL_RECIPE, backend, torch.float32).sum()
    loss.backward(retain_graph=kept)
    assert alive == [kept, kept]
    if kept:
        first = [leaf.grad.clone() for leaf in leaves]
        loss.backward()
        assert all(torch.equal(leaf.grad, 2 * grad) for leaf, grad in zip(leaves, first, strict=True))


def test_garbage_past_the_last_group_changes_nothing_and_gets_zeros(device):
    tensors, ends = _data(True, device)
    clean = _run(SwiGLUMLPFunction.apply, tensors, (True,) * 4, ends, *HOW)
    tensors[0][70:] = float("nan")
    dirty = _run(SwiGLUMLPFunction.apply, tensors, (True,) * 4, ends, *HOW)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert (dirty[0][70:] == 0).all()
    assert (dirty[1][70:] == 0).all()


def test_compiles_into_one_graph_and_equals_eager(device):
    tensors, ends = _data(True, device)
    compiled = torch.compile(
        lambda *args: SwiGLUMLPFunction.apply(*args, *HOW),
        fullgraph=True,
        backend="inductor" if device == "cuda" else "aot_eager",
    )
    got = _run(compiled, tensors, (True,) * 4, ends)
    want = _run(SwiGLUMLPFunction.apply, tensors, (True,) * 4, ends, *HOW)
    _assert_close(got, want)
