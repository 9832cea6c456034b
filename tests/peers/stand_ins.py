"""What stands in for torchao's functions in its own tests: this project's kernels, or on a CPU their references.

Each function has the arguments and the results of the one it stands in for. Under TRITON_INTERPRET=1 the kernels run on
a CPU too, slowly.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
from torch import Tensor, nn

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.blackwell import BLACKWELL
from mxfp8_titan.backends.hopper import HOPPER
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.backends.select import current_device
from mxfp8_titan.format import BLOCK_SIZE, BLOCKED, FLOOR, PLAIN, RCEIL, blocked_shape
from mxfp8_titan.job_config import RECIPES, Recipe
from mxfp8_titan.kernels.dot_scaled_gemm import gemm_of_rows, gemm_over_t
from mxfp8_titan.kernels.quantize_32x32 import quantize_32x32_both as kernel_32x32_both
from mxfp8_titan.modules.linear import MXFP8Linear
from mxfp8_titan.reference.gemm import gemm
from mxfp8_titan.reference.grouped_gemm import group_bounds, grouped_gemm
from mxfp8_titan.reference.quantize import Quantized
from mxfp8_titan.reference.quantize_32x32 import quantize_32x32_both

ON_GPU = torch.cuda.is_available()
KERNELS = ON_GPU or triton.knobs.runtime.interpret

if KERNELS:
    from mxfp8_titan.kernels.quantize import quantize_along_k, quantize_along_t
    from mxfp8_titan.kernels.quantize import quantize_along_t as quantize_along_n
    from mxfp8_titan.kernels.quantize_aligned import quantize_aligned_along_k
    from mxfp8_titan.kernels.quantize_aligned_t import quantize_aligned_along_t
    from mxfp8_titan.kernels.scale_swizzle import swizzle, swizzle_k_groups, swizzle_t_groups
    from mxfp8_titan.kernels.scale_swizzle import swizzle as swizzle_per_expert
else:
    from mxfp8_titan.reference.quantize import quantize_along_k, quantize_along_n, quantize_along_t
    from mxfp8_titan.reference.quantize_aligned import quantize_aligned_along_k, quantize_aligned_along_t
    from mxfp8_titan.reference.scale_swizzle import swizzle, swizzle_k_groups, swizzle_per_expert, swizzle_t_groups


# Scale layouts


def rearrange_rows_of_groups(scale: Tensor, ends: Tensor, chunks_per_tb: int = 0) -> Tensor:
    return swizzle_t_groups(scale, ends)


def rearrange_columns_of_groups(scale: Tensor, ends_in_columns: Tensor) -> Tensor:
    return swizzle_k_groups(scale, ends_in_columns * BLOCK_SIZE)


def their_blocked(scale: Tensor) -> Tensor:
    """What torchao's kernel for one matrix of scales returns, by torchao's to_blocked: it is a reference there."""
    from torchao.prototype.mx_formats.utils import to_blocked

    return to_blocked(scale).view(blocked_shape(*scale.shape))


# Blocks of 32


def _blocked(quantize, x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """quantize(x, rounding) with its scales in the blocked layout: a kernel writes it itself."""
    if KERNELS:
        return quantize(x, rounding, BLOCKED)
    data, scale = quantize(x, rounding)
    return data, swizzle(scale) if scale.ndim == 2 else swizzle_per_expert(scale)


def quantize_rows(x: Tensor, block_size: int = BLOCK_SIZE, scaling_mode: str = RCEIL) -> tuple[Tensor, Tensor]:
    return tuple(quantize_along_k(x, scaling_mode))


def quantize_rows_dim0(x: Tensor, inner_block_size: int, scaling_mode: str) -> tuple[Tensor, Tensor]:
    return tuple(quantize_along_k(x, scaling_mode))


def quantize_rows_blocked(x: Tensor, block_size: int, scaling_mode: str, offs=None) -> tuple[Tensor, Tensor]:
    return _blocked(quantize_along_k, x, scaling_mode)


def quantize_columns(
    x: Tensor, block_size: int, scaling_mode: str = RCEIL, blocked_scale_output: bool = False, offs=None
) -> tuple[Tensor, Tensor]:
    if blocked_scale_output:
        data, scale = _blocked(quantize_along_t, x, scaling_mode)
        return data.t(), scale.flatten()
    data, scale = quantize_along_t(x, scaling_mode)
    return data.t(), scale


def quantize_weights(
    w: Tensor,
    block_size: int,
    scale_block_dim1: int = BLOCK_SIZE,
    scale_block_dim2: int = 1,
    scaling_mode: str = RCEIL,
    blocked_scale_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Blocks along dim 1 of w (E, N, K), or squares."""
    if scale_block_dim2 != 1:
        data, scale = _quantize_squares(w, scaling_mode, blocked_scale_output)
    elif blocked_scale_output:
        data, scale = _blocked(quantize_along_n, w, scaling_mode)
    else:
        data, rows = quantize_along_n(w, scaling_mode)
        scale = rows.mT.contiguous()
    return data.mT, scale


def _quantize_squares(w: Tensor, rounding: str, blocked: bool) -> tuple[Tensor, Tensor]:
    """w transposed (E, K, N), and scales: one a square, or blocked, as for the rows of data."""
    if KERNELS:
        _, data, *scales = kernel_32x32_both(w, rounding, BLOCKED if blocked else PLAIN)
        return data, scales[blocked]
    square = quantize_32x32_both(w, rounding)
    return square.along_n, swizzle_per_expert(square.scale_along_n()) if blocked else square.scale


def quantize_columns_of_groups(x: Tensor, offs: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    data, scale = quantize_along_t(x, FLOOR)
    return data.t(), scale.t()


def quantize_rows_of_groups(x: Tensor, offs: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    return tuple(quantize_along_k(x, FLOOR))


# One power of two a row, as on Hopper. torchao returns what it multiplied by, which is the reciprocal.


def _reciprocal(data: Tensor, scale: Tensor, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
    assert round_scales_to_power_of_2, "this project has no other scales"
    return data, scale.reciprocal()


def scale_and_cast_rows(x: Tensor, output_dtype, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
    data, scale = quantize_aligned_along_k(x, RCEIL)
    return _reciprocal(data, scale.unsqueeze(-1), round_scales_to_power_of_2)


def scale_and_cast_columns(x: Tensor, output_dtype, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
    data, scale = quantize_aligned_along_k(x.mT, RCEIL)
    return _reciprocal(data.mT, scale.unsqueeze(-2), round_scales_to_power_of_2)


def scale_and_cast_columns_of_groups(
    x: Tensor, offs: Tensor, output_dtype, round_scales_to_power_of_2: bool
) -> tuple[Tensor, Tensor]:
    """x (T, K) whose groups are multiples of 128 rows, so that no padding is between them."""
    data, scale = quantize_aligned_along_t(x, rounding=RCEIL, group_ends=offs.int())
    return _reciprocal(data[:, : x.shape[0]].t(), scale.flatten(), round_scales_to_power_of_2)


def scale_and_cast_rows_of_groups(
    x: Tensor, offs: Tensor, output_dtype, round_scales_to_power_of_2: bool
) -> tuple[Tensor, Tensor]:
    data, scale = quantize_aligned_along_t(x.t(), rounding=RCEIL, group_ends=offs.int())
    return _reciprocal(data[:, : x.shape[1]].contiguous(), scale.flatten(), round_scales_to_power_of_2)


def scale_and_cast_weights_along_n(
    w_t: Tensor, output_dtype, round_scales_to_power_of_2: bool
) -> tuple[Tensor, Tensor]:
    """One scale for each expert and feature of w_t (E, K, N); the kernel's alone takes experts."""
    data, scale = quantize_aligned_along_t(w_t.mT, rounding=RCEIL)
    return _reciprocal(data.mT, scale, round_scales_to_power_of_2)


# Products


def rows_times_experts(a, a_scale, b, b_scale, offs, out_dtype, block_size: int = BLOCK_SIZE) -> Tensor:
    if not KERNELS:
        return grouped_gemm(Quantized(a, a_scale), Quantized(b.mT, b_scale.mT), offs, out_dtype)
    out = a.new_empty((a.shape[0], b.shape[-1]), dtype=out_dtype)
    pair = a, swizzle_t_groups(a_scale, offs), b.mT, swizzle_per_expert(b_scale.mT)
    gemm_of_rows([pair], offs, out)
    return out


def products_over_tokens(a, a_scale, b, b_scale, offs, out_dtype, block_size: int = BLOCK_SIZE) -> Tensor:
    if KERNELS:
        out = a.new_empty((offs.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)
        gemm_over_t(a, swizzle_k_groups(a_scale, offs), b, swizzle_k_groups(b_scale, offs), offs, out)
        return out

    def group(data, scale, start, end):
        return Quantized(data[:, start:end], scale[:, start // BLOCK_SIZE : end // BLOCK_SIZE])

    return torch.stack(
        [
            gemm(group(a, a_scale, *bounds), group(b, b_scale, *bounds), out_dtype)
            for bounds in group_bounds(offs, a.shape[1])
        ]
    )


# Layers


class Layers(NamedTuple):
    """A backend, and for each rounding the recipe that it runs."""

    name: str
    backend: Backend
    recipes: dict[str, Recipe]


EMULATED = Layers("emulated", REFERENCE, {FLOOR: RECIPES["mxfp8_emulated"], RCEIL: RECIPES["mxfp8_emulated_rceil"]})

BLOCK_SCALED = Layers(
    "block_scaled",
    BLACKWELL,
    {FLOOR: replace(RECIPES["mxfp8_cublas"], gemm="own"), RCEIL: replace(RECIPES["mxfp8_cublas_rceil"], gemm="own")},
)
"""This project's kernels for Blackwell, whose products Triton emulates on any other GPU."""

ALIGNED = Layers("hopper", HOPPER, {RCEIL: RECIPES["mxfp8_hopper"]})

ALL_LAYERS = [EMULATED]
if KERNELS:
    ALL_LAYERS.append(BLOCK_SCALED)
if current_device().capability in RECIPES["mxfp8_hopper"].capabilities:
    ALL_LAYERS.append(ALIGNED)

_layers = EMULATED


def use(layers: Layers) -> None:
    """From here on, layers run these."""
    global _layers
    _layers = layers


def _how(rounding: str, wgrad_with_hp: bool) -> tuple[Recipe, Backend]:
    return replace(_layers.recipes[rounding], wgrad_in_mxfp8=not wgrad_with_hp), _layers.backend


def grouped_linear(
    x: Tensor,
    w_t: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    kernel_preference=None,
    wgrad_with_hp: bool = False,
    scale_calculation_mode=None,
    pad_token_groups_for_grouped_mm: bool = False,
) -> Tensor:
    assert bias is None, "experts with biases are refused"
    return LinearFunction.apply(x, w_t.mT, offs, *_how(scale_calculation_mode.value, wgrad_with_hp), out_dtype)


def linear(
    in_features: int, out_features: int, bias: bool, device, dtype, kernel_preference, wgrad_with_hp: bool
) -> MXFP8Linear:
    plain = nn.Linear(in_features, out_features, bias, device, dtype)
    return MXFP8Linear.from_linear(plain, *_how(RCEIL, wgrad_with_hp))


class Weight(Tensor):
    """A weight (N, K) or (E, N, K) that torch.mm, torch.matmul, F.linear and torch._grouped_mm multiply in MXFP8.

    Here modules are converted and not weights: this carries the products that the modules run to torchao's tests.
    """

    @staticmethod
    def __new__(cls, w: Tensor, config) -> "Weight":
        return Tensor._make_subclass(cls, w.detach(), w.requires_grad)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        how = _how(RCEIL, wgrad_with_hp=False)
        if func is torch._grouped_mm:
            x, w_t = args
            return LinearFunction.apply(x, w_t.as_subclass(Tensor).mT, kwargs["offs"], *how, x.dtype)
        if func in (torch.mm, torch.matmul, torch.nn.functional.linear):
            x, w, *bias = args
            tokens = x.reshape(-1, x.shape[-1])
            y = LinearFunction.apply(tokens, w.as_subclass(Tensor), None, *how, x.dtype)
            y = y.view(*x.shape[:-1], w.shape[0])
            return y if not bias or bias[0] is None else y + bias[0]
        return super().__torch_function__(func, types, args, kwargs)


def convert(model: nn.Module, config, filter_fn) -> None:
    """Gives the experts and linears of torchao's copy of torchtitan's MoE their MXFP8 classes."""
    pytest.importorskip("torchtitan", reason="experts are torchtitan's")
    from mxfp8_titan.modules.experts import MXFP8GroupedExperts

    how = _how(RCEIL, wgrad_with_hp=False)
    for name, module in model.named_modules():
        if filter_fn(module, name) and isinstance(module, nn.Linear):
            MXFP8Linear.from_linear(module, *how)
        elif filter_fn(module, name) and type(module).__name__ == "GroupedExperts":
            MXFP8GroupedExperts.from_experts(module, *how)
