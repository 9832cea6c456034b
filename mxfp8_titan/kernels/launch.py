"""What every launcher checks before it allocates, without reading a tensor's values."""

import functools
import os
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from mxfp8_titan.format import BLOCK_SIZE, PLAIN, ROUNDINGS, SCALE_LAYOUTS

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_INT32_MAX = 2**31 - 1

DEBUG = os.environ.get("MXFP8_TITAN_DEBUG", "0") == "1"
"""Read group ends on the host and raise when they break the contract. Waits for the device on every call."""


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up. triton.cdiv and triton.next_power_of_2 cost the host 2 us a call, which adds up."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


@functools.cache
def multiprocessors(device: int) -> int:
    """How many a GPU has, by which programs that walk their work are counted. Asked for once, and kept.

    device: what Tensor.get_device() returns. Without a GPU, -1, two: the interpreter's programs walk too.
    """
    return 2 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count


def check_device(x: Tensor, name: str) -> None:
    """Raises: ValueError for a device that Triton's kernels do not run on."""
    if not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(
            f"{name} is on {x.device}, needs a CUDA device: this is a Triton kernel. On a CPU use "
            "mxfp8_titan.reference, or set TRITON_INTERPRET=1 before importing triton"
        )


def check_same_device(tensor: Tensor, name: str, x: Tensor, x_name: str) -> None:
    """Raises: ValueError for another device than x's, where a kernel would take its address for one of its own."""
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, needs {x.device}, where {x_name} is")


def check_source(x: Tensor, name: str, dims: tuple[int, ...]) -> None:
    """Raises: ValueError for another device or number of dims, TypeError for another dtype."""
    check_device(x, name)
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
    return groups, next_power_of_2(groups)


def can_load_words(x: Tensor) -> bool:
    """Whether x is bf16 in rows of 16-byte pieces, so that numbers can be read two at a time, eight to a load.

    Rows are also close enough for 32-bit offsets inside a tile of 128.
    """
    stride_t, stride_k = x.stride()[-2:]
    sizes = x.shape[-1] | stride_t | (x.stride(0) if x.ndim == 3 else 0) | x.data_ptr()
    return x.dtype == torch.bfloat16 and stride_k == 1 and sizes % 16 == 0 and abs(stride_t) < 2**24


def with_whole_rows(x: Tensor) -> Tensor:
    """x (rows, columns) itself if each row is contiguous, else a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


def new_tensor(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty contiguous tensor on x's device, for half of the host time of x.new_empty."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return torch.empty_strided(shape, strides[::-1], dtype=dtype, device=x.device)


_INTERPRETED = triton.knobs.runtime.interpret

_compiled: dict[tuple, CompiledKernel] = {}


def launch(
    kernel: triton.JITFunction,
    grid: int,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    constants: tuple,
    num_warps: int,
    maxnreg: int | None = None,
) -> None:
    """Runs `grid` programs of kernel(*tensors, *sizes, *constants) on the GPU of tensors[0].

    The same kernels as kernel[(grid,)](...) would pick, for less of the host's time: Triton's own path binds arguments
    by name, checks globals and asks each tensor for its type on every call. Kernels are compiled for what
    Triton specializes on (types, 16-byte pointers, integers that are 1 or multiples of 16), never for a token count.
    """
    if _INTERPRETED:
        kernel[(grid,)](*map(_without_e8m0, tensors), *sizes, *constants, num_warps=num_warps)
        return
    device = tensors[0].get_device()
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    key = (
        id(kernel),
        device,
        num_warps,
        maxnreg,
        constants,
        tuple([None if tensor is None else tensor.dtype for tensor in tensors]),
        tuple([pointer is None or pointer % 16 == 0 for pointer in pointers]),
        tuple([-1 if n == 1 else n & 15 == 0 if n <= _INT32_MAX else 2 + (n & 15 == 0) for n in sizes]),
    )
    compiled = _compiled.get(key)
    if compiled is not None and device == torch.cuda.current_device():
        stream = driver.active.get_current_stream(device)
        # Three hooks, which there are none of, come before the kernel's own arguments.
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *sizes, *constants,
        )  # fmt: skip
        return
    options = {"num_warps": num_warps} if maxnreg is None else {"num_warps": num_warps, "maxnreg": maxnreg}
    with torch.cuda.device(device):
        _compiled[key] = kernel[(grid,)](*map(_without_e8m0, tensors), *sizes, *constants, **options)


def _without_e8m0(tensor: Tensor | None) -> Tensor | None:
    """Triton has no name for E8M0; its bytes are uint8."""
    return tensor.view(torch.uint8) if tensor is not None and tensor.dtype == torch.float8_e8m0fnu else tensor


def register_op(schema: str, launcher: Callable, fake: Callable, cpu: Callable | None = None) -> None:
    """Makes `launcher` the op torch.ops.mxfp8_titan.<name of the schema>, traceable through `fake`.

    cpu: what runs on a CPU; without one `launcher` does, which refuses or is interpreted

    Defined without torch.library.custom_op, whose Python wrappers would add to the host time of every call.
    """
    name = "mxfp8_titan::" + schema.split("(", 1)[0]
    torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    if cpu is None:
        torch.library.impl(name, "CompositeExplicitAutograd", launcher)
    else:
        torch.library.impl(name, "CUDA", launcher)
        torch.library.impl(name, "CPU", cpu)
    torch.library.register_fake(name, fake)
