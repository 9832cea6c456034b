"""What a backend offers to autograd: operands made once, and the three GEMMs that multiply them.

An operand is a tuple of tensors that only its backend can read: autograd carries it from where it is made to where it
is multiplied, and saves it for backward. So a backend is free to quantize early or late, to save FP8 or bf16, and to
lay out scales as its hardware wants; x and dy are quantized once for all products they take part in. Only an x that
something else saves anyway is not saved a second time in FP8: it is quantized for y and again for dw.

A layer is dense, w (N, K) and group_ends None, or grouped, w (E, N, K) and group_ends (E,) int32. Weights come as
a list of matrices with the same K that count as joined along N, so that w1 and w3 of a SwiGLU MLP can be one product.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Operand = tuple[Tensor, ...]


class Tokens(NamedTuple):
    """x, dy or h: as the left operand of y or dx, and as an operand of dw (empty when that was not asked for)."""

    rows: Operand
    dw: Operand


class SavedTokens(NamedTuple):
    """x as the left operand of y, and what makes the x that autograd saves itself an operand of dw cheaply later."""

    rows: Operand
    kept: Operand


class Weights(NamedTuple):
    """w for y, and what makes w for dx cheaper later; the second is never weight-sized, because it outlives FSDP2's
    reshard."""

    y: Operand
    kept: Operand


@dataclass(frozen=True)
class Backend:
    """All tensors are plain, of any strides, fp32, bf16 or fp16. `recipe` is a job_config.Recipe.

    Rows past group_ends[-1] may hold anything, influence nothing, and are zero in y and dx.
    Every op inside is visible to torch.compile and to activation checkpointing as one node.
    """

    name: str
    home: str
    """Where it is defined, as module:variable. A pickled module refers to its backend by this."""

    group_alignment: int
    """What the size of each group of tokens must be a multiple of."""

    quantize_tokens: Callable[..., Tokens]
    """(x (T, K), group_ends, recipe, for_dw) -> Tokens"""
    quantize_saved_tokens: Callable[..., SavedTokens]
    """(x (T, K), group_ends, recipe) -> SavedTokens"""
    quantize_saved_tokens_for_dw: Callable[..., Operand]
    """(x (T, K), kept, group_ends, recipe) -> x as an operand of dw"""
    quantize_weights: Callable[..., Weights]
    """(ws, recipe, for_dx) -> Weights"""
    quantize_weights_for_dx: Callable[..., Operand]
    """(ws, kept, recipe) -> the right operand of dx"""

    y: Callable[..., Tensor]
    """(rows, weights, group_ends, recipe, out_dtype) -> x @ w^T (T, N)"""
    dx: Callable[..., Tensor]
    """(rows, weights, group_ends, recipe, out_dtype) -> dy @ w (T, K)"""
    dw: Callable[..., list[Tensor]]
    """(dy, x, group_ends, recipe, parts, out_dtype) -> dy^T @ x, cut along N into `parts` (N / parts, K) or
    (E, N / parts, K)"""

    swiglu: Callable[..., tuple[Tokens, Operand]]
    """(h13 (T, 2H), group_ends, recipe, for_dw) -> h = silu(h1) * h3 (T, H), and what swiglu_backward needs
    besides h13"""
    swiglu_backward: Callable[..., tuple[Tokens, Operand]]
    """(dh (T, H), h13, that, group_ends, recipe, for_dw13) -> dh13 (T, 2H), and h again as an operand of dw"""

    saved_ops: tuple[Callable[..., Tensor], ...]
    """The ops whose outputs per-op activation checkpointing may save, as it saves aten.mm's."""

    def __reduce__(self) -> tuple:
        return pkgutil.resolve_name, (self.home,)

    def __deepcopy__(self, memo: dict) -> "Backend":
        return self
