"""Rows of docs/benchmarks/*.json: measured values under the ids that the project's targets use."""

import contextlib
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

WORST_OF_OPS = "rceil_over_floor"
"""The row whose value is the largest of many ops'."""


@dataclass(frozen=True)
class Row:
    """One figure. `target` as text, since some are upper and some lower bounds."""

    id: str
    value: float
    unit: str
    target: str
    detail: str
    us: dict[str, float | None] | None = None
    """Times of several versions of the same work by name, None for one that did not run. `value` is then the fastest
    other's over that of `here`."""


def version(package: str) -> str:
    """The installed version of a package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def command() -> str:
    """The command line, without where the results go and what commit they are filed under."""
    # As it was typed: sys.argv has a module's file in place of `-m` and its name.
    words, line = ["python", *sys.orig_argv[1:]], []
    while words:
        word = words.pop(0)
        if word in ("--json", "--commit"):
            words.pop(0)
        elif not word.startswith(("--json=", "--commit=")):
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

    Rows with other ids that the file holds already are kept, if they come from the same commit, GPU and versions. So is
    the larger of two WORST_OF_OPS. Uncommitted changes are no commit to share.
    Raises: ValueError as `read` does.
    """
    found, kept = read(path), []
    same = all(found.get(key) == value for key, value in env.items() if key not in ("command", "date"))
    if found and same and not env["commit"].endswith("with changes"):
        worst = next((row for row in found["rows"] if row["id"] == WORST_OF_OPS), None)
        if worst:
            rows = [row for row in rows if row.id != WORST_OF_OPS or row.value > worst["value"]]
        kept = [row for row in found["rows"] if row["id"] not in {new.id for new in rows}]
        commands = [line for line in found["command"].split(" && ") if line != env["command"]] if kept else []
        env = env | {"command": " && ".join([*commands, env["command"]])}
    path.write_text(json.dumps(env | {"rows": kept + as_dicts(rows)}, indent=1) + "\n")


def read(path: Path) -> dict:
    """A results file's content; empty where there is none yet.

    Raises: ValueError for a file that is none, or a folder that does not exist.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder for results")
    if not path.exists():
        return {}
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and {"rows", "command"} <= found.keys():
            return found
    raise ValueError(f"{path} holds no results of bench.py, and is not overwritten")


def as_dicts(rows: list[Row]) -> list[dict]:
    """Rows as the results files hold them, without fields that say nothing."""
    return [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]


def beside_others(rows: list[dict]) -> tuple[list[str], list[tuple]]:
    """Columns and lines of the table of the rows that have `us`; no lines where none has."""
    rows = [row for row in rows if "us" in row]
    versions = list(dict.fromkeys(version for row in rows for version in row["us"]))
    lines = []
    for row in rows:
        times = [row["us"].get(version) for version in versions]
        cells = ["-" if us is None else f"{us:.1f}" for us in times]
        lines.append((row["id"].removesuffix("_beside"), row["detail"], *cells, f"{row['value']:.2f}"))
    return ["op", "case", *(f"{version}, us" for version in versions), "fastest other / here"], lines


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
