"""Every flag set wrong once: one clear line and a non-zero exit, before a process group or a GPU is touched."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest
from torchtitan.hf_datasets.text_datasets import DATASETS

from mxfp8_titan import preflight
from mxfp8_titan import train as entry
from mxfp8_titan.job_args import add_config_hook
from mxfp8_titan.job_config import MX as Settings
from tests.train.harness import DEBUG, ROOT, entry_args

MX = "--model.converters=mx"
WORKER = "--training.dataloader.num_workers=1"
AC = "--activation_checkpoint.mode=selective"


def _start(args):
    """What mxfp8_titan.train does before it trains."""
    try:
        args = add_config_hook(args)
    except entry.REFUSALS as error:
        entry.refuse(error)
    entry.check_or_refuse(entry.parse_or_refuse(args))


def _refused(capsys, *flags, config=DEBUG):
    with pytest.raises(SystemExit) as stopped:
        _start(["--job.config_file", str(config), *flags])
    assert stopped.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.converters=mxx"], "model.converters is 'mxx', needs one of: .*mx.*Did you mean mx?"),
        (['--model.converters="mx"'], "left over from shell quoting"),
        (
            ["--model.flavor=debugmodle"],
            "model.flavor of llama4 is 'debugmodle', needs one of: .*Did you mean debugmodel",
        ),
        (["--model.name=llama5"], "llama5"),
        (["--training.dataset=local_txt"], "training.dataset is 'local_txt', needs one of: .*Did you mean local_text"),
        ([MX, "--mx.recipe_name=mxfp8"], "mxfp8.*mxfp8_cublas_rceil"),
        ([MX, "--mx.recipe_name=mxfp8_cublas"], "needs a GPU of compute capability 10.0.*--mx.recipe_name=auto"),
        ([MX, "--mx.filter_fqns=lm_head"], "'lm_head' matches no dense linear"),
        ([MX, "--mx.filter_fqns=output,"], "empty entry; remove the extra comma"),
        ([MX, "--mx.moe_fqns_prototype=exprts"], "'exprts' matches no expert module.*Near matches: experts"),
        ([MX, "--mx.no-dense"], "would convert nothing"),
        ([MX, "--mx.wgrad=fp8"], "fp8.*mxfp8.*bf16"),
        ([MX, "--mx.recipe=auto"], "mx.recipe"),
        (["--mx.dense=maybe"], "mx.no-dense|Unrecognized options"),
        (["--mx.health_every=-2"], "mx.health_every is -2, needs a whole number of steps from 1 up, or 0 for off"),
        (["--mx.health_every=often"], "health.every"),
        (["--mx.moe_fqn_prototype=experts"], "prototype=experts. Did you mean --mx.moe_fqns_prototype"),
        (["--mx.recipe_nam=auto"], "Did you mean --mx.recipe_name?"),
        (["--compile.enabel"], "Did you mean --compile.enable?"),
        (["--mx.no_dens=1", "--trainin.steps=3"], r"=3. Did you mean --mx.dense\? Did you mean --training.steps"),
        (["--training.step=3"], "error: Unrecognized options: --training.step=3. Did you mean --training.steps?"),
        (["--model.converters=mx,mx"], "model.converters is mx,mx, needs each name once"),
        (["--training.seq_len=-5"], "training.seq_len is -5, needs a whole number from 1 up"),
        (["--training.steps=0"], "training.steps is 0"),
        (["--metrics.log_freq=0"], "metrics.log_freq is 0"),
        (["--mx.trace_file=t.json", "--mx.trace_steps=20"], "mx.trace_steps is 20 .* a trace needs one step before it"),
        ([MX, "--mx.gemm=mine"], "mine.*'auto', 'library', 'own'"),
        ([MX, "--mx.fast_accumulation"], "mx.fast_accumulation is true, and recipe mxfp8_emulated_rceil"),
        ([MX, "--mx.fast_accumulation", "--mx.gemm=own"], "mx.fast_accumulation is true and mx.gemm is own"),
        ([MX, "--mx.moe_fqns_prototype=experts,shared_experts"], "'shared_experts' matches .*It names dense linears"),
        (["--mx.metrics_file=/tmp"], "mx.metrics_file is /tmp, needs a file"),
        (["--mx.trace_file=/dev/null/t.json"], "mx.trace_file is /dev/null/t.json, needs a place that can be written"),
        (["--mx.trace_steps=0"], "mx.trace_steps is 0, needs a whole number from 1 up"),
        (["--job.dump_folder=/dev/null"], "job.dump_folder is /dev/null, needs a folder"),
        (["--model.hf_assets_path=/no/such"], "model.hf_assets_path is /no/such, needs a folder with a tokenizer"),
        (["--training.dataset_path=/no/such"], "training.dataset_path is /no/such, needs a file or folder that exists"),
        (["--training.global_batch_size=3"], "training.global_batch_size is 3, needs a multiple of 4"),
        (["--training.global_batch_size=0"], "training.global_batch_size is 0"),
        (["--training.max_norm=-1"], "training.max_norm is -1.0, needs more than 0"),
        (["--training.seq_len=65"], "training.seq_len is 65, needs a multiple of 2"),
        (["--lr_scheduler.warmup_steps=-5"], "lr_scheduler.warmup_steps is -5"),
        (
            ["--training.dataloader.num_workers=-1"],
            "training.dataloader. cannot be used: num_workers option should be non",
        ),
        ([WORKER, "--training.dataloader.prefetch_factor=-2"], "training.dataloader. cannot be used: prefetch_factor"),
        ([WORKER, "--training.dataloader.prefetch_factor=0"], "prefetch_factor is 0, needs a whole number from 1 up"),
        (["--training.dataloader.num_worker=1"], "Did you mean --training.dataloader.num.workers?"),
        (["--optimizer.name=Lion"], "Optimizer Lion not added"),
        (["--optimizer.lr=-1"], "Invalid learning rate"),
        (["--optimizer.beta1=2"], "Invalid beta"),
        (["--optimizer.implementation=fast"], "fast.*'for-loop', 'foreach', 'fused'"),
        (["--activation_checkpoint.mode=half"], "half.*'selective', 'full'"),
        (["--activation_checkpoint.selective_ac_option=0", AC], "selective_ac_option is '0', needs op, or n"),
        (["--activation_checkpoint.selective_ac_option=all", AC], "selective_ac_option is 'all', needs op, or n"),
        (["--activation_checkpoint.mode=memory_budget"], "memory_budget, which needs --compile.enable"),
        (["--compile.enable", "--compile.backend=inductr"], "compile.backend is 'inductr'.*Did you mean inductor"),
        (
            ["--compile.enable", "--compile.components=modle"],
            "compile.components is 'modle', needs one of: loss, model",
        ),
        (["--profiling.enable_profiling"], "profiling.enable_profiling needs a GPU; --mx.trace_file"),
        (["--validation.enable"], "torchtitan 0.2.2 validates no model with sdpa attention"),
        (["--checkpoint.enable", "--checkpoint.initial_load_path=/no"], "initial_load_path is /no, needs a folder"),
        (["--parallelism.expert_parallel_degree=3"], "expert_parallel_degree is 3.* divide the 1 ranks"),
        (["--parallelism.context_parallel_degree=2"], "parallelism does not fit 1 processes: a degree is too large"),
        (["--parallelism.data_parallel_shard_degree=7"], "parallelism does not fit 1 processes.*dp_shard"),
        (["--parallelism.tensor_parallel_degree=0"], "parallelism does not fit.*>= 1"),
        (["--experimental.custom_import=no_such_module"], "no_such_module"),
        (["--job.custom_config_module=no_such_module"], "no_such_module"),
        (["--job.custom_config_module"], "--job.custom_config_module needs a value"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(flags, message, capsys):
    assert re.search(message, _refused(capsys, *flags))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[mx]\nfilter_fqn = "wk"\n', "mx.filter_fqn in the TOML is no setting of this job. Did you mean filter_fqns"),
        ("[training]\nstepz = 5\n", "training.stepz in the TOML is no setting of this job. Did you mean steps"),
        ("[trainin]\nsteps = 5\n", "trainin in the TOML is no setting of this job. Did you mean training"),
        ('[mx]\nrecipe_name = "fast"\n', "mx.recipe_name is 'fast'"),
        ('[model]\nconverters = "mx"\n', "model.converters is 'mx', needs list"),
        ("[model]\nconverters = 3\n", "model.converters is 3, needs list"),
        ("[model]\nflavor = 3\n", "model.flavor is 3, needs str"),
        ("[training]\nsteps = '5'\n", "training.steps is '5', needs int"),
        ('[training]\ndtype = "fp99"\n', "training.dtype is 'fp99', needs"),
        ("mx = 3\n", "mx is 3, needs a table"),
        ("[mx\n", "job.toml is no TOML: Expected"),
    ],
)
def test_a_wrong_toml_is_refused_by_name(toml, message, tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(toml)
    assert re.search(message, _refused(capsys, config=path))


@pytest.mark.parametrize(
    ("processes", "flags", "message"),
    [
        (16, ["--parallelism.expert_parallel_degree=16"], "is 16, needs a divisor of the 8 experts of layers.1.moe"),
        (2, ["--parallelism.expert_parallel_degree=4"], "needs 4 to divide the 2 ranks"),
        (3, ["--parallelism.tensor_parallel_degree=3", "--training.seq_len=96"], "is 3, needs a divisor of .* 16"),
        (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1f"], "schedule"),
    ],
)
def test_degrees_that_the_model_does_not_split_into_are_refused(processes, flags, message, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert re.search(message, _refused(capsys, *flags))


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(tmp_path, capsys):
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    flags = [f"--job.dump_folder={tmp_path}", "--checkpoint.enable", "--checkpoint.load_step=7"]
    assert re.search("load_step is 7, needs a checkpoint that exists in .*: step-5", _refused(capsys, *flags))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--mx.wgrad=bf16"], "mx.wgrad set but model.converters does not contain mx: nothing will be converted"),
        (["--mx.gemm=own", "--mx.no-dense"], "mx.dense, mx.gemm set but model.converters does not contain mx"),
        (["--mx.health_every=5"], "mx.health_every set but model.converters does not contain mx"),
        (["--mx.filter_fqns=output,router.gate,wk,wv"], "mx.filter_fqns set but"),
        ([MX, "--mx.gemm=own"], "mx.gemm is own but recipe mxfp8_emulated_rceil emulates"),
        (["--training.dataloader.persistent_workers"], "prefetch_factor are for workers, and num_workers is 0"),
        (["--training.dataloader.prefetch_factor=2"], "prefetch_factor are for workers, and num_workers is 0"),
        (["--mx.trace_steps=2"], "mx.trace_steps is set but mx.trace_file is not"),
        (
            ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=7"],
            "selective_ac_option is 7 and a process has 6 layers: nothing will be recomputed, take a number up to 6",
        ),
    ],
)
def test_a_setting_without_effect_is_said(flags, sentence, caplog):
    _start(["--job.config_file", str(DEBUG), *flags])
    assert sentence in caplog.text


def test_settings_that_have_their_effect_are_not_mentioned(caplog, tmp_path):
    selective = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=6"]
    observed = ["--mx.wgrad=bf16", f"--mx.metrics_file={tmp_path}/new/m.jsonl"]
    _start(["--job.config_file", str(DEBUG), MX, *selective, *observed])
    warnings = "".join(record.message for record in caplog.records if record.levelname == "WARNING")
    assert "mx." not in warnings
    assert "nothing will" not in warnings


# Each key of [mx] with values of every other kind, and with one that is near.
WRONG_VALUES = {
    "recipe_name": ["3", "true", "[]", '"mxfp8"', '"MXFP8_CUBLAS"'],
    "filter_fqns": ["3", "true", "[3]", '"wk,"', '["wk", ""]', "{a = 1}"],
    "moe_fqns_prototype": ["3", "true", "[3]", '"experts,"', '"exprts"'],
    "dense": ["3", '"yes"', "[]"],
    "wgrad": ["3", "true", '"fp8"'],
    "gemm": ["3", "true", '"mine"', "[]"],
    "fast_accumulation": ["3", '"yes"', "true"],
    "metrics_file": ["3", "true", '["a"]'],
    "trace_file": ["3", "true", "{}"],
    "trace_steps": ["0", "-1", "2.5", '"3"', "true"],
    "health_every": ["-1", "2.5", '"3"', "true"],
}


def test_there_is_a_wrong_value_for_every_key():
    assert set(WRONG_VALUES) == {field.name for field in fields(Settings)}


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_every_wrong_value_of_every_key_is_refused_by_name_on_one_line(key, tmp_path, capsys):
    path = tmp_path / "job.toml"
    for value in WRONG_VALUES[key]:
        path.write_text(f"[model]\nname = 'llama4'\nhf_assets_path = 'local_text'\n[mx]\n{key} = {value}\n")
        with pytest.raises(SystemExit) as stopped:
            _start(["--job.config_file", str(path), MX, "--training.dataset=local_text"])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert stopped.value.code == 2
        assert len(lines) == 1, value
        assert f"mx.{key}" in lines[0], value


def test_a_missing_toml_is_named(capsys):
    assert "no_such.toml" in _refused(capsys, config="no_such.toml")


def test_the_process_ends_with_code_2_and_one_line():
    command = [sys.executable, *entry_args(MX, "--mx.filter_fqns=lm_head")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: mx.filter_fqns entry 'lm_head' matches no dense linear of the model. Entries are whole dotted "
        "components, without wildcards. The last components there are: gate, output, w1, w2, w3, wk, wo, wq, wv."
    ]
    assert "Traceback" not in done.stderr + done.stdout


@pytest.fixture
def my_modules(tmp_path, monkeypatch):
    """A user's own config module and custom_import, importable."""
    (tmp_path / "my_config.py").write_text(
        "from dataclasses import dataclass, field\n@dataclass\nclass Mine:\n    x: int = 3\n"
        "@dataclass\nclass JobConfig:\n    mine: Mine = field(default_factory=Mine)\n"
    )
    (tmp_path / "my_plugin.py").write_text(
        "import mxfp8_titan.plugin\nfrom torchtitan.hf_datasets.text_datasets import DATASETS\n"
        "DATASETS.setdefault('mine', DATASETS['local_text'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    DATASETS.pop("mine", None)


@pytest.mark.parametrize("in_toml", [True, False])
def test_a_config_module_of_the_user_s_own_keeps_its_sections_and_gets_ours(in_toml, my_modules, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[mine]\nx = 5\n[job]\ncustom_config_module = "my_config"\n' if in_toml else "[mine]\nx = 5\n")
    flags = [] if in_toml else ["--job.custom-config-module", "my_config"]
    args = add_config_hook([f"--job.config-file={path}", *flags, "--mx.wgrad=bf16"])
    config = preflight.parse(args)
    assert (config.mine.x, config.mx.wgrad) == (5, "bf16")


def test_a_config_module_that_has_our_section_is_left_alone(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[job]\ncustom_config_module = "mxfp8_titan.job_config"\n')
    args = ["--job.config_file", str(path)]
    assert add_config_hook(args) == args
    assert add_config_hook([]) == ["--job.custom_config_module=mxfp8_titan.job_config"]


def test_what_the_user_s_custom_import_registers_may_be_named(my_modules):
    args = ["--job.config_file", str(DEBUG), "--experimental.custom_import=my_plugin", "--training.dataset=Mine"]
    preflight.check(preflight.parse(add_config_hook(args)))
