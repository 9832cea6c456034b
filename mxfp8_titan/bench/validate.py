"""Everything that can be checked on the GPU at hand, in one run, with a summary to paste into an issue.

scripts/validate_gpu.sh [--only STEPS] [--out FOLDER] [--quick]

Runs on any NVIDIA GPU: what needs another one is skipped and named. Each step is a process of its own, so that
one that fails, or leaves the GPU's context broken, does not stop the next.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mxfp8_titan.backends.blackwell import grouped_library_lacks
from mxfp8_titan.backends.select import current_device, select
from mxfp8_titan.job_config import AUTO
from mxfp8_titan.report.facts import tree_commit

ROOT = Path(__file__).parents[2]

KERNEL_OPS = ("quantize_along_k", "quantize_along_t", "quantize_both", "swiglu_forward", "swiglu_backward")
"""The kernels whose bandwidth the first table shows, by their names in scripts/bench.py."""

FITS = ((75, "scout_1layer", "--training.local_batch_size=8"), (0, "debug", ""))
"""The comparison by GiB of GPU memory: the first row that fits, its configs/llama4_*.toml and flags for all runs."""


@dataclass(frozen=True)
class Step:
    """What a step does, in words, and how: (given, its folder) -> (passed, lines for the summary)."""

    does: str
    run: Callable[[argparse.Namespace, Path], tuple[bool, list[str]]]


def _products(table: str) -> Callable[[argparse.Namespace, Path], tuple[bool, list[str]]]:
    def run(given: argparse.Namespace, out: Path) -> tuple[bool, list[str]]:
        quick = ["--quick"] if given.quick else []
        log = out / f"{table}.log"
        passed, end = _command([sys.executable, "-m", "mxfp8_titan.bench.products", table, *quick], log, 8)
        rows = [line for line in log.read_text().splitlines() if line.startswith("| ")]
        return passed, rows if passed and rows else [*rows, "", *end]

    return run


def _tests(given: argparse.Namespace, out: Path) -> tuple[bool, list[str]]:
    folders = ["tests/kernels", "tests/backends", *([] if given.quick else ["tests/autograd", "tests/modules"])]
    return _command([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders], out / "tests.log", 12)


def _kernels(given: argparse.Namespace, out: Path) -> tuple[bool, list[str]]:
    bench = [sys.executable, "scripts/bench.py", "--no-peers", "--json", out / "kernels.json", "--commit", given.commit]
    return _command([*bench, "--op", *(KERNEL_OPS[2:3] if given.quick else KERNEL_OPS)], out / "kernels.log", 12)


def _compare(given: argparse.Namespace, out: Path) -> tuple[bool, list[str]]:
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    config, flags = next((config, flags) for least, config, flags in FITS if memory >= least)
    command = [
        "env", "NGPU=1", f"PYTHON={sys.executable}", f"CONFIG_FILE={ROOT}/configs/llama4_{config}.toml",
        ROOT / "scripts/compare.sh", "--steps", "30", "--log-freq", "10", "--warm-up", "10", "--out", out / "compare",
        "--commit", given.commit, f"--flags={flags}",
    ]  # fmt: skip
    passed, lines = _command(command, out / "compare.log", 12)
    report = out / "compare" / "report.md"
    return passed, report.read_text().splitlines() if passed else lines


STEPS = {
    "products": Step(
        "every product of this GPU's recipes against emulation and float64; the dot_scaled kernels on any GPU",
        _products("check"),
    ),
    "tests": Step("tests/kernels, tests/backends, tests/autograd and tests/modules on this GPU", _tests),
    "kernels": Step("table 1: bandwidth of the quantizers, as a share of a copy", _kernels),
    "gemms": Step("table 2: TFLOP/s of y, dx and dw from quantized operands, beside bf16", _products("gemms")),
    "grouped": Step(
        "table 3: 24 shapes of grouped forward plus backward, beside bf16: quantization and the host's time included, "
        "one version after another, so that rows differ by a tenth between runs, and by more where tokens are few",
        _products("grouped"),
    ),
    "compare": Step(
        "20 steps of Llama 4, after 10 of warm-up, in bf16 (twice), MXFP8 dense, experts only and both, one GPU",
        _compare,
    ),
}


def _command(command: list, log: Path, lines: int) -> tuple[bool, list[str]]:
    """Runs it in the repository; its last lines as a code block."""
    with log.open("w") as file:
        code = subprocess.run(
            [str(word) for word in command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    tail = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in log.read_text(errors="replace").splitlines()[-lines:]]
    return code == 0, ["```", *tail, "```", f"exit code {code}, all of it in {log.name}"]


def _machine(commit: str) -> list[str]:
    """What every report must say about where it was made."""
    import triton

    device = current_device()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    lacks = grouped_library_lacks(torch.__config__.show(), device.capability)
    choice = select(AUTO, device)
    return [
        f"- {torch.cuda.device_count()} x {device}, {memory:.0f} GiB",
        f"- torch {torch.__version__} (CUDA {torch.version.cuda}), triton {triton.__version__}",
        f"- commit {commit}",
        f"- `auto` picks {choice.recipe_name}: {choice.why}",
        f"- F.scaled_grouped_mm in MXFP8: {f'no, {lacks}' if lacks else 'this build has it, for sm100'}",
    ]


def main() -> int:
    """0 when all steps passed, 1 when one did not, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="validate_gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated steps of {', '.join(STEPS)} (default: all)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "logs" / "validate",
        help="folder for logs and summary.md (default logs/validate)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer tests and shapes, for minutes of a borrowed GPU")
    parser.add_argument(
        "--commit", default=tree_commit(ROOT), help="what the summary names, for a copy of the tree without its history"
    )
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}, needs steps of {', '.join(STEPS)}")
    if not torch.cuda.is_available():
        print("No NVIDIA GPU is visible to PyTorch here, so nothing was validated. On a GPU this would run:\n")
        print("\n".join(f"  {name:9} {STEPS[name].does}" for name in names))
        print(f"\nand write a summary to paste into an issue to {given.out / 'summary.md'}.")
        return 2
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    summary, verdicts = [f"### mxfp8_titan on {torch.cuda.get_device_name()}", "", *_machine(given.commit)], {}
    for name in names:
        print(f"{name}: {STEPS[name].does} ...", flush=True)
        start = time.perf_counter()
        passed, lines = STEPS[name].run(given, out)
        verdicts[name] = passed
        seconds = time.perf_counter() - start
        summary += ["", f"#### {name}: {'passed' if passed else 'FAILED'} in {seconds:.0f} s", "", STEPS[name].does, ""]
        summary += lines
        (out / "summary.md").write_text("\n".join(summary) + "\n")
    print("\n" + "\n".join(summary))
    failed = [name for name, passed in verdicts.items() if not passed]
    print(f"\n{len(verdicts) - len(failed)} of {len(verdicts)} steps passed. Summary: {out / 'summary.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
