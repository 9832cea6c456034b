"""`python -m mxfp8_titan.plan --job.config_file ... [flags]`: what would be converted, as a table.

Takes the same TOML and flags as training. Builds the model on the meta device: no GPU, no weights, no data.
"""

import sys

from mxfp8_titan.train import parsed_flags, prepare_host, refuse


def main() -> None:
    prepare_host()
    from mxfp8_titan import preflight

    job_config = parsed_flags(sys.argv[1:])
    try:
        model = preflight.meta_model(job_config)
        plan = preflight.conversion_plan(job_config, model)
    except (ValueError, TypeError) as error:
        refuse(error)
    print(render(job_config, plan))


def render(job_config, plan) -> str:
    """The plan as a table with layer numbers folded, then the recipe that this machine would run."""
    rows: dict[tuple[str, str, str, str], int] = {}
    for decision in plan.decisions:
        name = ".".join("*" if part.isdigit() else part for part in decision.fqn.split("."))
        shape = " x ".join(map(str, decision.shape))
        precision = "MXFP8" if decision.converted else f"bf16: {decision.reason}"
        key = (name, decision.kind, shape, precision)
        rows[key] = rows.get(key, 0) + 1
    table = [("module", "kind", "shape", "count", "precision")]
    table += [(name, kind, shape, str(count), precision) for (name, kind, shape, precision), count in rows.items()]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in table]
    lines.insert(1, "-" * max(map(len, lines)))
    converted = {kind: len(plan.converted(kind)) for kind in ("linear", "experts")}
    return "\n".join([
        f"{job_config.model.name} {job_config.model.flavor}",
        *lines,
        f"converted: {converted['linear']} linears, {converted['experts']} expert modules",
        _recipe_line(job_config),
    ])  # fmt: skip


def _recipe_line(job_config) -> str:
    from mxfp8_titan.backends.select import current_device, select

    name = job_config.mx.recipe_name
    try:
        selection = select(name, current_device())
    except ValueError as error:
        return f"recipe {name}: would stop on this machine. {error}"
    converts = "" if "mx" in job_config.model.converters else " (add --model.converters=mx to train with it)"
    return f"recipe {selection.recipe_name}: {selection.why}{converts}"


if __name__ == "__main__":
    main()
