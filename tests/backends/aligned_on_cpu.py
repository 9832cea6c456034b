"""CPU implementations, from the references, of the ops that the Hopper backend calls: its wiring without a GPU."""

import torch

from mxfp8_titan.backends import hopper  # noqa: F401 - defines the ops
from mxfp8_titan.reference import aligned_gemm as gemm
from mxfp8_titan.reference import quantize_aligned as ref
from mxfp8_titan.reference import swiglu as ref_swiglu
from mxfp8_titan.reference.quantize_aligned import Aligned


def _live_rows(x, group_ends):
    """x with zeros in the rows that belong to nobody."""
    if group_ends is None:
        return x
    return torch.where(torch.arange(x.shape[0])[:, None] < group_ends[-1], x.float(), 0.0)


def _with_amax(x, rounding, group_ends=None):
    x = _live_rows(x, group_ends)
    return *ref.quantize_aligned_along_k(x, rounding), ref.column_amax(x, group_ends)


def _swiglu(h13, rounding, group_ends=None):
    return _with_amax(ref_swiglu.swiglu(*h13.chunk(2, -1)), rounding, group_ends)


def _swiglu_backward(dh, h13, rounding, group_ends=None):
    h1, h3 = h13.chunk(2, -1)
    dh13 = torch.cat(ref_swiglu.swiglu_backward(dh, h1, h3), -1)
    return *_with_amax(dh13, rounding, group_ends), *_swiglu(h13, rounding, group_ends)[:2]


def _rows_times(a, a_scale, b, b_scale, group_ends, own, fast_accumulation, out_dtype):
    return gemm.aligned_gemm(Aligned(a, a_scale), Aligned(b, b_scale), group_ends, torch.bfloat16).to(out_dtype)


def _over_t(a, a_scale, b, b_scale, group_ends, parts, own, fast_accumulation, out_dtype):
    dw = gemm.aligned_gemm_over_t(Aligned(a, a_scale), Aligned(b, b_scale), group_ends, parts, torch.bfloat16)
    return [part.to(out_dtype, copy=True) for part in dw]


IMPLEMENTATIONS = {
    "quantize_aligned_along_k": lambda x, r, ends=None: (*ref.quantize_aligned_along_k(_live_rows(x, ends), r),),
    "quantize_aligned_along_k_with_amax": _with_amax,
    "quantize_aligned_weights": ref.quantize_aligned_weights,
    "quantize_aligned_weights_along_n": lambda ws, amax, r: (*ref.quantize_aligned_weights_along_n(ws, amax, r),),
    "requantize_aligned_along_t": lambda data, scale, amax, r, ends=None: (
        *ref.requantize_aligned_along_t(Aligned(data, scale), amax, ends, r),
    ),
    "swiglu_aligned": _swiglu,
    "swiglu_aligned_backward": _swiglu_backward,
    "hopper_rows_times": _rows_times,
    "hopper_over_t": _over_t,
}


def install() -> torch.library.Library:
    """Registers them; they are gone with the library that is returned."""
    library = torch.library.Library("mxfp8_titan", "IMPL")
    for name, function in IMPLEMENTATIONS.items():
        library.impl(name, function, "CPU")
    return library
