"""Weights in MXFP8 with one scale per row: parts with the same K joined along N, for both GEMMs they take part in.

    quantize_aligned_weights           along K, with the column maxima of each expert
    quantize_aligned_weights_along_n   along N, transposed, with those maxima, in one read

Reference: mxfp8_titan.reference.quantize_aligned. Each part's kernel writes into its slice of the result, so that
w1 and w3 are never joined in memory. A part is (E, N_i, K), or (N_i, K) for one expert.
"""

import torch
from torch import Tensor

from mxfp8_titan.format import GROUP_TILE
from mxfp8_titan.kernels.column_maxima import merge_maxima, new_partial
from mxfp8_titan.kernels.launch import (
    ceil_div,
    check_blocks,
    check_choices,
    check_same_device,
    check_source,
    new_tensor,
    register_op,
)
from mxfp8_titan.kernels.quantize_aligned import EMPTY_SCALE, check_row, config_with_amax, launch_along_k
from mxfp8_titan.kernels.quantize_aligned_t import TILE_K, launch_along_t


def _check(ws: list[Tensor], rounding: str) -> tuple[int, int]:
    """(experts, N of all parts).

    Raises: ValueError or TypeError for parts that do not belong together.
    """
    if not ws:
        raise ValueError("ws is empty, needs a weight or more")
    check_choices(rounding)
    first = ws[0]
    for w in ws:
        check_source(w, "w", (2, 3))
        if w.shape[:-2] != first.shape[:-2] or w.shape[-1] != first.shape[-1] or w.device != first.device:
            raise ValueError(
                f"ws are {[tuple(w.shape) for w in ws]} on {[str(w.device) for w in ws]}, "
                "need the same experts, K and device: they are joined along N"
            )
    return first.shape[0] if first.ndim == 3 else 1, sum(w.shape[-2] for w in ws)


def _allocate(ws: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    first = ws[0]
    shape = (*first.shape[:-2], sum(w.shape[-2] for w in ws))
    return (
        new_tensor(first, (*shape, first.shape[-1]), torch.float8_e4m3fn),
        new_tensor(first, shape, torch.float32),
        new_tensor(first, (first.shape[0] if first.ndim == 3 else 1, first.shape[-1]), torch.float32),
    )


def quantize_aligned_weights(ws: list[Tensor], rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    """The parts joined along N, in MXFP8 with one scale per row, and their column maxima: (data, scale, amax).

    ws: (E, N_i, K) or (N_i, K) fp32, bf16 or fp16, any strides; K <= 32768
    returns data (E, sum N_i, K) float8_e4m3fn contiguous; scale (E, sum N_i) fp32, powers of two or NaN;
            amax (E, K) fp32. From 2D parts data (sum N_i, K), scale (sum N_i,), amax (1, K)
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    experts, rows = _check(ws, rounding)
    data, scale, amax = _allocate(ws)
    if data.numel() == 0:
        return data, scale.fill_(EMPTY_SCALE), amax.zero_()
    check_row(data.shape[-1])
    ws = [w for w in ws if w.numel()]
    configs = [config_with_amax(w) for w in ws]
    partials = sum(config[2] for config in configs)
    partial = new_partial(data, experts * partials, data.shape[-1])
    first_row = first_partial = 0
    for w, config in zip(ws, configs, strict=True):
        launch_along_k(
            w, data, scale, partial, rounding, None, (0, 0), config, rows, first_row, partials, first_partial
        )  # fmt: skip
        first_row += w.shape[-2]
        first_partial += config[2]
    merge_maxima(partial, amax, None, rows, partials, (0, 0))
    return data, scale, amax


def _allocate_along_n(ws: list[Tensor]) -> tuple[Tensor, Tensor]:
    first = ws[0]
    shape = (*first.shape[:-2], first.shape[-1])
    data = new_tensor(first, (*shape, sum(w.shape[-2] for w in ws)), torch.float8_e4m3fn)
    return data, new_tensor(first, shape, torch.float32)


def quantize_aligned_weights_along_n(ws: list[Tensor], amax: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """The parts joined along N, in MXFP8 with one scale per feature of K, written transposed: (data, scale).

    ws: (E, N_i, K) or (N_i, K) fp32, bf16 or fp16, any strides; sum N_i a multiple of 32
    amax: (E, K), or (1, K) for 2D parts, fp32 contiguous, as `quantize_aligned_weights` returned it
    returns data (E, K, sum N_i) float8_e4m3fn contiguous; scale (E, K) fp32. From 2D parts (K, sum N_i) and (K,)
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    experts, columns = _check(ws, rounding)
    check_blocks(columns, "N of all parts")
    features = ws[0].shape[-1]
    if amax.dtype != torch.float32:
        raise TypeError(f"amax is {amax.dtype}, needs float32")
    if amax.shape != (experts, features):
        raise ValueError(f"amax is {tuple(amax.shape)}, needs {(experts, features)}, for {tuple(ws[0].shape)}")
    check_same_device(amax, "amax", ws[0], "ws")
    data, scale = _allocate_along_n(ws)
    amax = amax.contiguous()
    tiles_k = ceil_div(features, TILE_K)
    first = 0
    for i, w in enumerate(ws):
        rows = w.shape[-2]
        tiles_n = ceil_div(rows, GROUP_TILE)
        launch_along_t(w, None, amax, data, scale, rounding, None, (0, 0), tiles_n, tiles_k, rows, first, i == 0)
        first += rows
    return data, scale


register_op(
    "quantize_aligned_weights(Tensor[] ws, str rounding) -> (Tensor, Tensor, Tensor)",
    quantize_aligned_weights,
    lambda ws, rounding: _allocate(ws),
)
register_op(
    "quantize_aligned_weights_along_n(Tensor[] ws, Tensor amax, str rounding) -> (Tensor, Tensor)",
    quantize_aligned_weights_along_n,
    lambda ws, amax, rounding: _allocate_along_n(ws),
)
