"""Where and with what runs are made, and a fingerprint of all that decides their numbers."""

import hashlib
import os
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What only reads finished runs may change without making them worthless.
_READERS = ("report", "compare.py", "compare_runs.py", "bench", "plan.py")


def gather_facts(root: Path, gpus: int, cores: int, commit: str = "") -> dict[str, str]:
    """Device, versions, commit and date.

    commit: for a copy of the tree without its history
    """
    import torch

    facts = {
        "gpu": f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"none, {cores} CPU cores",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": version("triton"),
        "torchtitan": _torchtitan(),
    }
    with suppress(PackageNotFoundError):
        facts["torchao"] = version("torchao")
    return {**facts, "commit": commit or tree_commit(root), "date": time.strftime("%Y-%m-%d")}


def _torchtitan() -> str:
    """The installed version, or which checkout TORCHTITAN_ROOT names."""
    checkout = os.environ.get("TORCHTITAN_ROOT")
    return f"{checkout} at {tree_commit(Path(checkout))}" if checkout else version("torchtitan")


def tree_commit(root: Path) -> str:
    """Short, and whether tracked files differ from it; "unknown" for a copy without its history."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "-uno").strip()
    return (git("rev-parse", "--short", "HEAD").strip() or "unknown") + (" with changes" if changed else "")


def sources_hash(root: Path) -> str:
    """Of the package's files that a run executes: commits do not tell two sets of uncommitted changes apart."""
    package = root / "mxfp8_titan"
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if inside.parts[0] not in _READERS:
            digest.update(str(inside).encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(command: list[str], config: Path, facts: dict[str, str], sources: str, cold: bool) -> str:
    """What a finished run must share with this one to be kept: commit, sources, machine, versions, flags, TOML."""
    same = {key: value for key, value in facts.items() if key != "date"}
    toml = config.read_bytes() if config.is_file() else b""
    return hashlib.sha256(repr((command, toml, same, sources, cold)).encode()).hexdigest()[:16]
