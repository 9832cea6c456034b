"""Rows of docs/benchmarks/*.json: measured values under the ids that the project's targets use."""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
import triton

from mxfp8_titan.report.facts import tree_commit


@dataclass(frozen=True)
class Row:
    """One figure. `target` as text, since some are upper and some lower bounds."""

    id: str
    value: float
    unit: str
    target: str
    detail: str


def version(package: str) -> str:
    """The installed version of a package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def command() -> str:
    """The command line, without where the results go and what commit they are filed under."""
    words, line = ["python", *sys.argv], []
    while words:
        word = words.pop(0)
        if word in ("--json", "--commit"):
            words.pop(0)
        else:
            line.append(word)
    return " ".join(line)


def environment(commit: str | None = None) -> dict[str, str]:
    """What every table must say about where it was measured.

    commit: for a copy of the tree without its history
    Raises: ValueError for such a copy without one.
    """
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if commit is None and (commit := tree_commit(Path(__file__).parent)) == "unknown":
        raise ValueError("this copy of the tree has no history to read its commit from: name it with --commit")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torchtitan": version("torchtitan"),
        "torchao": version("torchao"),
        "commit": commit,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": command(),
    }


def write(path: Path, env: dict[str, str], rows: list[Row]) -> None:
    """Writes one results file, the environment and then the rows.

    Rows with other ids that the file holds already are kept, if they come from the same commit, GPU and versions.
    """
    found = json.loads(path.read_text()) if path.exists() else {}
    kept = []
    if all(found.get(key) == value for key, value in env.items() if key not in ("command", "date")):
        kept = [row for row in found["rows"] if row["id"] not in {new.id for new in rows}]
        commands = [line for line in found["command"].split(" && ") if line != env["command"]] if kept else []
        env = env | {"command": " && ".join([*commands, env["command"]])}
    path.write_text(json.dumps(env | {"rows": kept + [asdict(row) for row in rows]}, indent=1) + "\n")


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown, a line a row, with a line break at the end."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def print_table(columns: list[str], rows: list[tuple]) -> None:
    """A plain table, numbers to the right."""
    cells = [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    for line in [columns, *cells]:
        print("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))))
