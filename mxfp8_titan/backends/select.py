"""Which backend runs a recipe on this machine. The only file that reads device capability."""

from dataclasses import dataclass

import torch

from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.backends.reference import REFERENCE

EMULATED = ("mxfp8_emulated", "mxfp8_emulated_rceil")

NEEDED_CAPABILITIES = {
    "mxfp8_cublas": ((10, 0), (10, 3)),
    "mxfp8_cublas_rceil": ((10, 0), (10, 3)),
    "mxfp8_hopper": ((9, 0),),
}
"""Exact compute capabilities: sm120 counts as newer than sm100 but lacks its block-scaled tensor core path."""

FAST_BACKENDS: dict[str, Backend] = {}
"""Recipe -> backend, for the recipes in NEEDED_CAPABILITIES that this version brings a backend for."""


@dataclass(frozen=True)
class Device:
    """The machine as selection sees it. capability is None without an NVIDIA GPU."""

    name: str
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        return self.name if self.capability is None else f"{self.name} (sm{self.capability[0]}{self.capability[1]})"


@dataclass(frozen=True)
class Selection:
    """A recipe's name, the backend that runs it, and one sentence that says why."""

    recipe_name: str
    backend: Backend
    why: str


def current_device() -> Device:
    """The current CUDA device, or the CPU."""
    if not torch.cuda.is_available():
        return Device("CPU, no NVIDIA GPU", None)
    return Device(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def select(recipe_name: str, device: Device) -> Selection:
    """The backend for `recipe_name` on `device`; `auto` picks the recipe as well.

    Raises: ValueError when a named recipe cannot run there, with what it needs and the flag to use instead.
    """
    if recipe_name == "auto":
        return _select_auto(device)
    if recipe_name in EMULATED:
        return Selection(recipe_name, REFERENCE, "emulation runs on any device, for numerics and not for speed")
    needed = NEEDED_CAPABILITIES[recipe_name]
    if device.capability not in needed:
        raise ValueError(
            f"mx.recipe_name={recipe_name} needs a GPU of compute capability {_spell(needed)}, "
            f"and this machine has {device}. Use --mx.recipe_name=auto to run here."
        )
    if recipe_name not in FAST_BACKENDS:
        raise ValueError(
            f"mx.recipe_name={recipe_name} has no backend in this version of mxfp8_titan, "
            f"though {device} could run it. Use --mx.recipe_name=auto, which emulates it."
        )
    return Selection(recipe_name, FAST_BACKENDS[recipe_name], f"named, and {device} runs it")


def _select_auto(device: Device) -> Selection:
    fastest = next((name for name in ("mxfp8_cublas_rceil", "mxfp8_hopper")
                    if device.capability in NEEDED_CAPABILITIES[name]), None)  # fmt: skip
    if fastest in FAST_BACKENDS:
        return Selection(fastest, FAST_BACKENDS[fastest], f"auto: the fastest recipe for {device}")
    if fastest:
        why = f"auto: {fastest} suits {device}, but this version has no backend for it yet"
    else:
        why = f"auto: no recipe uses MX or FP8 tensor cores on {device}"
    return Selection("mxfp8_emulated_rceil", REFERENCE, f"{why}, so MXFP8 is emulated (slower than bf16)")


def _spell(capabilities: tuple[tuple[int, int], ...]) -> str:
    return " or ".join(f"{major}.{minor} (sm{major}{minor})" for major, minor in capabilities)
