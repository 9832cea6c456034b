"""torchtitan's SwiGLU MLPs, dense and shared experts, as one function of MXFP8 products."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe import moe
from torchtitan.models.qwen3.model import model as qwen3

from mxfp8_titan.autograd.health import Health, observe
from mxfp8_titan.autograd.swiglu_mlp import SwiGLUMLPFunction
from mxfp8_titan.modules.linear import MXFP8Linear, output_dtype, saves_input


class _MXFP8FeedForward(nn.Module):
    """w2(silu(w1(x)) * w3(x)) without its intermediate in bf16, for a module whose linears are MXFP8Linear.

    x: (..., K) any float dtype
    returns (..., K) as MXFP8Linear does
    """

    input_is_saved = False
    """As MXFP8Linear's."""
    observed = ("input", "w1", "w2", "w3", "gradient")
    health: Health | None = None
    """As MXFP8Linear's; the linears have their own, for when they run one by one."""

    def forward(self, x: Tensor) -> Tensor:
        linears = self.w1, self.w2, self.w3
        recipe = self.w1.recipe
        sharded = isinstance(x, DTensor) or any(isinstance(linear.weight, DTensor) for linear in linears)
        # Tensor parallelism and hooks belong to the linears, and bf16 dw to their own function.
        if sharded or any(map(_has_hooks, linears)) or not recipe.wgrad_in_mxfp8:
            return super().forward(x)
        weights = tuple(linear.weight for linear in linears)
        tokens = x.reshape(-1, x.shape[-1])
        how = recipe, self.w1.backend, output_dtype(x), saves_input(self, x)
        y = SwiGLUMLPFunction.apply(tokens, *weights, None, *how)
        if self.health is not None:
            y = observe(y, tokens, weights, None, recipe, self.health)
        return y.view(*x.shape[:-1], y.shape[-1])


class MXFP8Llama3FeedForward(_MXFP8FeedForward, llama3.FeedForward):
    """Llama 3's."""


class MXFP8Llama4FeedForward(_MXFP8FeedForward, llama4.FeedForward):
    """Llama 4's dense blocks."""


class MXFP8Qwen3FeedForward(_MXFP8FeedForward, qwen3.FeedForward):
    """Qwen 3's."""


class MXFP8SharedExperts(_MXFP8FeedForward, moe.FeedForward):
    """Shared experts of all MoE models, DeepSeek V3's dense blocks."""


_CLASSES = {
    cls.__mro__[2]: cls
    for cls in (MXFP8Llama3FeedForward, MXFP8Llama4FeedForward, MXFP8Qwen3FeedForward, MXFP8SharedExperts)
}


def fuse_feed_forwards(model: nn.Module) -> None:
    """Give each SwiGLU MLP of `model` whose three linears are converted its class here, in place."""
    for module in model.modules():
        fused = _CLASSES.get(type(module))
        if fused and all(
            isinstance(linear, MXFP8Linear) and linear.bias is None for linear in (module.w1, module.w2, module.w3)
        ):
            module.__class__ = fused


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
