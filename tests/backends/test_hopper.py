"""The Hopper backend: its wiring on CPU tensors with references for kernels, the whole of it on an H100 or H200."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends import hopper
from mxfp8_titan.backends.hopper import HOPPER
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import MX, recipe_from
from tests.backends import aligned_on_cpu
from tests.oracles import RCEIL_RECIPE, sqnr

_ops = torch.ops.mxfp8_titan

GEMMS = ["auto", "library", "own"]
ENDS = [[64, 64, 97, 352], [0, 0, 0, 0], [0, 352, 352, 352], [1, 2, 3, 4]]

LOST_DB = {0.0: 0.1, 1.0: 0.3}
"""dB that a product may lose against exact 1x32 blocks, by the data's mean. docs/numerics.md has what was measured:
0.01 and, where most of the error is the bf16 output's, 0.22."""

FP8_ERROR = 0.06
"""Norm of the error over that of the product. Two operands quantized at 31.5 dB make 0.038; a wrong row makes 1."""


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    yield from aligned_on_cpu.on_this_machine(monkeypatch)


def _recipe(**choices):
    return recipe_from(MX(**choices), "mxfp8_hopper")


def _tensors(grouped, device, tokens=352, n=160, k=96, dtype=torch.bfloat16):
    experts = (4,) if grouped else ()
    x, w, dy = (torch.randn(s, device=device).to(dtype) for s in ((tokens, k), (*experts, n, k), (tokens, n)))
    return x, w, dy


def _run(x, w, dy, ends, recipe, backend):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = LinearFunction.apply(x, w, ends, recipe, backend, torch.bfloat16)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def _ends(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def _exact(x, w, dy, ends):
    """y, dx and dw in float64, zeros past the last group."""
    y, dx, dw = (torch.zeros(s, dtype=torch.float64, device=x.device) for s in (dy.shape, x.shape, w.shape))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        rows = slice(start, end)
        y[rows], dx[rows] = x[rows].double() @ w[expert].double().t(), dy[rows].double() @ w[expert].double()
        dw[expert] = dy[rows].double().t() @ x[rows].double()
        start = end
    return y, dx, dw


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("grouped", [False, True])
def test_sqnr_is_within_tenths_of_a_decibel_of_exact_1x32_emulation(grouped, mean, gemm, device):
    x, w, dy = _tensors(grouped, device, tokens=512, n=256, k=512)
    x, dy = x + mean, dy + mean
    ends = _ends([128, 128, 320, 512], device) if grouped else None
    exact = _exact(x, w, dy, ends) if grouped else (
        x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double()
    )  # fmt: skip
    got = _run(x, w, dy, ends, _recipe(gemm=gemm), HOPPER)
    emulated = _run(x, w, dy, ends, RCEIL_RECIPE, REFERENCE)
    for result, reference, answer in zip(got, emulated, exact, strict=True):
        assert sqnr(result, answer) >= sqnr(reference, answer) - LOST_DB[mean]


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("ends", ENDS)
def test_groups_of_any_size_and_garbage_past_the_last(ends, gemm, device):
    x, w, dy = _tensors(True, device)
    ends = _ends(ends, device)
    last = int(ends[-1])
    x[last:], dy[last:] = float("nan"), float("inf")
    # Memory that was freed full of NaN is what unwritten results would be made of.
    garbage = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(4)]
    del garbage
    y, dx, dw = _run(x, w, dy, ends, _recipe(gemm=gemm), HOPPER)
    want = _exact(x, w, dy, ends)
    assert (y[last:] == 0).all()
    assert (dx[last:] == 0).all()
    for got, exact in zip((y, dx, dw), want, strict=True):
        assert got.isfinite().all()
        assert (got.double() - exact).norm() <= FP8_ERROR * exact.norm()


@pytest.mark.parametrize(("gemm", "exact"), [("library", False), ("own", True)])
@pytest.mark.parametrize("grouped", [False, True])
def test_fp32_weights_have_fp32_gradients_unless_the_library_rounds_them(grouped, gemm, exact, device):
    x, w, dy = _tensors(grouped, device)
    ends = _ends(ENDS[0], device) if grouped else None
    _, _, dw = _run(x, w.float(), dy, ends, _recipe(gemm=gemm), HOPPER)
    assert dw.dtype == torch.float32
    assert torch.equal(dw, dw.bfloat16().float()) != exact


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("tokens", [0, 1, 33, 200])
def test_dense_layers_take_any_number_of_tokens(tokens, gemm, device):
    x, w, dy = _tensors(False, device, tokens=tokens)
    y, dx, dw = _run(x, w, dy, None, _recipe(gemm=gemm), HOPPER)
    exact = (x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double())
    for got, want in zip((y, dx, dw), exact, strict=True):
        assert (got.double() - want).norm() <= FP8_ERROR * want.norm()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_swiglu_mlp_is_as_close_to_fp32_as_emulation_is(grouped, device):
    experts = (4,) if grouped else ()
    shapes = (352, 96), (*experts, 160, 96), (*experts, 96, 160), (*experts, 160, 96)
    tensors = [(torch.randn(s, device=device) * 0.3).bfloat16() for s in shapes]
    ends = _ends([64, 64, 97, 352], device) if grouped else None

    def run(function):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = function(*leaves)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(y.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def exactly(x, w1, w2, w3):
        def mlp(x, w1, w2, w3):
            return (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT

        x, w1, w2, w3 = (t.double() for t in (x, w1, w2, w3))
        if not grouped:
            return mlp(x, w1, w2, w3)
        return torch.cat([mlp(r, w1[e], w2[e], w3[e]) for e, r in enumerate(x.split(ends.diff(
            prepend=ends.new_zeros(1)).tolist()))])  # fmt: skip

    how = ends, _recipe(), HOPPER, torch.bfloat16
    got = run(lambda *args: SwiGLUMLPFunction.apply(*args, *how))
    emulated = run(lambda *args: SwiGLUMLPFunction.apply(*args, ends, RCEIL_RECIPE, REFERENCE, torch.bfloat16))
    for result, reference, answer in zip(got, emulated, run(exactly), strict=True):
        assert sqnr(result, answer) >= sqnr(reference, answer) - 0.3


def test_what_is_saved_for_backward_is_fp8_and_small_beside_the_weight(device):
    x, w, _ = _tensors(True, device, tokens=352, n=160, k=96)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    x, w = x.requires_grad_(), w.requires_grad_()
    with hooks:
        LinearFunction.apply(x, w, _ends(ENDS[0], device), _recipe(), HOPPER, torch.bfloat16)
    weights = [t for t in saved if t.data_ptr() == w.data_ptr()]
    assert len(weights) == 1
    others = sum(t.nbytes for t in saved) - w.nbytes
    amax = 2 * 4 * 4 * 96
    assert others <= x.numel() + 4 * x.shape[0] + amax + 16


@pytest.mark.parametrize("grouped", [False, True])
def test_an_input_that_is_saved_anyway_is_rounded_from_itself_and_saved_once(grouped, device):
    x, w, dy = _tensors(grouped, device)
    ends, recipe, saved = _ends(ENDS[0], device) if grouped else None, _recipe(), []
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = LinearFunction.apply(*leaves, ends, recipe, HOPPER, torch.bfloat16, True)
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved)
    assert sum(t.data_ptr() == leaves[0].data_ptr() for t in saved) == 1
    y.backward(dy)
    want_y, want_dx, _ = _run(x, w, dy, ends, recipe, HOPPER)
    assert torch.equal(y, want_y)
    assert torch.equal(leaves[0].grad, want_dx)
    grads = HOPPER.quantize_tokens(dy, ends, recipe, True).dw
    operands = (*hopper.along_t(grads, ends, recipe), *_ops.quantize_aligned_along_t(x, recipe.rounding, ends))
    (dw,) = hopper.over_t(*operands, ends, 1, recipe.gemm, False, torch.bfloat16)
    assert torch.equal(leaves[1].grad, dw)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_swiglu_mlp_takes_x_itself_for_the_gradients_of_w1_and_w3(grouped, device):
    x, _, _ = _tensors(grouped, device)
    experts, ends = ((4,), _ends(ENDS[0], device)) if grouped else ((), None)
    saved, dw_of_x = [], []
    weights = [torch.randn((*experts, *s), device=device).bfloat16() for s in ((160, 96), (96, 160), (160, 96))]

    def noting_dw(dy, x, *rest):
        dw_of_x.append(x)
        return HOPPER.dw(dy, x, *rest)

    how = ends, _recipe(), replace(HOPPER, dw=noting_dw), torch.bfloat16
    results = []
    for saves_x in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = SwiGLUMLPFunction.apply(*leaves, *how, saves_x)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    plain, marked = results
    # y, dx and dw2 to the bit; of dw1 and dw3, elements that are subnormal in FP8 along features.
    assert all(torch.equal(plain[i], marked[i]) for i in (0, 1, 3))
    assert all(sqnr(marked[i], plain[i].double()) > 40 for i in (2, 4))
    assert sum(t.dtype == torch.float8_e4m3fn for t in saved) == 1
    (_, of_plain, _, of_marked) = dw_of_x
    assert of_plain[0].dtype == torch.float8_e4m3fn
    assert torch.equal(of_marked[0], x)


@pytest.mark.parametrize("grouped", [False, True])
def test_compiles_into_one_graph_for_any_number_of_tokens(grouped, device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    recipe = _recipe()

    def layer(x, w, ends):
        return LinearFunction.apply(x, w, ends, recipe, HOPPER, torch.bfloat16)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (352, 357, 64, 640):
        x, w, dy = _tensors(grouped, device, tokens=tokens)
        ends = _ends([tokens // 4] * 3 + [tokens], device) if grouped else None
        results = []
        for function in (layer, compiled):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = function(*leaves, ends)
            y.backward(dy)
            results.append((y.detach(), *(leaf.grad for leaf in leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count <= 2


def test_frozen_weights_and_inputs_cost_nothing(device):
    def wasted(*args):
        raise AssertionError("this gradient was not asked for")

    x, w, dy = _tensors(False, device)
    backend = replace(HOPPER, dw=wasted)
    LinearFunction.apply(x.requires_grad_(), w, None, _recipe(), backend, torch.bfloat16).backward(dy)
    assert x.grad.shape == x.shape
    backend = replace(HOPPER, dx=wasted, quantize_weights_for_dx=wasted)
    LinearFunction.apply(x.detach(), w.requires_grad_(), None, _recipe(), backend, torch.bfloat16).backward(dy)
    assert w.grad.shape == w.shape


# PyTorch's other checks compare inputs before and after, which it cannot do in FP8.
CHECKS = ("test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("grouped", [False, True])
def test_every_op_passes_torch_s_own_checks(grouped, device):
    x, w, dy = _tensors(grouped, device)
    ends = _ends(ENDS[0], device) if grouped else None
    recipe = _recipe()
    operands = [HOPPER.quantize_tokens(t, ends, recipe, True) for t in (x, dy)]
    weights = HOPPER.quantize_weights([w, w], recipe, True)
    along_t = [hopper.along_t(operand.dw, ends, recipe) for operand in operands]
    rounding, bf16 = recipe.rounding, torch.bfloat16
    h13 = torch.randn(x.shape[0], 128, device=device, dtype=bf16)
    calls = {
        "quantize_aligned_along_k": (x, rounding, ends),
        "quantize_aligned_along_k_with_amax": (x, rounding, ends),
        "quantize_aligned_weights": ([w, w], rounding),
        "quantize_aligned_weights_along_n": ([w, w], *weights.kept, rounding),
        "quantize_aligned_along_t": (x, rounding, ends, operands[0].dw[2]),
        "requantize_aligned_along_t": (*operands[0].dw, rounding, ends),
        "swiglu_aligned": (h13, rounding, ends),
        "swiglu_aligned_backward": (h13[:, :64], h13, rounding, ends),
        "hopper_rows_times": (*operands[0].rows, *weights.y, ends, "auto", False, bf16),
        "hopper_over_t": (*along_t[1], *along_t[0], ends, 1, "auto", False, bf16),
    }
    for name, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.mxfp8_titan, name).default, args, test_utils=CHECKS)


def test_a_copied_backend_is_the_same_one():
    assert copy.deepcopy(HOPPER) is HOPPER


@pytest.mark.hopper
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("grouped", [False, True])
def test_no_call_waits_for_the_gpu(grouped, gemm):
    x, w, dy = _tensors(grouped, "cuda")
    ends = _ends(ENDS[0], "cuda") if grouped else None
    _run(x, w, dy, ends, _recipe(gemm=gemm), HOPPER)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(x, w, dy, ends, _recipe(gemm=gemm), HOPPER)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.hopper
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_captured_step_gives_new_results_for_new_inputs(gemm):
    x, w, dy = _tensors(True, "cuda")
    ends = _ends(ENDS[0], "cuda")
    recipe = _recipe(gemm=gemm)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _run(x, w, dy, ends, recipe, HOPPER)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(x, w, dy, ends, recipe, HOPPER)
    x.copy_(torch.randn_like(x))
    ends.copy_(_ends(ENDS[2], "cuda"))
    graph.replay()
    for got, want in zip(captured, _run(x, w, dy, ends, recipe, HOPPER), strict=True):
        assert torch.equal(got, want)
