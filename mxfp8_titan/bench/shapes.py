"""Shapes that more than one benchmark measures: grouped experts, and uneven groups of tokens."""

import torch
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE

GROUPED_TOKENS = (16384, 128000)
GROUPED_WEIGHTS = ((8192, 5120), (1536, 5120), (2048, 7168))
"""Out and in features."""
GROUPED_EXPERTS = (1, 2, 4, 8)

GROUPED = [
    (tokens, n, k, experts) for tokens in GROUPED_TOKENS for n, k in GROUPED_WEIGHTS for experts in GROUPED_EXPERTS
]
"""The 24 rows of the grouped tables: (T, N, K, E)."""


def random_ends(tokens: int, groups: int, seed: int | None = None) -> Tensor:
    """(groups,) int32 ends on the GPU of uneven random groups that fill `tokens`, sizes multiples of 32.

    seed: the number of groups if it is None
    """
    generator = torch.Generator().manual_seed(groups if seed is None else seed)
    cuts = torch.randint(0, tokens // BLOCK_SIZE + 1, (groups - 1,), generator=generator).sort().values
    return (torch.cat([cuts, torch.tensor([tokens // BLOCK_SIZE])]) * BLOCK_SIZE).to(torch.int32).cuda()
