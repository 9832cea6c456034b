"""Rows of tokens to the order of experts, and back: the moves around routed experts, each a read and a write.

R rows in the experts' order come from T tokens, top_k rows each. `slot[r]` is the number of row r in the tokens' own
order, token * top_k + choice; `row` is its inverse. Both are permutations, so that no direction needs to accumulate
into memory: what is a scatter one way is a gather by the inverse.
"""

import torch
from torch import Tensor


def gather_rows(x: Tensor, slot: Tensor, top_k: int, scale: Tensor | None) -> Tensor:
    """x[slot // top_k] * scale (R, K), in x's dtype.

    x: (T, K), slot: (R,) int64, R = T * top_k, scale: (R,) fp32 or None for 1
    """
    rows = x[slot // top_k]
    return rows if scale is None else (rows.float() * scale[:, None]).to(x.dtype)


def sum_rows(rows: Tensor, row: Tensor, top_k: int, scale: Tensor | None, base: Tensor | None) -> Tensor:
    """base + sum over choices of (rows * scale)[row] (T, K), in rows' dtype.

    The sum is fp32 and rounded once, then base is added.

    rows: (R, K), row: (R,) int64, scale: (R,) fp32 or None for 1, base: (T, K) or None for 0
    """
    picked = rows[row].float()
    if scale is not None:
        picked = picked * scale[row][:, None]
    total = picked.view(-1, top_k, rows.shape[1]).sum(1).to(rows.dtype)
    # In this order the result has the strides of the sum, whatever those of base are.
    return total if base is None else total + base


def gather_rows_backward(
    drows: Tensor, x: Tensor, row: Tensor, top_k: int, scale: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx (T, K) in x's dtype, dscale (R,) fp32): the gradients of `gather_rows`.

    drows: (R, K), x: (T, K), row: (R,) int64, scale: (R,) fp32
    """
    dx = sum_rows(drows, row, top_k, scale, None)
    dots = (drows[row].float() * x.float().repeat_interleave(top_k, 0)).sum(1)
    return dx, torch.empty_like(dots).index_copy_(0, row, dots)
