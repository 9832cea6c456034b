import copy

import pytest
import torch
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.model import Transformer as Llama3
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.llama4.model.model import Transformer as Llama4
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.model.model import Qwen3Model

from mxfp8_titan.backends.hopper import HOPPER
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import RECIPES
from mxfp8_titan.modules.feed_forward import fuse_feed_forwards
from mxfp8_titan.modules.linear import MXFP8Linear
from mxfp8_titan.modules.saved_inputs import mark_saved_inputs
from tests.backends import aligned_on_cpu
from tests.oracles import sqnr

TOKENS = 2 * 32
MODELS = {
    "llama4": (Llama4, llama4_args["debugmodel"]),
    "llama3": (Llama3, llama3_args["debugmodel"]),
    "qwen3": (Qwen3Model, qwen3_args["0.6B"]),
}
MARKED = {"llama4": ["attention.wo", "attention.wq", "moe.shared_experts", "moe.shared_experts.w1",
                     "moe.shared_experts.w3"],
          "llama3": ["attention.wo", "attention.wq"],
          "qwen3": ["attention.wo", "attention.wq"]}  # fmt: skip


def _model(name, device="meta", recipe="mxfp8_emulated_rceil", backend=REFERENCE):
    """A model whose linears are converted as the default filter does, wk, wv and routers left as they are."""
    cls, args = MODELS[name]
    with torch.device(device):
        model = cls(copy.deepcopy(args))
    for fqn, module in model.named_modules():
        if type(module) is torch.nn.Linear and not fqn.endswith(("wk", "wv", "gate", "output")):
            MXFP8Linear.from_linear(module, RECIPES[recipe], backend)
    fuse_feed_forwards(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_layers_with_a_neighbour_that_saves_their_input_are_marked_and_no_others(name):
    model = _model(name)
    mark_saved_inputs(model)
    marked = {fqn.split(".", 2)[2] for fqn, module in model.named_modules() if getattr(module, "input_is_saved", False)}
    assert sorted(marked) == MARKED[name]


@pytest.fixture
def hopper_on_this_machine(monkeypatch):
    yield from aligned_on_cpu.on_this_machine(monkeypatch)


def _step(model, device):
    """(bytes saved for backward, by storage; output; gradients)"""
    storages = {}

    def note(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens = torch.randint(0, 256, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = model(tokens)
    model.zero_grad()
    y.float().square().mean().backward()
    return sum(storages.values()), y, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.usefixtures("hopper_on_this_machine")
def test_a_marked_model_saves_a_byte_less_for_each_element_and_computes_the_same(device):
    args = MODELS["llama4"][1]
    model = _model("llama4", device, "mxfp8_hopper", HOPPER).bfloat16()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    before, plain, plain_grads = _step(model, device)
    mark_saved_inputs(model)
    after, marked, marked_grads = _step(model, device)
    assert torch.equal(plain, marked)
    # Elements that are subnormal in FP8 along features are rounded from themselves; nothing else differs.
    assert all(sqnr(marked_grads[name], grad) > 35 for name, grad in plain_grads.items() if grad.any())
    inputs = sum(2 + layer.moe_enabled for layer in model.layers.values())
    # FP8 data and a scale a token; the column maxima are still there.
    assert before - after == inputs * TOKENS * (args.dim + 4)


def test_an_input_that_autocast_would_cast_is_not_saved_in_its_own_dtype(device, monkeypatch):
    kept = []
    monkeypatch.setattr(
        "mxfp8_titan.modules.linear.LinearFunction.apply", lambda x, w, *rest: kept.append(rest[-1]) or x @ w.t()
    )
    linear = MXFP8Linear.from_linear(torch.nn.Linear(64, 96, bias=False, device=device), None, REFERENCE)
    linear.input_is_saved = True
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device, dtype=torch.bfloat16):
            linear(torch.randn(4, 64, device=device, dtype=dtype))
    assert kept == [False, True]
