"""The Blackwell backend: its wiring on CPU tensors, with PyTorch's calls as documented; the whole of it on a B200."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends import blackwell, select
from mxfp8_titan.backends.blackwell import BLACKWELL, grouped_library_lacks, own_kernel_multiplies_experts
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.job_config import MX, recipe_from
from tests.backends import blackwell_on_cpu
from tests.oracles import FLOOR_RECIPE, RCEIL_RECIPE, sqnr

GEMMS = ["auto", "library", "own"]
ENDS = [64, 64, 96, 352]

BF16_STEP = 2.0**-7
"""Between neighbours, relative: equal operands summed in another order may round to the next one. Elements that cancel
to nearly nothing differ by more of themselves; for them the tests allow a hundredth of the typical element."""


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    """On a CPU the references stand in; a GPU that is no Blackwell has neither."""
    if not torch.cuda.is_available():
        library = blackwell_on_cpu.install(monkeypatch)
        yield
        library._destroy()
        own_kernel_multiplies_experts.cache_clear()
    elif select.current_device().capability not in ((10, 0), (10, 3)):
        pytest.skip("runs on a CPU or an sm100 or sm103 GPU (B200, B300)")
    else:
        yield


def _recipe(rounding=RCEIL, **choices):
    return recipe_from(MX(**choices), "mxfp8_cublas" if rounding == FLOOR else "mxfp8_cublas_rceil")


def _ends(device):
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def _tensors(grouped, device, tokens=384, n=160, k=96, dtype=torch.bfloat16):
    experts = (4,) if grouped else ()
    return [torch.randn(s, device=device).to(dtype) for s in ((tokens, k), (*experts, n, k), (tokens, n))]


def _run(x, w, dy, ends, recipe, backend, out_dtype=torch.bfloat16):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = LinearFunction.apply(x, w, ends, recipe, backend, out_dtype)
    y.backward(dy.to(out_dtype))
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("grouped", [False, True])
def test_products_are_those_of_emulation(grouped, rounding, gemm, device):
    tensors = _tensors(grouped, device)
    ends = _ends(device) if grouped else None
    got = _run(*tensors, ends, _recipe(rounding, gemm=gemm), BLACKWELL)
    want = _run(*tensors, ends, RCEIL_RECIPE if rounding == RCEIL else FLOOR_RECIPE, REFERENCE)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=BF16_STEP, atol=1e-2 * w.abs().mean().item())


@pytest.mark.parametrize("gemm", GEMMS)
def test_rows_past_the_last_group_are_zeros_and_influence_nothing(gemm, device):
    x, w, dy = _tensors(True, device)
    clean = _run(x, w, dy, _ends(device), _recipe(gemm=gemm), BLACKWELL)
    x[352:], dy[352:] = float("nan"), float("inf")
    dirty = _run(x, w, dy, _ends(device), _recipe(gemm=gemm), BLACKWELL)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert (dirty[0][352:] == 0).all()
    assert (dirty[1][352:] == 0).all()
    assert (dirty[2][1] == 0).all()


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_dense_layers_take_any_number_of_tokens(tokens, gemm, device):
    tensors = _tensors(False, device, tokens=tokens)
    got = _run(*tensors, None, _recipe(gemm=gemm), BLACKWELL, torch.float32)
    want = _run(*tensors, None, RCEIL_RECIPE, REFERENCE, torch.float32)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=BF16_STEP, atol=1e-2)


def _mlp(tensors, function):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_swiglu_mlp_is_as_close_to_float64_as_emulation_is(grouped, gemm, device):
    experts = (4,) if grouped else ()
    shapes = (384, 96), (*experts, 160, 96), (*experts, 96, 160), (*experts, 160, 96)
    tensors = [(torch.randn(s, device=device) * 0.3).bfloat16() for s in shapes]
    ends = _ends(device) if grouped else None
    groups = [slice(a, b) for a, b in zip([0, *ENDS], ENDS, strict=False)]

    def exactly(x, *ws):
        def mlp(x, w1, w2, w3):
            return (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT

        x, *ws = (t.double() for t in (x, *ws))
        if not grouped:
            return mlp(x, *ws)
        parts = [mlp(x[rows], *(w[e] for w in ws)) for e, rows in enumerate(groups)]
        return torch.cat([*parts, x.new_zeros((384 - 352, 96))])

    def of(recipe, backend):
        return lambda *args: SwiGLUMLPFunction.apply(*args, ends, recipe, backend, torch.bfloat16)

    got = _mlp(tensors, of(_recipe(gemm=gemm), BLACKWELL))
    emulated = _mlp(tensors, of(RCEIL_RECIPE, REFERENCE))
    for result, reference, answer in zip(got, emulated, _mlp(tensors, exactly), strict=True):
        assert sqnr(result, answer) >= sqnr(reference, answer) - 0.3


@pytest.mark.parametrize("needs", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0)])
def test_a_swiglu_mlp_computes_the_gradients_that_are_asked_for(needs, device):
    tensors = [torch.randn(s, device=device) * 0.3 for s in ((384, 64), (4, 32, 64), (4, 64, 32), (4, 32, 64))]
    everything = _mlp(
        tensors, lambda *a: SwiGLUMLPFunction.apply(*a, _ends(device), _recipe(), BLACKWELL, torch.float32)
    )
    leaves = [t.clone().requires_grad_(bool(need)) for t, need in zip(tensors, needs, strict=True)]
    y = SwiGLUMLPFunction.apply(*leaves, _ends(device), _recipe(), BLACKWELL, torch.float32)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y))
    for leaf, need, grad in zip(leaves, needs, everything[1:], strict=True):
        assert (leaf.grad is not None) == bool(need)
        assert not need or torch.equal(leaf.grad, grad)


def test_what_is_saved_for_dw_is_fp8_and_its_scales(device):
    x, w, _ = _tensors(True, device)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks:
        LinearFunction.apply(
            x.requires_grad_(), w.requires_grad_(), _ends(device), _recipe(), BLACKWELL, torch.bfloat16
        )
    others = [t for t in saved if t.data_ptr() != w.data_ptr() and t.dtype != torch.int32]
    assert [t.dtype for t in others] == [torch.float8_e4m3fn, torch.float8_e8m0fnu]
    assert others[0].shape == (96, 384)


@pytest.mark.parametrize("grouped", [False, True])
def test_an_input_that_is_saved_anyway_gives_the_same_gradients_without_fp8_beside_it(grouped, device):
    x, w, dy = _tensors(grouped, device)
    ends, saved = _ends(device) if grouped else None, []
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = LinearFunction.apply(*leaves, ends, _recipe(), BLACKWELL, torch.bfloat16, True)
    assert {t.data_ptr() for t in saved if t.dtype != torch.int32} == {leaf.data_ptr() for leaf in leaves}
    y.backward(dy)
    got = y.detach(), *(leaf.grad for leaf in leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, _run(x, w, dy, ends, _recipe(), BLACKWELL), strict=True))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_swiglu_mlp_whose_input_is_saved_anyway_gives_the_same_gradients(grouped, device):
    experts, ends = ((4,), _ends(device)) if grouped else ((), None)
    shapes = (384, 64), (*experts, 32, 64), (*experts, 64, 32), (*experts, 32, 64)
    tensors = [torch.randn(shape, device=device) * 0.3 for shape in shapes]
    how = ends, _recipe(), BLACKWELL, torch.float32
    plain, marked = (
        _mlp(tensors, lambda *args, saves_x=saves_x: SwiGLUMLPFunction.apply(*args, *how, saves_x))
        for saves_x in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, marked, strict=True))


@pytest.mark.parametrize("grouped", [False, True])
def test_compiles_into_one_graph_and_equals_eager(grouped, device):
    torch._dynamo.reset()
    tensors = _tensors(grouped, device, n=64, k=64, dtype=torch.float32)
    experts = (4,) if grouped else ()
    w2 = torch.randn((*experts, 64, 64), device=device)
    x, w1, _ = tensors
    ends = _ends(device) if grouped else None
    recipe = _recipe()

    def mlp(*leaves):
        h = LinearFunction.apply(leaves[0], leaves[2], ends, recipe, BLACKWELL, torch.float32)
        return SwiGLUMLPFunction.apply(h, *leaves[1:], ends, recipe, BLACKWELL, torch.float32)

    compiled = torch.compile(mlp, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for a, b in zip(_mlp([x, w1, w2, w1], mlp), _mlp([x, w1, w2, w1], compiled), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [False, True])
def test_every_op_passes_torch_s_own_check_of_custom_ops(grouped, out_dtype, device):
    x, w, dy = _tensors(grouped, device)
    ends = _ends(device) if grouped else None
    how = ends, "auto", out_dtype
    tokens, grads = (BLACKWELL.quantize_tokens(t, ends, _recipe(), True) for t in (x, dy))
    (data, scale), (data_n, scale_n) = (
        BLACKWELL.quantize_weights([w], _recipe(), True).y,
        BLACKWELL.quantize_weights_for_dx([w], (), _recipe()),
    )
    dx_args = [grads.rows[0]] * 2, [grads.rows[1]] * 2, [data_n] * 2, [scale_n] * 2
    ops = torch.ops.mxfp8_titan
    for op, operands in (
        (ops.blackwell_y, (*tokens.rows, [data, data], [scale, scale])),
        (ops.blackwell_dx, dx_args),
        (ops.blackwell_dw, (*grads.dw, *tokens.dw)),
    ):
        # The other two compare FP8 inputs before and after, with an operator that FP8 does not have.
        torch.library.opcheck(
            op.default, (*operands, *how), test_utils=("test_faketensor", "test_autograd_registration")
        )


def test_a_copied_backend_is_the_same_one():
    assert copy.deepcopy(BLACKWELL) is BLACKWELL


@pytest.mark.parametrize(
    ("build", "capability", "lacks"),
    [
        ("CUDA 13.0, -DUSE_FBGEMM -DUSE_MSLK -DUSE_KINETO", (10, 0), ""),
        ("USE_FBGEMM_GENAI=ON", (10, 0), ""),
        ("-DUSE_FBGEMM -DUSE_KINETO", (10, 0), "built without"),
        ("USE_MSLK=OFF", (10, 0), "built without"),
        ("-DUSE_MSLK", (10, 3), "trap on sm103"),
    ],
)
def test_the_build_says_whether_it_multiplies_groups(build, capability, lacks):
    reason = grouped_library_lacks(build, capability)
    assert lacks in reason
    assert bool(reason) == bool(lacks)


def test_a_torch_without_the_call_lacks_it(monkeypatch):
    monkeypatch.delattr(F, "scaled_grouped_mm")
    assert "has no F.scaled_grouped_mm" in grouped_library_lacks("-DUSE_MSLK", (10, 0))


@pytest.fixture
def without_grouped_kernels(monkeypatch):
    monkeypatch.setattr(torch.__config__, "show", lambda: "")
    own_kernel_multiplies_experts.cache_clear()


def test_without_it_the_project_s_kernel_runs_and_the_log_says_why_once(without_grouped_kernels, caplog):
    caplog.set_level(logging.INFO)
    assert own_kernel_multiplies_experts("auto")
    assert own_kernel_multiplies_experts("auto")
    (line,) = [r.message for r in caplog.records if r.name == blackwell.__name__]
    assert line.startswith("MXFP8 GEMMs of experts: this project (torch ")
    assert "USE_MSLK" in line


def test_a_forced_library_that_lacks_it_is_an_error_that_names_the_flag(without_grouped_kernels):
    with pytest.raises(ValueError, match=r"mx.gemm is library.*built without.*--mx.gemm=auto or --mx.gemm=own"):
        own_kernel_multiplies_experts("library")


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a CPU: it counts the calls that stand in for PyTorch's")
@pytest.mark.parametrize(("gemm", "calls"), [("auto", (3, 3)), ("library", (3, 3)), ("own", (0, 0))])
def test_the_flag_decides_whose_gemms_run(gemm, calls, device, monkeypatch):
    counts = {"scaled_mm": 0, "scaled_grouped_mm": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in counts:
        monkeypatch.setattr(F, name, counted(name, getattr(blackwell_on_cpu, name)))
    _run(*_tensors(False, device), None, _recipe(gemm=gemm), BLACKWELL)
    _run(*_tensors(True, device), _ends(device), _recipe(gemm=gemm), BLACKWELL)
    assert tuple(counts.values()) == calls
