"""docs/benchmarks.md from the results files in docs/benchmarks, so that no number is typed by hand.

python -m mxfp8_titan.bench.render docs/benchmarks docs/benchmarks.md
"""

import csv
import json
import re
import sys
from pathlib import Path

from mxfp8_titan.bench.results import beside_others, markdown_table

TITLES = {
    "kernels": "Kernels",
    "gemm": "GEMMs and layers",
    "grouped_linear": "Training steps of grouped experts",
}

REPORTS = {
    "one_gpu": "End to end: one GPU",
    "one_gpu_ac_full": "End to end: one GPU, full activation checkpointing",
    "one_gpu_ac_every_second": "End to end: one GPU, every second layer checkpointed",
    "one_gpu_ac_op": "End to end: one GPU, per-op activation checkpointing",
}
"""Folders with a comparison by scripts/compare.sh, whose report.md becomes a section."""

HEAD = """# Benchmarks

Rendered by `python -m mxfp8_titan.bench.render docs/benchmarks docs/benchmarks.md` from the results files beside it.
Each section holds for the commit it names. Losses are printed like wins. What limits each kernel is in
[kernels.md](kernels.md), what was tried in [benchmarks/notes.md](benchmarks/notes.md).
"""

PRINTED = "\nEvery shape, layout and rounding, as printed: [benchmarks/kernels.txt](benchmarks/kernels.txt).\n"

BESIDE = """
### Beside others

The same outputs from the same input: by the kernel here, by `torch.compile` of this project's plain PyTorch reference,
and by torchao (`to_mx` through `torch.compile`; for one scale per row its Triton kernel). `-`: it has none, or it did
not run.

"""

GROUPED = """
All cases: forward and backward, quantization included; `library` and `auto` say whose GEMMs ran, torchao is its FP8
row-wise grouped layer with fast accumulation, called as it is, not compiled. Device time in CUDA graphs, versions
taking turns. The limit is the three FP8 GEMMs alone, the faster ones, and each byte of quantization moved once. What
else that command measures was measured anew: the section above.

"""


def met(value: float, target: str) -> str:
    """ "yes", "no", or nothing where there is no target: ">= 0.90" or "<= 20"."""
    if not target:
        return ""
    relation, bound = target.split()
    return "yes" if (value >= float(bound) if relation == ">=" else value <= float(bound)) else "**no**"


def section(name: str, results: dict) -> str:
    """One results file as a heading, its environment and a table."""
    lines = [f"\n## {TITLES[name]}\n"]
    lines += [", ".join(f"{key} {value}" for key, value in results.items() if key not in ("rows", "command")) + "\n"]
    lines += [f"`{results['command']}`\n\n"]
    cells = [
        (row["id"], f"{row['value']:g}", row["unit"], row["target"], met(row["value"], row["target"]), row["detail"])
        for row in results["rows"]
        if "us" not in row
    ]
    text = "\n".join(lines) + markdown_table(("id", "value", "unit", "target", "met", "detail"), cells)
    columns, others = beside_others(results["rows"])
    return text + (BESIDE + markdown_table(columns, others) if others else "")


def report_section(folder: Path, title: str) -> str:
    """A comparison's report one level deeper, its pictures where they lie, its command lines left to the folder."""
    text, _, _ = (folder / "report.md").read_text().partition("\n## Commands\n")
    text = re.sub("^##", "###", text, flags=re.MULTILINE).replace("# Comparison", f"\n## {title}", 1)
    place = f"{folder.parent.name}/{folder.name}"
    text = re.sub(r"(!\[[^]]*\]\()", rf"\1{place}/", text)
    logged = f"[report.json]({place}/report.json)"
    return f"{text}\nCommand lines: [report.md]({place}/report.md). What was logged: {logged}.\n"


def csv_table(path: Path) -> str:
    """A CSV file as a table."""
    with path.open(newline="") as file:
        columns, *rows = csv.reader(file)
    return markdown_table(columns, rows)


def main(folder: Path, out: Path) -> None:
    """Write the whole page to `out`."""
    files = [path for name in TITLES if (path := folder / f"{name}.json").exists()]
    text = HEAD
    for path in files:
        text += section(path.stem, json.loads(path.read_text()))
        if path.stem == "kernels":
            text += PRINTED
        if path.stem == "grouped_linear":
            text += GROUPED + csv_table(path.with_suffix(".csv"))
    for name, title in REPORTS.items():
        text += report_section(folder / name, title)
    out.write_text(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
