"""torchao 0.18.0's own tests, loaded from its wheel to run with this project's functions in place of its own.

Their tests are written for a GPU, most of them for an sm100, and most of their files refuse to be imported without one.
A file is imported here while torch says that it has one; then the names under test are replaced in it (stand_ins.py).
Without a GPU its tests run with every "cuda" read as "cpu". What a result is compared with stays torchao's: to_mx,
to_blocked, torch_to_blocked_*, tensor_to_scale.

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
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

VERSION = "0.18.0"

IMPORTED_BEFOREHAND = (
    "torchao.prototype.moe_training.kernels",
    "torchao.prototype.moe_training.kernels.mxfp8",
    "torchao.prototype.moe_training.mxfp8_grouped_mm",
    "torchao.prototype.moe_training.mxfp8_linear",
    "torchao.prototype.moe_training.tensor",
    "torchao.prototype.mx_formats.kernels",
    "torchao.quantization.quant_api",
)
"""What the test files import of torchao: it must not see the pretended GPU."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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


class Here(TorchFunctionMode):
    """Reads "cuda" as "cpu" where there is no GPU, and compares 1-byte floats as bytes: a CPU cannot compare them all.

    Bytes are the stricter measure: -0 is not 0.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {name: _here(value) for name, value in (kwargs or {}).items()}
        args = tuple(_here(value) for value in args)
        if func in COMPARISONS:
            args = tuple(_bytes(value) for value in args)
        return func(*args, **kwargs)


def _here(value):
    return DEVICE if isinstance(value, str) and value == "cuda" else value


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
    path = Path(folder, "test", file)
    package = types.ModuleType("torchao_own")
    package.__path__ = [str(path.parent)]
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.dict(sys.modules, {"torchao.testing.utils": testing, package.__name__: package}),
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
    test: Callable,
    fits: Callable[..., bool],
    instead: dict[str, list],
    difference: Difference | None,
    before: Callable[[], None],
) -> Callable:
    """A test of torchao: those of its cases that `fits` takes, with other values for the names in `instead`.

    Its skips for want of a GPU are dropped. `before` is called before each case.
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
    def here(**arguments):
        # Theirs draw group sizes with one and values with the other.
        random.seed(0)
        torch.manual_seed(0)
        before()
        try:
            with Here():
                test(**arguments)
        finally:
            # Other processes may want the GPU's memory.
            torch.cuda.empty_cache()

    here.pytestmark = []
    if not names:
        return here
    kept = []
    for row in rows:
        case = dict(zip(names, row, strict=True))
        fails = difference is not None and difference.cases(**case)
        marks = [pytest.mark.xfail(raises=difference.raises, reason=difference.reason, strict=True)] if fails else []
        if fits(**case):
            kept.append(pytest.param(*row, marks=marks))
    assert kept, f"no case of {test.__name__} is left"
    return pytest.mark.parametrize(names, kept)(here)


def tests(module: types.ModuleType) -> Iterator[str]:
    """Names of all tests in a module."""
    return (name for name, _ in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_"))
