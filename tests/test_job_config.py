import pytest

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.job_config import DEFAULT_FILTER_FQNS, MX, RECIPES, recipe_from


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        ("output,wk", ["output", "wk"]),
        ("output, wk ", ["output", "wk"]),
        (["output", "wk"], ["output", "wk"]),
        (["output,wk", "wv"], ["output", "wk", "wv"]),
        ("", []),
        ([], []),
        ([""], []),
        ("experts", ["experts"]),
    ],
)
def test_entries_come_as_a_comma_string_or_a_list(value, entries):
    assert MX(filter_fqns=value).filter_fqns == entries
    assert MX(moe_fqns_prototype=value).moe_fqns_prototype == entries


@pytest.mark.parametrize("value", ["output,", ",output", "output,,wk", ["output", ""]])
def test_an_empty_entry_is_refused(value):
    with pytest.raises(ValueError, match="mx.filter_fqns.*empty entry; remove the extra comma"):
        MX(filter_fqns=value)


@pytest.mark.parametrize("value", [3, ["wk", 3], {"a": 1}, None])
def test_entries_of_another_type_are_refused(value):
    with pytest.raises(TypeError, match="mx.filter_fqns is .* needs a list of names"):
        MX(filter_fqns=value)


def test_unknown_names_are_refused_with_the_known_ones_and_a_near_match():
    with pytest.raises(
        ValueError, match=r"mx.recipe_name is 'mxfp8_hoper', needs one of: auto.*Did you mean mxfp8_hopper"
    ):
        MX(recipe_name="mxfp8_hoper")
    with pytest.raises(ValueError, match="mx.wgrad is 'fp8', needs one of: mxfp8, bf16"):
        MX(wgrad="fp8")
    with pytest.raises(TypeError, match="mx.dense is 'no', needs true or false"):
        MX(dense="no")


def test_the_default_filter_is_known_to_be_the_default():
    assert tuple(MX().filter_fqns) == DEFAULT_FILTER_FQNS == ("output", "router.gate", "wk", "wv")
    assert not MX().user_gave_filter
    assert MX(filter_fqns=list(DEFAULT_FILTER_FQNS)).user_gave_filter


def test_recipes_round_as_the_design_says():
    assert {name: recipe.rounding for name, recipe in RECIPES.items()} == {
        "mxfp8_cublas": FLOOR,
        "mxfp8_cublas_rceil": RCEIL,
        "mxfp8_hopper": RCEIL,
        "mxfp8_emulated": FLOOR,
        "mxfp8_emulated_rceil": RCEIL,
    }
    assert recipe_from(MX(wgrad="bf16"), "mxfp8_emulated").wgrad_in_mxfp8 is False


def _parse(tmp_path, toml, *flags):
    from torchtitan.config import ConfigManager

    path = tmp_path / "job.toml"
    path.write_text('[job]\ncustom_config_module = "mxfp8_titan.job_config"\n' + toml)
    return ConfigManager().parse_args(["--job.config_file", str(path), *flags])


def test_toml_and_command_line_both_reach_the_mx_section(tmp_path):
    toml = '[mx]\nrecipe_name = "mxfp8_emulated"\nfilter_fqns = "output, wk"\nmoe_fqns_prototype = "experts"\n'
    config = _parse(tmp_path, toml)
    assert config.mx.recipe_name == "mxfp8_emulated"
    assert config.mx.filter_fqns == ["output", "wk"]
    assert config.mx.moe_fqns_prototype == ["experts"]
    config = _parse(
        tmp_path, toml, "--mx.filter_fqns=wv", "--mx.wgrad=bf16", "--mx.no-dense", "--mx.recipe_name", "auto"
    )
    assert config.mx.filter_fqns == ["wv"]
    assert (config.mx.wgrad, config.mx.dense, config.mx.recipe_name) == ("bf16", False, "auto")


def test_one_hook_brings_the_other(tmp_path):
    config = _parse(tmp_path, "")
    assert config.experimental.custom_import == "mxfp8_titan.plugin"
    assert not config.mx.user_gave_filter


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[mx]\nrecipe = 'auto'\n", "Invalid field names.*recipe"),
        ("[mx]\nrecipe_name = 'mxfp9'\n", "mx.recipe_name is 'mxfp9'"),
        ("[mx]\nwgrad = 8\n", "mx.wgrad is 8"),
        ("[mx]\ndense = 'yes'\n", "mx.dense is 'yes'"),
        ("[mx]\nhealth_every = -1\n", "mx.health_every is -1, needs a whole number"),
        ("[mx]\nhealth_every = 'often'\n", "mx.health_every is 'often'"),
    ],
)
def test_typos_and_wrong_values_in_toml_are_refused(tmp_path, toml, message):
    with pytest.raises((ValueError, TypeError), match=message):
        _parse(tmp_path, toml)


def test_fast_accumulation_is_refused_where_nothing_has_it():
    with pytest.raises(ValueError, match="gemm is own, but this project's kernels accumulate in full only"):
        MX(fast_accumulation=True, gemm="own")
    with pytest.raises(ValueError, match="recipe mxfp8_emulated always accumulates in full"):
        recipe_from(MX(fast_accumulation=True), "mxfp8_emulated")
    recipe = recipe_from(MX(fast_accumulation=True), "mxfp8_hopper")
    assert recipe.fast_accumulation
    assert recipe.gemm == "library"
