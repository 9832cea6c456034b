"""What scripts/compare.sh runs: one job in bf16 (twice), MXFP8 dense, experts only, and both, and a report on them.

All runs share seed, data, configuration and machine, and go through the launcher of llama4.sh, whose environment
variables count here too.
"""

import argparse
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
from mxfp8_titan.launch import ROOT, Job, Machine, check, make_job, run, this_machine
from mxfp8_titan.report.comparison import AGAIN, BASELINE, Run, make_rows
from mxfp8_titan.report.draw import draw_breakdowns, draw_losses, draw_speeds
from mxfp8_titan.report.facts import fingerprint, gather_facts, sources_hash
from mxfp8_titan.report.inventory import read_inventory, tokens_per_step
from mxfp8_titan.report.limits import GemmSpeedUps, parse_speed_ups, read_speed_ups
from mxfp8_titan.report.metrics import read_metrics
from mxfp8_titan.report.tables import as_json, as_markdown, as_text, breakdown_table, speed_table, state_table
from mxfp8_titan.report.trace import read_trace

DENSE = "--model.converters=mx"
EXPERTS = f"{DENSE} --mx.moe_fqns_prototype=experts"
VARIANTS = {
    BASELINE: "",
    AGAIN: "",
    "dense": DENSE,
    "experts": f"{EXPERTS} --mx.no-dense",
    "both": EXPERTS,
}
ON_ONE_PROCESS = (
    "--training.global_batch_size=-1",
    *(f"--parallelism.{what}_parallel_degree=1" for what in
      ("tensor", "pipeline", "context", "expert", "expert_tensor")),
    *(f"--parallelism.data_parallel_{what}_degree=1" for what in ("shard", "replicate")),
)  # fmt: skip
GEMM_RESULTS = ROOT / "docs" / "benchmarks" / "gemm.json"
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


def parse(args: list[str]) -> Settings:
    """The settings in `args`. Ends the process with a message for arguments that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="compare.sh",
        allow_abbrev=False,
        description="Runs one torchtitan job in bf16 (twice, for the noise), MXFP8 dense, experts only and both, and "
        "reports speed, memory and loss beside each other. NGPU, CONFIG_FILE, CUDA_VISIBLE_DEVICES and "
        "TORCHTITAN_ROOT count as for llama4.sh.",
    )
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS", help="a further run")
    parser.add_argument("--only", default="", metavar="A,B", help="these runs, beside bf16, and no others")
    parser.add_argument("--flags", default="", help="torchtitan flags for every run, quoted as in a shell")
    parser.add_argument("--steps", type=int, default=50, help="steps of each run (default 50)")
    parser.add_argument("--log-freq", type=int, default=5, help="steps between measurements (default 5)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps that are not measured (default 10)")
    parser.add_argument("--seed", type=int, default=42, help="seed of every run (default 42)")
    parser.add_argument("--trace-steps", type=int, default=3, help="steps traced after those, 0 for none (default 3)")
    parser.add_argument("--hang-after", type=int, default=600, help="end a run silent for so many s (default 600)")
    parser.add_argument("--gemm-speed-ups", default="", metavar="dense=X,grouped=Y", help="FP8 GEMM rates over bf16, "
                        "for the limits (default: docs/benchmarks/gemm.json, where it is of this GPU)")  # fmt: skip
    parser.add_argument(
        "--commit", default="", help="what the report names, for a copy of the tree without its history"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "logs" / "compare",
                        help="folder for runs and report (default logs/compare)")  # fmt: skip
    parser.add_argument("--cold", action="store_true", help="start every run with empty compile caches")
    # argparse takes a value of one word that begins with a dash, --flags --compile.enable, for a flag of its own.
    if "--flags" in args[:-1]:
        at = args.index("--flags")
        args = [*args[:at], f"--flags={args[at + 1]}", *args[at + 2 :]]
    given = parser.parse_args(args)
    variants = dict(VARIANTS)
    for item in given.variant:
        name, equals, flags = item.partition("=")
        if not (name and equals) or not name.replace("_", "").replace("-", "").isalnum():
            parser.error(f"--variant {item!r}: needs NAME=FLAGS, the name of letters, digits, - and _")
        variants[name] = flags
    only = [name for name in given.only.split(",") if name]
    unknown = [name for name in only if name not in variants]
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}; runs are {', '.join(variants)}")
    if only:
        variants = {name: flags for name, flags in variants.items() if name == BASELINE or name in only}
    if min(given.log_freq, given.warm_up) < 1:
        parser.error("--log-freq and --warm-up need whole numbers from 1 up")
    needed = given.warm_up + 2 * given.log_freq
    if given.steps < needed:
        parser.error(f"--steps {given.steps}, needs {needed} or more: --warm-up {given.warm_up} and two intervals of "
                     f"--log-freq {given.log_freq}")  # fmt: skip
    if given.trace_steps < 0 or given.hang_after < 1:
        parser.error("--trace-steps needs a whole number from 0 up, --hang-after from 1 up")
    try:
        speed_ups = parse_speed_ups(given.gemm_speed_ups) if given.gemm_speed_ups else None
    except ValueError as error:
        parser.error(str(error))
    return Settings(
        variants=variants,
        common=given.flags,
        steps=given.steps,
        log_freq=given.log_freq,
        warm_up=given.warm_up,
        seed=given.seed,
        trace_steps=given.trace_steps,
        hang_after=given.hang_after,
        speed_ups=speed_ups,
        out=given.out.absolute(),
        cold=given.cold,
        commit=given.commit,
    )


def compare(settings: Settings, machine: Machine) -> int:
    """Run what has not been run yet, then write the report. 0, or the exit code of the run that failed."""
    settings.out.mkdir(parents=True, exist_ok=True)
    # The step between those that are measured and those that are traced starts the profiler.
    traced = 1 + settings.trace_steps if settings.trace_steps else 0
    common = [
        f"--training.steps={settings.steps + traced}",
        f"--metrics.log_freq={settings.log_freq}",
        f"--debug.seed={settings.seed}",
        *shlex.split(settings.common),
    ]
    facts = gather_facts(ROOT, machine.gpus, machine.cores, settings.commit)
    facts["compile caches"] = "empty before each run" if settings.cold else "as they were"
    sources = sources_hash(ROOT)
    if not machine.gpus:
        common += seed_checkpoint(settings, machine, common)
    jobs = {
        name: variant_job(settings, machine, name, [*common, *shlex.split(flags)])
        for name, flags in settings.variants.items()
    }
    done = {}
    for name, job in jobs.items():
        config = Path(flag_value(job.command, "job.config_file") or "")
        done[name] = job.log.parent / f"done-{fingerprint(job.command, config, facts, sources, settings.cold)}"
    # All of them before the first, which removes what earlier runs of its name left.
    for name, job in jobs.items():
        code = 0 if done[name].exists() else check(job)
        if code:
            print(f"error: {name} cannot start. Nothing was run, and what {settings.out} holds is as it was.",
                  file=sys.stderr)  # fmt: skip
            return code
    for number, (name, job) in enumerate(jobs.items(), 1):
        place = f"[{number}/{len(jobs)}] {name}"
        if done[name].exists():
            print(f"{place}: kept from {job.log.parent}", flush=True)
            continue
        print(f"{place}: {settings.steps} steps{f' and {traced} for the trace' if traced else ''}", flush=True)
        code = run_variant(replace(job, check=[]), settings)
        if code:
            print(f"error: {name} failed; no report. {tail(job.log)}", file=sys.stderr)
            return code
        done[name].touch()
    write_report(settings, [finished(settings, name, job) for name, job in jobs.items()], facts)
    return 0


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


def run_variant(job: Job, settings: Settings) -> int:
    """Run `job` afresh, compile caches empty if the settings say so; its exit code."""
    folder = job.log.parent
    for stale in [*folder.glob("done-*"), folder / "metrics.jsonl", trace_of(folder), job.log]:
        stale.unlink(missing_ok=True)
    cache = folder / "cache"
    # Also of a cold run that was stopped.
    shutil.rmtree(cache, ignore_errors=True)
    if settings.cold:
        env = {**job.env, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        job = replace(job, env=env)
    with ended_when_silent(job.log, settings.hang_after):
        code = run(job)
    shutil.rmtree(cache, ignore_errors=True)
    return code


@contextmanager
def ended_when_silent(log: Path, seconds: float) -> Iterator[None]:
    """Tell this process to end, which ends the run it waits for, when `log` gets no new line for `seconds`."""
    over = threading.Event()

    def watch() -> None:
        size, since = -1, time.monotonic()
        while not over.wait(min(1.0, seconds / 4)):
            now = log.stat().st_size if log.exists() else -1
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > seconds:
                print(f"error: no output for {seconds} s: the run hangs and is ended", file=sys.stderr, flush=True)
                # To the main thread, so that its waiting for output is interrupted.
                signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def tail(log: Path) -> str:
    """The end of a log, and where all of it is."""
    if not log.exists():
        return "It left no log."
    lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines)])


def seed_checkpoint(settings: Settings, machine: Machine, common: list[str]) -> list[str]:
    """Flags that start every run from one checkpoint, written by one process: torch draws the same initial values on
    every rank of a CPU."""
    folder = settings.out / f"seed-{settings.seed}"
    start = ["--checkpoint.enable", f"--checkpoint.initial_load_path={folder / 'checkpoint' / 'step-0'}"]
    # Nothing is saved: these runs are for the report.
    start.append("--checkpoint.load_only")
    if not (folder / "checkpoint" / "step-0" / ".metadata").exists():
        print("writing a seed checkpoint that every run starts from", flush=True)
        flags = [*common, *ON_ONE_PROCESS, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
        flags.append(f"--job.dump_folder={folder}")
        job = make_job({**os.environ, "EXTRA_ARGS": "", "NGPU": "1", "LOG_DIR": str(folder)}, flags, machine)
        code = run(job)
        if code:
            sys.exit(code)
    return start


def finished(settings: Settings, name: str, job: Job) -> Run:
    """What a finished run left behind."""
    folder = job.log.parent
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


def portable(command: list[str]) -> list[str]:
    """The command as it runs in any checkout's root: the interpreter by name, files of this one by relative paths."""
    python, *words = command
    return [Path(python).name, *(word.replace(f"{ROOT}{os.sep}", "") for word in words)]


def write_report(settings: Settings, runs: list[Run], facts: dict[str, str]) -> None:
    """report.md, report.json and the pictures in the comparison's folder; the tables on the terminal."""
    speed_ups = settings.speed_ups or read_speed_ups(GEMM_RESULTS, facts["gpu"])
    rows = make_rows(runs, settings.warm_up, facts["gpu"], speed_ups)
    out = settings.out
    draw_speeds(rows, out / "speed.png")
    draw_losses({run.name: run.steps for run in runs}, out / "loss.png")
    breakdowns = {run.name: run.breakdown for run in runs if run.breakdown}
    (out / "breakdown.png").unlink(missing_ok=True)
    if breakdowns:
        draw_breakdowns(breakdowns, out / "breakdown.png")
    (out / "report.json").write_text(as_json(runs, rows, facts, speed_ups))
    (out / "report.md").write_text(as_markdown(runs, rows, facts, speed_ups))
    for table in (speed_table(rows), state_table(rows), breakdown_table(runs)):
        if table:
            print(f"\n{as_text(table)}")
    print(f"\nreport: {out / 'report.md'}")


def main() -> None:
    """Compare as the command line asks; exit as the first run that fails, or 0."""
    try:
        sys.exit(compare(parse(sys.argv[1:]), this_machine()))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
