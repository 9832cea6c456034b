"""Stand-ins, from the references, for the kernels and GEMMs that the Hopper backend calls: its wiring on a CPU."""

from collections.abc import Iterator

import pytest
import torch

from mxfp8_titan.backends import hopper, select
from mxfp8_titan.reference import aligned_gemm as ref_gemm
from mxfp8_titan.reference import quantize_aligned as ref
from mxfp8_titan.reference.quantize_aligned import Aligned
from mxfp8_titan.reference.swiglu_aligned import owned, swiglu_aligned, swiglu_aligned_backward


def _with_amax(x, rounding, group_ends=None):
    x = owned(x, group_ends)
    return *ref.quantize_aligned_along_k(x, rounding), ref.column_amax(x, group_ends)


def _along_t(x, rounding, group_ends=None, amax=None):
    if amax is not None:
        assert torch.equal(amax, ref.column_amax(owned(x, group_ends), group_ends))
    return (*ref.quantize_aligned_along_t(x, group_ends, rounding),)


def _scaled_mm(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum):
    """torch._scaled_mm as sm90 has it: rows x columns, bf16 out, row-wise scales (M, 1) and (1, N)."""
    assert out_dtype == torch.bfloat16
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0
    assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
    return ref_gemm.aligned_gemm(Aligned(a, scale_a[:, 0]), Aligned(b.t(), scale_b[0]), None, out_dtype)


def _scaled_grouped_mm(a, b, scale_a, scale_b, offs, *, out_dtype, use_fast_accum):
    """torch._scaled_grouped_mm as sm90 has it. Rows past the last end are left as they come, here NaN."""
    assert out_dtype == torch.bfloat16
    assert a.is_contiguous()
    assert b.mT.is_contiguous()
    assert a.shape[1] % 16 == b.shape[-1] % 16 == 0
    groups = offs.shape[0]
    if b.ndim == 3:
        assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (groups, b.shape[2]))
        y = ref_gemm.aligned_gemm(Aligned(a, scale_a), Aligned(b.mT, scale_b), offs, out_dtype)
        y[int(offs[-1]) :] = float("nan")
        return y
    # Another size ends the process there, and so does an end past the operands.
    assert all(end % 16 == 0 for end in offs.tolist())
    assert offs[-1] <= a.shape[1] == b.shape[0]
    scale_a, scale_b = scale_a.view(groups, a.shape[0]), scale_b.view(groups, b.shape[1])
    out = torch.zeros(groups, a.shape[0], b.shape[1], dtype=out_dtype)
    start = 0
    for group, end in enumerate(offs.tolist()):
        if start < end:
            left, right = Aligned(a[:, start:end], scale_a[group]), Aligned(b.t()[:, start:end], scale_b[group])
            out[group] = ref_gemm.aligned_gemm(left, right, None, out_dtype)
        start = end
    return out


def _aligned_gemm(a, a_scale, b, b_scale, group_ends, out_dtype):
    return ref_gemm.aligned_gemm(Aligned(a, a_scale), Aligned(b, b_scale), group_ends, out_dtype)


def _aligned_gemm_over_t(a, a_scale, b, b_scale, group_ends, parts, out_dtype):
    dw = ref_gemm.aligned_gemm_over_t(Aligned(a, a_scale), Aligned(b, b_scale), group_ends, parts, out_dtype)
    return [part.clone() for part in dw]


def _zero_rows_past(out, group_ends):
    out[int(group_ends[-1]) :] = 0


IMPLEMENTATIONS = {
    "quantize_aligned_along_k": lambda x, r, ends=None: (*ref.quantize_aligned_along_k(owned(x, ends), r),),
    "quantize_aligned_along_k_with_amax": _with_amax,
    "quantize_aligned_weights": ref.quantize_aligned_weights,
    "quantize_aligned_weights_along_n": lambda ws, amax, r: (*ref.quantize_aligned_weights_along_n(ws, amax, r),),
    "quantize_aligned_along_t": _along_t,
    "requantize_aligned_along_t": lambda data, scale, amax, r, ends=None: (
        *ref.requantize_aligned_along_t(Aligned(data, scale), amax, ends, r),
    ),
    "swiglu_aligned": swiglu_aligned,
    "swiglu_aligned_backward": swiglu_aligned_backward,
    "padded_group_ends": ref.padded_group_ends,
}


def on_this_machine(monkeypatch) -> Iterator[None]:
    """For a fixture: on a CPU the references stand in; another GPU than Hopper has neither."""
    if not torch.cuda.is_available():
        library = install(monkeypatch)
        yield
        library._destroy()
    elif select.current_device().capability != (9, 0):
        pytest.skip("runs on a CPU or an sm90 GPU (H100, H200)")
    else:
        yield


def install(monkeypatch) -> torch.library.Library:
    """Puts them in place of kernels and of PyTorch's FP8 GEMMs. The ops are gone with the library that is returned."""
    for name, function in (("_scaled_mm", _scaled_mm), ("_scaled_grouped_mm", _scaled_grouped_mm)):
        monkeypatch.setattr(torch, name, function)
    monkeypatch.setattr(hopper, "aligned_gemm", _aligned_gemm)
    monkeypatch.setattr(hopper, "aligned_gemm_over_t", _aligned_gemm_over_t)
    monkeypatch.setattr(hopper, "zero_rows_past", _zero_rows_past)
    library = torch.library.Library("mxfp8_titan", "IMPL")
    for name, function in IMPLEMENTATIONS.items():
        library.impl(name, function, "CPU")
    return library
