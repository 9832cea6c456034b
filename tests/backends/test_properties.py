"""What holds for every backend whatever the group sizes, strides and magnitudes are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends.reference import REFERENCE
from tests.backends.test_poisoned_memory import how  # noqa: F401 - the fixture: each backend where it runs
from tests.oracles import RCEIL_RECIPE
from tests.strategies import DTYPES, derandomized, ends_of, group_sizes, strided

K, N = 64, 96


def _draw(data, *shape):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    return torch.randn(shape, generator=generator)


def _run(function, tensors, ends, recipe_and_backend, dy, out_dtype=torch.float32):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function.apply(*leaves, ends, *recipe_and_backend, out_dtype)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def _equal(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _experts(data, sizes, grouped):
    return (len(sizes),) if grouped else ()


@derandomized(15)
@given(data=st.data(), split=group_sizes(multiple=32), grouped=st.booleans())
def test_strides_and_rows_of_nobody_change_no_bit(how, device, data, split, grouped):  # noqa: F811
    sizes, tail = split
    last = sum(sizes)
    dtype = data.draw(st.sampled_from(DTYPES))
    experts = _experts(data, sizes, grouped)
    x, w, dy = (_draw(data, *s).to(dtype) for s in ((last + tail, K), (*experts, N, K), (last + tail, N)))
    ends = ends_of(sizes, device) if grouped else None
    moved = [data.draw(strided(t)) for t in (x, w, dy)]
    want = _run(LinearFunction, [x.to(device), w.to(device)], ends, how, dy.to(device), dtype)
    if grouped:
        for t in (moved[0], moved[2]):
            t[last:] = data.draw(st.sampled_from([float("nan"), float("inf"), 1e30]))
    x, w, dy = (t.to(device) for t in moved)
    got = _run(LinearFunction, [x, w], ends, how, dy, dtype)
    assert _equal(got, want)
    if grouped:
        assert not got[0][last:].any()
        assert not got[1][last:].any()


@derandomized(15)
@given(
    data=st.data(), split=group_sizes(multiple=32), grouped=st.booleans(), powers=st.tuples(*[st.integers(-20, 20)] * 3)
)
def test_powers_of_two_go_through_all_products_exactly(how, device, data, split, grouped, powers):  # noqa: F811
    sizes, tail = split
    experts = _experts(data, sizes, grouped)
    rows = sum(sizes) + tail
    x, w, dy = (_draw(data, *s).to(device) for s in ((rows, K), (*experts, N, K), (rows, N)))
    ends = ends_of(sizes, device) if grouped else None
    # A library's grouped product is bf16 only, and rounds once: a power of two does not change that either.
    y, dx, dw = _run(LinearFunction, [x, w], ends, how, dy)
    i, j, m = (2.0**p for p in powers)
    assert _equal(_run(LinearFunction, [x * i, w * j], ends, how, dy * m), [y * i * j, dx * j * m, dw * i * m])


@derandomized(10)
@given(data=st.data(), split=group_sizes(multiple=32))
def test_experts_in_another_order_give_the_same_in_that_order(how, device, data, split):  # noqa: F811
    sizes, _ = split
    order = data.draw(st.permutations(range(len(sizes))))
    x, w, dy = (_draw(data, *s).to(device) for s in ((sum(sizes), K), (len(sizes), N, K), (sum(sizes), N)))
    rows = torch.cat([part for e in order for part in [torch.arange(sum(sizes)).split(sizes)[e]]]).to(device)
    y, dx, dw = _run(LinearFunction, [x, w], ends_of(sizes, device), how, dy)
    moved = ends_of([sizes[e] for e in order], device)
    got = _run(LinearFunction, [x[rows], w[list(order)]], moved, how, dy[rows])
    for a, b in zip(got, (y[rows], dx[rows], dw[list(order)]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()) if b.numel() else 0)


@derandomized(10)
@given(data=st.data(), split=group_sizes(multiple=32), grouped=st.booleans())
def test_a_swiglu_mlp_is_as_near_to_float64_as_emulation(how, device, data, split, grouped):  # noqa: F811
    sizes, tail = split
    rows, experts = sum(sizes) + tail, _experts(data, sizes, grouped)
    shapes = (rows, K), (*experts, N, K), (*experts, K, N), (*experts, N, K)
    tensors = [_draw(data, *s).to(device) * 0.3 for s in shapes]
    ends = ends_of(sizes, device) if grouped else None
    dy = _draw(data, rows, K).to(device)
    if grouped:
        dy[sum(sizes) :] = 0
    got = _run(SwiGLUMLPFunction, tensors, ends, how, dy)
    want = _run(SwiGLUMLPFunction, tensors, ends, (RCEIL_RECIPE, REFERENCE), dy)
    exact = _exact_mlp(tensors, ends, dy)
    for a, b, e in zip(got, want, exact, strict=True):
        size = e.norm()
        assert (a.double() - e).norm() <= 1.1 * (b.double() - e).norm() + 0.005 * size + 1e-12


def _exact_mlp(tensors, ends, dy):
    x, w1, w2, w3 = (t.double().requires_grad_() for t in tensors)
    if ends is None:
        y = (torch.nn.functional.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t()
    else:
        parts, start = [], 0
        for expert, end in enumerate(ends.tolist()):
            rows = x[start:end]
            h = torch.nn.functional.silu(rows @ w1[expert].t()) * (rows @ w3[expert].t())
            parts.append(h @ w2[expert].t())
            start = end
        y = torch.cat([*parts, x[start:] * 0])
    y.backward(dy.double())
    return [y.detach(), *(t.grad for t in (x, w1, w2, w3))]
