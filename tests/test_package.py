"""The package as it is installed, and what every error in it has."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

import mxfp8_titan

PACKAGE = Path(mxfp8_titan.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_a_wheel_holds_every_module_and_imports_without_any_other_package(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77 to build a wheel offline")
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((PACKAGE.parent / name).read_bytes())
    (source / "mxfp8_titan").symlink_to(PACKAGE)
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert held == {str(path.relative_to(PACKAGE.parent)) for path in SOURCES}
    # Without site-packages there is no torch, no triton, no torchtitan.
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import mxfp8_titan; print(mxfp8_titan.__version__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == mxfp8_titan.__version__


def test_nothing_imports_torchao():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torchao" for name in names) or "bench" in path.parts, path


def test_every_error_says_something():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert not isinstance(node.exc, ast.Name) or node.exc.id[0].islower(), where
                assert not isinstance(node.exc, ast.Call) or node.exc.args, where


def test_every_dependency_is_a_released_version_by_name():
    # A nightly or an address can vanish, and the release that asks for it with it.
    project = tomli.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    assert len(texts) > 10
    for requirement in map(Requirement, texts):
        assert requirement.url is None, requirement
        assert requirement.specifier, requirement
        assert not requirement.specifier.prereleases, requirement
        assert all("+" not in part.version for part in requirement.specifier), requirement
