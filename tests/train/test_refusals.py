"""Every flag set wrong once: one clear line and a non-zero exit, before a process group or a GPU is touched."""

import re
import subprocess
import sys

import pytest

from mxfp8_titan import train as entry
from tests.train.harness import DEBUG, ROOT

MX = "--model.converters=mx"


def _refused(capsys, *flags, config=DEBUG):
    with pytest.raises(SystemExit) as stopped:
        entry.check_or_refuse(entry.parse_or_refuse(entry.add_config_hook(["--job.config_file", str(config), *flags])))
    assert stopped.value.code not in (0, None)
    captured = capsys.readouterr()
    return " ".join((captured.err + captured.out).replace("│", " ").split())


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
    ],
)
def test_a_wrong_flag_is_refused_by_name(flags, message, capsys):
    assert re.search(message, _refused(capsys, *flags))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[mx]\nfilter_fqn = "wk"\n', "filter_fqn"),
        ('[mx]\nrecipe_name = "fast"\n', "mx.recipe_name is 'fast'"),
        ('[model]\nconverters = "mx"\n', "model.converters"),
        ("[mx\n", "job.toml|Expected"),
    ],
)
def test_a_wrong_toml_is_refused_by_name(toml, message, tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(toml)
    assert re.search(message, _refused(capsys, config=path))


def test_a_missing_toml_is_named(capsys):
    assert "no_such.toml" in _refused(capsys, config="no_such.toml")


def test_the_process_ends_with_code_2_and_one_line():
    command = [
        sys.executable,
        "-m",
        "mxfp8_titan.train",
        "--job.config_file",
        str(DEBUG),
        MX,
        "--mx.filter_fqns=lm_head",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: mx.filter_fqns entry 'lm_head' matches no dense linear of the model. Entries are whole dotted "
        "components, without wildcards. The last components there are: gate, output, w1, w2, w3, wk, wo, wq, wv."
    ]
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("toml", "flags", "hooked"),
    [
        ("", [], True),
        ('[job]\ncustom_config_module = "mine"\n', [], False),
        ("", ["--job.custom_config_module=mine"], False),
        ("", ["--job.custom-config-module", "mine"], False),
        ("[job\n", [], True),
    ],
)
def test_a_config_module_of_the_user_s_own_is_not_overridden(toml, flags, hooked, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(toml)
    for given in (["--job.config_file", str(path)], [f"--job.config-file={path}"]):
        args = entry.add_config_hook([*given, *flags])
        assert (entry.CONFIG_HOOK in args) is hooked
