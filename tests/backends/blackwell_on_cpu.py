"""The Blackwell backend without a GPU: references for its kernels, and PyTorch's block-scaled calls as documented.

The two calls check what PyTorch checks (shapes, strides, dtypes, sizes of scales, recipe and swizzle), dequantize and
multiply, and leave NaN wherever the real ones promise nothing. Source of the checks: PyTorch 2.11 to 2.13,
aten/src/ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp, and the grouped kernel they call.
"""

import torch
import torch.nn.functional as F

from mxfp8_titan.backends import blackwell
from mxfp8_titan.format import BLOCKED, round_up
from mxfp8_titan.reference import dot_scaled_gemm as gemm
from mxfp8_titan.reference import quantize as ref
from mxfp8_titan.reference import scale_swizzle
from mxfp8_titan.reference import swiglu as ref_swiglu


def _live_rows(x, group_ends):
    """x with zeros in the rows that belong to nobody."""
    if group_ends is None:
        return x
    return torch.where(torch.arange(x.shape[0])[:, None] < group_ends[-1], x.float(), 0.0)


def _swizzled(q, group_ends, along_t):
    if q.data.ndim == 3:
        return q.data, scale_swizzle.swizzle_per_expert(q.scale)
    if group_ends is None:
        return q.data, scale_swizzle.swizzle(q.scale)
    split = scale_swizzle.swizzle_k_groups if along_t else scale_swizzle.swizzle_t_groups
    return q.data, split(q.scale, group_ends)


def quantize_along_k(x, rounding, scale_layout, group_ends=None):
    assert scale_layout == BLOCKED
    return _swizzled(ref.quantize_along_k(_live_rows(x, group_ends), rounding), group_ends, False)


def quantize_along_t(x, rounding, scale_layout, group_ends=None):
    assert scale_layout == BLOCKED
    quantize = ref.quantize_along_n if x.ndim == 3 else ref.quantize_along_t
    return _swizzled(quantize(_live_rows(x, group_ends), rounding), group_ends, True)


def quantize_both(*args):
    return *quantize_along_k(*args), *quantize_along_t(*args)


def _quantize(x, rounding, along_k, along_t, scale_layout, group_ends=None):
    how = rounding, scale_layout, group_ends
    return [*(quantize_along_k(x, *how) if along_k else ()), *(quantize_along_t(x, *how) if along_t else ())]


def swiglu(h1, h3, *how):
    return _quantize(ref_swiglu.swiglu(h1, h3), *how)


def swiglu_backward(dh, h1, h3, *how):
    return [t for grad in ref_swiglu.swiglu_backward(dh, h1, h3) for t in _quantize(grad, *how)]


def _check_data(a, b):
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.mT.is_contiguous()
    assert a.shape[-1] == b.shape[-2]
    assert all(size % 16 == 0 for size in (a.shape[-1], *b.shape[-2:]))


def _check_scales(scales, recipes, swizzles):
    assert all(scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous() for scale in scales)
    assert set(recipes) == {F.ScalingType.BlockWise1x32}
    assert set(swizzles) == {F.SwizzleType.SWIZZLE_32_4_4}


def scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None, bias=None,
    output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False,
):  # fmt: skip
    assert mat_a.ndim == mat_b.ndim == 2
    _check_data(mat_a, mat_b)
    _check_scales((scale_a, scale_b), (scale_recipe_a, scale_recipe_b), (swizzle_a, swizzle_b))
    cols = round_up(mat_a.shape[1] // 32, 4)
    assert scale_a.numel() == round_up(mat_a.shape[0], 128) * cols
    assert scale_b.numel() == round_up(mat_b.shape[1], 128) * cols
    assert bias is None
    assert output_dtype in (torch.bfloat16, torch.float16, torch.float32)
    return gemm.gemm_of_rows(mat_a, scale_a, mat_b.mT, scale_b, None, output_dtype)


def scaled_grouped_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None, bias=None,
    offs=None, output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False,
):  # fmt: skip
    assert mat_a.ndim == 2
    _check_data(mat_a, mat_b)
    _check_scales((scale_a, scale_b), (scale_recipe_a, scale_recipe_b), (swizzle_a, swizzle_b))
    assert scale_a.ndim == 2
    assert scale_a.shape[0] >= mat_a.shape[0]
    assert bias is None
    assert (offs.dtype, offs.ndim, output_dtype) == (torch.int32, 1, torch.bfloat16)
    sizes = offs.diff(prepend=offs.new_zeros(1))
    assert (sizes % 32 == 0).all()
    cols = round_up(mat_a.shape[1] // 32, 4)
    if mat_b.ndim == 3:
        assert mat_b.shape[0] == offs.shape[0]
        assert scale_b.shape == (mat_b.shape[0], cols * round_up(mat_b.shape[2], 128))
        out = gemm.gemm_of_rows(mat_a, scale_a, mat_b.mT, scale_b, offs, output_dtype)
        out[offs[-1] :] = float("nan")
        return out
    assert scale_b.ndim == 2
    assert scale_b.shape[0] >= mat_b.shape[1]
    out = gemm.gemm_over_t(mat_a, scale_a, mat_b.mT, scale_b, offs, output_dtype)
    out[sizes == 0] = float("nan")
    return out


def _gemm_of_rows(pairs, group_ends, out):
    out.copy_(sum(gemm.gemm_of_rows(*pair, group_ends, torch.float32) for pair in pairs))


def _gemm_over_t(a, a_scale, b, b_scale, group_ends, out):
    out.copy_(gemm.gemm_over_t(a, a_scale, b, b_scale, group_ends, out.dtype))


def _zero_rows_past(out, group_ends):
    out[group_ends[-1] :] = 0


def _zero_empty_groups(out, group_ends):
    out[group_ends.diff(prepend=group_ends.new_zeros(1)) == 0] = 0


def install(monkeypatch, build_has_grouped_mm=True) -> torch.library.Library:
    """Puts all of it in place; the ops' CPU versions are gone with the library that is returned."""
    library = torch.library.Library("mxfp8_titan", "IMPL")
    for function in (quantize_along_k, quantize_along_t, quantize_both, swiglu, swiglu_backward):
        library.impl(function.__name__, function, "CPU")
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)
    for function in (_gemm_of_rows, _gemm_over_t, _zero_rows_past, _zero_empty_groups):
        monkeypatch.setattr(blackwell, function.__name__[1:], function)
    build = "USE_MSLK=ON" if build_has_grouped_mm else ""
    monkeypatch.setattr(torch.__config__, "show", lambda: build)
    blackwell.own_kernel_multiplies_experts.cache_clear()
    return library
