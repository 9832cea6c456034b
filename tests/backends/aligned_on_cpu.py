"""CPU implementations, from the references, of the ops that the Hopper backend calls: its wiring without a GPU."""

import torch

from mxfp8_titan.backends import hopper
from mxfp8_titan.reference import aligned_gemm as ref_gemm
from mxfp8_titan.reference import quantize_aligned as ref
from mxfp8_titan.reference.quantize_aligned import Aligned
from mxfp8_titan.reference.swiglu_aligned import owned, swiglu_aligned, swiglu_aligned_backward


def _with_amax(x, rounding, group_ends=None):
    x = owned(x, group_ends)
    return *ref.quantize_aligned_along_k(x, rounding), ref.column_amax(x, group_ends)


def _product_dtype(gemm, group_ends, out_dtype):
    """PyTorch's GEMMs write bf16 alone."""
    return hopper._own_dtype(out_dtype) if hopper._runs_own(gemm, group_ends) else torch.bfloat16


def _rows_times(a, a_scale, b, b_scale, group_ends, gemm, fast_accumulation, out_dtype):
    dtype = _product_dtype(gemm, group_ends, out_dtype)
    return ref_gemm.aligned_gemm(Aligned(a, a_scale), Aligned(b, b_scale), group_ends, dtype).to(out_dtype)


def _over_t(a, a_scale, b, b_scale, group_ends, parts, gemm, fast_accumulation, out_dtype):
    dtype = _product_dtype(gemm, group_ends, out_dtype)
    dw = ref_gemm.aligned_gemm_over_t(Aligned(a, a_scale), Aligned(b, b_scale), group_ends, parts, dtype)
    return [part.to(out_dtype, copy=True) for part in dw]


IMPLEMENTATIONS = {
    "quantize_aligned_along_k": lambda x, r, ends=None: (*ref.quantize_aligned_along_k(owned(x, ends), r),),
    "quantize_aligned_along_k_with_amax": _with_amax,
    "quantize_aligned_weights": ref.quantize_aligned_weights,
    "quantize_aligned_weights_along_n": lambda ws, amax, r: (*ref.quantize_aligned_weights_along_n(ws, amax, r),),
    "requantize_aligned_along_t": lambda data, scale, amax, r, ends=None: (
        *ref.requantize_aligned_along_t(Aligned(data, scale), amax, ends, r),
    ),
    "swiglu_aligned": swiglu_aligned,
    "swiglu_aligned_backward": swiglu_aligned_backward,
    "hopper_rows_times": _rows_times,
    "hopper_over_t": _over_t,
}


def install() -> torch.library.Library:
    """Registers them; they are gone with the library that is returned."""
    library = torch.library.Library("mxfp8_titan", "IMPL")
    for name, function in IMPLEMENTATIONS.items():
        library.impl(name, function, "CPU")
    return library
