"""Every backend in memory that held something else: nothing that it allocates and leaves unwritten may show.

On a CPU every new tensor is filled; on a GPU the caching allocator hands out blocks that were freed full, for 20 steps,
because the first steps of a process find memory fresh from the system, which is zero.
"""

import pytest
import torch

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends import select
from mxfp8_titan.backends.blackwell import BLACKWELL, own_kernel_multiplies_experts
from mxfp8_titan.backends.hopper import HOPPER
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import MX, recipe_from
from tests.backends import aligned_on_cpu, blackwell_on_cpu

STEPS = 20 if torch.cuda.is_available() else 5
BYTES = (0xFF, 0x7F)
"""In turns. 0xFF is NaN in fp32, bf16, E4M3 and E8M0; 0x7F is NaN in E4M3 and huge elsewhere."""
TOKENS, K, N = 224, 64, 96
SIZES = [[32, 0, 64, 96], [0, 0, 0, 0], [0, 0, 0, 224], [192, 0, 0, 0], [0, 32, 0, 32]]
"""Of the groups in turn; what is left of the tokens belongs to nobody."""

BACKENDS = {
    "reference": (REFERENCE, "mxfp8_emulated_rceil", "auto"),
    "hopper_own": (HOPPER, "mxfp8_hopper", "own"),
    "blackwell_own": (BLACKWELL, "mxfp8_cublas_rceil", "own"),
    "blackwell_library": (BLACKWELL, "mxfp8_cublas_rceil", "library"),
}
if torch.cuda.is_available():
    # The references that stand in on a CPU are the same for both.
    BACKENDS["hopper_library"] = (HOPPER, "mxfp8_hopper", "library")
NEEDS = {"hopper": [(9, 0)], "blackwell": [(10, 0), (10, 3)]}


@pytest.fixture(params=BACKENDS)
def how(request, monkeypatch):
    backend, name, gemm = BACKENDS[request.param]
    library = None
    if torch.cuda.is_available():
        if select.current_device().capability not in NEEDS.get(backend.name, [select.current_device().capability]):
            pytest.skip(f"runs on a CPU or on {NEEDS[backend.name]}")
    elif backend is HOPPER:
        library = aligned_on_cpu.install(monkeypatch)
    elif backend is BLACKWELL:
        library = blackwell_on_cpu.install(monkeypatch)
    yield recipe_from(MX(gemm=gemm), name), backend
    if library is not None:
        library._destroy()
    own_kernel_multiplies_experts.cache_clear()


@pytest.fixture
def poison(monkeypatch):
    """A function that fills with its argument the memory that is to come; none is filled before the first call."""
    if torch.cuda.is_available():

        def fill(byte):
            blocks = [torch.full((1 << size,), byte, dtype=torch.uint8, device="cuda")
                      for size in range(9, 26) for _ in range(4)]  # fmt: skip
            del blocks

        return fill

    chosen = []

    def poisoned(make):
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            if chosen and out.device.type == "cpu" and out.dtype.is_floating_point:
                out.view(torch.uint8).fill_(chosen[-1])
            return out

        return made

    for owner, name in [(torch.Tensor, "new_empty"), (torch, "empty_strided"), (torch, "empty_like"), (torch, "empty")]:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    return chosen.append


def _linear(x, ends, how, ws):
    return LinearFunction.apply(x, ws[0], ends, *how, torch.bfloat16)


def _mlp(x, ends, how, ws):
    return SwiGLUMLPFunction.apply(x, *ws, ends, *how, torch.bfloat16)


def _step(layer, step, grouped, how, device):
    """[y, dx, gradients of the weights] of one step: a function of `step` alone."""
    generator = torch.Generator().manual_seed(step)
    experts = (4,) if grouped else ()
    shapes = [(TOKENS, K), (*experts, N, K), (*experts, K, N), (*experts, N, K)]
    x, w1, w2, w3 = (torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes)
    ends = None
    if grouped:
        ends = torch.tensor(SIZES[step % len(SIZES)], device=device).cumsum(0, dtype=torch.int32)
        x[int(ends[-1]) :] = float("nan")
    leaves = [t.requires_grad_() for t in (x, w1, w2, w3)]
    y = layer(leaves[0], ends, how, leaves[1:])
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("layer", [_linear, _mlp])
def test_steps_give_what_clean_memory_gives(layer, grouped, how, device, poison):
    clean = [_step(layer, step, grouped, how, device) for step in range(STEPS)]
    for step, expected in enumerate(clean):
        poison(BYTES[step % 2])
        got = _step(layer, step, grouped, how, device)
        assert all(t.isfinite().all() for t in got), step
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), step


@pytest.mark.parametrize("layer", [_linear, _mlp])
def test_an_idle_expert_has_zero_gradients_and_rows_of_nobody_are_zero(layer, how, device, poison):
    for step in range(len(SIZES)):
        poison(0xFF)
        y, dx, *dws = _step(layer, step, True, how, device)
        last = sum(SIZES[step])
        assert (y[last:] == 0).all()
        assert (dx[last:] == 0).all()
        assert all((dw[expert] == 0).all() for dw in dws for expert, size in enumerate(SIZES[step]) if size == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tail", [float("nan"), 1e30, 448.0])
def test_2048_tokens_in_17408_rows_and_240_idle_experts(how, device, poison, tail):
    x = torch.randn(17408, 256, device=device).bfloat16()
    w = torch.randn(256, 128, 256, device=device).bfloat16().requires_grad_()
    ends = torch.zeros(256, dtype=torch.int64, device=device).index_fill_(0, torch.arange(16, device=device) * 16, 128)
    ends = ends.cumsum(0, dtype=torch.int32)
    results = []
    for value in (0.0, tail):
        poison(0xFF)
        w.grad = None
        rows = x.clone()
        rows[2048:] = value
        y = LinearFunction.apply(rows.requires_grad_(), w, ends, *how, torch.bfloat16)
        y.backward(rows.detach()[:, :128])
        results.append((y.detach(), rows.grad, w.grad))
    assert all(t.isfinite().all() for t in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
