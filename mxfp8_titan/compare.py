"""What scripts/compare.sh runs: one job in bf16 (twice), MXFP8 dense, experts only, and both, and a report on them.

All runs share seed, data, configuration and machine, and go through the launcher of llama4.sh, whose environment
variables count here too.
"""

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from mxfp8_titan.launch import ROOT, Job, Machine, make_job, run, this_machine
from mxfp8_titan.report.comparison import (
    BASELINE,
    Logged,
    as_json,
    as_markdown,
    as_text,
    bf16_peak,
    make_row,
    read_metrics,
)
from mxfp8_titan.report.draw import draw_losses, draw_speeds

DENSE = "--model.converters=mx"
EXPERTS = f"{DENSE} --mx.moe_fqns_prototype=experts"
VARIANTS = {
    BASELINE: "",
    f"{BASELINE}_again": "",
    "dense": DENSE,
    "experts": f"{EXPERTS} --mx.no-dense",
    "both": EXPERTS,
}
_MXFP8_LINE = "MXFP8: "


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
    out: Path
    cold: bool


def parse(args: list[str]) -> Settings:
    """The settings in `args`. Ends the process with a message for arguments that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="compare.sh",
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
    parser.add_argument("--out", type=Path, default=ROOT / "logs" / "compare", help="folder for runs and report")
    parser.add_argument("--cold", action="store_true", help="start every run with empty compile caches")
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
    if given.steps < given.warm_up + 2 * given.log_freq or min(given.log_freq, given.warm_up) < 1:
        parser.error(f"--steps {given.steps} leaves no two intervals of {given.log_freq} after warm-up {given.warm_up}")
    return Settings(
        variants, given.flags, given.steps, given.log_freq, given.warm_up, given.seed, given.out.absolute(), given.cold
    )


def compare(settings: Settings, machine: Machine) -> int:
    """Run what has not been run yet, then write the report. 0, or the exit code of the run that failed."""
    settings.out.mkdir(parents=True, exist_ok=True)
    common = [
        f"--training.steps={settings.steps}",
        f"--metrics.log_freq={settings.log_freq}",
        f"--debug.seed={settings.seed}",
        *shlex.split(settings.common),
    ]
    facts = gather_facts(machine)
    if not machine.gpus:
        common += seed_checkpoint(settings, machine, common)
    steps: dict[str, list[Logged]] = {}
    commands: dict[str, str] = {}
    logs: dict[str, str] = {}
    for number, (name, flags) in enumerate(settings.variants.items(), 1):
        job = variant_job(settings, machine, name, [*common, *shlex.split(flags)])
        commands[name] = shlex.join(job.command)
        folder = job.log.parent
        done = folder / f"done-{fingerprint(job, facts, settings)}"
        if done.exists():
            print(f"[{number}/{len(settings.variants)}] {name}: kept from {folder}", flush=True)
        else:
            print(f"[{number}/{len(settings.variants)}] {name}: {settings.steps} steps", flush=True)
            code = run_variant(job, settings.cold)
            if code:
                print(f"error: {name} failed; no report. Its log: {job.log}", file=sys.stderr)
                return code
            done.touch()
        steps[name] = read_metrics(folder / "metrics.jsonl")
        logs[name] = job.log.read_text(errors="replace")
    write_report(settings, steps, commands, logs, facts, machine)
    return 0


def variant_job(settings: Settings, machine: Machine, name: str, flags: list[str]) -> Job:
    """The launcher's job for one run, its log and metrics in a folder of its own."""
    folder = settings.out / name
    flags = [*flags, f"--mx.metrics_file={folder / 'metrics.jsonl'}", f"--job.dump_folder={folder}"]
    job = make_job({**os.environ, "EXTRA_ARGS": "", "LOG_DIR": str(folder)}, flags, machine)
    command = [f"--log-dir={folder / 'ranks'}" if arg.startswith("--log-dir=") else arg for arg in job.command]
    return replace(job, command=command, log=folder / "run.log")


def run_variant(job: Job, cold: bool) -> int:
    """Run `job` afresh, compile caches empty if `cold`; its exit code."""
    folder = job.log.parent
    for stale in [*folder.glob("done-*"), folder / "metrics.jsonl"]:
        stale.unlink(missing_ok=True)
    if cold:
        cache = folder / f"cache-{time.time_ns()}"
        env = {**job.env, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        job = replace(job, env=env)
    return run(job)


def seed_checkpoint(settings: Settings, machine: Machine, common: list[str]) -> list[str]:
    """Flags that start every run from one checkpoint, written by one process: torch draws the same initial values on
    every rank of a CPU."""
    folder = settings.out / f"seed-{settings.seed}"
    start = ["--checkpoint.enable", f"--checkpoint.initial_load_path={folder / 'checkpoint' / 'step-0'}"]
    start.append(f"--checkpoint.interval={settings.steps + 1}")
    if not (folder / "checkpoint" / "step-0" / ".metadata").exists():
        print("writing a seed checkpoint that every run starts from", flush=True)
        flags = [*common, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint", f"--job.dump_folder={folder}"]
        job = make_job({**os.environ, "EXTRA_ARGS": "", "NGPU": "1", "LOG_DIR": str(folder)}, flags, machine)
        code = run(job)
        if code:
            sys.exit(code)
    return start


def fingerprint(job: Job, facts: dict[str, str], settings: Settings) -> str:
    """What a finished run must share with this one to be kept: commit, machine, versions, flags."""
    same = {key: value for key, value in facts.items() if key != "date"}
    return hashlib.sha256(repr((job.command, same, settings.cold)).encode()).hexdigest()[:16]


def gather_facts(machine: Machine) -> dict[str, str]:
    """Where and with what the runs are made."""
    import torch

    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    ).stdout
    gpu = f"{machine.gpus} x {torch.cuda.get_device_name()}" if machine.gpus else f"none, {machine.cores} CPU cores"
    peak = bf16_peak(gpu)
    return {
        "gpu": gpu,
        "bf16 peak": f"{peak[0]}, {peak[1] / 1e12:,.0f} TFLOP/s dense" if peak else "unknown for this device",
        "torch": torch.__version__,
        "triton": version("triton"),
        "torchtitan": version("torchtitan"),
        "commit": (commit.strip() or "unknown") + (" with changes" if changed else ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_report(
    settings: Settings,
    steps: dict[str, list[Logged]],
    commands: dict[str, str],
    logs: dict[str, str],
    facts: dict[str, str],
    machine: Machine,
) -> None:
    """report.md, report.json, speed.png and loss.png in the comparison's folder; the table on the terminal."""
    rows = [
        make_row(
            name, logged, steps[BASELINE], settings.warm_up, tokens_per_step(logs[name]), facts["gpu"],
            converted_in(logs[name]),
        )
        for name, logged in steps.items()
    ]  # fmt: skip
    draw_speeds(rows, settings.out / "speed.png")
    draw_losses(steps, settings.out / "loss.png")
    (settings.out / "report.json").write_text(as_json(rows, steps, facts, commands))
    (settings.out / "report.md").write_text(as_markdown(rows, facts, commands))
    print(f"\n{as_text(rows)}\n\nreport: {settings.out / 'report.md'}")


def converted_in(log: str) -> str:
    """'30 linears, 3 expert modules' from the converter's summary, or 'nothing'."""
    line = next((line for line in log.splitlines() if _MXFP8_LINE in line and "converted" in line), "")
    return line.partition(_MXFP8_LINE)[2].partition(" converted")[0].replace(" and", ",") or "nothing"


def tokens_per_step(log: str) -> int:
    """Tokens one device sees in a step, from the line with which torchtitan's Trainer starts."""
    words = next(line for line in log.splitlines() if "Trainer is initialized with local batch size" in line)
    numbers = {key: int(words.partition(key)[2].split(",")[0].split("(")[0]) for key in
               ("local batch size ", "gradient accumulation steps ", "sequence length ")}  # fmt: skip
    return numbers["local batch size "] * numbers["gradient accumulation steps "] * numbers["sequence length "]


def main() -> None:
    """Compare as the command line asks; exit as the first run that fails, or 0."""
    try:
        sys.exit(compare(parse(sys.argv[1:]), this_machine()))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
