"""torchtitan's GroupedExperts with MXFP8 GEMMs."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts

from mxfp8_titan.autograd.health import Health, observe
from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.format import BLOCK_SIZE
from mxfp8_titan.job_config import Recipe
from mxfp8_titan.modules.linear import output_dtype


class MXFP8GroupedExperts(GroupedExperts):
    """w2 @ (silu(w1 @ x) * (w3 @ x)) per expert, its nine GEMMs in MXFP8; made from GroupedExperts by `from_experts`.

    x: (T, dim) tokens sorted by expert
    num_tokens_per_expert: (E,) counts on the device
    w1, w3: (E, hidden, dim), w2: (E, dim, hidden); dim and hidden multiples of 32, also after tensor parallelism
    returns (T, dim) in x's dtype
    """

    recipe: Recipe
    backend: Backend
    observed = ("input", "w1", "w2", "w3", "gradient")
    health: Health | None = None
    """As MXFP8Linear's."""

    @classmethod
    def from_experts(cls, experts: GroupedExperts, recipe: Recipe, backend: Backend) -> "MXFP8GroupedExperts":
        """`experts` itself, its class swapped: same parameter objects, hooks and identity."""
        experts.__class__ = cls
        experts.recipe = recipe
        experts.backend = backend
        # Registered before torchtitan's expert parallelism adds its dispatch hook, so ours runs first.
        experts.register_forward_pre_hook(_align_groups_to_blocks)
        experts.register_forward_hook(_restore_group_alignment, always_call=True)
        return experts

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        # Under expert parallelism the dispatch hook has already padded the groups.
        # A mesh without names is not torchtitan's, and shards something else.
        mesh_dims = self.w1.device_mesh.mesh_dim_names or () if isinstance(self.w1, DTensor) else ()
        experts_are_sharded = "ep" in mesh_dims
        # torch's bf16 dw needs padding whatever the backend does. Where nothing needs it, four copies of x are spared.
        any_size_fits = self.backend.group_alignment == 1 and self.recipe.wgrad_in_mxfp8
        if experts_are_sharded or any_size_fits:
            return self._run(w1, w2, w3, x, num_tokens_per_expert)
        return moe_utils.indices_padding_wrapper(self._run)(w1, w2, w3, x, num_tokens_per_expert)

    def _run(self, w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        group_ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        how = self.recipe, self.backend, output_dtype(x)
        if self.recipe.wgrad_in_mxfp8:
            y = SwiGLUMLPFunction.apply(x, w1, w2, w3, group_ends, *how)
        else:
            h1, h3 = (LinearFunction.apply(x, w, group_ends, *how) for w in (w1, w3))
            y = LinearFunction.apply(F.silu(h1) * h3, w2, group_ends, *how)
        if self.health is not None:
            y = observe(y, x, (w1, w2, w3), group_ends, self.recipe, self.health)
        return y.type_as(x)

    def extra_repr(self) -> str:
        experts, hidden, dim = self.w1.shape
        return (
            f"num_experts={experts}, dim={dim}, hidden_dim={hidden}, "
            f"recipe={self.recipe.name}, backend={self.backend.name}"
        )


def _align_groups_to_blocks(experts: MXFP8GroupedExperts, args: tuple) -> None:
    """Have torchtitan pad each group to whole MX blocks, for the length of this call.

    Its alignment is one number per process. It is set here and put back by `_restore_group_alignment`, so that
    another model in the same process keeps its own.
    """
    experts._outer_alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    moe_utils.set_token_group_alignment_size_m(math.lcm(BLOCK_SIZE, experts._outer_alignment))


def _restore_group_alignment(experts: MXFP8GroupedExperts, args: tuple, output: Tensor | None) -> None:
    moe_utils.set_token_group_alignment_size_m(experts._outer_alignment)
