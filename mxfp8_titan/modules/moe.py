"""torchtitan's MoE layer with its token moves done once: same router, experts and numbers, fewer passes over memory."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import MoE

from mxfp8_titan.autograd.permute import CombineFunction, DispatchFunction


class MXFP8MoE(MoE):
    """MoE whose tokens are gathered and scored in one pass, and summed with the shared experts' output in one.

    x: (batch, sequence, dim)
    returns the same shape. Bit-equal to MoE's forward for top_k 1; for more, gradients are summed in fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Scores after the experts, and tensor parallelism's hooks on the reorderer, keep the host's own way.
        reorderer = getattr(self.reorderer, "_orig_mod", self.reorderer)
        hooked = reorderer._forward_hooks or reorderer._forward_pre_hooks
        if not self.score_before_experts or hooked or isinstance(x, DTensor):
            return super().forward(x)
        tokens = x.view(-1, x.shape[-1])
        top_k = self.router.top_k
        top_scores, chosen, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        scores, slot, counts = self.reorderer(top_scores, chosen)
        row = torch.empty_like(slot)
        row[slot] = torch.arange(slot.shape[0], device=slot.device)
        routed = self.experts(DispatchFunction.apply(tokens, scores, slot, row, top_k), counts)
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        # Under autocast with fp32 weights the shared experts answer in bf16 and the routed ones in fp32.
        base = shared if shared is not None and shared.dtype == routed.dtype else None
        y = CombineFunction.apply(routed, base, slot, row, top_k)
        return (y if shared is base else shared + y).view(x.shape)


def speed_up_token_moves(moe: MoE) -> None:
    """Give `moe` its class here, in place; another kind of MoE, such as one with its own dispatch, is left as it is."""
    if type(moe) is MoE:
        moe.__class__ = MXFP8MoE
