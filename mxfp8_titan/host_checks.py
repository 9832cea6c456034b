"""What torchtitan finds wrong with a job only after its processes have started, or never, found before.

Each check asks what torchtitan, torch or the file system would be asked later, so that there is no second list of
allowed values to keep up; where that is not possible, the range is written here.
"""

import math
import os
import warnings
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.train_spec import get_train_spec

from mxfp8_titan import checkpoint_checks, local_text
from mxfp8_titan.backends.select import current_device
from mxfp8_titan.job_config import did_you_mean


def check(job_config: JobConfig, degrees: ParallelDims | None, model: nn.Module) -> None:
    """Refuse what torchtitan would stop at later.

    degrees: how the processes are split; None when that is not known
    model: the job's, on the meta device
    Raises: ValueError that says which setting, what it got and what it needs.
    """
    _check_training(job_config, degrees)
    _check_recomputation_and_compilation(job_config)
    if degrees is not None:
        _check_parallelism(job_config, degrees, model)
    _check_files(job_config)
    checkpoint_checks.check(job_config, degrees)
    _check_what_the_host_cannot_do(job_config, model)


def without_effect(job_config: JobConfig, model: nn.Module) -> Iterator[str]:
    """A sentence for each setting of the host's that changes nothing in this job."""
    loader = job_config.training.dataloader
    if loader.num_workers == 0 and (loader.persistent_workers or loader.prefetch_factor is not None):
        yield (
            "training.dataloader.persistent_workers and prefetch_factor are for workers, and num_workers is 0: text "
            "will be loaded in the step"
        )
    # torchtitan recomputes every n-th layer of a process.
    checkpointing = job_config.activation_checkpoint
    every = checkpointing.selective_ac_option
    if checkpointing.mode == "selective" and every.isdecimal():
        layers = math.ceil(len(model.layers) / job_config.parallelism.pipeline_parallel_degree)
        if int(every) > layers:
            yield (
                f"activation_checkpoint.selective_ac_option is {every} and a process has {layers} layers: nothing will "
                f"be recomputed, take a number up to {layers}, or op"
            )


def _check_training(job_config: JobConfig, degrees: ParallelDims | None) -> None:
    training, warmup = job_config.training, job_config.lr_scheduler.warmup_steps
    if training.max_norm <= 0:
        raise ValueError(f"training.max_norm is {training.max_norm}, needs more than 0 (a large number: no clipping)")
    if warmup < 0:
        raise ValueError(f"lr_scheduler.warmup_steps is {warmup}, needs a whole number from 0 up")
    if training.global_batch_size == 0:
        raise ValueError("training.global_batch_size is 0, needs a whole number from 1 up, or -1 for one microbatch")
    _check_loader(asdict(training.dataloader))
    builder = get_train_spec(job_config.model.name).build_optimizers_fn
    if degrees is not None and builder in (build_optimizers, build_optimizers_with_moe_load_balancing):
        try:
            build_optimizers([nn.Linear(1, 1)], job_config.optimizer, degrees)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"[optimizer] cannot be used: {error}") from None


def _check_loader(settings: dict[str, Any]) -> None:
    if settings["num_workers"] > 0 and settings["prefetch_factor"] == 0:
        raise ValueError("training.dataloader.prefetch_factor is 0, needs a whole number from 1 up")
    try:
        with warnings.catch_warnings():
            # The job itself will say that there are more workers than cores.
            warnings.simplefilter("ignore")
            ParallelAwareDataloader([], dp_rank=0, dp_world_size=1, **settings)
    except ValueError as error:
        raise ValueError(f"[training.dataloader] cannot be used: {error}") from None


def _check_recomputation_and_compilation(job_config: JobConfig) -> None:
    checkpointing, compiling = job_config.activation_checkpoint, job_config.compile
    option = checkpointing.selective_ac_option
    if checkpointing.mode == "selective" and option != "op" and not (option.isdecimal() and int(option) > 0):
        raise ValueError(
            f"activation_checkpoint.selective_ac_option is {option!r}, needs op, or n for every n-th layer"
        )
    compiles_model = compiling.enable and "model" in compiling.components
    if checkpointing.mode == "memory_budget" and not compiles_model:
        raise ValueError("activation_checkpoint.mode is memory_budget, which needs --compile.enable")
    for name in compiling.components:
        known("compile.components", name, ("model", "loss"))
    if compiling.enable:
        known("compile.backend", compiling.backend, torch.compiler.list_backends(exclude_tags=()))


def _check_parallelism(job_config: JobConfig, degrees: ParallelDims, model: nn.Module) -> None:
    seq_len, divisor = job_config.training.seq_len, degrees.seq_len_divisor
    if seq_len % divisor:
        raise ValueError(
            f"training.seq_len is {seq_len}, needs a multiple of {divisor}: 2 x context parallel degree {degrees.cp} x "
            f"tensor parallel degree {degrees.tp}"
        )
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(model.model_args, name, None)
        if heads and heads % degrees.tp:
            raise ValueError(
                f"parallelism.tensor_parallel_degree is {degrees.tp}, needs a divisor of the model's {heads} ({name})"
            )
    if degrees.ep > 1:
        ranks, of_experts = degrees.dp_shard * degrees.cp * degrees.tp, degrees.ep * degrees.etp
        if ranks % of_experts:
            raise ValueError(
                f"parallelism.expert_parallel_degree is {degrees.ep}, which with expert_tensor_parallel_degree "
                f"{degrees.etp} needs {of_experts} to divide the {ranks} ranks that share one copy of the model"
            )
        for fqn, module in model.named_modules():
            if isinstance(module, GroupedExperts) and module.num_experts % degrees.ep:
                raise ValueError(
                    f"parallelism.expert_parallel_degree is {degrees.ep}, needs a divisor of the "
                    f"{module.num_experts} experts of {fqn}"
                )
    if degrees.pp > 1 and not job_config.parallelism.pipeline_parallel_schedule_csv:
        try:
            get_schedule_class(job_config.parallelism.pipeline_parallel_schedule)
        except ValueError as error:
            raise ValueError(f"parallelism.pipeline_parallel_schedule cannot be used: {error}") from None


def _check_files(job_config: JobConfig) -> None:
    _check_can_be_written("job.dump_folder", Path(job_config.job.dump_folder), is_folder=True)
    mx = getattr(job_config, "mx", None)
    for name in ("metrics_file", "trace_file"):
        if mx and getattr(mx, name):
            _check_can_be_written(f"mx.{name}", Path(getattr(mx, name)), is_folder=False)
    assets, spec = job_config.model.hf_assets_path, get_train_spec(job_config.model.name)
    if spec.build_tokenizer_fn and assets != local_text.TOKENIZER_PATH and not Path(assets).is_dir():
        raise ValueError(
            f"model.hf_assets_path is {assets}, needs a folder with a tokenizer, or {local_text.TOKENIZER_PATH} for "
            "one trained on local text"
        )


def _check_can_be_written(name: str, path: Path, is_folder: bool) -> None:
    """`path` itself if it exists, else the nearest folder above it that does: there it will be made."""
    if path.exists() and path.is_dir() != is_folder:
        raise ValueError(f"{name} is {path}, needs a {'folder' if is_folder else 'file'}")
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if (nearest != path.absolute() and not nearest.is_dir()) or not os.access(nearest, os.W_OK):
        raise ValueError(f"{name} is {path}, needs a place that can be written: {nearest} cannot")


def _check_what_the_host_cannot_do(job_config: JobConfig, model: nn.Module) -> None:
    if job_config.profiling.enable_profiling and current_device().capability is None:
        raise ValueError("profiling.enable_profiling needs a GPU; --mx.trace_file traces without one")
    # Its validator hands every model attention masks, which this kind of attention refuses.
    if job_config.validation.enable and getattr(model.model_args, "attn_type", None) == "sdpa":
        raise ValueError(
            f"validation.enable cannot be used: torchtitan 0.2.2 validates no model with sdpa attention, such as "
            f"{job_config.model.name} {job_config.model.flavor}"
        )


def known(setting: str, name: str, allowed: Collection[str]) -> None:
    """Refuse a `name` that is none of `allowed`.

    Raises: ValueError with the allowed ones and near matches.
    """
    if name not in allowed:
        quotes = " It holds a quotation mark, left over from shell quoting." if set(name) & set("'\"") else ""
        raise ValueError(
            f"{setting} is {name!r}, needs one of: {', '.join(sorted(allowed))}.{did_you_mean(name, allowed)}{quotes}"
        )
