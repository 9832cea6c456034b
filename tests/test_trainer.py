import pytest
import torch
from torch import nn
from torchtitan.models.moe.moe import MoE, MoEArgs

from mxfp8_titan import trainer
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import MX, RECIPES, recipe_from
from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from mxfp8_titan.modules.linear import MXFP8Linear
from mxfp8_titan.report import inventory as inventory_report
from mxfp8_titan.report import trace as trace_report
from mxfp8_titan.report.inventory import Inventory
from mxfp8_titan.report.trace import GPU, read_trace
from mxfp8_titan.trainer import Tracer, inventory, tokens_per_expert

RECIPE = RECIPES["mxfp8_emulated"]


def _moe(device="cpu", forced=False):
    args = MoEArgs(num_experts=4, num_shared_experts=0, top_k=2, _debug_force_load_balance=forced)
    moe = MoE(args, dim=32, hidden_dim=64).to(device)
    with torch.no_grad():
        moe.init_weights(0.02, torch.device(device))
    return moe


def test_the_inventory_counts_modules_and_the_weights_that_multiply_a_token():
    moe = _moe()
    MXFP8GroupedExperts.from_experts(moe.experts, RECIPE, REFERENCE)
    model = nn.ModuleDict({"moe": moe, "wq": MXFP8Linear.from_linear(nn.Linear(32, 64, bias=False), RECIPE, REFERENCE)})
    found = inventory([model], flops_per_token=1e6)
    # The router's gate is the linear that stays. A token meets 2 experts of 3 matrices.
    assert found["dense"] == {"Linear": [1, 4 * 32], "MXFP8Linear": [1, 32 * 64]}
    assert found["experts"] == {"MXFP8GroupedExperts": [1, 2 * 3 * 32 * 64]}
    assert (found["recipe"], found["backend"], found["wgrad"], found["routing"]) == (
        "mxfp8_emulated", "reference", "mxfp8", "real",
    )  # fmt: skip
    assert Inventory(**found).converted == "1 of 2 linears, 1 of 1 expert modules"


def test_a_report_looks_for_what_the_trainer_writes():
    # Neither imports the other: reports are made where torchtitan need not be installed.
    assert inventory_report._LINE == trainer.INVENTORY
    assert trace_report._KEY == trainer.TRACE_KEY


def test_routing_is_read_from_the_model():
    assert inventory([_moe(forced=True)], 1.0)["routing"] == "forced-balanced"
    assert inventory([nn.Linear(2, 2)], 1.0)["routing"] == "none"


def test_a_bf16_weight_gradient_is_noted():
    recipe = recipe_from(MX(wgrad="bf16"), "mxfp8_emulated")
    assert inventory([MXFP8Linear.from_linear(nn.Linear(32, 32), recipe, REFERENCE)], 1.0)["wgrad"] == "bf16"


def test_tokens_of_each_expert_are_copied_and_a_compiled_layer_counts_once(device):
    moe = _moe(device, forced=True)
    moe(torch.randn(1, 8, 32, device=device))
    counts = tokens_per_expert([nn.ModuleList([torch.compile(moe)])])
    moe.tokens_per_expert.zero_()
    assert [count.tolist() for count in counts] == [[4, 4, 4, 4]]


def test_the_last_steps_are_traced_and_those_before_them_are_not(tmp_path):
    tracer = Tracer(tmp_path / "new" / "trace.json.gz", warm_up=2, steps=2, device=torch.device("cpu"))
    x = torch.randn(64, 64)
    for step in range(1, 5):
        tracer.before(step)
        if step <= 2:
            torch.fft.fft(x)
        x @ x
        tracer.after(step)
    breakdown = read_trace(tracer.path)
    assert breakdown.steps == 2
    assert breakdown.summed_ms["gemm_dense"] > 0
    assert 0 < sum(breakdown.shown_ms.values()) <= breakdown.wall_ms
    assert not any("fft" in name for name in breakdown.unknown_ms)


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_traced_and_no_operators(tmp_path):
    tracer = Tracer(tmp_path / "trace.json.gz", warm_up=1, steps=2, device=torch.device("cuda"))
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for step in range(1, 4):
        tracer.before(step)
        x @ x
        tracer.after(step)
    breakdown = read_trace(tracer.path)
    assert (breakdown.source, breakdown.steps) == (GPU, 2)
    assert breakdown.summed_ms["gemm_dense"] > 0


@pytest.mark.parametrize(
    ("field", "value"), [("trace_file", 3), ("trace_steps", 0), ("trace_steps", "3"), ("trace_steps", True)]
)
def test_settings_of_a_trace_that_cannot_be_used_are_refused(field, value):
    with pytest.raises((TypeError, ValueError), match=f"mx.{field} is"):
        MX(**{field: value})
