"""The program that compute-sanitizer watches leaves no launcher out, and runs."""

import importlib
import inspect
import pkgutil
import types

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

import mxfp8_titan.kernels
from tests.kernels import every_kernel
from tests.kernels.conftest import INTERPRETED

PACKAGE = mxfp8_titan.kernels.__name__


def _mentioned(function):
    """The values of the global names in a function, those of its lambdas and comprehensions included."""
    codes, found = [function.__code__], []
    while codes:
        code = codes.pop()
        found += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return found


def _reached(function):
    """The functions of the package that a function mentions, those that these mention, and so on."""
    reached, left = set(), [function]
    while left:
        called = {f for f in _mentioned(left.pop()) if isinstance(f, types.FunctionType) and _is_ours(f)}
        left += called - reached
        reached |= called
    return reached


def _is_ours(function):
    return function.__module__.startswith(PACKAGE)


def _kernels(function):
    """Names of the kernels that a function launches, itself or by others."""
    mentioned = [m for f in {function} | _reached(function) for m in _mentioned(f)]
    return {m.__name__ for m in mentioned if isinstance(m, KernelInterface)}


def _launchers():
    """{launcher: its kernels}, of the public functions that launch and are not called by another one that does."""
    modules = [
        importlib.import_module(f"{PACKAGE}.{m.name}") for m in pkgutil.iter_modules(mxfp8_titan.kernels.__path__)
    ]
    functions = [
        f for module in modules for _, f in inspect.getmembers(module, inspect.isfunction)
        if f.__module__ == module.__name__
    ]  # fmt: skip
    launching = {f: kernels for f in functions if (kernels := _kernels(f))}
    helpers = {other for f in launching for other in _reached(f)}
    return {f: kernels for f, kernels in launching.items() if f not in helpers and not f.__name__.startswith("_")}


@pytest.mark.parametrize("size", every_kernel.SIZES, ids=str)
def test_every_public_launcher_has_a_case(size):
    launchers = _launchers()
    assert len(launchers) > 30
    assert {launcher for _, launcher, *_ in every_kernel.cases(size, "cpu")} == set(launchers)


def test_the_names_of_cases_differ():
    names = [
        (size, launcher, variant)
        for size in every_kernel.SIZES
        for variant, launcher, *_ in every_kernel.cases(size, "cpu")
    ]
    assert len(names) == len(set(names))


def test_every_triton_kernel_runs(device, monkeypatch, capsys):
    ran = set()
    if INTERPRETED:
        run = InterpretedFunction.run
        monkeypatch.setattr(InterpretedFunction, "run", lambda k, *a, **how: ran.add(k.__name__) or run(k, *a, **how))
    # Fewer rows than in the program's own sizes: the interpreter takes milliseconds a row.
    done = every_kernel.run(device.type, [every_kernel.Size(41, 96, 32, 3, torch.bfloat16, "contiguous")])
    assert done == len(capsys.readouterr().out.splitlines())
    assert done > 80
    if INTERPRETED:
        assert ran == set().union(*_launchers().values()) - {"aligned_gemm_kernel"}
