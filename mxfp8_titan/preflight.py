"""Everything about a job that can be found wrong without a process group or a GPU, found before either is touched."""

import copy

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.model_converter import _registry_model_converter_cls as CONVERTERS
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

from mxfp8_titan import plugin  # noqa: F401 - the config names what it registers
from mxfp8_titan.backends.select import current_device, select
from mxfp8_titan.converter import mx_section, tensor_parallel_degrees
from mxfp8_titan.job_config import did_you_mean
from mxfp8_titan.selection import Plan, make_plan


def parse(args: list[str]) -> JobConfig:
    """torchtitan's configuration from its TOML and `args`.

    Raises: ValueError or TypeError for keys and values it refuses, OSError for a file it cannot read; SystemExit
        for command-line arguments it refuses (it has printed why).
    """
    return ConfigManager().parse_args(args)


def check(job_config: JobConfig) -> None:
    """Refuse a job that would fail after start-up.

    Raises: ValueError or TypeError that says which setting, what it got and what it needs.
    """
    if isinstance(job_config.model.converters, str):
        raise TypeError(
            f'model.converters is the string {job_config.model.converters!r}, needs a list: converters = ["mx"]'
        )
    for name in job_config.model.converters:
        _known("model.converters", name, CONVERTERS)
    _known("training.dataset", job_config.training.dataset, DATASETS)
    model = meta_model(job_config)
    if "mx" in job_config.model.converters:
        select(mx_section(job_config).recipe_name, current_device())
        conversion_plan(job_config, model)


def meta_model(job_config: JobConfig) -> nn.Module:
    """The job's model with meta parameters, as torchtitan builds it before conversion.

    Raises: ValueError for an unknown model or flavor.
    """
    spec = get_train_spec(job_config.model.name)
    _known(f"model.flavor of {job_config.model.name}", job_config.model.flavor, spec.model_args)
    # A copy: torchtitan writes the job into the flavor.
    model_args = copy.deepcopy(spec.model_args[job_config.model.flavor])
    model_args.update_from_config(job_config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(model_args)


def conversion_plan(job_config: JobConfig, model: nn.Module) -> Plan:
    """What the mx converter would do to `model`.

    Raises: ValueError as `make_plan` does.
    """
    return make_plan(model, mx_section(job_config), *tensor_parallel_degrees(job_config))


def _known(setting: str, name: str, registered) -> None:
    if name not in registered:
        quotes = " It holds a quotation mark, left over from shell quoting." if set(name) & set("'\"") else ""
        raise ValueError(
            f"{setting} is {name!r}, needs one of: {', '.join(sorted(registered))}."
            f"{did_you_mean(name, registered)}{quotes}"
        )
