import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import RECIPES
from mxfp8_titan.modules.linear import MXFP8Linear, _tensor_parallel_rule

RECIPE = RECIPES["mxfp8_emulated_rceil"]


def _product(x, linear, out_dtype=None):
    """The module's answer from the autograd function, which has tests of its own."""
    y = LinearFunction.apply(x.reshape(-1, x.shape[-1]), linear.weight, None, RECIPE, REFERENCE, out_dtype or x.dtype)
    y = y.reshape(*x.shape[:-1], linear.out_features)
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def _converted(in_features=64, out_features=96, bias=False, device="cpu", dtype=torch.float32):
    plain = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
    return plain, MXFP8Linear.from_linear(copy.deepcopy(plain), RECIPE, REFERENCE)


def test_conversion_keeps_the_module_its_parameters_and_its_state_dict():
    linear = nn.Linear(64, 96)
    parameters = dict(linear.named_parameters())
    before = {k: v.clone() for k, v in linear.state_dict().items()}
    converted = MXFP8Linear.from_linear(linear, RECIPE, REFERENCE)
    assert converted is linear
    assert isinstance(converted, nn.Linear)
    assert all(p is parameters[name] for name, p in converted.named_parameters())
    assert all(type(v) is torch.Tensor and torch.equal(v, before[k]) for k, v in converted.state_dict().items())
    assert "MXFP8Linear" in repr(converted)
    assert "recipe=mxfp8_emulated_rceil" in repr(converted)


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64), (2, 0, 64), (1, 1, 50, 64)])
def test_any_leading_dims_work_as_in_nn_linear(shape, device):
    plain, mx = _converted(bias=True, device=device)
    x = torch.randn(shape, device=device)
    assert mx(x).shape == plain(x).shape
    assert torch.equal(mx(x), _product(x, mx))


def test_bias_is_added_and_gets_its_gradient(device):
    plain, mx = _converted(bias=True, device=device)
    x, dy = torch.randn(2, 16, 64, device=device), torch.randn(2, 16, 96, device=device)
    plain(x).backward(dy)
    mx(x).backward(dy)
    torch.testing.assert_close(mx.bias.grad, plain.bias.grad)
    got, mx.weight.grad = mx.weight.grad, None
    _product(x, mx).backward(dy)
    assert torch.equal(got, mx.weight.grad)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_output_has_autocast_s_dtype_and_the_weight_its_own_gradient(x_dtype, device):
    plain, mx = _converted(bias=True, device=device)
    x = torch.randn(32, 64, device=device, dtype=x_dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, want = mx(x), plain(x)
    assert y.dtype == want.dtype == torch.bfloat16
    y.sum().backward()
    assert mx.weight.grad.dtype == torch.float32
    assert torch.equal(y, _product(x, mx, torch.bfloat16))


def test_without_grad_nothing_is_saved(device):
    _, mx = _converted(device=device)
    with torch.no_grad():
        assert mx(torch.randn(4, 64, device=device)).grad_fn is None
    with torch.inference_mode():
        assert mx(torch.randn(4, 64, device=device)).shape == (4, 96)


@pytest.mark.parametrize("autocast", [True, False])
def test_only_x_and_w_are_saved_for_backward(autocast, device):
    _, mx = _converted(device=device)
    x = torch.randn(64, 64, device=device, requires_grad=True)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        mx(x)
    storages = {t.untyped_storage().data_ptr() for t in saved}
    # The weight itself, and not a copy that would outlive FSDP2's reshard.
    assert storages == {x.untyped_storage().data_ptr(), mx.weight.untyped_storage().data_ptr()}


def test_gradients_accumulate_over_microbatches(device):
    _, mx = _converted(device=device)
    xs = [torch.randn(32, 64, device=device) for _ in range(3)]
    single = []
    for x in xs:
        mx.weight.grad = None
        mx(x).square().sum().backward()
        single.append(mx.weight.grad.clone())
    mx.weight.grad = None
    for x in xs:
        mx(x).square().sum().backward()
    torch.testing.assert_close(mx.weight.grad, sum(single))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant, device):
    _, mx = _converted(device=device)
    x = torch.randn(32, 64, device=device, requires_grad=True)
    mx(x).square().sum().backward()
    want_x, want_w = x.grad.clone(), mx.weight.grad.clone()
    x.grad = mx.weight.grad = None
    checkpoint(mx, x, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, want_x)
    assert torch.equal(mx.weight.grad, want_w)


def test_meta_device_initialisation_works():
    with torch.device("meta"):
        mx = MXFP8Linear.from_linear(nn.Linear(64, 96), RECIPE, REFERENCE)
    mx.to_empty(device="cpu")
    nn.init.normal_(mx.weight)
    nn.init.zeros_(mx.bias)
    assert mx(torch.randn(2, 64)).isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_compiles_into_one_graph_and_equals_eager(bias, device):
    _, mx = _converted(bias=bias, device=device)
    compiled = torch.compile(mx, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    x = torch.randn(48, 64, device=device, requires_grad=True)
    mx(x).square().sum().backward()
    want = x.grad.clone(), mx.weight.grad.clone()
    x.grad = mx.weight.grad = None
    compiled(x).square().sum().backward()
    assert torch.equal(x.grad, want[0])
    assert torch.equal(mx.weight.grad, want[1])


def test_two_layers_and_two_optimizer_steps_see_their_own_current_weights(device):
    first, second = (_converted(64, 64, device=device)[1] for _ in range(2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    x = torch.randn(32, 64, device=device)
    outputs = []
    for _ in range(3):
        y = second(first(x))
        outputs.append(y.detach())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    with torch.no_grad():
        first.weight.copy_(second.weight)
    assert torch.equal(first(x), second(x))


def test_deepcopy_keeps_recipe_and_backend():
    _, mx = _converted()
    other = copy.deepcopy(mx)
    assert (other.recipe, other.backend) == (mx.recipe, mx.backend)
    x = torch.randn(4, 64)
    assert torch.equal(other(x), mx(x))


@pytest.mark.parametrize(
    ("x", "w", "y_dx_dw"),
    [
        (Replicate(), Shard(0), (Shard(2), Partial(), Shard(0))),
        (Shard(2), Shard(1), (Partial(), Shard(2), Shard(1))),
        (Shard(-1), Shard(1), (Partial(), Shard(2), Shard(1))),
        (Shard(1), Replicate(), (Shard(1), Shard(1), Partial())),
        (Replicate(), Replicate(), (Replicate(), Replicate(), Replicate())),
    ],
)
def test_each_tensor_parallel_style_has_its_placements(x, w, y_dx_dw):
    assert _tensor_parallel_rule(x, w, x_dims=3) == y_dx_dw


@pytest.mark.parametrize(("x", "w"), [(Shard(1), Shard(0)), (Partial(), Replicate()), (Shard(2), Replicate())])
def test_placements_without_a_rule_are_refused(x, w):
    with pytest.raises(ValueError, match="no tensor-parallel rule for x .* and weight .*--mx.filter_fqns"):
        _tensor_parallel_rule(x, w, x_dims=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_the_output_s_dtype_and_nothing_inside_the_product(dtype, device):
    # Under fp16 the dequantized operands would overflow.
    _, mx = _converted(device=device)
    with torch.no_grad():
        mx.weight.mul_(1e-7)
    x = torch.randn(32, 64, device=device) * 1e6
    want = _product(x, mx)
    with torch.autocast(device, dtype=dtype):
        assert torch.equal(mx(x), want.to(dtype))
        y = _product(x, mx)
        y.backward(torch.ones_like(y))
    inside, mx.weight.grad = mx.weight.grad, None
    want.backward(torch.ones_like(want))
    assert torch.equal(y, want)
    assert torch.equal(inside, mx.weight.grad)


def test_a_pickled_module_finds_its_backend_again():
    _, mx = _converted()
    other = pickle.loads(pickle.dumps(mx))
    assert other.backend is REFERENCE
    x = torch.randn(4, 64)
    assert torch.equal(other(x), mx(x))


def test_the_meta_device_has_a_forward():
    with torch.device("meta"):
        mx = MXFP8Linear.from_linear(nn.Linear(64, 96), RECIPE, REFERENCE)
        assert mx(torch.empty(3, 64)).shape == (3, 96)
