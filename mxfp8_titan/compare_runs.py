"""The runs of a comparison: their jobs, what makes a finished one count, how one is started and what it leaves."""

import fcntl
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mxfp8_titan.job_args import flag_value
from mxfp8_titan.launch import ROOT, Job, Machine, execute, make_job
from mxfp8_titan.report.comparison import Run
from mxfp8_titan.report.facts import fingerprint, sources_hash
from mxfp8_titan.report.finish import finish
from mxfp8_titan.report.inventory import read_inventory, tokens_per_step
from mxfp8_titan.report.limits import GemmSpeedUps
from mxfp8_titan.report.metrics import read_metrics
from mxfp8_titan.report.trace import read_trace

ON_ONE_PROCESS = (
    "--training.global_batch_size=-1",
    *(f"--parallelism.{what}_parallel_degree=1" for what in
      ("tensor", "pipeline", "context", "expert", "expert_tensor")),
    *(f"--parallelism.data_parallel_{what}_degree=1" for what in ("shard", "replicate")),
)  # fmt: skip
CHECKPOINTS = "checkpoint"
"""Folder of a run's checkpoints, in its own."""
FROM_SEED = "--checkpoint.initial_load_path"
NOT_YET = "--checkpoint.folder=not-yet"
"""For the check of a run, which begins without the checkpoints that an earlier one of its name left."""
SEED = "seed-"
"""What names of folders with a seed checkpoint begin with."""
HUNG = 1
"""Exit code of a run that was ended because it hung: that of a failure, not of being told to end."""
TAIL = 25
"""Lines of a failed run's log that are shown."""


@dataclass(frozen=True)
class Settings:
    """A comparison as the command line asks for it."""

    variants: dict[str, str]
    """Name -> torchtitan flags that only this run gets."""
    common: str
    """Flags that every run gets."""
    steps: int
    log_freq: int
    warm_up: int
    seed: int
    trace_steps: int
    """Steps that are traced after the measured ones; 0: none."""
    hang_after: int
    """Seconds without a new line in a run's log after which it is ended."""
    speed_ups: GemmSpeedUps | None
    """FP8 GEMM rates over bf16, if the command line gives them."""
    out: Path
    cold: bool
    commit: str

    @property
    def extra_steps(self) -> int:
        """Steps after the measured ones: the one that starts the profiler, and those that are traced."""
        return 1 + self.trace_steps if self.trace_steps else 0


@contextmanager
def alone_in(folder: Path) -> Iterator[tuple[int, ...]]:
    """Holds the folder's lock; yields what runs must keep open, so that one that outlives a killed comparison holds it.

    Raises: ValueError while another comparison, or such a run, holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is in use, by another comparison or by a run that a killed one left: wait for it or end it, "
                "or give another --out"
            ) from None
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error}); run one comparison in it at a time", file=sys.stderr)
        yield (lock.fileno(),)


def flags_of(settings: Settings, variant: str) -> list[str]:
    """Flags of a run: the user's for all runs, the variant's, then what the comparison sets."""
    return [
        *shlex.split(settings.common),
        *shlex.split(variant),
        f"--training.steps={settings.steps + settings.extra_steps}",
        f"--metrics.log_freq={settings.log_freq}",
        f"--debug.seed={settings.seed}",
        f"--checkpoint.folder={CHECKPOINTS}",
    ]


def variant_job(settings: Settings, machine: Machine, name: str, flags: list[str]) -> Job:
    """The launcher's job for one run, its log, metrics and trace in a folder of its own."""
    folder = settings.out / name
    flags = [*flags, f"--mx.metrics_file={folder / 'metrics.jsonl'}", f"--job.dump_folder={folder}"]
    if settings.trace_steps:
        flags += [f"--mx.trace_file={trace_of(folder)}", f"--mx.trace_steps={settings.trace_steps}"]
    job = make_job({**os.environ, "EXTRA_ARGS": "", "LOG_DIR": str(folder)}, flags, machine)
    command = [f"--log-dir={folder / 'ranks'}" if arg.startswith("--log-dir=") else arg for arg in job.command]
    return replace(job, command=command, log=folder / "run.log")


def trace_of(folder: Path) -> Path:
    """Where the run in `folder` leaves its trace."""
    return folder / "trace.json.gz"


def stamp(command: list[str], facts: dict[str, str], cold: bool) -> str:
    """What a finished run must share with a job to count as its run; the TOML and the sources as they are now."""
    config = Path(flag_value(command, "job.config_file") or "")
    return fingerprint(command, config, facts, sources_hash(ROOT), cold)


def done_marker(job: Job, its_stamp: str) -> Path:
    """The file that stands for a finished run."""
    return job.log.parent / f"done-{its_stamp}"


def run_variant(job: Job, settings: Settings, keep_open: tuple[int, ...]) -> int:
    """Run `job`, which passed its check, afresh, compile caches empty if the settings say so; its exit code.

    keep_open: file descriptors for the run to inherit
    """
    folder = job.log.parent
    for stale in [*folder.glob("done-*"), folder / "metrics.jsonl", trace_of(folder), job.log]:
        stale.unlink(missing_ok=True)
    # torchtitan would go on from a checkpoint that an earlier run left.
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    cache = folder / "cache"
    # Also of a cold run that was stopped.
    shutil.rmtree(cache, ignore_errors=True)
    if settings.cold:
        env = {**job.env, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        job = replace(job, env=env)
    with ended_when_silent(job.log, settings.hang_after) as hung:
        code = execute(job, keep_open)
    shutil.rmtree(cache, ignore_errors=True)
    return finish(job.log, HUNG if hung.is_set() else code)


@contextmanager
def ended_when_silent(log: Path, seconds: float) -> Iterator[threading.Event]:
    """Tell this process to end, which ends the run it waits for, when `log` gets no new line for `seconds`; yields what
    is set then."""
    over, hung = threading.Event(), threading.Event()

    def watch() -> None:
        size, since = -1, time.monotonic()
        while not over.wait(min(1.0, seconds / 4)):
            now = log.stat().st_size if log.exists() else -1
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > seconds:
                print(f"error: no output for {seconds} s: the run hangs and is ended", file=sys.stderr, flush=True)
                hung.set()
                # To the main thread, so that its waiting for output is interrupted.
                signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield hung
    finally:
        over.set()
        watcher.join()


def tail(log: Path) -> str:
    """The end of a log, and where all of it is."""
    if not log.exists():
        return "It left no log."
    lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines)])


def seed_checkpoint(settings: Settings, machine: Machine, facts: dict[str, str]) -> tuple[Job | None, list[str]]:
    """The job that writes a checkpoint for every run to start from, on one process, None where it has been written; and
    flags that start a run from it. On a CPU torch draws the same initial values on every rank."""
    flags = [*flags_of(settings, ""), *ON_ONE_PROCESS, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    env = {**os.environ, "EXTRA_ARGS": "", "NGPU": "1", "LOG_DIR": str(settings.out)}
    config = flag_value(make_job(env, flags, machine).command, "job.config_file")
    folder = settings.out / f"{SEED}{settings.seed}-{stamp([f'--job.config_file={config}', *flags], facts, False)}"
    checkpoint = folder / CHECKPOINTS / "step-0"
    job = make_job({**env, "LOG_DIR": str(folder)}, [*flags, f"--job.dump_folder={folder}"], machine)
    # Nothing is saved: these runs are for the report.
    start = [
        "--checkpoint.enable",
        "--checkpoint.load_only",
        "--checkpoint.initial_load_model_only",
        f"{FROM_SEED}={checkpoint}",
    ]
    return None if (checkpoint / ".metadata").exists() else job, start


def finished(settings: Settings, name: str, job: Job) -> Run:
    """What a finished run left behind.

    Raises: ValueError when it cannot be read.
    """
    folder = job.log.parent
    try:
        log = job.log.read_text(errors="replace")
        return Run(
            name=name,
            command=shlex.join(portable(job.command)),
            steps=read_metrics(folder / "metrics.jsonl", settings.steps),
            inventory=read_inventory(log),
            tokens_per_step=tokens_per_step(log),
            devices=job.processes,
            breakdown=read_trace(trace_of(folder)) if settings.trace_steps else None,
        )
    except (OSError, EOFError, ValueError, LookupError, TypeError, StopIteration) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"what {name} left in {folder} cannot be read ({why}); without it, it is run again") from None


def portable(command: list[str]) -> list[str]:
    """The command as it runs in any checkout's root: the interpreter by name, files of this one by relative paths."""
    python, *words = command
    return [Path(python).name, *("=".join(map(_relative, word.split("=", 1))) for word in words)]


def _relative(path: str) -> str:
    inside = Path(path).is_absolute() and Path(path).is_relative_to(ROOT)
    return str(Path(path).relative_to(ROOT)) if inside else path
