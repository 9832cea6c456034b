"""nn.Linear whose three GEMMs run in MXFP8."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from mxfp8_titan.autograd.health import Health, observe
from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.job_config import Recipe


class MXFP8Linear(nn.Linear):
    """nn.Linear with y, dx and dw as MXFP8 products; made from an existing nn.Linear by `from_linear`.

    x: (..., K) any float dtype, K and N multiples of 32, any number of rows
    returns (..., N): the autocast dtype under autocast, else x's dtype. Operands are quantized from what they are:
    an fp32 weight under autocast is not rounded to bf16 first.
    """

    recipe: Recipe
    backend: Backend
    input_is_saved = False
    """Whether the model saves the input for backward whatever this layer does: see modules.saved_inputs."""
    observed = ("input", "weight", "gradient")
    health: Health | None = None
    """Where --mx.health_every counts what the observed operands lose; not part of the module's state."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe, backend: Backend) -> "MXFP8Linear":
        """`linear` itself, its class swapped: same parameter objects, hooks and identity."""
        linear.__class__ = cls
        linear.recipe = recipe
        linear.backend = backend
        return linear

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor) or isinstance(self.weight, DTensor):
            y = self._sharded_product(x)
        else:
            y = self._product(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        how = self.recipe, self.backend, output_dtype(x), saves_input(self, x)
        y = LinearFunction.apply(tokens, w, None, *how)
        if self.health is not None:
            y = observe(y, tokens, (w,), None, self.recipe, self.health)
        return y.view(*x.shape[:-1], w.shape[0])

    def _sharded_product(self, x: Tensor) -> Tensor:
        """Tensor parallelism: the product of the local shards, with placements as F.linear's own rules give them."""
        if not (isinstance(x, DTensor) and isinstance(self.weight, DTensor)):
            raise TypeError(
                f"MXFP8Linear got x as {type(x).__name__} and weight as {type(self.weight).__name__}, needs both plain "
                "tensors or both DTensors: parallelize its input as the weight's tensor-parallel style does"
            )
        mesh = self.weight.device_mesh
        rules = [
            _tensor_parallel_rule(*pair, x.dim()) for pair in zip(x.placements, self.weight.placements, strict=True)
        ]
        y_placements, dx_placements, dw_placements = zip(*rules, strict=True)
        x_local = x.to_local(grad_placements=dx_placements)
        w_local = self.weight.to_local(grad_placements=dw_placements)
        return DTensor.from_local(self._product(x_local, w_local), mesh, y_placements, run_check=False)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}, backend={self.backend.name}"


def output_dtype(x: Tensor) -> torch.dtype:
    """What torch's own linear would return for x: the autocast dtype under autocast, else x's dtype."""
    device = x.device.type
    # The meta device knows no autocast.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def saves_input(layer: nn.Module, x: Tensor) -> bool:
    """Whether `layer` is to save x itself: something else does, and not what autocast would make of x."""
    return layer.input_is_saved and x.dtype == output_dtype(x)


def _tensor_parallel_rule(x: Placement, w: Placement, x_dims: int) -> tuple[Placement, Placement, Placement]:
    """Placements of (y, dx, dw) for y = x @ w^T, on one mesh dim."""
    last = x_dims - 1
    if x.is_shard() and x.dim < 0:
        x = Shard(x.dim + x_dims)
    if x.is_replicate() and w.is_shard(0):
        return Shard(last), Partial(), Shard(0)
    if x.is_shard(last) and w.is_shard(1):
        return Partial(), Shard(last), Shard(1)
    if x.is_shard() and not x.is_shard(last) and w.is_replicate():
        return x, x, Partial()
    if x.is_replicate() and w.is_replicate():
        return Replicate(), Replicate(), Replicate()
    raise ValueError(
        f"MXFP8Linear has no tensor-parallel rule for x {x} and weight {w}; it knows column-wise "
        "(Replicate, Shard(0)), row-wise (Shard(-1), Shard(1)) and a replicated weight. "
        "Keep this module in bf16 with --mx.filter_fqns."
    )
