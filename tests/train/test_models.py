"""torchtitan's other models convert by the same rules, and train."""

import copy

import pytest
import torch
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from mxfp8_titan.preflight import conversion_plan, meta_model, parse
from mxfp8_titan.selection import EXPERTS, LINEAR
from tests.train.harness import MX, TINY, train

HOOK = "--job.custom_config_module=mxfp8_titan.job_config"
ANY_FILTER = "--mx.filter_fqns=output"


def _plan(model, flavor, *flags):
    config = parse([HOOK, f"--model.name={model}", f"--model.flavor={flavor}", "--training.seq_len=64", *flags])
    return conversion_plan(config, meta_model(config))


@pytest.mark.parametrize(
    ("model", "flavor", "linears", "experts"),
    [
        ("llama4", "debugmodel", 30, 3),
        ("llama4", "17bx16e", 240, 48),
        ("llama4", "17bx128e", 240, 24),
        ("llama4", "scout_4layer", 20, 4),
        ("llama3", "debugmodel", 30, 0),
        ("deepseek_v3", "debugmodel", 42, 5),
        ("qwen3", "debugmodel", 40, 0),
        ("qwen3", "debugmodel_moe", 16, 8),
    ],
)
def test_every_model_s_plan_has_these_counts(model, flavor, linears, experts):
    plan = _plan(model, flavor, *(["--mx.moe_fqns_prototype=experts"] if experts else []))
    assert (len(plan.converted(LINEAR)), len(plan.converted(EXPERTS))) == (linears, experts)


def test_asking_a_dense_model_for_experts_is_refused():
    with pytest.raises(
        ValueError, match="'experts' matches no expert module of the model.*The model has no expert module"
    ):
        _plan("llama3", "debugmodel", "--mx.moe_fqns_prototype=experts")


@pytest.mark.train
@pytest.mark.parametrize(
    ("model", "flavor", "flags"),
    [
        ("deepseek_v3", "debugmodel", MX[:2]),
    ],
)
def test_other_debug_models_train(model, flavor, flags, tmp_path):
    named = (f"--model.name={model}", f"--model.flavor={flavor}")
    run = train(tmp_path, *named, *flags, *TINY, "--training.steps=2")
    assert "expert modules converted" in run.output
    assert len(run.steps) == 2
    assert all(7 < loss < 9 for loss in run.losses())


def test_a_shrunken_qwen3_moe_runs_forward_and_backward(device):
    # Qwen3's debug flavors take up to 40 s a step on two cores, in bf16 too: 64 experts, a vocabulary of 151,936.
    args = copy.deepcopy(get_train_spec("qwen3").model_args["debugmodel_moe"])
    args.n_layers, args.vocab_size, args.moe_args.num_experts, args.max_seq_len = 1, 256, 8, 32
    args.moe_args.use_grouped_mm = False
    model = get_train_spec("qwen3").model_cls(args)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    config = parse([HOOK, "--model.name=qwen3", *MX])
    build_model_converters(config, None).convert(model)
    model.to(device)(torch.randint(0, 256, (2, 32), device=device)).square().mean().backward()
    assert isinstance(model.layers["0"].moe.experts, MXFP8GroupedExperts)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
