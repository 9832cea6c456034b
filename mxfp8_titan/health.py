"""--mx.health_every: what converted modules lose under aligned exponents, from their probes into metrics.

Each step every converted module looks at 64 rows of its operands, other ones after each optimizer step, so that over
steps all rows weigh the same. The counts stay on the device and add up until they are read.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mxfp8_titan.autograd.health import SAMPLES, Health
from mxfp8_titan.format import ALIGNMENT_COUNTS, BLOCK_SIZE

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and activation checkpointing add to names."""

PHASE_STEP = 40503
"""2**16 over the golden ratio: the phases of any number of steps in a row lie evenly."""


class Shares(NamedTuple):
    """What one operand of one module lost: underflows and saturated elements of its elements, zero blocks of its
    blocks."""

    fqn: str
    operand: str
    underflow: float
    zero_blocks: float
    saturated: float


KINDS = Shares._fields[2:]


def attach(model: nn.Module, device: torch.device | str) -> None:
    """Have each converted module of `model` count. Parameters, buffers and state dict stay as they are."""
    phase = torch.zeros((), dtype=torch.int64, device=device)
    for module in model.modules():
        if hasattr(module, "observed"):
            shape = len(module.observed), SAMPLES, ALIGNMENT_COUNTS
            probe = torch.zeros(shape, dtype=torch.float32, device=device, requires_grad=True)
            module.health = Health(probe, phase)


def look_at_other_rows(model_parts: list[nn.Module]) -> None:
    """To be called between steps. Nothing waits for the device."""
    # The modules of a part share their phase; pipelining copies a model for each part, and the phase with it.
    for part in model_parts:
        healths = (getattr(module, "health", None) for module in part.modules())
        first = next((health for health in healths if isinstance(health, Health)), None)
        if first is not None:
            first.phase.add_(PHASE_STEP)


def read(model_parts: list[nn.Module], group: ProcessGroup | None = None) -> list[Shares]:
    """What was lost since the last call, a line a module and operand, and start again. Waits for the device, once.

    group: ranks with the same modules and other data, whose counts are added; all of them call this
    """
    counting = _counting(model_parts)
    if not counting:
        return []
    # A module that did not run has no gradient, such as a linear of an MLP that runs as a whole; its zeros count.
    probes = [health.probe for _, _, health in counting]
    counts = torch.cat([probe.detach() if probe.grad is None else probe.grad for probe in probes])
    counts = counts.sum(1, dtype=torch.float64)
    if group is not None:
        torch.distributed.all_reduce(counts, group=group)
    for probe in probes:
        probe.grad = None
    names = [(fqn, operand) for fqn, observed, _ in counting for operand in observed]
    return [
        Shares(*name, underflows / elements, zero_blocks * BLOCK_SIZE / elements, saturated / elements)
        for name, (elements, underflows, zero_blocks, saturated) in zip(names, counts.tolist(), strict=True)
        if elements
    ]


def _counting(model_parts: list[nn.Module]) -> list[tuple[str, tuple[str, ...], Health]]:
    """(fqn, observed operands, health) of each module that counts, named as before it was wrapped."""
    found = {}
    for part in model_parts:
        for name, module in part.named_modules():
            health = getattr(module, "health", None)
            # A wrapper passes the attributes of its module on.
            if isinstance(health, Health) and id(health.probe) not in found:
                fqn = ".".join(piece for piece in name.split(".") if piece not in WRAPPERS)
                found[id(health.probe)] = fqn, module.observed, health
    return list(found.values())


def scalars(shares: list[Shares]) -> dict[str, float]:
    """For torchtitan's loggers: mx/<fqn>/<operand>_underflow, _zero_blocks and _saturated."""
    return {f"mx/{share.fqn}/{share.operand}_{kind}": getattr(share, kind) for share in shares for kind in KINDS}


def summary(shares: list[Shares]) -> str:
    """One line: the largest share of each kind, and whose it is."""
    modules = len({share.fqn for share in shares})
    worst = []
    for kind in KINDS:
        share = max(shares, key=lambda share: getattr(share, kind))
        value = getattr(share, kind)
        worst.append(f"{kind} {value:.2e}" + (f" ({share.fqn} {share.operand})" if value else ""))
    return f"MXFP8 health, the worst of {modules} modules: {', '.join(worst)}"
