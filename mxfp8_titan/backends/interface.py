"""What a backend offers to autograd: three GEMMs for a linear layer and three for grouped experts.

Each takes unquantized tensors and quantizes both operands itself, along the dim that the GEMM contracts, so that
a backend is free to fuse, cache or lay out as its hardware wants.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Backend:
    """Six ops. All tensors are 2D or 3D, plain, of any strides; fp32, bf16 or fp16 in, `out_dtype` out.

    Every op is visible to torch.compile and to activation checkpointing as one node.
    """

    name: str
    home: str
    """Where it is defined, as module:variable. A pickled module refers to its backend by this."""

    linear_y: Callable[..., Tensor]
    """(x (T, K), w (N, K), rounding, out_dtype) -> x @ w^T (T, N)"""
    linear_dx: Callable[..., Tensor]
    """(dy (T, N), w (N, K), rounding, out_dtype) -> dy @ w (T, K)"""
    linear_dw: Callable[..., Tensor]
    """(dy (T, N), x (T, K), rounding, out_dtype) -> dy^T @ x (N, K)"""

    grouped_y: Callable[..., Tensor]
    """(x (T, K), w (E, N, K), group_ends (E,) int32, rounding, out_dtype) -> (T, N)"""
    grouped_dx: Callable[..., Tensor]
    """(dy (T, N), w (E, N, K), group_ends (E,) int32, rounding, out_dtype) -> (T, K)"""
    grouped_dw: Callable[..., Tensor]
    """(dy (T, N), x (T, K), group_ends (E,) int32, rounding, out_dtype) -> (E, N, K)"""

    def __reduce__(self) -> tuple:
        return pkgutil.resolve_name, (self.home,)

    def __deepcopy__(self, memo: dict) -> "Backend":
        return self

    def forward_ops(self) -> tuple[Callable[..., Tensor], ...]:
        """The ops whose outputs selective activation checkpointing should save, as it saves aten.mm's."""
        return self.linear_y, self.grouped_y
