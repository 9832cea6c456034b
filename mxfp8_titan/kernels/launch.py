"""What every launcher checks before it allocates, without reading a tensor's values."""

import contextlib
import os
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE, PLAIN, ROUNDINGS, SCALE_LAYOUTS

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

DEBUG = os.environ.get("MXFP8_TITAN_DEBUG", "0") == "1"
"""Read group ends on the host and raise when they break the contract. Waits for the device on every call."""


def check_source(x: Tensor, name: str, dims: tuple[int, ...]) -> None:
    """Raises: ValueError for another device or number of dims, TypeError for another dtype."""
    if not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(
            f"{name} is on {x.device}, needs a CUDA device: this is a Triton kernel. On a CPU use "
            "mxfp8_titan.reference, or set TRITON_INTERPRET=1 before importing triton"
        )
    if x.dtype not in SOURCE_DTYPES:
        raise TypeError(f"{name} is {x.dtype}, needs float32, bfloat16 or float16")
    if x.ndim not in dims:
        raise ValueError(f"{name} is {tuple(x.shape)}, needs {' or '.join(map(str, dims))} dims")


def check_blocks(size: int, name: str) -> None:
    """Raises: ValueError when a dim that blocks run along does not hold whole blocks."""
    if size % BLOCK_SIZE:
        raise ValueError(f"{name} is {size}, needs a multiple of {BLOCK_SIZE}: blocks of {BLOCK_SIZE} run along it")


def check_choices(rounding: str, scale_layout: str = PLAIN) -> None:
    """Raises: ValueError for an unknown rounding or scale layout."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}, needs one of {', '.join(ROUNDINGS)}")
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f"scale_layout is {scale_layout!r}, needs one of {', '.join(SCALE_LAYOUTS)}")


def check_groups(group_ends: Tensor | None, x: Tensor, tokens: int, multiple: int = 1) -> tuple[int, int]:
    """(number of groups, the power of two the kernel is compiled for); (0, 0) without groups.

    multiple: what every size must be a multiple of; looked at only under MXFP8_TITAN_DEBUG=1
    Raises: TypeError for another dtype, ValueError for another shape or device, or (debug) ends that break the rules.
    """
    if group_ends is None:
        return 0, 0
    if group_ends.dtype != torch.int32:
        raise TypeError(f"group_ends is {group_ends.dtype}, needs int32: cumsum(..., dtype=torch.int32)")
    if group_ends.ndim != 1 or not group_ends.is_contiguous() or group_ends.shape[0] == 0:
        raise ValueError(f"group_ends is {tuple(group_ends.shape)}, needs one contiguous dim with a group or more")
    if group_ends.device != x.device:
        raise ValueError(f"group_ends is on {group_ends.device}, needs {x.device}, where the tokens are")
    if DEBUG:
        ends = group_ends.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        if min(sizes) < 0 or ends[-1] > tokens or any(size % multiple for size in sizes):
            raise ValueError(
                f"group_ends is {ends}, needs non-decreasing ends up to {tokens} tokens, "
                f"with sizes that are multiples of {multiple}"
            )
    groups = group_ends.shape[0]
    return groups, triton.next_power_of_2(groups)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes x's GPU current, where Triton launches; free when it already is."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def register_op(schema: str, launcher: Callable, fake: Callable) -> None:
    """Makes `launcher` the op torch.ops.mxfp8_titan.<name of the schema>, traceable through `fake`.

    Defined without torch.library.custom_op, whose Python wrappers cost a call more than the launch itself.
    """
    name = "mxfp8_titan::" + schema.split("(", 1)[0]
    torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "CompositeExplicitAutograd", launcher)
    torch.library.register_fake(name, fake)
