"""The design's one-way flow of imports, read from the sources."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import mxfp8_titan

PACKAGE = Path(mxfp8_titan.__file__).parent

# What each module or folder may import from this project, besides itself. Lower ones first.
ALLOWED = {
    "__init__": set(),
    "format": set(),
    "reference": {"format"},
    "kernels": {"format"},
    "job_config": {"format"},
    "backends": {"reference", "kernels", "format", "job_config"},
    "autograd": {"backends", "job_config"},
    "modules": {"autograd", "backends", "job_config", "format"},
    "health": {"autograd", "backends", "format"},
    "selection": {"job_config", "format"},
    "converter": {"health", "selection", "modules", "backends", "job_config"},
    "report": set(),
    "bench": {
        "train",
        "selection",
        "modules",
        "autograd",
        "backends",
        "kernels",
        "reference",
        "job_config",
        "format",
        "report",
    },
    "local_text": set(),
    "flavors": {"local_text"},
    "compilations": set(),
    "model_specs": {"local_text", "converter", "compilations", "health"},
    "plugin": {"converter", "flavors", "local_text", "model_specs"},
    "cpu_host": set(),
    "job_args": {"job_config"},
    "checkpoint_checks": {"job_config"},
    "host_checks": {"checkpoint_checks", "backends", "job_config", "local_text"},
    "preflight": {
        "host_checks",
        "plugin",
        "converter",
        "selection",
        "backends",
        "job_config",
        "job_args",
        "local_text",
    },
    "trainer": set(),
    "train": {"cpu_host", "preflight", "job_args", "trainer"},
    "check": {"train"},
    "plan": {"train", "preflight", "backends", "selection"},
    "launch": {"report", "job_args"},
    "compare_runs": {"launch", "report", "job_args"},
    "compare": {"compare_runs", "launch", "report", "job_args"},
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "mxfp8_titan" else [f"mxfp8_titan.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("mxfp8_titan.")}
    return found


def _files(layer: str) -> list[Path]:
    module = PACKAGE / f"{layer}.py"
    return [module] if module.exists() else sorted((PACKAGE / layer).rglob("*.py"))


def test_imports_point_down_only():
    for layer, allowed in ALLOWED.items():
        for path in _files(layer):
            extra = _imports(path) - allowed - {layer, "__init__"}
            assert not extra, f"{path.relative_to(PACKAGE)} imports {extra}"


def _imported_files(path: Path) -> set[Path]:
    """Of this project, by `path` itself, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = {PACKAGE.parent / (name.replace(".", "/") + ".py") for name in names}
    return {file for file in files if file.is_relative_to(PACKAGE) and file.exists()}


def test_no_file_imports_itself_by_way_of_others():
    graph = {path: _imported_files(path) for path in PACKAGE.rglob("*.py")}
    graphlib.TopologicalSorter(graph).prepare()


def test_every_module_and_folder_has_its_place():
    present = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert present == set(ALLOWED)


def test_only_selection_of_backends_reads_device_capability():
    readers = [p for p in PACKAGE.rglob("*.py") if "get_device_capability" in p.read_text()]
    assert [str(p.relative_to(PACKAGE)) for p in readers] == ["backends/select.py"]


def test_importing_the_package_imports_nothing_heavy():
    heavy = ("torch", "triton", "torchtitan", "torchao", "datasets", "matplotlib")
    code = f"import sys, mxfp8_titan; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_reading_the_configuration_does_not_import_torch_or_triton():
    code = "import sys, mxfp8_titan.job_config; print([m for m in ('torch', 'triton') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
