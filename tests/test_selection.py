import pytest
import torch
from torch import nn
from torchtitan.models.moe import MoE, MoEArgs

from mxfp8_titan.job_config import MX
from mxfp8_titan.selection import EXPERTS, LINEAR, make_plan, matches


@pytest.mark.parametrize(
    ("entry", "fqn", "expected"),
    [
        ("wk", "layers.3.attention.wk", True),
        ("wk", "layers.3.attention.wkv", False),
        ("wk", "layers.3.attention.wk_norm", False),
        ("wv", "layers.3.attention.wvo", False),
        ("output", "output", True),
        ("output", "layers.0.output_norm", False),
        ("router.gate", "layers.1.moe.router.gate", True),
        ("router.gate", "layers.1.moe.gate", False),
        ("router.gate", "layers.1.router.x.gate", False),
        ("experts", "layers.1.moe.experts", True),
        ("experts", "layers.1.moe.shared_experts.w1", False),
        ("layers.0", "layers.0.attention.wq", True),
        ("layers.0", "layers.01.attention.wq", False),
        ("layers.1", "layers.11.attention.wq", False),
        ("attention", "layers.2.attention.wo", True),
        ("w", "layers.2.attention.wo", False),
        ("mlp.gate.", "mlp.gate_proj", False),
        (".*", "output", False),
    ],
)
def test_entries_match_whole_components_anywhere(entry, fqn, expected):
    assert matches(entry, fqn) is expected


class _Block(nn.Module):
    def __init__(self, dim: int, experts: int):
        super().__init__()
        self.attention = nn.ModuleDict({n: nn.Linear(dim, dim, bias=False) for n in ("wq", "wk", "wv", "wo", "wkv")})
        self.moe = MoE(MoEArgs(num_experts=experts), dim=dim, hidden_dim=96)


class _Model(nn.Module):
    def __init__(self, dim=64, experts=8, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(_Block(dim, experts) for _ in range(layers))
        self.output = nn.Linear(dim, 128, bias=False)


def _plan(model=None, tensor_parallel=1, experts_tensor_parallel=1, **mx):
    with torch.device("meta"):
        model = model or _Model()
    return make_plan(model, MX(**mx), tensor_parallel, experts_tensor_parallel)


def _converted(plan, kind):
    return {d.fqn for d in plan.converted(kind)}


def test_the_default_list_keeps_output_router_wk_and_wv_and_nothing_else():
    plan = _plan()
    assert {reason: len(group) for reason, group in plan.kept().items()} == {
        "filter_fqns: wk": 2,
        "filter_fqns: wv": 2,
        "router, always kept": 2,
        "not in moe_fqns_prototype": 2,
        "filter_fqns: output": 1,
    }
    assert "layers.0.attention.wkv" in _converted(plan, LINEAR)
    assert "layers.1.moe.shared_experts.w2" in _converted(plan, LINEAR)
    assert _converted(plan, EXPERTS) == set()


def test_experts_means_the_routed_experts_and_not_the_shared_ones():
    plan = _plan(moe_fqns_prototype=["experts"], filter_fqns=["shared_experts"])
    assert _converted(plan, EXPERTS) == {"layers.0.moe.experts", "layers.1.moe.experts"}
    assert not any("shared_experts" in fqn for fqn in _converted(plan, LINEAR))


def test_an_entry_may_name_a_block_or_any_part_of_a_name():
    assert not any(fqn.startswith("layers.0.") for fqn in _converted(_plan(filter_fqns=["layers.0"]), LINEAR))
    assert not any("attention" in fqn for fqn in _converted(_plan(filter_fqns=["attention"]), LINEAR))
    assert _converted(_plan(moe_fqns_prototype=["layers.1"]), EXPERTS) == {"layers.1.moe.experts"}


def test_changing_the_filter_changes_the_converted_set():
    assert _converted(_plan(filter_fqns=["wq"]), LINEAR) != _converted(_plan(filter_fqns=["wo"]), LINEAR)


def test_an_empty_filter_converts_the_output_layer_too_but_never_the_router():
    plan = _plan(_Model(experts=128, layers=1), filter_fqns=[])
    assert "output" in _converted(plan, LINEAR)
    assert "layers.0.attention.wk" in _converted(plan, LINEAR)
    # With 128 experts the router's sizes would fit.
    assert "layers.0.moe.router.gate" not in _converted(plan, LINEAR)


def test_experts_only_is_a_switch():
    plan = _plan(dense=False, moe_fqns_prototype=["experts"])
    assert _converted(plan, LINEAR) == set()
    assert len(_converted(plan, EXPERTS)) == 2


@pytest.mark.parametrize(
    ("in_features", "out_features", "reason"),
    [
        (712, 896, "in_features 712 is not a multiple of 32"),
        (896, 712, "out_features 712 is not a multiple of 32"),
        (5120, 16, "out_features 16 is not a multiple of 32"),
    ],
)
def test_a_linear_whose_sizes_do_not_fit_stays_and_the_plan_says_why(in_features, out_features, reason):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(in_features, out_features), nn.Linear(64, 64))
    plan = _plan(model)
    assert list(plan.kept()) == [reason]
    assert _converted(plan, LINEAR) == {"1"}


def test_tensor_parallel_shards_must_be_whole_blocks_too():
    plan = _plan(_Model(dim=128, layers=1), tensor_parallel=4, filter_fqns=["output"])
    assert "layers.0.attention.wq" in _converted(plan, LINEAR)
    assert [d.fqn for d in plan.kept()["out_features 96 over tensor-parallel degree 4 is not a multiple of 32"]] == [
        "layers.0.moe.shared_experts.w1",
        "layers.0.moe.shared_experts.w3",
    ]


def test_hidden_dims_that_do_not_split_keep_the_experts_in_bf16():
    plan = _plan(experts_tensor_parallel=2, moe_fqns_prototype=["experts"])
    assert "hidden_dim 96 over tensor-parallel degree 2 is not a multiple of 32" in plan.kept()


@pytest.mark.parametrize(
    ("mx", "message"),
    [
        (
            {"filter_fqns": ["lm_head"]},
            "mx.filter_fqns entry 'lm_head' matches no dense linear.*last components there are",
        ),
        ({"filter_fqns": ["outputs"]}, "'outputs' matches no dense linear.*Near matches: output"),
        ({"filter_fqns": ["attention.wk_"]}, "Near matches: attention.wk, attention.wkv"),
        ({"filter_fqns": ["re:.*wk"]}, "'re:.\\*wk' matches no dense linear.*without wildcards"),
        ({"filter_fqns": ['"output']}, "Near matches: output.*quotation mark"),
        ({"moe_fqns_prototype": ["expert"]}, "mx.moe_fqns_prototype entry 'expert' matches no expert module.*experts"),
        ({"moe_fqns_prototype": ["experts", "shared_experts"]}, "'shared_experts'.*names dense linears"),
    ],
)
def test_an_entry_that_matches_nothing_is_an_error_with_near_matches(mx, message):
    with pytest.raises(ValueError, match=message):
        _plan(**mx)


def test_a_default_entry_may_match_nothing():
    with torch.device("meta"):
        plan = _plan(nn.Sequential(nn.Linear(64, 64)))
    assert len(plan.converted(LINEAR)) == 1


def test_the_same_entries_written_by_the_user_may_not():
    with torch.device("meta"), pytest.raises(ValueError, match="'output' matches no dense linear"):
        _plan(nn.Sequential(nn.Linear(64, 64)), filter_fqns=["output", "router.gate", "wk", "wv"])


def test_converting_nothing_is_an_error_that_says_why_for_each_module():
    with pytest.raises(ValueError, match=r"would convert nothing.*9 x dense linears are off.*mx.moe_fqns_prototype"):
        _plan(_Model(layers=1), dense=False)
    with torch.device("meta"), pytest.raises(ValueError, match="no nn.Linear and no GroupedExperts"):
        _plan(nn.Sequential(nn.ReLU()))


def test_experts_of_another_kind_are_refused_when_asked_for_and_kept_otherwise():
    class BiasedGroupedExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.empty(4, 64, 64))
            self.b1 = nn.Parameter(torch.empty(4, 64))

    with torch.device("meta"):
        model = nn.ModuleDict({"experts": BiasedGroupedExperts(), "linear": nn.Linear(64, 64)})
    assert _plan(model).kept()["not in moe_fqns_prototype"][0].fqn == "experts"
    with pytest.raises(ValueError, match="experts, which is BiasedGroupedExperts; only torchtitan's GroupedExperts"):
        _plan(model, moe_fqns_prototype=["experts"])


def test_subclasses_of_linear_are_left_to_whoever_made_them():
    class LoRALinear(nn.Linear):
        pass

    with torch.device("meta"):
        plan = _plan(nn.Sequential(LoRALinear(64, 64), nn.Linear(64, 64)))
    assert list(plan.kept()) == ["is LoRALinear, not a plain nn.Linear"]


def test_other_modules_with_3d_parameters_are_no_experts():
    with torch.device("meta"):
        model = nn.ModuleDict({"vision": nn.Conv1d(64, 64, 3), "linear": nn.Linear(64, 64)})
    assert [d.fqn for d in _plan(model).decisions] == ["linear"]
    with pytest.raises(ValueError, match="'vision' matches no expert module of the model.*has no expert module"):
        _plan(model, moe_fqns_prototype=["vision"])


def test_a_dim_longer_than_the_recipe_takes_keeps_the_module_in_bf16():
    with torch.device("meta"):
        model = _Model()
        model.output = nn.Linear(64, 65536, bias=False)
    plan = make_plan(model, MX(filter_fqns=[]), max_features=32768)
    assert "output" not in _converted(plan, LINEAR)
    assert "out_features 65536 is more than 32768, the longest row the recipe takes" in plan.kept()
    assert "output" in _converted(make_plan(model, MX(filter_fqns=[])), LINEAR)
