"""Launches of Gluon kernels whose operands the copy engine (TMA) moves in boxes, for little of the host's time."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.compiler import CompiledKernel
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

MAX_MAPS = 4096
"""Tensor maps that are kept, of 128 bytes each."""


class Boxes(NamedTuple):
    """A matrix and the boxes it is moved in: what Triton's launcher asks of a tensor descriptor, and no checks.

    base: where the matrix starts, 16-byte aligned; its own shape does not matter
    strides: in elements; the first one a multiple of 16 bytes, the second one 1
    """

    base: Tensor
    shape: tuple[int, int]
    strides: tuple[int, int]
    block_shape: tuple[int, int]
    layout: NVMMASharedLayout
    padding: str = "zero"

    def checked(self) -> TensorDescriptor:
        """The same for Triton's own launch path."""
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape), self.layout)


class _Fast(NamedTuple):
    """A compiled kernel, Triton's C function that launches it, and the form of its tensor maps."""

    compiled: CompiledKernel
    launch: Callable
    map_forms: list[dict]


_fast: dict[tuple, _Fast] = {}
_maps: dict[tuple, list] = {}


def launch_with_boxes(
    kernel: triton.JITFunction,
    grid: int,
    boxes: tuple[Boxes, ...],
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    constants: tuple,
    num_warps: int,
) -> None:
    """Runs `grid` programs of kernel(*boxes, *tensors, *sizes, *constants, num_warps) on the GPU of boxes[0].

    As kernels.launch.launch does, this skips Triton's own path once a kernel is compiled. A tensor map is a function
    of pointer, shape, strides and form alone, so it is kept and used again when all of them come back.

    sizes: int32, which the kernel declares do_not_specialize, as it does the alignment of tensors
    """
    device = boxes[0].base.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_with_boxes(kernel, grid, boxes, tensors, sizes, constants, num_warps)
        return
    key = (
        id(kernel),
        device,
        constants,
        num_warps,
        tuple([(box.base.dtype, box.block_shape) for box in boxes]),
        tuple([None if tensor is None else tensor.dtype for tensor in tensors]),
    )
    fast = _fast.get(key)
    if fast is None:
        checked = [box.checked() for box in boxes]
        compiled = kernel[(grid,)](*checked, *tensors, *sizes, *constants, num_warps=num_warps)
        # Triton 3.6 wraps the C function in one that makes the maps of every call, 5 us each; the cell has its name.
        c_launch = inspect.getclosurevars(compiled.run.launch).nonlocals["launcher"]
        _fast[key] = _Fast(compiled, c_launch, compiled.metadata.tensordesc_meta)
        return
    compiled, c_launch, map_forms = fast
    maps = []
    for box, form in zip(boxes, map_forms, strict=True):
        map_key = box.base.data_ptr(), box.base.dtype, box.shape, box.strides, box.block_shape, device
        found = _maps.get(map_key)
        if found is None:
            if len(_maps) >= MAX_MAPS:
                _maps.clear()
            found = _maps[map_key] = make_tensordesc_arg(box, form)
        maps += found
    c_launch(
        grid, 1, 1, driver.active.get_current_stream(device), compiled.function,
        False, False, None, None, compiled.packed_metadata, None, None, None,
        *maps, *[None if tensor is None else tensor.data_ptr() for tensor in tensors], *sizes, *constants, num_warps,
    )  # fmt: skip
