"""What scripts/compare.sh runs: one job in bf16 (twice), MXFP8 dense, experts only, and both, and a report on them.

All runs share seed, data, configuration and machine, and go through the launcher of llama4.sh, whose environment
variables count here too, but for STEPS and EXTRA_ARGS.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from mxfp8_titan.compare_runs import (
    FROM_SEED,
    NOT_YET,
    SEED,
    Settings,
    alone_in,
    done_marker,
    finished,
    flags_of,
    run_variant,
    seed_checkpoint,
    stamp,
    tail,
    variant_job,
)
from mxfp8_titan.job_args import flag_values
from mxfp8_titan.launch import INTERRUPTED, ROOT, Machine, check_all, execute, this_machine
from mxfp8_titan.report.comparison import AGAIN, BASELINE, Run, make_rows
from mxfp8_titan.report.draw import draw_breakdowns, draw_losses, draw_speeds
from mxfp8_titan.report.facts import gather_facts
from mxfp8_titan.report.finish import STOPS, finish
from mxfp8_titan.report.limits import parse_speed_ups, read_speed_ups
from mxfp8_titan.report.tables import as_json, as_markdown, as_text, breakdown_table, speed_table, state_table

DENSE = "--model.converters=mx"
EXPERTS = f"{DENSE} --mx.moe_fqns_prototype=experts"
VARIANTS = {
    BASELINE: "",
    AGAIN: "",
    "dense": DENSE,
    "experts": f"{EXPERTS} --mx.no-dense",
    "both": EXPERTS,
}
OURS = {
    "training.steps": "--steps",
    "metrics.log_freq": "--log-freq",
    "debug.seed": "--seed",
    "mx.trace_steps": "--trace-steps",
    **dict.fromkeys(("job.dump_folder", "mx.metrics_file", "mx.trace_file", "checkpoint.folder"), "--out"),
}
"""torchtitan flags that the comparison sets itself, and what asks it to."""
# Removed before the first run, so that none of an earlier comparison stands beside what this one leaves.
REPORT = ("report.md", "report.json", "speed.png", "loss.png", "breakdown.png")
GEMM_RESULTS = ROOT / "docs" / "benchmarks" / "gemm.json"


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
        if name in (BASELINE, AGAIN) or name.startswith(SEED):
            parser.error(f"--variant {item!r}: {name} is a name of the comparison's own")
        variants[name] = flags
    for option, flags in [("--flags", given.flags), *((f"--variant {name}", f) for name, f in variants.items())]:
        try:
            words = shlex.split(flags)
            taken = next((key for key in OURS if flag_values(words, key)), None)
        except ValueError as error:
            parser.error(f"{option} {flags!r}: {error}")
        if taken:
            parser.error(f"{option} sets {taken}, which the comparison sets: use {OURS[taken]}")
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
    """Run what has not been run yet, then write the report. 0, or the exit code of the run that failed.

    Raises: ValueError for a folder or variables that cannot be used, and for runs that cannot be reported.
    """
    ignored = [name for name in ("STEPS", "EXTRA_ARGS") if os.environ.get(name)]
    if ignored:
        raise ValueError(f"{' and '.join(ignored)} set, for llama4.sh; compare.sh takes --steps and --flags")
    with alone_in(settings.out) as keep_open:
        return _compare_alone(settings, machine, keep_open)


def _compare_alone(settings: Settings, machine: Machine, keep_open: tuple[int, ...]) -> int:
    facts = gather_facts(ROOT, machine.gpus, machine.cores, settings.commit)
    facts["compile caches"] = "empty before each run" if settings.cold else "as they were"
    seed, start = (None, []) if machine.gpus else seed_checkpoint(settings, machine, facts)
    jobs = {
        name: variant_job(settings, machine, name, [*flags_of(settings, flags), *start])
        for name, flags in settings.variants.items()
    }
    stamps = {name: stamp(job.command, facts, settings.cold) for name, job in jobs.items()}
    pending = [name for name, job in jobs.items() if not done_marker(job, stamps[name]).exists()]
    if pending:
        print(f"checking {', '.join(pending)}", flush=True)
    # All of them before the first, which removes what earlier runs of its name left; as they will start, but for the
    # seed checkpoint, which is not there yet.
    known = [*(flag for flag in start if not flag.startswith(FROM_SEED)), NOT_YET]
    checked = {"the seed checkpoint": seed} if seed and pending else {}
    for name in pending:
        checked[name] = variant_job(settings, machine, name, [*flags_of(settings, settings.variants[name]), *known])
    for name, (code, said) in zip(checked, check_all(list(checked.values())), strict=True):
        sys.stderr.write(said)
        if code:
            print(f"error: {name} cannot start. Nothing was run, and what {settings.out} holds is as it was.",
                  file=sys.stderr)  # fmt: skip
            return code
    for file in REPORT:
        (settings.out / file).unlink(missing_ok=True)
    if seed and pending:
        print("writing a seed checkpoint that every run starts from", flush=True)
        code = finish(seed.log, execute(seed, keep_open))
        if code:
            return code
    for number, (name, job) in enumerate(jobs.items(), 1):
        place = f"[{number}/{len(jobs)}] {name}"
        if name not in pending:
            print(f"{place}: kept from {job.log.parent}", flush=True)
            continue
        extra = f" and {settings.extra_steps} for the trace" if settings.extra_steps else ""
        print(f"{place}: {settings.steps} steps{extra}", flush=True)
        code = run_variant(job, settings, keep_open)
        if code in {128 + number for number in STOPS}:
            print(f"{name} is not finished; no report. The same command goes on: finished runs are kept.")
            return code
        if code:
            print(f"error: {name} failed; no report. {tail(job.log)}", file=sys.stderr)
            return code
        if stamp(job.command, facts, settings.cold) != stamps[name]:
            print(f"error: the TOML or this project's sources changed before {name} ended, so that it is not the same "
                  "job as the others; no report", file=sys.stderr)  # fmt: skip
            return 1
        done_marker(job, stamps[name]).touch()
    write_report(settings, [finished(settings, name, job) for name, job in jobs.items()], facts)
    return 0


def write_report(settings: Settings, runs: list[Run], facts: dict[str, str]) -> None:
    """report.md, report.json and the pictures in the comparison's folder; the tables on the terminal."""
    speed_ups = settings.speed_ups or read_speed_ups(GEMM_RESULTS, facts["gpu"])
    rows = make_rows(runs, settings.warm_up, facts["gpu"], speed_ups)
    out = settings.out
    draw_speeds(rows, out / "speed.png")
    draw_losses({run.name: run.steps for run in runs}, out / "loss.png")
    breakdowns = {run.name: run.breakdown for run in runs if run.breakdown}
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
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        # Outside a run, which is told to end.
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
