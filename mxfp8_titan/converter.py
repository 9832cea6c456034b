"""MXConverter, what `--model.converters=mx` runs: check, plan, swap, one summary."""

from importlib.metadata import version
from operator import attrgetter

import torch
from torch import nn
from torchtitan.tools.logging import logger

from mxfp8_titan.backends.select import Selection, current_device, select
from mxfp8_titan.job_config import MX, Recipe, recipe_from
from mxfp8_titan.modules.experts import MXFP8GroupedExperts
from mxfp8_titan.modules.linear import MXFP8Linear
from mxfp8_titan.selection import EXPERTS, LINEAR, Plan, make_plan


class MXConverter:
    """Swaps the selected dense linears and experts of a model for their MXFP8 classes, in place.

    Parameters stay the same objects, so that initialisation, optimizers, FSDP2 and checkpoints do not notice.
    """

    def __init__(self, job_config, parallel_dims) -> None:
        """
        Raises: ValueError when the [mx] section is missing or its recipe cannot run on this device.
        """
        self.mx = mx_section(job_config)
        self.selection = select(self.mx.recipe_name, current_device())
        self.recipe = recipe_from(self.mx, self.selection.recipe_name)
        self.plan_degrees = tensor_parallel_degrees(job_config)
        logger.info(f"MXFP8 recipe {self.recipe.name}: {self.selection.why}")

    def convert(self, model: nn.Module) -> None:
        """
        Raises: ValueError as `make_plan` does.
        """
        plan = make_plan(model, self.mx, *self.plan_degrees)
        swap(model, plan, self.recipe, self.selection)
        _save_forward_gemms_under_selective_checkpointing(self.selection)
        logger.info(summarize(plan, self.recipe, self.selection))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: no state is kept between steps."""


def mx_section(job_config) -> MX:
    """The [mx] section.

    Raises: ValueError when torchtitan parsed its configuration without it.
    """
    mx = getattr(job_config, "mx", None)
    if not isinstance(mx, MX):
        raise ValueError(
            "model.converters contains mx but there is no [mx] section: add "
            "--job.custom_config_module=mxfp8_titan.job_config (or custom_config_module under the TOML's [job])"
        )
    return mx


def tensor_parallel_degrees(job_config) -> tuple[int, int]:
    """(degree that shards dense linears, degree that shards the experts' hidden dim), as torchtitan applies them."""
    parallelism = job_config.parallelism
    dense = parallelism.tensor_parallel_degree
    if parallelism.expert_parallel_degree > 1:
        return dense, parallelism.expert_tensor_parallel_degree
    return dense, dense


def swap(model: nn.Module, plan: Plan, recipe: Recipe, selection: Selection) -> None:
    """Give each module that the plan converts its MXFP8 class."""
    for decision in plan.converted(LINEAR):
        MXFP8Linear.from_linear(attrgetter(decision.fqn)(model), recipe, selection.backend)
    for decision in plan.converted(EXPERTS):
        MXFP8GroupedExperts.from_experts(model.get_submodule(decision.fqn), recipe, selection.backend)


def summarize(plan: Plan, recipe: Recipe, selection: Selection) -> str:
    """What was converted and what was not, a line a reason."""
    lines = [
        f"MXFP8: {len(plan.converted(LINEAR))} linears and {len(plan.converted(EXPERTS))} expert modules converted, "
        f"recipe={recipe.name} ({recipe.rounding}), wgrad={'mxfp8' if recipe.wgrad_in_mxfp8 else 'bf16'}, "
        f"backend={selection.backend.name}, device={current_device()}, torch {torch.__version__}, "
        f"triton {version('triton')}, torchtitan {version('torchtitan')}"
    ]
    for reason, decisions in plan.kept().items():
        names = collapse_layers(d.fqn for d in decisions)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"  kept in bf16: {len(decisions)} x {shown} ({reason})")
    return "\n".join(lines)


def collapse_layers(fqns) -> list[str]:
    """Names with their layer numbers folded: layers.0.attention.wk, layers.1.attention.wk -> layers.*.attention.wk."""
    folded = {".".join("*" if part.isdigit() else part for part in fqn.split(".")): None for fqn in fqns}
    return list(folded)


def _save_forward_gemms_under_selective_checkpointing(selection: Selection) -> None:
    """Tell torchtitan's `op` activation checkpointing to save these GEMMs' outputs, as it does for aten.mm.

    The host extends the same set at run time for its own communication ops.
    """
    from torchtitan.models.llama4.infra.parallelize import _op_sac_save_list

    _op_sac_save_list.update(selection.backend.forward_ops())
