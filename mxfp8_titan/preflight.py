"""Everything about a job that can be found wrong without a process group or a GPU, found before either is touched."""

import contextlib
import copy
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.model_converter import _registry_model_converter_cls as CONVERTERS
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype

from mxfp8_titan import host_checks, local_text, plugin  # noqa: F401 - the config names what plugin registers
from mxfp8_titan.backends.select import current_device, select
from mxfp8_titan.converter import mx_section, tensor_parallel_degrees
from mxfp8_titan.host_checks import known
from mxfp8_titan.job_args import read_toml
from mxfp8_titan.job_config import MX, RECIPES, Recipe, did_you_mean, recipe_from
from mxfp8_titan.selection import Plan, make_plan


def parse(args: list[str]) -> JobConfig:
    """torchtitan's configuration from its TOML and `args`.

    Raises: ValueError or TypeError for keys, values and command-line arguments it refuses, OSError for a file it
        cannot read; SystemExit after --help.
    """
    manager = ConfigManager()
    toml = read_toml(args)
    config_cls = manager._maybe_add_custom_config(args, toml)
    if toml:
        _check_names(config_cls, toml, "")
        # torchtitan puts the TOML's values where the annotations promise something else.
        _check_types(manager._dict_to_dataclass(config_cls, toml), "")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            config = manager.parse_args(args)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise ValueError(_text_of_box(printed.getvalue(), _flags(config_cls))) from None
    # Warnings go there too, before torchtitan sets its logging up.
    sys.stderr.write(printed.getvalue())
    return config


def _flags(config_cls: type, prefix: str = "--") -> Iterator[str]:
    """Every flag of the job."""
    for field in fields(config_cls):
        if is_dataclass(field.type):
            yield from _flags(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _text_of_box(box: str, flags: Iterable[str]) -> str:
    """What is wrong, and which flags may have been meant, from the titled box that tyro draws around an error; its
    lines are dashes where stdout is not UTF-8. For some of `--flag=value` it has no suggestion."""
    lines = [line.strip("╭╮╰╯│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]]
    parts = itertools.groupby(filter(None, lines), lambda line: set(line) <= {"─", "-"})
    sections = [list(section) for is_rule, section in parts if not is_rule]
    text = " ".join(sections[0]).removeprefix("Error parsing mx: ") if sections else box
    meant = [
        line.split()[0].rstrip(",")
        for section in sections[1:]
        if "meant" in section[0]
        for line in section
        if line[0] == "-"
    ]
    if meant:
        return f"{text}. Did you mean {', '.join(meant)}?"
    unknown = re.findall(r"(?<!\S)--[^=\s,]+", text) if text.startswith("Unrecognized options: ") else []
    known = list(flags)
    near = "".join(did_you_mean(flag, known) for flag in unknown)
    return f"{text}.{near}" if near else text


def _check_names(config_cls: type, toml: dict[str, Any], path: str) -> None:
    sections = {field.name: field.type for field in fields(config_cls)}
    for name, value in toml.items():
        if name not in sections:
            raise ValueError(f"{path}{name} in the TOML is no setting of this job.{did_you_mean(name, sections)}")
        if is_dataclass(sections[name]) and isinstance(value, dict):
            _check_names(sections[name], value, f"{path}{name}.")


def _check_types(config: Any, path: str) -> None:
    for field in fields(config):
        value, name = getattr(config, field.name), f"{path}{field.name}"
        if is_dataclass(field.type):
            if not is_dataclass(value):
                raise TypeError(f"{name} is {value!r}, needs a table: [{name}]")
            _check_types(value, f"{name}.")
        elif not _fits(value, field.type):
            raise TypeError(f"{name} is {value!r}, needs {getattr(field.type, '__name__', field.type)}")


def _fits(value: Any, kind: Any) -> bool:
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in options)
    if origin is Literal:
        return value in options
    if origin is list:
        return isinstance(value, list) and all(_fits(item, options[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def check(job_config: JobConfig) -> None:
    """Refuse a job that would fail after start-up.

    Raises: ValueError or TypeError that says which setting, what it got and what it needs; ImportError for a
        custom_import that cannot be imported.
    """
    import_custom_module(job_config)
    names = job_config.model.converters
    for name in names:
        known("model.converters", name, CONVERTERS)
    if len(set(names)) != len(names):
        raise ValueError(f"model.converters is {','.join(names)}, needs each name once")
    known("training.dataset", job_config.training.dataset.lower(), DATASETS)
    known("training.dtype", job_config.training.dtype, TORCH_DTYPE_MAP)
    _check_sizes(job_config)
    degrees = _check_degrees(job_config)
    model = meta_model(job_config)
    recipe = None
    if "mx" in names:
        mx = mx_section(job_config)
        recipe = recipe_from(mx, select(mx.recipe_name, current_device()).recipe_name)
        conversion_plan(job_config, model)
    host_checks.check(job_config, degrees, model)
    ours = _without_effect(getattr(job_config, "mx", None), recipe)
    for sentence in itertools.chain(ours, host_checks.without_effect(job_config, model)):
        logger.warning(sentence)


def _without_effect(mx: MX | None, recipe: Recipe | None) -> Iterator[str]:
    """A sentence for each setting of the [mx] section that changes nothing in this job."""
    if mx is None:
        return
    default = MX()
    given = [f.name for f in fields(MX) if getattr(mx, f.name) != getattr(default, f.name)]
    if mx.user_gave_filter and "filter_fqns" not in given:
        given.append("filter_fqns")
    observing = ("metrics_file", "trace_file", "trace_steps")
    converting = [f"mx.{name}" for name in given if name not in observing]
    if recipe is None and converting:
        yield f"{', '.join(converting)} set but model.converters does not contain mx: nothing will be converted"
    if recipe is not None and mx.gemm != default.gemm and not recipe.capabilities:
        yield f"mx.gemm is {mx.gemm} but recipe {recipe.name} emulates: it has one way to multiply, in plain PyTorch"
    if "trace_steps" in given and not mx.trace_file:
        yield "mx.trace_steps is set but mx.trace_file is not: nothing will be traced"


def import_custom_module(job_config: JobConfig) -> None:
    """Import experimental.custom_import: it may register converters, datasets, flavors and models that the job names.

    Raises: ImportError when it cannot be imported.
    """
    if job_config.experimental.custom_import:
        importlib.import_module(job_config.experimental.custom_import)


def _check_sizes(job_config: JobConfig) -> None:
    training, metrics = job_config.training, job_config.metrics
    sizes = {
        "training.seq_len": training.seq_len,
        "training.local_batch_size": training.local_batch_size,
        "training.steps": training.steps,
        "metrics.log_freq": metrics.log_freq,
        "checkpoint.interval": job_config.checkpoint.interval,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, needs a whole number from 1 up")
    mx = getattr(job_config, "mx", None)
    if mx and mx.trace_file and mx.trace_steps >= training.steps:
        raise ValueError(
            f"mx.trace_steps is {mx.trace_steps} and training.steps {training.steps}: a trace needs one step before it"
        )
    is_local = training.dataset.lower() == local_text.DATASET
    if is_local and training.dataset_path and not Path(training.dataset_path).exists():
        raise ValueError(f"training.dataset_path is {training.dataset_path}, needs a file or folder that exists")


def _check_degrees(job_config: JobConfig) -> ParallelDims | None:
    parallelism, training = job_config.parallelism, job_config.training
    if job_config.comm.mode != "default":
        # A dry run takes its world size from elsewhere.
        return None
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        degrees = ParallelDims(
            dp_shard=parallelism.data_parallel_shard_degree,
            dp_replicate=parallelism.data_parallel_replicate_degree,
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
            pp=parallelism.pipeline_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            etp=parallelism.expert_tensor_parallel_degree,
            world_size=world_size,
        )
    except AssertionError as error:
        raise ValueError(
            f"parallelism does not fit {world_size} processes: {str(error) or 'a degree is too large'}"
        ) from None
    ranks_with_data = degrees.dp_replicate * degrees.dp_shard
    per_pass = training.local_batch_size * ranks_with_data
    if training.global_batch_size > 0 and training.global_batch_size % per_pass != 0:
        raise ValueError(
            f"training.global_batch_size is {training.global_batch_size}, needs a multiple of {per_pass}: "
            f"local_batch_size {training.local_batch_size} x {ranks_with_data} data-parallel ranks"
        )
    return degrees


def meta_model(job_config: JobConfig) -> nn.Module:
    """The job's model with meta parameters, as torchtitan builds it before conversion.

    Raises: ValueError for an unknown model or flavor.
    """
    spec = get_train_spec(job_config.model.name)
    known(f"model.flavor of {job_config.model.name}", job_config.model.flavor, spec.model_args)
    # A copy: torchtitan writes the job into the flavor.
    model_args = copy.deepcopy(spec.model_args[job_config.model.flavor])
    model_args.update_from_config(job_config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(model_args)


def conversion_plan(job_config: JobConfig, model: nn.Module) -> Plan:
    """What the mx converter would do to `model`.

    Raises: ValueError as `make_plan` does.
    """
    mx = mx_section(job_config)
    return make_plan(model, mx, *tensor_parallel_degrees(job_config), _max_features(mx.recipe_name))


def _max_features(recipe_name: str) -> int | None:
    """That of the recipe this machine would run, or of the one named if it cannot."""
    with contextlib.suppress(ValueError):
        recipe_name = select(recipe_name, current_device()).recipe_name
    return RECIPES[recipe_name].max_features if recipe_name in RECIPES else None
