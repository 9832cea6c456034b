"""Which backend runs a recipe on this machine. The only file that reads device capability."""

import pkgutil
from dataclasses import dataclass

import torch

from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.job_config import AUTO, RECIPES

AUTO_ORDER = ("mxfp8_cublas_rceil", "mxfp8_hopper", "mxfp8_emulated_rceil")
"""What `auto` tries, fastest first; the last one runs anywhere."""

FAST_BACKENDS = {
    "mxfp8_cublas": "mxfp8_titan.backends.blackwell:BLACKWELL",
    "mxfp8_cublas_rceil": "mxfp8_titan.backends.blackwell:BLACKWELL",
    "mxfp8_hopper": "mxfp8_titan.backends.hopper:HOPPER",
}
"""Recipe name -> home of its backend, for the recipes with `capabilities` that this version has a backend for. Its file
is imported when it is picked, so that a backend can import this one to ask for the device."""


@dataclass(frozen=True)
class Device:
    """The machine as selection sees it. capability is None without an NVIDIA GPU."""

    name: str
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        if self.capability is None:
            return self.name
        major, minor = self.capability
        return f"{self.name} (sm{major}{minor})"


@dataclass(frozen=True)
class BackendChoice:
    """The recipe that runs (never `auto`), the backend that runs it, where, and one sentence that says why."""

    recipe_name: str
    backend: Backend
    device: Device
    why: str


def current_device() -> Device:
    """The current CUDA device, or the CPU."""
    if not torch.cuda.is_available():
        return Device("the CPU (no NVIDIA GPU)", None)
    return Device(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def select(recipe_name: str, device: Device) -> BackendChoice:
    """The backend for `recipe_name` on `device`; `auto` picks the recipe as well.

    Raises: ValueError when a named recipe cannot run there, with what it needs and the flag to use instead.
    """
    if recipe_name == AUTO:
        return _select_auto(device)
    needed = RECIPES[recipe_name].capabilities
    if not needed:
        return BackendChoice(recipe_name, REFERENCE, device, "emulation, for numerics and not for speed")
    if device.capability not in needed:
        raise ValueError(
            f"mx.recipe_name={recipe_name} needs a GPU of compute capability {_spell(needed)}, "
            f"and this machine has {device}. {_instead(recipe_name, device)}"
        )
    if recipe_name not in FAST_BACKENDS:
        raise ValueError(
            f"mx.recipe_name={recipe_name} has no backend in this version of mxfp8_titan, "
            f"though {device} could run it. {_instead(recipe_name, device)}"
        )
    return BackendChoice(recipe_name, _fast_backend(recipe_name), device, f"named, and {device} runs it")


def _fast_backend(recipe_name: str) -> Backend:
    return pkgutil.resolve_name(FAST_BACKENDS[recipe_name])


def _select_auto(device: Device) -> BackendChoice:
    passed_over = ""
    for name in AUTO_ORDER:
        needed = RECIPES[name].capabilities
        if name in FAST_BACKENDS and device.capability in needed:
            return BackendChoice(name, _fast_backend(name), device, f"auto: the fastest recipe for {device}")
        if device.capability in needed:
            passed_over = f"{name} suits {device}, but this version has no backend for it yet"
    passed_over = passed_over or f"no recipe uses MX or FP8 tensor cores on {device}"
    why = f"auto: {passed_over}, so MXFP8 is emulated (for numerics, not for speed)"
    return BackendChoice(AUTO_ORDER[-1], REFERENCE, device, why)


def _instead(recipe_name: str, device: Device) -> str:
    same_rounding = next(
        name
        for name, recipe in RECIPES.items()
        if not recipe.capabilities and recipe.rounding == RECIPES[recipe_name].rounding
    )
    return (
        f"Use --mx.recipe_name={AUTO} to run here (it picks {_select_auto(device).recipe_name}), "
        f"or --mx.recipe_name={same_rounding} to emulate the same rounding."
    )


def _spell(capabilities: tuple[tuple[int, int], ...]) -> str:
    return " or ".join(f"{major}.{minor} (sm{major}{minor})" for major, minor in capabilities)
