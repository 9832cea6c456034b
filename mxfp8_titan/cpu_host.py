"""Makes torchtitan 0.2.2 usable on a machine without a GPU: gloo, FSDP2, one process or more.

`install()` must run before torchtitan is imported. It replaces what torchtitan takes from a GPU, and no file of
torchtitan. Each replacement can go when torchtitan or torch does it by itself.
"""

import os
import sys
import types
from pathlib import Path

import torch


def install() -> None:
    """Point torchtitan at the CPU. Installing twice changes nothing more.

    Raises: RuntimeError on a machine with a GPU, or when torchtitan was imported for one already.
    """
    if torch.cuda.is_available():
        raise RuntimeError("cpu_host is for machines without a GPU, and this one has a GPU")
    utils = sys.modules.get("torchtitan.tools.utils")
    if utils is not None and utils.device_type != "cpu":
        raise RuntimeError("torchtitan was imported before cpu_host.install() and expects a GPU; install first")
    if utils is None:
        _choose_cpu_as_the_device()
        _count_integers_with_histc()
        sum_gradients_as_gloo_can()
        _permute_tokens_without_triton()
        _ignore_profiler_marks_in_checkpointing()


def _choose_cpu_as_the_device() -> None:
    """torchtitan.tools.utils asks torch once, at import, and takes cuda when there is no accelerator."""
    import torch._utils as torch_utils

    functions = torch_utils._get_available_device_type, torch_utils._get_device_module
    torch_utils._get_available_device_type = lambda: "cpu"
    torch_utils._get_device_module = lambda device_type: _device_module()
    try:
        import torchtitan.tools.utils  # noqa: F401
    finally:
        torch_utils._get_available_device_type, torch_utils._get_device_module = functions


def _device_module() -> types.SimpleNamespace:
    """torch.cpu and the functions that torchtitan's metrics expect of a device module."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    members = {name: getattr(torch.cpu, name) for name in torch.cpu.__all__}
    members.update(
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=total),
        memory_stats=lambda device=None: _memory_stats(),
        reset_peak_memory_stats=_reset_peak_memory,
        empty_cache=lambda: None,
    )
    return types.SimpleNamespace(**members)


def _memory_stats() -> dict[str, int]:
    """The process's peak resident memory, under the names of the CUDA caching allocator."""
    peak = 0
    status = Path("/proc/self/status")
    if status.exists():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
        peak = int(line.split()[1]) * 1024
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}


def _reset_peak_memory() -> None:
    clear = Path("/proc/self/clear_refs")
    if os.access(clear, os.W_OK):
        clear.write_text("5")


def _count_integers_with_histc() -> None:
    """The router counts tokens with torch.histc, which on a CPU takes no integers (torch 2.11 to 2.13)."""
    histc = torch.histc

    def histc_with_integers(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        if x.is_floating_point() or x.device.type != "cpu":
            return histc(x, bins=bins, min=min, max=max)
        return histc(x.double(), bins=bins, min=min, max=max).to(x.dtype)

    torch.histc = histc_with_integers


def sum_gradients_as_gloo_can() -> None:
    """FSDP2 scales inside the reduction (PREMUL_SUM) when a divide factor is set; gloo can only sum, on a GPU too."""
    from torch.distributed.fsdp import FSDPModule

    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum


def _permute_tokens_without_triton() -> None:
    """The permutation's Triton kernel has a PyTorch twin beside it."""
    from torchtitan.models.moe import kernels

    kernels.fill_indices_wrapper = kernels.fill_indices_cpu


def _ignore_profiler_marks_in_checkpointing() -> None:
    """torch 2.13 counts record_function ops when it replays a checkpointed region, and expert parallelism's
    all-to-all emits them unevenly: selective checkpointing then fails on them."""
    import torch.utils.checkpoint as checkpoint

    for packet in (torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit):
        checkpoint.SAC_IGNORED_OPS.update(getattr(packet, overload) for overload in packet.overloads())
