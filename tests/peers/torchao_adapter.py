"""torchao 0.18.0's own tests, loaded from its wheel to run on a CPU with this project's functions in place of its own.

Their tests are written for a GPU, and most of their files refuse to be imported without one. A file is imported here
while torch says that it has an sm100; then the names under test are replaced in it, and its tests run with every
"cuda" read as "cpu". What a result is compared with stays torchao's: to_mx, to_blocked, torch_to_blocked_*,
tensor_to_scale. Kernels of this project are its references here, which its own tests hold equal to them.

No line of torchao is in this repository: it is read where TORCHAO_TESTS says.
"""

import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.format import BLOCK_SIZE, FLOOR, RCEIL, blocked_shape
from mxfp8_titan.job_config import RECIPES, Recipe
from mxfp8_titan.modules.linear import MXFP8Linear
from mxfp8_titan.reference.gemm import gemm
from mxfp8_titan.reference.grouped_gemm import group_bounds, grouped_gemm
from mxfp8_titan.reference.quantize import Quantized, quantize_along_k, quantize_along_n, quantize_along_t
from mxfp8_titan.reference.quantize_32x32 import quantize_32x32_both
from mxfp8_titan.reference.quantize_aligned import quantize_aligned_along_k, quantize_aligned_along_t
from mxfp8_titan.reference.scale_swizzle import swizzle, swizzle_k_groups, swizzle_per_expert, swizzle_t_groups

VERSION = "0.18.0"

IMPORTED_BEFOREHAND = (
    "torchao.prototype.moe_training.kernels",
    "torchao.prototype.moe_training.kernels.mxfp8",
    "torchao.prototype.moe_training.mxfp8_grouped_mm",
    "torchao.prototype.moe_training.mxfp8_linear",
    "torchao.prototype.moe_training.tensor",
    "torchao.prototype.mx_formats.kernels",
)
"""What the test files import of torchao: it must not see the pretended GPU."""

COMPARISONS = {torch.eq, torch.equal, torch.allclose, torch.isclose, Tensor.eq, Tensor.equal, Tensor.__eq__}


def missing() -> str:
    """Why torchao's tests cannot run here, or nothing. Imports nothing."""
    folder = os.environ.get("TORCHAO_TESTS")
    if not folder:
        return (
            f"TORCHAO_TESTS names no folder: unzip torchao=={VERSION}'s wheel (it holds torchao's tests) and name the "
            "folder in it"
        )
    absent = [name for name in ("torchao", "test/prototype/moe_training") if not Path(folder, name).is_dir()]
    return f"TORCHAO_TESTS is {folder}, which has no {' and no '.join(absent)}" if absent else ""


class OnCpu(TorchFunctionMode):
    """Reads "cuda" as "cpu", and compares 1-byte floats as bytes, because a CPU cannot compare them all.

    Bytes are the stricter measure: -0 is not 0.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        args = tuple(_cpu(value) for value in args)
        if func in COMPARISONS:
            args = tuple(_bytes(value) for value in args)
        return func(*args, **kwargs)


def _cpu(value):
    return "cpu" if isinstance(value, str) and value == "cuda" else value


def _bytes(value):
    is_byte = isinstance(value, Tensor) and value.dtype.is_floating_point and value.element_size() == 1
    return value.view(torch.uint8) if is_byte else value


def load(file: str, replaced: dict[str, object]) -> types.ModuleType:
    """The module of a test file of torchao, with the names of `replaced` replaced in it."""
    folder = os.environ["TORCHAO_TESTS"]
    if importlib.util.find_spec("torchao") is None:
        sys.path.append(folder)
    torchao = importlib.import_module("torchao")
    assert torchao.__version__ == VERSION, f"torchao is {torchao.__version__}, this adapter was written for {VERSION}"
    for name in IMPORTED_BEFOREHAND:
        importlib.import_module(name)
    # torchao's own needs a package that its wheel does not ask for; only one decorator of it is used.
    testing = types.ModuleType("torchao.testing.utils")
    testing.skip_if_rocm = lambda reason: lambda test: test
    spec = importlib.util.spec_from_file_location(f"torchao_own_{Path(file).stem}", Path(folder, "test", file))
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.dict(sys.modules, {"torchao.testing.utils": testing}),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(10, 0)),
        mock.patch("torch.version.cuda", "12.8"),
    ):
        try:
            spec.loader.exec_module(module)
        except pytest.skip.Exception as skipped:
            raise AssertionError(f"{file} still asks for a GPU: {skipped}") from skipped
    absent = [name for name in replaced if not hasattr(module, name)]
    assert not absent, f"{file} uses no {absent}"
    for name, ours in replaced.items():
        setattr(module, name, ours)
    return module


class Difference(NamedTuple):
    """Cases of one of torchao's tests that must fail here, and why that is right."""

    cases: Callable[..., bool]
    raises: type[BaseException]
    reason: str


def adapted(
    test: Callable, fits: Callable[..., bool], instead: dict[str, list], difference: Difference | None
) -> Callable:
    """A test of torchao on a CPU: those of its cases that `fits` takes, with other values for the names in `instead`.

    Its skips for want of a GPU are dropped.
    """
    names, rows = [], [()]
    for mark in getattr(test, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        argnames, argvalues = mark.args
        values = instead.get(argnames, argvalues) if isinstance(argnames, str) else argvalues
        new = [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else list(argnames)
        names += new
        rows = [(*row, *(value if len(new) > 1 else (value,))) for row, value in itertools.product(rows, values)]

    @functools.wraps(test)
    def on_cpu(**arguments):
        # Theirs draw group sizes with one and values with the other.
        random.seed(0)
        torch.manual_seed(0)
        with OnCpu():
            test(**arguments)

    on_cpu.pytestmark = []
    if not names:
        return on_cpu
    kept = []
    for row in rows:
        case = dict(zip(names, row, strict=True))
        fails = difference is not None and difference.cases(**case)
        marks = [pytest.mark.xfail(raises=difference.raises, reason=difference.reason, strict=True)] if fails else []
        if fits(**case):
            kept.append(pytest.param(*row, marks=marks))
    assert kept, f"no case of {test.__name__} is left"
    return pytest.mark.parametrize(names, kept)(on_cpu)


def tests(module: types.ModuleType) -> Iterator[str]:
    """Names of all tests in a module."""
    return (name for name, _ in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_"))


# Scale layouts


def rearrange_rows_of_groups(scale: Tensor, ends: Tensor, chunks_per_tb: int = 0) -> Tensor:
    return swizzle_t_groups(scale, ends)


def rearrange_columns_of_groups(scale: Tensor, ends_in_columns: Tensor) -> Tensor:
    return swizzle_k_groups(scale, ends_in_columns * BLOCK_SIZE)


def their_blocked(scale: Tensor) -> Tensor:
    """What torchao's kernel for one matrix of scales returns, by torchao's to_blocked: it is a reference there."""
    to_blocked = importlib.import_module("torchao.prototype.mx_formats.utils").to_blocked
    return to_blocked(scale).view(blocked_shape(*scale.shape))


# Blocks of 32


def quantize_rows(x: Tensor, block_size: int = BLOCK_SIZE, scaling_mode: str = RCEIL) -> tuple[Tensor, Tensor]:
    return tuple(quantize_along_k(x, scaling_mode))


def quantize_rows_dim0(x: Tensor, inner_block_size: int, scaling_mode: str) -> tuple[Tensor, Tensor]:
    return tuple(quantize_along_k(x, scaling_mode))


def quantize_rows_blocked(x: Tensor, block_size: int, scaling_mode: str, offs=None) -> tuple[Tensor, Tensor]:
    data, scale = quantize_along_k(x, scaling_mode)
    return data, swizzle(scale)


def quantize_columns(
    x: Tensor, block_size: int, scaling_mode: str = RCEIL, blocked_scale_output: bool = False, offs=None
) -> tuple[Tensor, Tensor]:
    data, scale = quantize_along_t(x, scaling_mode)
    return data.t(), swizzle(scale).flatten() if blocked_scale_output else scale


def quantize_weights(
    w: Tensor,
    block_size: int,
    scale_block_dim1: int = BLOCK_SIZE,
    scale_block_dim2: int = 1,
    scaling_mode: str = RCEIL,
    blocked_scale_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Blocks along dim 1 of w (E, N, K), or squares."""
    if scale_block_dim2 == 1:
        data, rows = quantize_along_n(w, scaling_mode)
        scale = rows.mT
    else:
        square = quantize_32x32_both(w, scaling_mode)
        data, rows, scale = square.along_n, square.scale_along_n(), square.scale
    return data.mT, swizzle_per_expert(rows) if blocked_scale_output else scale.contiguous()


def quantize_columns_of_groups(x: Tensor, offs: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    data, scale = quantize_along_t(x, FLOOR)
    return data.t(), scale.t()


def quantize_rows_of_groups(x: Tensor, offs: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    return tuple(quantize_along_k(x, FLOOR))


# One power of two a row, as on Hopper. torchao returns what it multiplied by, which is the reciprocal.


def _reciprocal(data: Tensor, scale: Tensor, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
    assert round_scales_to_power_of_2, "this project has no other scales"
    return data, scale.reciprocal()


def scale_and_cast_rows(x: Tensor, output_dtype, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
    data, scale = quantize_aligned_along_k(x, RCEIL)
    return _reciprocal(data, scale.unsqueeze(-1), round_scales_to_power_of_2)


def scale_and_cast_columns(x: Tensor, output_dtype, round_scales_to_power_of_2: bool) -> tuple[Tensor, Tensor]:
    data, scale = quantize_aligned_along_k(x.mT, RCEIL)
    return _reciprocal(data.mT, scale.unsqueeze(-2), round_scales_to_power_of_2)


def scale_and_cast_columns_of_groups(
    x: Tensor, offs: Tensor, output_dtype, round_scales_to_power_of_2: bool
) -> tuple[Tensor, Tensor]:
    """x (T, K) whose groups are multiples of 128 rows, so that no padding is between them."""
    data, scale = quantize_aligned_along_t(x, offs.int(), RCEIL)
    return _reciprocal(data[:, : x.shape[0]].t(), scale.flatten(), round_scales_to_power_of_2)


def scale_and_cast_rows_of_groups(
    x: Tensor, offs: Tensor, output_dtype, round_scales_to_power_of_2: bool
) -> tuple[Tensor, Tensor]:
    data, scale = quantize_aligned_along_t(x.t(), offs.int(), RCEIL)
    return _reciprocal(data[:, : x.shape[1]].contiguous(), scale.flatten(), round_scales_to_power_of_2)


# Products


def rows_times_experts(a, a_scale, b, b_scale, offs, out_dtype, block_size: int = BLOCK_SIZE) -> Tensor:
    return grouped_gemm(Quantized(a, a_scale), Quantized(b.mT, b_scale.mT), offs, out_dtype)


def products_over_tokens(a, a_scale, b, b_scale, offs, out_dtype, block_size: int = BLOCK_SIZE) -> Tensor:
    def group(data, scale, start, end):
        return Quantized(data[:, start:end], scale[:, start // BLOCK_SIZE : end // BLOCK_SIZE])

    return torch.stack(
        [
            gemm(group(a, a_scale, *bounds), group(b, b_scale, *bounds), out_dtype)
            for bounds in group_bounds(offs, a.shape[1])
        ]
    )


def recipe(rounding: str, wgrad_with_hp: bool) -> Recipe:
    name = "mxfp8_emulated" if rounding == FLOOR else "mxfp8_emulated_rceil"
    return replace(RECIPES[name], wgrad_in_mxfp8=not wgrad_with_hp)


def grouped_linear(
    x: Tensor,
    w_t: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    kernel_preference=None,
    wgrad_with_hp: bool = False,
    scale_calculation_mode=None,
    pad_token_groups_for_grouped_mm: bool = False,
) -> Tensor:
    assert bias is None, "experts with biases are refused"
    how = recipe(scale_calculation_mode.value, wgrad_with_hp)
    return LinearFunction.apply(x, w_t.mT, offs, how, REFERENCE, out_dtype)


def linear(
    in_features: int, out_features: int, bias: bool, device, dtype, kernel_preference, wgrad_with_hp: bool
) -> MXFP8Linear:
    plain = nn.Linear(in_features, out_features, bias, device, dtype)
    return MXFP8Linear.from_linear(plain, recipe(RCEIL, wgrad_with_hp), REFERENCE)


class Weight(Tensor):
    """A weight (N, K) or (E, N, K) that torch.mm, torch.matmul, F.linear and torch._grouped_mm multiply in MXFP8.

    Here modules are converted and not weights: this carries the products that the modules run to torchao's tests.
    """

    @staticmethod
    def __new__(cls, w: Tensor, config) -> "Weight":
        return Tensor._make_subclass(cls, w.detach(), w.requires_grad)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        how = recipe(RCEIL, wgrad_with_hp=False)
        if func is torch._grouped_mm:
            x, w_t = args
            return LinearFunction.apply(x, w_t.as_subclass(Tensor).mT, kwargs["offs"], how, REFERENCE, x.dtype)
        if func in (torch.mm, torch.matmul, torch.nn.functional.linear):
            x, w, *bias = args
            tokens = x.reshape(-1, x.shape[-1])
            y = LinearFunction.apply(tokens, w.as_subclass(Tensor), None, how, REFERENCE, x.dtype)
            y = y.view(*x.shape[:-1], w.shape[0])
            return y if not bias or bias[0] is None else y + bias[0]
        return super().__torch_function__(func, types, args, kwargs)
