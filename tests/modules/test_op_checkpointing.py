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


@pytest.fixture
def unchanged(monkeypatch):
    """For every saved tensor, whether it still was what it had been when backward came for it.

    Compiled code overwrites without a trace in the version that PyTorch checks.
    """
    found = []

    class Watched(torch.utils.checkpoint._VersionWrapper):
        def __init__(self, val):
            super().__init__(val)
            self.as_it_was = val.clone()

        def get_val(self, *args):
            found.append(torch.equal(self.as_it_was, self.val))
            return super().get_val(*args)

    monkeypatch.setattr(torch.utils.checkpoint, "_VersionWrapper", Watched)
    return found


@pytest.mark.gpu
def test_what_is_saved_for_backward_is_what_backward_finds(unchanged, device, monkeypatch):
    # apply_compile changes both for the whole process.
    monkeypatch.setattr(torch._dynamo.config, "capture_scalar_outputs", True)
    monkeypatch.setattr(moe, "_run_experts_grouped_mm", moe._run_experts_grouped_mm)
    debug = llama4_args["debugmodel"]
    monkeypatch.setattr(debug, "interleave_moe_layer_step", 1)
    monkeypatch.setattr(debug, "n_layers", 2)
    config = parse([
        "--job.custom_config_module=mxfp8_titan.job_config", "--model.name=llama4", "--model.converters=mx",
        "--mx.moe_fqns_prototype=experts", "--compile.enable", "--training.seq_len=64",
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op",
    ])  # fmt: skip
    model = meta_model(config)
    build_model_converters(config, None).convert(model)
    saved = parallelize._op_sac_save_list
    apply_ac(model, config.activation_checkpoint, model_compile_enabled=True, op_sac_save_list=saved)
    parallelize.apply_compile(model, config.compile, ep_enabled=False)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    tokens = torch.randint(0, 256, (2, 64), device=device)
    with torch.autocast(device, torch.bfloat16):
        y = model(tokens)
    y.square().mean().backward()
    # The experts' two products of each layer, at least.
    assert len(unchanged) >= 4
    assert all(unchanged)
