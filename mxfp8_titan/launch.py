"""What scripts/llama4.sh runs: one torchtitan job under torchrun, its log kept, and two lines at its end.

Everything is set by environment variables (`USAGE` lists them), as torchtitan's own run_train.sh does.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mxfp8_titan.job_args import flag_values, read_toml
from mxfp8_titan.report.finish import STOPS, finish

ROOT = Path(__file__).resolve().parents[1]

USAGE = """usage: [VARIABLE=value ...] ./llama4.sh [torchtitan flags]

Trains Llama4 with torchtitan and prints median tokens/second and peak memory at the end.

  EXTRA_ARGS            torchtitan flags, quoted as in a shell. Unset: MXFP8 dense + MoE
                        (--model.converters=mx --mx.moe_fqns_prototype=experts). Set: only what it says;
                        without --model.converters that is the bf16 baseline.
  CONFIG_FILE           a torchtitan TOML. Default: Llama4 Scout's layer sizes with 2 layers where the GPUs
                        hold it, else the debug model.
  NGPU                  processes, one a GPU. Default: every visible GPU; 2 without a GPU.
  CUDA_VISIBLE_DEVICES  the GPUs to use.
  STEPS                 training steps. Default: the TOML's.
  LOG_DIR               folder for the log, each rank's own output and the loss curve. Default: logs/ of this project.
  LOG_RANK              ranks whose output is shown, 0 or 0,1. Default: the first that knows the loss.
  TORCHTITAN_ROOT       a torchtitan 0.2.2 checkout to use instead of the installed package.
"""

MXFP8_EVERYWHERE = ("--model.converters=mx", "--mx.moe_fqns_prototype=experts")

TORCHTITAN_VERSION = "0.2.2"

SCOUT_STATE_GIB = 74
"""What scout_2layer keeps over all ranks: 4.43 B parameters x 18 bytes (fp32 masters, gradients and both AdamW states,
and the bf16 copy that FSDP2 gathers)."""
SCOUT_WORKING_GIB = 36
"""What it needs on each rank beside that, for one sequence of 8192 tokens: activations, gathered weights, emulation's
fp32 copies. Two H200s reserved 71.3 GiB each in emulation and 63.2 in bf16."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C."""
CHECKS_AT_ONCE = 4
"""Each takes about 1 GiB of the host's memory."""


@dataclass(frozen=True)
class Machine:
    """What launching depends on. gpu_gib is the smallest memory of the visible GPUs, 0 without one."""

    gpus: int
    gpu_gib: float
    cores: int


def this_machine() -> Machine:
    """The machine this process runs on; CUDA_VISIBLE_DEVICES counts."""
    import torch

    gpus = torch.cuda.device_count()
    sizes = [torch.cuda.get_device_properties(i).total_memory / 2**30 for i in range(gpus)]
    return Machine(gpus, min(sizes, default=0.0), os.cpu_count() or 1)


@dataclass(frozen=True)
class Job:
    """A checked job: the command, its environment and where its log goes."""

    command: list[str]
    env: dict[str, str]
    log: Path
    processes: int = 1
    check: list[str] = field(default_factory=list)
    """A command that ends non-zero, having said why, where the job could not start; none if empty."""


def make_job(env: Mapping[str, str], flags: list[str], machine: Machine) -> Job:
    """The job that the variables in `env` and `flags` ask for.

    Raises: ValueError for a variable that cannot be used, naming it.
    """
    processes = _positive_int(env, "NGPU") or machine.gpus or 2
    if machine.gpus and processes > machine.gpus:
        raise ValueError(
            f"NGPU={processes} but {machine.gpus} GPUs are visible; lower NGPU or set CUDA_VISIBLE_DEVICES"
        )
    config = _config_file(env, machine, processes)
    args = ["--job.config_file", str(config)]
    steps = _positive_int(env, "STEPS")
    if steps:
        args.append(f"--training.steps={steps}")
    args += _split(env["EXTRA_ARGS"]) if "EXTRA_ARGS" in env else MXFP8_EVERYWHERE
    args += flags
    log_dir = Path(env.get("LOG_DIR") or ROOT / "logs").absolute()
    if log_dir.exists() and not log_dir.is_dir():
        raise ValueError(f"LOG_DIR={env['LOG_DIR']} is a file, needs a folder (it is made if it does not exist)")
    log = log_dir / f"llama4-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d",
        # Port 0 takes a free one, so that two jobs can run side by side.
        "--rdzv-endpoint=localhost:0", "--role=rank", "--tee=3", f"--log-dir={log.with_suffix('')}",
        f"--local-ranks-filter={_shown_ranks(env, processes, args)}", "-m", "mxfp8_titan.train",
    ]  # fmt: skip
    check = [sys.executable, "-m", "mxfp8_titan.check", *args]
    return Job([*torchrun, *args], _environment(env, machine, processes), log, processes, check)


def _shown_ranks(env: Mapping[str, str], processes: int, args: list[str]) -> str:
    """LOG_RANK, or the rank that knows the loss: the first of the last pipeline stage."""
    given = env.get("LOG_RANK", "").strip()
    if not given:
        stages = _pipeline_stages(args)
        return str(processes // stages * (stages - 1)) if 0 < stages <= processes else "0"
    ranks = given.split(",")
    if not all(rank.strip().isdecimal() and int(rank) < processes for rank in ranks):
        raise ValueError(f"LOG_RANK={given!r}, needs ranks between 0 and {processes - 1}, such as 0 or 0,1")
    return given


def _pipeline_stages(args: list[str]) -> int:
    """parallelism.pipeline_parallel_degree of the job; 1 for what is no number, which the check then says."""
    section = read_toml(args).get("parallelism")
    in_toml = section.get("pipeline_parallel_degree", 1) if isinstance(section, dict) else 1
    value = str([in_toml, *flag_values(args, "parallelism.pipeline_parallel_degree")][-1])
    return int(value) if value.isdecimal() else 1


def check(job: Job) -> int:
    """0, or the exit code of the job's check, which has said why the job could not start."""
    return _run_check(job, keep_output=False).returncode


def check_all(jobs: list[Job]) -> list[tuple[int, str]]:
    """Exit code and output (stdout and stderr in one) of each job's check, in the order of `jobs`. A check takes
    seconds, most of them imports: CHECKS_AT_ONCE run at a time."""
    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        ended = list(pool.map(lambda job: _run_check(job, keep_output=True), jobs))
    return [(done.returncode, done.stdout) for done in ended]


def _run_check(job: Job, keep_output: bool) -> subprocess.CompletedProcess[str]:
    if not job.check:
        return subprocess.CompletedProcess([], 0, "")
    env = {**job.env, "WORLD_SIZE": str(job.processes)}
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if keep_output else {}
    return subprocess.run(job.check, env=env, check=False, text=True, errors="replace", **to)


def run(job: Job, keep_open: tuple[int, ...] = ()) -> int:
    """Check `job`, run it and say how it ended; the exit code for the whole.

    keep_open: file descriptors for the job to inherit
    """
    return check(job) or finish(job.log, execute(job, keep_open))


def execute(job: Job, keep_open: tuple[int, ...] = ()) -> int:
    """Run `job`, showing and keeping its output; its exit code, negative for a signal. The job ends when this process
    is told to end, or when nobody reads its output any more.

    keep_open: file descriptors for the job to inherit
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)
    print(f"log: {job.log}\n$ {shlex.join(job.command)}", flush=True)
    told: list[int] = []
    children: list[subprocess.Popen] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        for child in children:
            # torchrun ends its workers on a TERM.
            child.terminate()

    before = {number: signal.signal(number, pass_on) for number in STOPS}
    with open(job.log, "w", buffering=1) as log:
        log.write(f"$ {shlex.join(job.command)}\n")
        # In a session of its own, so that Ctrl-C comes through here and is passed on once.
        child = subprocess.Popen(
            job.command,
            env=job.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=keep_open,
        )
        children.append(child)
        try:
            if told:
                child.terminate()
            shown = True
            for line in child.stdout:
                log.write(line)
                ending = bool(told)
                if shown:
                    sys.stdout.write(f"stopping the job; its last output goes to {job.log}\n" if ending else line)
                    sys.stdout.flush()
                # torchrun's traceback of being told to end is for the log.
                shown = not ending
        except BrokenPipeError:
            # `llama4.sh | head`: end as a program that writes to a closed pipe does, without a second complaint.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            told.append(signal.SIGPIPE)
        finally:
            if child.poll() is None and told:
                child.terminate()
            code = child.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
    return -told[0] if told else code


def _positive_int(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r}, needs a whole number from 1 up")
    return int(text)


def _config_file(env: Mapping[str, str], machine: Machine, processes: int) -> Path:
    if env.get("CONFIG_FILE"):
        path = Path(env["CONFIG_FILE"]).absolute()
        if not path.is_file():
            raise ValueError(
                f"CONFIG_FILE={env['CONFIG_FILE']} is not a file; configs of this project: {ROOT / 'configs'}"
            )
        return path
    fits = machine.gpus and machine.gpu_gib >= SCOUT_STATE_GIB / processes + SCOUT_WORKING_GIB
    return ROOT / "configs" / ("llama4_scout_2layer.toml" if fits else "llama4_debug.toml")


def _split(extra_args: str) -> list[str]:
    # As a shell would: in EXTRA_ARGS='--model.converters="mx"' the inner quotes are no part of the name.
    try:
        return shlex.split(extra_args)
    except ValueError as error:
        raise ValueError(f"EXTRA_ARGS cannot be split into flags ({error}): {extra_args}") from None


def _environment(env: Mapping[str, str], machine: Machine, processes: int) -> dict[str, str]:
    paths = [str(ROOT)]
    if env.get("TORCHTITAN_ROOT"):
        checkout = Path(env["TORCHTITAN_ROOT"]).absolute()
        if not (checkout / "torchtitan" / "train.py").is_file():
            raise ValueError(
                f"TORCHTITAN_ROOT={env['TORCHTITAN_ROOT']} is no torchtitan checkout: no torchtitan/train.py"
            )
        version_file = checkout / "assets" / "version.txt"
        version = version_file.read_text().strip() if version_file.is_file() else TORCHTITAN_VERSION
        if version != TORCHTITAN_VERSION:
            raise ValueError(
                f"TORCHTITAN_ROOT={env['TORCHTITAN_ROOT']} is torchtitan {version}, needs {TORCHTITAN_VERSION}: "
                f"check out its tag v{TORCHTITAN_VERSION}"
            )
        paths.append(str(checkout))
    if env.get("PYTHONPATH"):
        paths.append(env["PYTHONPATH"])
    threads = str(max(1, machine.cores // processes))
    defaults = {"OMP_NUM_THREADS": threads, "PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"}
    # Files in the folder where the user stands must not shadow installed packages (Python 3.11 and later).
    defaults["PYTHONSAFEPATH"] = "1"
    return {**defaults, **env, "PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    """Run the job that the environment and the command line ask for; exit as it does."""
    try:
        sys.exit(_launch(sys.argv[1:]))
    except KeyboardInterrupt:
        # Outside the job's run, which is told to end.
        sys.exit(INTERRUPTED)


def _launch(flags: list[str]) -> int:
    if flags and flags[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    try:
        job = make_job(os.environ, flags, this_machine())
        job.log.parent.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: the log folder (LOG_DIR) cannot be made: {error}")
    return run(job)


if __name__ == "__main__":
    main()
