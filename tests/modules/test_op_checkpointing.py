"""torchtitan's per-op activation checkpointing of layers that it compiles in pieces around their experts."""

import pytest
import torch
import torch.utils.checkpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.llama4.infra import parallelize
from torchtitan.models.moe import moe
from torchtitan.protocols.model_converter import build_model_converters

from mxfp8_titan.preflight import meta_model, parse
from tests.train.harness import OP_CHECKPOINTING

NOTHING = ("--activation_checkpoint.mode=none",)


@pytest.fixture
def unchanged(monkeypatch):
    """For every saved tensor, whether it still was what it had been when backward came for it.

    Compiled code overwrites without a trace in the version that PyTorch checks.
    """
    found = []

    class Watched(torch.utils.checkpoint._VersionWrapper):
        def __init__(self, val):
            super().__init__(val)
            # Attention saves numbers, and nothing, beside tensors.
            self.as_it_was = val.clone() if isinstance(val, torch.Tensor) else None

        def get_val(self, *args):
            if self.as_it_was is not None:
                found.append(torch.equal(self.as_it_was, self.val))
            return super().get_val(*args)

    monkeypatch.setattr(torch.utils.checkpoint, "_VersionWrapper", Watched)
    return found


@pytest.fixture
def gradients(device, monkeypatch):
    """A function of flags of activation checkpointing: the gradient of each weight of two compiled layers with experts,
    by name."""
    # Put back after the test: what apply_compile and apply_ac set for the process, and what conversion saves.
    monkeypatch.setattr(moe, "_run_experts_grouped_mm", moe._run_experts_grouped_mm)
    monkeypatch.setattr(parallelize, "_op_sac_save_list", set(parallelize._op_sac_save_list))
    debug = llama4_args["debugmodel"]
    monkeypatch.setattr(debug, "interleave_moe_layer_step", 1)
    monkeypatch.setattr(debug, "n_layers", 2)

    def run(*flags: str) -> dict[str, torch.Tensor]:
        config = parse([
            "--job.custom_config_module=mxfp8_titan.job_config", "--model.name=llama4", "--model.converters=mx",
            "--mx.moe_fqns_prototype=experts", "--compile.enable", "--training.seq_len=64", *flags,
        ])  # fmt: skip
        model = meta_model(config)
        build_model_converters(config, None).convert(model)
        if config.activation_checkpoint.mode != "none":
            saved = parallelize._op_sac_save_list
            apply_ac(model, config.activation_checkpoint, model_compile_enabled=True, op_sac_save_list=saved)
        parallelize.apply_compile(model, config.compile, ep_enabled=False)
        model.to_empty(device=device)
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights(buffer_device=device)
        tokens = torch.randint(0, 256, (2, 64), device=device)
        with torch.autocast(device, torch.bfloat16):
            y = model(tokens)
        y.square().mean().backward()
        named = model.named_parameters()
        return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in named}

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield run
    torch._C._dynamo.eval_frame._set_lru_cache(True)


@pytest.mark.gpu
def test_what_is_saved_for_backward_is_what_backward_finds(unchanged, gradients):
    gradients(*OP_CHECKPOINTING)
    # Attention's outputs, at least.
    assert unchanged
    assert all(unchanged)


def test_gradients_are_those_of_layers_that_recompute_nothing(gradients):
    """On a CPU Inductor overwrites nothing here; there it holds that each saved tensor comes back in its place."""
    plain, checkpointed = gradients(*NOTHING), gradients(*OP_CHECKPOINTING)
    assert plain.keys() == checkpointed.keys()
    errors = {name: float((checkpointed[name] - grad).norm() / grad.norm()) for name, grad in plain.items()}
    # On a GPU the embedding adds its gradients in any order.
    assert all(error < 1e-4 for error in errors.values()), errors
