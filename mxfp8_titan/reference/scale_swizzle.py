"""E8M0 scales into the blocked layout that block-scaled tensor cores read, and back.

The layout itself is `format.blocked_index`. Four cases, each with its inverse:

    one matrix   (R, C)       rows and columns of one operand
    T groups     (T, C)       blocks along K; the rows are split among experts, each group padded to 128 rows
    K groups     (R, T / 32)  blocks along T; the columns are split among experts, each group padded to 4 columns
    per expert   (E, R, C)    one matrix per expert

Buffers have sizes that don't depend on the split, and every byte that holds no scale is zero. `group_ends` counts
tokens in both grouped cases; sizes must be multiples of 32 tokens when the blocks run along T.
"""

import torch
from torch import Tensor

from mxfp8_titan.format import (
    BLOCK_SIZE,
    blocked_index,
    blocked_shape,
    blocked_shape_k_groups,
    blocked_shape_t_groups,
)
from mxfp8_titan.reference.grouped_gemm import group_bounds


def _index(rows: int, cols: int, device: torch.device) -> Tensor:
    """(rows, cols) int64: the byte of each scale."""
    row = torch.arange(rows, device=device).unsqueeze(1)
    return blocked_index(row, torch.arange(cols, device=device), cols)


def swizzle(scale: Tensor) -> Tensor:
    """scale in the blocked layout (pad128(R), pad4(C)).

    scale: (R, C) one byte per element, any strides
    """
    out = torch.zeros(blocked_shape(*scale.shape), dtype=torch.uint8, device=scale.device)
    out.view(-1)[_index(*scale.shape, scale.device)] = scale.view(torch.uint8)
    return out.view(scale.dtype)


def unswizzle(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """(rows, cols) scales from `swizzle`'s buffer."""
    flat = blocked.view(torch.uint8).reshape(-1)
    return flat[_index(rows, cols, blocked.device)].view(blocked.dtype)


def swizzle_per_expert(scale: Tensor) -> Tensor:
    """Each expert's scales in the blocked layout (E, pad128(R) * pad4(C)).

    scale: (E, R, C) one byte per element, any strides
    """
    experts, rows, cols = scale.shape
    out_rows, out_cols = blocked_shape(rows, cols)
    out = torch.zeros((experts, out_rows * out_cols), dtype=torch.uint8, device=scale.device)
    out[:, _index(rows, cols, scale.device)] = scale.view(torch.uint8)
    return out.view(scale.dtype)


def unswizzle_per_expert(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """(E, rows, cols) scales from `swizzle_per_expert`'s buffer."""
    return blocked.view(torch.uint8)[:, _index(rows, cols, blocked.device)].view(blocked.dtype)


def _t_group_regions(group_ends: Tensor, tokens: int, cols: int) -> list[tuple[slice, slice]]:
    """(tokens, flat bytes) of each group in the T-groups layout. Group g starts at row sum of pad128(earlier sizes)."""
    regions = []
    first_row = 0
    for start, end in group_bounds(group_ends, tokens):
        height, width = blocked_shape(end - start, cols)
        regions.append((slice(start, end), slice(first_row * width, (first_row + height) * width)))
        first_row += height
    return regions


def swizzle_t_groups(scale: Tensor, group_ends: Tensor) -> Tensor:
    """Each group's rows in the blocked layout, one after the other (T + 128 G, pad4(C)).

    scale: (T, C) one byte per element, any strides; rows past the last group end are ignored
    group_ends: (G,) int32, tokens
    """
    out = torch.zeros(blocked_shape_t_groups(*scale.shape, group_ends.shape[0]), dtype=torch.uint8, device=scale.device)
    for tokens, region in _t_group_regions(group_ends, *scale.shape):
        out.view(-1)[region] = swizzle(scale[tokens].view(torch.uint8)).view(-1)
    return out.view(scale.dtype)


def unswizzle_t_groups(blocked: Tensor, group_ends: Tensor, tokens: int, cols: int) -> Tensor:
    """(tokens, cols) scales from `swizzle_t_groups`' buffer; rows past the last group end are zero."""
    out = torch.zeros((tokens, cols), dtype=torch.uint8, device=blocked.device)
    flat = blocked.view(torch.uint8).reshape(-1)
    for rows, region in _t_group_regions(group_ends, tokens, cols):
        out[rows] = unswizzle(flat[region], rows.stop - rows.start, cols)
    return out.view(blocked.dtype)


def _k_group_regions(group_ends: Tensor, rows: int, cols: int) -> list[tuple[slice, slice]]:
    """(columns, flat bytes) of each group in the K-groups layout. Group g starts at byte pad128(R) * P_g, with P_g
    the sum of pad4(earlier sizes in columns).

    Raises: ValueError when a group's size is not a multiple of 32 tokens.
    """
    regions = []
    first_col = 0
    for start, end in group_bounds(group_ends, cols * BLOCK_SIZE):
        if (end - start) % BLOCK_SIZE:
            raise ValueError(
                f"a group spans tokens {start} to {end}, needs a size that is a multiple of {BLOCK_SIZE}: "
                "a block of scales along T would belong to two experts"
            )
        height, width = blocked_shape(rows, (end - start) // BLOCK_SIZE)
        regions.append(
            (
                slice(start // BLOCK_SIZE, end // BLOCK_SIZE),
                slice(first_col * height, (first_col + width) * height),
            )
        )
        first_col += width
    return regions


def swizzle_k_groups(scale: Tensor, group_ends: Tensor) -> Tensor:
    """Each group's columns in the blocked layout, one group after the other (pad128(R), C + 4 G).

    scale: (R, C) one byte per element, any strides; columns past the last group end are ignored
    group_ends: (G,) int32, tokens: 32 per column, every size a multiple of 32
    Raises: ValueError for a size that is not.
    """
    out = torch.zeros(blocked_shape_k_groups(*scale.shape, group_ends.shape[0]), dtype=torch.uint8, device=scale.device)
    for cols, region in _k_group_regions(group_ends, *scale.shape):
        out.view(-1)[region] = swizzle(scale[:, cols].view(torch.uint8)).view(-1)
    return out.view(scale.dtype)


def unswizzle_k_groups(blocked: Tensor, group_ends: Tensor, rows: int, cols: int) -> Tensor:
    """(rows, cols) scales from `swizzle_k_groups`' buffer; columns past the last group end are zero."""
    out = torch.zeros((rows, cols), dtype=torch.uint8, device=blocked.device)
    flat = blocked.view(torch.uint8).reshape(-1)
    for group, region in _k_group_regions(group_ends, rows, cols):
        out[:, group] = unswizzle(flat[region], rows, group.stop - group.start)
    return out.view(blocked.dtype)
