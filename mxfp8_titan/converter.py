"""MXConverter, what `--model.converters=mx` runs: check, plan, swap, one summary."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version

import torch
import torchtitan
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import MoE
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from mxfp8_titan import health
from mxfp8_titan.backends.select import BackendChoice, current_device, select
from mxfp8_titan.job_config import MX, Recipe, recipe_from
from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from mxfp8_titan.modules.feed_forward import fuse_feed_forwards
from mxfp8_titan.modules.linear import MXFP8Linear
from mxfp8_titan.modules.moe import speed_up_token_moves
from mxfp8_titan.modules.saved_inputs import mark_saved_inputs
from mxfp8_titan.selection import EXPERTS, LINEAR, Plan, fold_layer_numbers, make_plan

MODELS = ("llama4", "llama3", "deepseek_v3", "qwen3")
"""torchtitan's models that this project is tested with."""


class MXConverter:
    """Swaps the selected dense linears and experts of a model for their MXFP8 classes, in place.

    Parameters stay the same objects, so that initialisation, optimizers, FSDP2 and checkpoints do not notice.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims | None) -> None:
        """Chooses the backend.

        Raises: ValueError when the [mx] section is missing or its recipe cannot run on this device.
        """
        self.mx = mx_section(job_config)
        self.model_name = job_config.model.name
        self.choice = select(self.mx.recipe_name, current_device())
        self.recipe = recipe_from(self.mx, self.choice.recipe_name)
        self.tensor_parallel_degrees = tensor_parallel_degrees(job_config)
        logger.info(f"MXFP8 recipe {self.recipe.name}: {self.choice.why}")

    def convert(self, model: nn.Module) -> None:
        """Converts `model` and logs the summary.

        Raises: ValueError as `make_plan` does.
        """
        plan = make_plan(model, self.mx, *self.tensor_parallel_degrees, self.recipe.max_features)
        swap(model, plan, self.recipe, self.choice)
        if self.mx.health_every:
            health.attach(model, utils.device_type)
        has_experts = any(isinstance(module, MoE) for module in model.modules())
        _save_forward_gemms_under_op_checkpointing(self.model_name, self.choice.backend.saved_ops, not has_experts)
        logger.info(summarize(plan, self.recipe, self.choice))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing, unless modules count what they lose: then in other rows from now on."""
        if self.mx.health_every:
            health.look_at_other_rows(model if isinstance(model, list) else [model])


def mx_section(job_config: JobConfig) -> MX:
    """The [mx] section.

    Raises: ValueError when torchtitan parsed its configuration without it.
    """
    mx = getattr(job_config, "mx", None)
    if not isinstance(mx, MX):
        raise ValueError(
            "model.converters contains mx but there is no [mx] section: add "
            "--job.custom_config_module=mxfp8_titan.job_config (or custom_config_module under the TOML's [job]); "
            "a config module of your own needs the field `mx` of mxfp8_titan.job_config.JobConfig"
        )
    return mx


def tensor_parallel_degrees(job_config: JobConfig) -> tuple[int, int]:
    """(degree that shards dense linears, degree that shards the experts' hidden dim), as torchtitan applies them."""
    parallelism = job_config.parallelism
    dense = parallelism.tensor_parallel_degree
    if parallelism.expert_parallel_degree > 1:
        return dense, parallelism.expert_tensor_parallel_degree
    return dense, dense


def swap(model: nn.Module, plan: Plan, recipe: Recipe, choice: BackendChoice) -> None:
    """Give each module that the plan converts its MXFP8 class, and the layers around them theirs."""
    for decision in plan.converted(LINEAR):
        MXFP8Linear.from_linear(model.get_submodule(decision.fqn), recipe, choice.backend)
    for decision in plan.converted(EXPERTS):
        MXFP8GroupedExperts.from_experts(model.get_submodule(decision.fqn), recipe, choice.backend)
        parent = model.get_submodule(decision.fqn.rpartition(".")[0])
        if isinstance(parent, MoE):
            speed_up_token_moves(parent)
    fuse_feed_forwards(model)
    mark_saved_inputs(model)


def summarize(plan: Plan, recipe: Recipe, choice: BackendChoice) -> str:
    """What was converted and what was not, a line a reason."""
    lines = [
        f"MXFP8: {len(plan.converted(LINEAR))} linears and {len(plan.converted(EXPERTS))} expert modules converted, "
        f"recipe={recipe.name} ({recipe.rounding}), wgrad={'mxfp8' if recipe.wgrad_in_mxfp8 else 'bf16'}, "
        f"backend={choice.backend.name}, device={choice.device}, torch {torch.__version__}, "
        f"triton {version('triton')}, torchtitan {torchtitan.__version__}"
    ]
    for reason, decisions in plan.kept().items():
        names = _distinct(fold_layer_numbers(decision.fqn) for decision in decisions)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"  kept in bf16: {len(decisions)} x {shown} ({reason})")
    return "\n".join(lines)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _save_forward_gemms_under_op_checkpointing(model_name: str, ops: Iterable[Callable], save: bool) -> None:
    """Tell torchtitan's `op` activation checkpointing whether to save these GEMMs' outputs, as it does aten.mm's.

    model_name: one of MODELS; another has no list that is known here, and nothing of ours is saved
    save: False for a model with experts. torchtitan compiles their layers in pieces, inside the checkpointed region,
        and what compiled code makes there is its own to overwrite: saved, it would come back as something else. And it
        does not save the experts' products in bf16 either, which are larger than all that it does save.

    The list is global to the process, so that the last conversion of a model decides; the host extends it at run time
    for its own ops too.
    """
    if model_name not in MODELS:
        return
    saved = import_module(f"torchtitan.models.{model_name}.infra.parallelize")._op_sac_save_list
    if save:
        saved.update(ops)
    else:
        saved.difference_update(ops)
