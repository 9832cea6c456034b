import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from mxfp8_titan.bench import roofline, validate
from mxfp8_titan.bench.validate import STEPS
from tests.test_docs import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a machine without a GPU")


def _run(*arguments):
    command = [sys.executable, "-m", "mxfp8_titan.bench.validate", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_says_so_and_what_it_would_do(tmp_path):
    done = _run("--out", str(tmp_path))
    assert done.returncode == 2
    assert "No NVIDIA GPU is visible to PyTorch here, so nothing was validated" in done.stdout
    assert all(f"  {name:9} {step.does}" in done.stdout for name, step in STEPS.items())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_step_is_named():
    done = _run("--only", "products,speed")
    assert done.returncode == 2
    assert "--only names speed, needs steps of products, tests," in done.stderr


def test_a_failed_comparison_shows_its_own_lines_and_no_older_report(tmp_path, monkeypatch):
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "report.md").write_text("of last month")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=0))
    monkeypatch.setattr(validate, "_command", lambda *a: (False, ["it failed"]))
    assert validate._compare(Namespace(commit="abc"), tmp_path) == (False, ["it failed"])


def test_the_docs_show_the_roofline_as_it_is_computed():
    shown = (ROOT / "docs" / "backends.md").read_text()
    assert all(
        f"| {' | '.join(map(str, row))} |" in shown for row in (*roofline.grouped_rows(), *roofline.scout_rows())
    )
