"""MXFP8 on Blackwell (sm100, sm103): blocks of 32 with a scale each, multiplied by the block-scaled tensor cores.

An operand is (data, scale) with the scale in the blocked layout, as the quantizer wrote it: nothing is swizzled in a
training step. x and dy are quantized along both dims from one read; autograd saves the FP8 that dw will contract. w1
and w3 stay two operands: their products go into one output side by side, or are added. h as an operand of dw is
(h13,): it is made from h13, quantized along T, when it is multiplied.

Dense layers are multiplied by `F.scaled_mm`. Experts by `F.scaled_grouped_mm` where the build of PyTorch has it for
this GPU, else by kernels.dot_scaled_gemm; mx.gemm forces one of them. See docs/backends.md.
"""

import functools
import logging
import re

import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_titan.backends import select
from mxfp8_titan.backends.interface import Backend, Operand, SavedTokens, Tokens, Weights
from mxfp8_titan.format import BLOCK_SIZE, BLOCKED
from mxfp8_titan.job_config import Recipe
from mxfp8_titan.kernels import quantize, swiglu  # noqa: F401 - importing them registers their ops
from mxfp8_titan.kernels.dot_scaled_gemm import gemm_of_rows, gemm_over_t
from mxfp8_titan.kernels.launch import register_op
from mxfp8_titan.kernels.zero_groups import zero_empty_groups
from mxfp8_titan.kernels.zero_rows import zero_rows_past

_ops = torch.ops.mxfp8_titan

logger = logging.getLogger(__name__)


def grouped_library_lacks(build: str, capability: tuple[int, int] | None) -> str:
    """Why F.scaled_grouped_mm cannot multiply MXFP8 here, or nothing.

    build: torch.__config__.show()
    capability: of the GPU, or None
    Source: the flag is the one that torch.testing._internal.common_cuda asks for. On sm103 the grouped FP8 kernels
    of the same library are built for sm100 alone and trap (pytorch/pytorch#187095).
    """
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no F.scaled_grouped_mm"
    if not re.search(r"USE_(MSLK|FBGEMM_GENAI)(?!\s*=\s*(OFF|0))", build):
        return f"torch {torch.__version__} was built without its grouped MXFP8 kernels (USE_MSLK)"
    if capability == (10, 3):
        return "its grouped kernels are built for sm100, and a trap on sm103 would end the process"
    return ""


@functools.cache
def own_kernel_multiplies_experts(gemm: str) -> bool:
    """Whether kernels.dot_scaled_gemm runs grouped products, for a value of mx.gemm. Decided and logged once.

    Raises: ValueError for library where PyTorch's grouped GEMM cannot run.
    """
    lacks = grouped_library_lacks(torch.__config__.show(), select.current_device().capability)
    if gemm == "library" and lacks:
        raise ValueError(
            f"mx.gemm is library, but PyTorch cannot multiply groups in MXFP8 here: {lacks}. "
            "Use --mx.gemm=auto or --mx.gemm=own, which run this project's kernel"
        )
    own = gemm == "own" or bool(lacks)
    why = "mx.gemm=own" if gemm == "own" else lacks or "PyTorch's build has it"
    logger.info(f"MXFP8 GEMMs of experts: {'this project' if own else 'F.scaled_grouped_mm'} ({why})")
    return own


def _own(gemm: str, group_ends: Tensor | None) -> bool:
    return gemm == "own" if group_ends is None else own_kernel_multiplies_experts(gemm)


def _library_product(a, a_scale, b, b_scale, group_ends, out_dtype: torch.dtype) -> Tensor:
    """a @ b^T by PyTorch: 2D x 2D, or grouped 2D x 3D (groups along rows) and 2D x 2D (groups along the last dim).

    Grouped products are rounded to bf16 first, the only dtype PyTorch offers.
    """
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    scales = a_scale, recipe, b_scale, recipe, swizzle, swizzle
    if group_ends is None:
        return F.scaled_mm(a, b.mT, *scales, output_dtype=out_dtype)
    out = F.scaled_grouped_mm(a, b.mT, *scales, offs=group_ends, output_dtype=torch.bfloat16)
    if b.ndim == 3:
        zero_rows_past(out, group_ends)
    else:
        zero_empty_groups(out, group_ends)
    return out.to(out_dtype)


def rows_times_joined(
    a: Tensor, a_scale: Tensor, bs: list[Tensor], b_scales: list[Tensor], group_ends: Tensor | None, gemm: str,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y: a @ b^T of each b beside each other, zeros past the last group.

    a: (T, K), bs: (N_i, K) or (E, N_i, K) float8_e4m3fn contiguous; scales blocked
    returns (T, sum of N_i) in `out_dtype`
    """
    if a.shape[0] == 0 or _own(gemm, group_ends):
        out = _joined_out(a, a_scale, bs, b_scales, group_ends, gemm, out_dtype)
        widths = [b.shape[-2] for b in bs]
        for part, b, b_scale in zip(out.split(widths, 1), bs, b_scales, strict=True):
            gemm_of_rows([(a, a_scale, b, b_scale)], group_ends, part)
        return out
    parts = [
        _library_product(a, a_scale, b, b_scale, group_ends, out_dtype) for b, b_scale in zip(bs, b_scales, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _joined_out(a, a_scale, bs, b_scales, group_ends, gemm, out_dtype) -> Tensor:
    return a.new_empty((a.shape[0], sum(b.shape[-2] for b in bs)), dtype=out_dtype)


def rows_times_added(
    rows: list[Tensor], row_scales: list[Tensor], bs: list[Tensor], b_scales: list[Tensor], group_ends: Tensor | None,
    gemm: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dx: the sum of a @ b^T over one or two pairs, zeros past the last group.

    rows: (T, N) each, bs: (K, N) or (E, K, N) float8_e4m3fn contiguous; scales blocked
    returns (T, K) in `out_dtype`; PyTorch's products are rounded before they are added
    """
    pairs = list(zip(rows, row_scales, bs, b_scales, strict=True))
    if rows[0].shape[0] == 0 or _own(gemm, group_ends):
        out = _added_out(rows, row_scales, bs, b_scales, group_ends, gemm, out_dtype)
        gemm_of_rows(pairs, group_ends, out)
        return out
    out, *more = (_library_product(*pair, group_ends, out_dtype) for pair in pairs)
    for product in more:
        out += product
    return out


def _added_out(rows, row_scales, bs, b_scales, group_ends, gemm, out_dtype) -> Tensor:
    return rows[0].new_empty((rows[0].shape[0], bs[0].shape[-2]), dtype=out_dtype)


def over_t(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None, gemm: str, out_dtype: torch.dtype
) -> Tensor:
    """dw: a @ b^T over the tokens of each group, zeros for a group without tokens.

    a: (N, T'), b: (K, T') float8_e4m3fn contiguous; scales blocked
    returns (N, K) or (E, N, K) in `out_dtype`
    """
    if a.shape[1] == 0 or _own(gemm, group_ends):
        out = _over_t_out(a, a_scale, b, b_scale, group_ends, gemm, out_dtype)
        gemm_over_t(a, a_scale, b, b_scale, group_ends, out)
        return out
    return _library_product(a, a_scale, b, b_scale, group_ends, out_dtype)


def _over_t_out(a, a_scale, b, b_scale, group_ends, gemm, out_dtype) -> Tensor:
    groups = () if group_ends is None else (group_ends.shape[0],)
    return a.new_empty((*groups, a.shape[0], b.shape[0]), dtype=out_dtype)


_HOW = "Tensor? group_ends, str gemm, ScalarType out_dtype"
register_op(
    f"blackwell_y(Tensor a, Tensor a_scale, Tensor[] bs, Tensor[] b_scales, {_HOW}) -> Tensor",
    rows_times_joined,
    _joined_out,
)
register_op(
    f"blackwell_dx(Tensor[] rows, Tensor[] row_scales, Tensor[] bs, Tensor[] b_scales, {_HOW}) -> Tensor",
    rows_times_added,
    _added_out,
)
register_op(f"blackwell_dw(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, {_HOW}) -> Tensor", over_t, _over_t_out)


def _quantize_tokens(x: Tensor, group_ends: Tensor | None, recipe: Recipe, for_dw: bool) -> Tokens:
    if not for_dw:
        return Tokens(tuple(_ops.quantize_along_k(x, recipe.rounding, BLOCKED, group_ends)), ())
    data, scale, data_t, scale_t = _ops.quantize_both(x, recipe.rounding, BLOCKED, group_ends)
    return Tokens((data, scale), (data_t, scale_t))


def _quantize_saved_tokens(x: Tensor, group_ends: Tensor | None, recipe: Recipe) -> SavedTokens:
    return SavedTokens(_quantize_tokens(x, group_ends, recipe, False).rows, ())


def _quantize_saved_tokens_for_dw(x: Tensor, kept: Operand, group_ends: Tensor | None, recipe: Recipe) -> Operand:
    return tuple(_ops.quantize_along_t(x, recipe.rounding, BLOCKED, group_ends))


def _quantize_weights(ws: list[Tensor], recipe: Recipe, for_dx: bool) -> Weights:
    return Weights(tuple(t for w in ws for t in _ops.quantize_along_k(w, recipe.rounding, BLOCKED)), ())


def _quantize_weights_for_dx(ws: list[Tensor], kept: Operand, recipe: Recipe) -> Operand:
    return tuple(t for w in ws for t in _ops.quantize_along_t(w, recipe.rounding, BLOCKED))


def _y(rows: Operand, weights: Operand, group_ends: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
    return _ops.blackwell_y(*rows, list(weights[::2]), list(weights[1::2]), group_ends, recipe.gemm, out_dtype)


def _dx(rows: Operand, weights: Operand, group_ends: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
    operands = [list(operand[first::2]) for operand in (rows, weights) for first in (0, 1)]
    return _ops.blackwell_dx(*operands, group_ends, recipe.gemm, out_dtype)


def _dw(
    dy: Operand, x: Operand, group_ends: Tensor | None, recipe: Recipe, parts: int, out_dtype: torch.dtype
) -> list[Tensor]:
    assert len(dy) == 2 * parts, "dy was quantized in as many parts as dw has"
    if len(x) == 1:
        x = _ops.swiglu(*x[0].chunk(2, -1), recipe.rounding, False, True, BLOCKED, group_ends)
    pairs = zip(dy[::2], dy[1::2], strict=True)
    return [_ops.blackwell_dw(*pair, *x, group_ends, recipe.gemm, out_dtype) for pair in pairs]


def _swiglu(h13: Tensor, group_ends: Tensor | None, recipe: Recipe, for_dw: bool) -> tuple[Tokens, Operand]:
    rows = _ops.swiglu(*h13.chunk(2, -1), recipe.rounding, True, False, BLOCKED, group_ends)
    return Tokens(tuple(rows), (h13,) if for_dw else ()), ()


def _swiglu_backward(
    dh: Tensor, h13: Tensor, kept: Operand, group_ends: Tensor | None, recipe: Recipe, for_dw13: bool
) -> tuple[Tokens, Operand]:
    outs = _ops.swiglu_backward(dh, *h13.chunk(2, -1), recipe.rounding, True, for_dw13, BLOCKED, group_ends)
    dh1, dh3 = outs[: len(outs) // 2], outs[len(outs) // 2 :]
    return Tokens((*dh1[:2], *dh3[:2]), (*dh1[2:], *dh3[2:])), (h13,)


BLACKWELL = Backend(
    name="blackwell",
    home="mxfp8_titan.backends.blackwell:BLACKWELL",
    group_alignment=BLOCK_SIZE,
    quantize_tokens=_quantize_tokens,
    quantize_saved_tokens=_quantize_saved_tokens,
    quantize_saved_tokens_for_dw=_quantize_saved_tokens_for_dw,
    quantize_weights=_quantize_weights,
    quantize_weights_for_dx=_quantize_weights_for_dx,
    y=_y,
    dx=_dx,
    dw=_dw,
    swiglu=_swiglu,
    swiglu_backward=_swiglu_backward,
    saved_ops=(_ops.blackwell_y.default,),
)
