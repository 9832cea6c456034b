"""Counts of what a module's operands lose, brought out of forward and backward as the gradient of a probe.

A probe is a small tensor that requires a gradient and that no result depends on. Its "gradient" is the counts: those
of x and of the weights from forward, which wait beside what is saved for backward, and those of dy. So nothing is
mutated inside a graph, torch.compile needs no special case, microbatches add up as gradients do, and a layer that
activation checkpointing runs twice is counted once.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp8_titan.backends.alignment_counts import alignment_counts
from mxfp8_titan.job_config import Recipe

SAMPLES = 64
"""Rows of an operand that are looked at."""


class Health(NamedTuple):
    """What a module that is counted holds."""

    probe: Tensor
    """(operands, SAMPLES, 4) fp32: x, the weights, dy; its .grad is the sum of reference.alignment_counts"""
    phase: Tensor
    """0-dim int64, shared by all modules: which rows are looked at"""


class ObserveFunction(torch.autograd.Function):
    """y -> y, and the counts of dy, after `counts` (operands - 1, SAMPLES, 4), as the gradient of probe."""

    @staticmethod
    def forward(
        ctx, y: Tensor, probe: Tensor, counts: Tensor, phase: Tensor, group_ends: Tensor | None, rounding: str
    ) -> Tensor:
        ctx.save_for_backward(counts, phase, group_ends)
        ctx.rounding = rounding
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        counts, phase, group_ends = ctx.saved_tensors
        of_dy = alignment_counts(dy, group_ends, phase, ctx.rounding, SAMPLES)
        return dy, torch.cat((counts, of_dy.unsqueeze(0))), None, None, None, None


def observe(
    y: Tensor, x: Tensor, ws: tuple[Tensor, ...], group_ends: Tensor | None, recipe: Recipe, health: Health
) -> Tensor:
    """y itself; its backward adds what x, the weights and dy lose under aligned exponents to health.probe.grad.

    x: (T, K), ws: (N, K) or (E, N, K) each, y: (T, N); rows of x and y past group_ends[-1] are not looked at
    Each is counted along its last dim, over which y = x @ w^T and dx = dy @ w sum. Nothing is done without gradients.
    """
    if not torch.is_grad_enabled():
        return y
    with torch.no_grad():
        counts = [alignment_counts(x, group_ends, health.phase, recipe.rounding, SAMPLES)]
        counts += [alignment_counts(w, None, health.phase, recipe.rounding, SAMPLES) for w in ws]
        counts = torch.stack(counts)
    return ObserveFunction.apply(y, health.probe, counts, health.phase, group_ends, recipe.rounding)
