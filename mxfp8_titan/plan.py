"""`python -m mxfp8_titan.plan --job.config_file ... [flags]`: what would be converted, as a table.

Takes the same TOML and flags as training. Builds the model on the meta device: no GPU, no weights, no data.
"""

import sys
from typing import TYPE_CHECKING

from mxfp8_titan.train import REFUSALS, parse_or_refuse, prepare_host, refuse

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

    from mxfp8_titan.selection import Plan


def main() -> None:
    """Print the plan for the job on the command line."""
    prepare_host()
    from mxfp8_titan import preflight

    job_config = parse_or_refuse(sys.argv[1:])
    try:
        preflight.import_custom_module(job_config)
        model = preflight.meta_model(job_config)
        plan = preflight.conversion_plan(job_config, model)
    except REFUSALS as error:
        refuse(error)
    print(render(job_config, plan))


def render(job_config: "JobConfig", plan: "Plan") -> str:
    """The plan as a table with layer numbers folded, then the recipe that this machine would run."""
    from mxfp8_titan.selection import EXPERTS, LINEAR, fold_layer_numbers

    rows: dict[tuple[str, str, str, str], int] = {}
    for decision in plan.decisions:
        shape = " x ".join(map(str, decision.shape))
        precision = "MXFP8" if decision.converted else f"bf16: {decision.reason}"
        key = (fold_layer_numbers(decision.fqn), decision.kind, shape, precision)
        rows[key] = rows.get(key, 0) + 1
    table = [("module", "kind", "shape", "count", "precision")]
    table += [(name, kind, shape, str(count), precision) for (name, kind, shape, precision), count in rows.items()]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in table]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([
        f"{job_config.model.name} {job_config.model.flavor}",
        *lines,
        f"converted: {len(plan.converted(LINEAR))} linears, {len(plan.converted(EXPERTS))} expert modules",
        _recipe_line(job_config),
    ])  # fmt: skip


def _recipe_line(job_config: "JobConfig") -> str:
    from mxfp8_titan.backends.select import current_device, select

    name = job_config.mx.recipe_name
    try:
        choice = select(name, current_device())
    except ValueError as error:
        return f"recipe {name}: would stop on this machine. {error}"
    converts = "" if "mx" in job_config.model.converters else " (add --model.converters=mx to train with it)"
    return f"recipe {choice.recipe_name}: {choice.why}{converts}"


if __name__ == "__main__":
    main()
