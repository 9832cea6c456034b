"""What a run trained, from the line that its trainer logs, and the peak that its speed is held against."""

import json
import re
from dataclasses import dataclass

_LINE = "What is trained: "
_IN_BF16 = ("Linear", "GroupedExperts")
_EMULATION = "reference"
_GEMMS_PER_WEIGHT = 3
_FLOPS_PER_WEIGHT = 2 * _GEMMS_PER_WEIGHT

# NVIDIA's dense figures, without sparsity, in TFLOP/s: bf16, FP8. First match; the boards with a lower clock first.
PEAKS = {
    "H100 PCIe": (756, 1513),
    "H100 NVL": (835, 1671),
    "H200 NVL": (835, 1671),
    "H100": (989, 1979),
    "H200": (989, 1979),
    "B200": (2250, 4500),
    "B300": (2250, 4500),
    "A100": (312, None),
}


@dataclass(frozen=True)
class Inventory:
    """A run's modules. dense and experts: class -> (number, weights that multiply one token)."""

    flops_per_token: float
    dense: dict[str, tuple[int, int]]
    experts: dict[str, tuple[int, int]]
    recipe: str
    backend: str
    gemm: str
    """Whose GEMMs were asked for, and how they accumulate where not in full."""
    wgrad: str
    routing: str
    """real, forced-balanced, or none: the model has no experts."""

    @property
    def converted(self) -> str:
        """'30 of 46 linears, 3 of 3 expert modules', or 'nothing'."""
        said = []
        for modules, noun in ((self.dense, "linears"), (self.experts, "expert modules")):
            changed = sum(number for name, (number, _) in modules.items() if name not in _IN_BF16)
            if changed:
                said.append(f"{changed} of {sum(number for number, _ in modules.values())} {noun}")
        return ", ".join(said) or "nothing"

    @property
    def runs_on(self) -> str:
        """Recipe and backend of the converted modules, or the classes that another converter made."""
        if self.recipe:
            how = f"{self.recipe} on {self.backend}" + (f", GEMMs {self.gemm}" if self.backend != _EMULATION else "")
            return how + (", wgrad in bf16" if self.wgrad == "bf16" else "")
        return ", ".join(name for name in (*self.dense, *self.experts) if name not in _IN_BF16) or "bf16"

    def converted_share(self, modules: dict[str, tuple[int, int]]) -> float:
        """The part of these modules' GEMM FLOPs that is converted: two GEMMs of three where dw stays in bf16."""
        weights = sum(weights for _, weights in modules.values())
        changed = sum(weights for name, (_, weights) in modules.items() if name not in _IN_BF16)
        of_gemms = 2 / _GEMMS_PER_WEIGHT if self.wgrad == "bf16" else 1
        return of_gemms * changed / weights if weights else 0.0

    @property
    def fp8_share(self) -> float:
        """The part of the model's FLOPs that FP8 tensor cores do. Emulation multiplies in fp32 or bf16."""
        if self.backend == _EMULATION:
            return 0.0
        done = sum(
            self.converted_share(modules) * sum(weights for _, weights in modules.values())
            for modules in (self.dense, self.experts)
        )
        return min(1.0, _FLOPS_PER_WEIGHT * done / self.flops_per_token)


def read_inventory(log: str) -> Inventory:
    """From a run's log.

    Raises: ValueError when the trainer's line is missing.
    """
    line = next((line for line in log.splitlines() if _LINE in line), None)
    if line is None:
        raise ValueError(f"the log has no line {_LINE!r}: the run was not started by mxfp8_titan.train")
    return Inventory(**json.loads(line.partition(_LINE)[2]))


def tokens_per_step(log: str) -> int:
    """Tokens that all devices together see in a step, from the line with which torchtitan's Trainer starts."""
    line = next(line for line in log.splitlines() if "Trainer is initialized with local batch size" in line)
    batch, length = (int(re.search(rf"{what} (\d+)", line)[1]) for what in ("global batch size", "sequence length"))
    return batch * length


def peak(device: str, inventory: Inventory) -> tuple[str, float] | None:
    """(name, FLOP/s) of what `device` could reach with this mix of precisions: the FP8 part of the FLOPs at the FP8
    peak, the rest at the bf16 peak. None for an unknown device: no peak is better than another device's."""
    name = next((name for name in PEAKS if name in device), None)
    if name is None:
        return None
    bf16, fp8 = PEAKS[name]
    share = inventory.fp8_share
    if share == 0 or fp8 is None:
        return f"{name} bf16, {bf16:,} TFLOP/s", bf16 * 1e12
    mixed = 1 / (share / fp8 + (1 - share) / bf16)
    return f"{name} {100 * share:.0f} % FP8, {mixed:,.0f} TFLOP/s", mixed * 1e12
