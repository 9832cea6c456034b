"""Starts whole training jobs as a user does, and reads what they logged."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from mxfp8_titan.report.run_log import Step, read_steps
from tests.train import shared_gpu

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "configs" / "llama4_debug.toml"
MX = ("--model.converters=mx", "--mx.moe_fqns_prototype=experts", "--mx.recipe_name=mxfp8_emulated_rceil")
TINY = ("--training.seq_len=64", "--training.local_batch_size=2")
OP_CHECKPOINTING = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")


@dataclass(frozen=True)
class Run:
    code: int
    output: str
    steps: list[Step]

    def losses(self, first: int = 1) -> list[float]:
        return [step.loss for step in self.steps if step.step >= first]


def import_paths() -> str:
    """PYTHONPATH for a process that imports this project, and whatever the caller does."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def environment(processes: int) -> dict[str, str]:
    """Environment variables of a job of that many processes on this machine."""
    # Whoever runs several tests at once shares the cores out.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // processes))
    # What torchrun would set; torchtitan's own entry does not set it for a single process.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    ours = {"PYTHONPATH": import_paths(), "OMP_NUM_THREADS": threads, "HF_DATASETS_OFFLINE": "1"}
    return {**os.environ, **ours, **(alone if processes == 1 else {})}


def entry_args(*flags: str, entry: str = "mxfp8_titan.train", config: Path = DEBUG) -> list[str]:
    """A job, as arguments of the interpreter or of torchrun."""
    return ["-m", entry, "--job.config_file", str(config), *flags]


def train(
    folder: Path,
    *flags: str,
    processes: int = 1,
    config: Path = DEBUG,
    entry: str = "mxfp8_titan.train",
    fails: bool = False,
    timeout: int = 400,
) -> Run:
    """One job with its outputs under `folder`; asserts that it ends as `fails` says."""
    folder.mkdir(parents=True, exist_ok=True)
    if shared_gpu.used(processes):
        assert entry == "mxfp8_titan.train", f"{entry} wants a GPU for each of its {processes} processes"
        entry = "tests.train.shared_gpu"
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d"]
        launcher += ["--rdzv-endpoint=localhost:0", "--local-ranks-filter=0"]
    command = [*launcher, *entry_args(f"--job.dump_folder={folder}", *flags, entry=entry, config=config)]
    done = subprocess.run(
        command,
        env=environment(processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    log = folder / "log.txt"
    log.write_text(done.stdout)
    assert (done.returncode != 0) == fails, f"exit code {done.returncode}\n{done.stdout[-4000:]}"
    return Run(done.returncode, re.sub(r"\x1b\[[0-9;]*m", "", done.stdout), read_steps(log))


def only_step(folder: Path, step: int, into: Path) -> Path:
    """A copy of `folder`'s checkpoints in `into` that holds nothing later than `step`."""
    shutil.copytree(folder / "checkpoint" / f"step-{step}", into / "checkpoint" / f"step-{step}")
    return into


def read_checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a distributed checkpoint, unsharded."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = folder / f"step-{step}.pt"
    dcp_to_torch_save(str(folder / "checkpoint" / f"step-{step}"), str(path))
    # weights_only refuses any class that is not a plain tensor or container.
    state = torch.load(path, weights_only=True, map_location="cpu")
    flat: dict[str, torch.Tensor] = {}

    def visit(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), item)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    visit("", state)
    return flat
