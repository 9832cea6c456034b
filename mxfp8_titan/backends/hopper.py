"""MXFP8 on Hopper: blocks that share the largest exponent of their row, multiplied by the FP8 tensor cores.

An operand for rows, x (T, K) or w (E, N, K), is (data, scale): E4M3 and one fp32 power of two a row, which the GEMM
applies after its sum. An operand for dw is (data, scale, amax): the same FP8 rows and the largest magnitude of each
feature in each group, from which an exponent shift and a transpose make the layout that contracts tokens. So
autograd saves FP8, x is read once in bf16, and every element is rounded once. See docs/numerics.md. Where autograd
saves x itself, (x, amax) is that operand.
"""

import torch
from torch import Tensor

from mxfp8_titan.backends.interface import Backend, Operand, SavedTokens, Tokens, Weights
from mxfp8_titan.job_config import Recipe
from mxfp8_titan.kernels import (  # noqa: F401 - importing them registers their ops
    quantize_aligned,
    quantize_aligned_t,
    quantize_aligned_weights,
    swiglu_aligned,
)
from mxfp8_titan.kernels.aligned_gemm import aligned_gemm, aligned_gemm_over_t
from mxfp8_titan.kernels.launch import register_op
from mxfp8_titan.kernels.zero_rows import zero_rows_past

_ops = torch.ops.mxfp8_titan


def _quantize_tokens(x: Tensor, group_ends: Tensor | None, recipe: Recipe, for_dw: bool) -> Tokens:
    if for_dw:
        data, scale, amax = _ops.quantize_aligned_along_k_with_amax(x, recipe.rounding, group_ends)
        return Tokens((data, scale), (data, scale, amax))
    return Tokens(_ops.quantize_aligned_along_k(x, recipe.rounding, group_ends), ())


def _quantize_saved_tokens(x: Tensor, group_ends: Tensor | None, recipe: Recipe) -> SavedTokens:
    """Keeps the column maxima, so that backward reads x once."""
    data, scale, amax = _ops.quantize_aligned_along_k_with_amax(x, recipe.rounding, group_ends)
    return SavedTokens((data, scale), (amax,))


def _quantize_weights(ws: list[Tensor], recipe: Recipe, for_dx: bool) -> Weights:
    """Column maxima are kept for dx, and not FP8 data, which would outlive FSDP2's reshard."""
    data, scale, amax = _ops.quantize_aligned_weights(ws, recipe.rounding)
    return Weights((data, scale), (amax,) if for_dx else ())


def _quantize_weights_for_dx(ws: list[Tensor], kept: Operand, recipe: Recipe) -> Operand:
    return _ops.quantize_aligned_weights_along_n(ws, *kept, recipe.rounding)


def _rows_times(
    rows: Operand, weights: Operand, group_ends: Tensor | None, recipe: Recipe, out_dtype: torch.dtype
) -> Tensor:
    return _ops.hopper_rows_times(*rows, *weights, group_ends, recipe.gemm, recipe.fast_accumulation, out_dtype)


def _dw(
    dy: Operand, x: Operand, group_ends: Tensor | None, recipe: Recipe, parts: int, out_dtype: torch.dtype
) -> list[Tensor]:
    operands = *along_t(dy, group_ends, recipe), *along_t(x, group_ends, recipe)
    return _ops.hopper_over_t(*operands, group_ends, parts, recipe.gemm, recipe.fast_accumulation, out_dtype)


def along_t(operand: Operand, group_ends: Tensor | None, recipe: Recipe) -> Operand:
    """An operand of dw in the layout that contracts tokens: data (K, T') and scale (G, K)."""
    if operand[0].dtype != torch.float8_e4m3fn:
        x, amax = operand
        return _ops.quantize_aligned_along_t(x, recipe.rounding, group_ends, amax)
    return _ops.requantize_aligned_along_t(*operand, recipe.rounding, group_ends)


def _swiglu(h13: Tensor, group_ends: Tensor | None, recipe: Recipe, for_dw: bool) -> tuple[Tokens, Operand]:
    """Keeps the column maxima of h, so that backward can make h again and transpose it at once."""
    data, scale, amax = _ops.swiglu_aligned(h13, recipe.rounding, group_ends)
    return Tokens((data, scale), (data, scale, amax) if for_dw else ()), (amax,)


def _swiglu_backward(
    dh: Tensor, h13: Tensor, kept: Operand, group_ends: Tensor | None, recipe: Recipe, for_dw13: bool
) -> tuple[Tokens, Operand]:
    data, scale, amax, h, h_scale = _ops.swiglu_aligned_backward(dh, h13, recipe.rounding, group_ends)
    return Tokens((data, scale), (data, scale, amax) if for_dw13 else ()), (h, h_scale, *kept)


def _runs_own(gemm: str, group_ends: Tensor | None) -> bool:
    """Whether this project's GEMM runs. `auto` takes it for groups, where it measured faster at every shape."""
    return gemm == "own" or (gemm == "auto" and group_ends is not None)


def _own_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """What this project's GEMM writes for `out_dtype`: fp32 as it is, any other through bf16."""
    return torch.float32 if out_dtype == torch.float32 else torch.bfloat16


def rows_times(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None,
    gemm: str, fast_accumulation: bool, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """(a * a_scale) @ (b * b_scale)^T, with b of each group if there are groups; zeros past the last one.

    a: (T, K), b: (N, K) or (E, N, K) float8_e4m3fn contiguous; scales (T,) and (N,) or (E, N) fp32
    gemm: auto, library or own
    returns (T, N) in `out_dtype`, rounded to bf16 first by the library's GEMM
    """
    if a.shape[0] == 0:
        return _rows_times_out(a, a_scale, b, b_scale, group_ends, gemm, fast_accumulation, out_dtype)
    if _runs_own(gemm, group_ends):
        return aligned_gemm(a, a_scale, b, b_scale, group_ends, _own_dtype(out_dtype)).to(out_dtype)
    if group_ends is None:
        y = torch._scaled_mm(
            a, b.t(), a_scale[:, None], b_scale[None], out_dtype=torch.bfloat16, use_fast_accum=fast_accumulation
        )
    else:
        y = torch._scaled_grouped_mm(
            a, b.mT, a_scale, b_scale, group_ends, out_dtype=torch.bfloat16, use_fast_accum=fast_accumulation
        )
        zero_rows_past(y, group_ends)
    return y.to(out_dtype)


def _rows_times_out(a, a_scale, b, b_scale, group_ends, gemm, fast_accumulation, out_dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[-2]), dtype=out_dtype)


def over_t(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None, parts: int,
    gemm: str, fast_accumulation: bool, out_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """(a * a_scale) @ (b * b_scale)^T over the tokens of each group, cut along N into `parts`.

    a: (N, T'), b: (K, T') float8_e4m3fn contiguous, groups as kernels.quantize_aligned_t lays them out
    scales (G, N) and (G, K) fp32
    returns (N / parts, K) or (G, N / parts, K) in `out_dtype`, rounded to bf16 first by the library's GEMM
    """
    if a.shape[1] == 0:
        outs = _over_t_out(a, a_scale, b, b_scale, group_ends, parts, gemm, fast_accumulation, out_dtype)
        return [out.zero_() for out in outs]
    if _runs_own(gemm, group_ends):
        dws = aligned_gemm_over_t(a, a_scale, b, b_scale, group_ends, parts, _own_dtype(out_dtype))
        return [dw.to(out_dtype) for dw in dws]
    if group_ends is None:
        b_scale = b_scale.view(1, -1)
        a_parts = zip(a.chunk(parts), a_scale.view(-1, 1).chunk(parts), strict=True)
        dws = [
            torch._scaled_mm(
                part, b.t(), scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast_accumulation
            )
            for part, scale in a_parts
        ]  # fmt: skip
    else:
        ends = _ops.padded_group_ends(group_ends)
        a_parts = zip(a.chunk(parts), a_scale.chunk(parts, 1), strict=True)
        dws = [
            torch._scaled_grouped_mm(
                part, b.t(), scale.reshape(-1), b_scale.view(-1), ends,
                out_dtype=torch.bfloat16, use_fast_accum=fast_accumulation,
            )
            for part, scale in a_parts
        ]  # fmt: skip
    return [dw.to(out_dtype) for dw in dws]


def _over_t_out(a, a_scale, b, b_scale, group_ends, parts, gemm, fast_accumulation, out_dtype) -> list[Tensor]:
    groups = () if group_ends is None else (group_ends.shape[0],)
    return [a.new_empty((*groups, a.shape[0] // parts, b.shape[0]), dtype=out_dtype) for _ in range(parts)]


_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? group_ends"
_HOW = "str gemm, bool fast_accumulation, ScalarType out_dtype"
register_op(f"hopper_rows_times({_OPERANDS}, {_HOW}) -> Tensor", rows_times, _rows_times_out)
register_op(f"hopper_over_t({_OPERANDS}, int parts, {_HOW}) -> Tensor[]", over_t, _over_t_out)

HOPPER = Backend(
    name="hopper",
    home="mxfp8_titan.backends.hopper:HOPPER",
    group_alignment=1,
    quantize_tokens=_quantize_tokens,
    quantize_saved_tokens=_quantize_saved_tokens,
    quantize_saved_tokens_for_dw=lambda x, kept, group_ends, recipe: (x, *kept),
    quantize_weights=_quantize_weights,
    quantize_weights_for_dx=_quantize_weights_for_dx,
    y=_rows_times,
    dx=_rows_times,
    dw=_dw,
    swiglu=_swiglu,
    swiglu_backward=_swiglu_backward,
    saved_ops=(_ops.hopper_rows_times.default,),
)
