"""`python -m mxfp8_titan.train` (under torchrun for several processes): torchtitan's own main with this plugin's
hooks already given, usable without a GPU, and with one clear line for a job it refuses.

On a GPU `-m torchtitan.train` with the hooks on the command line or in the TOML trains the same.

Without a GPU, torch draws the same initial values on every rank, so that with two processes one half of a sharded
weight equals the other. Comparisons on a CPU start from a seed checkpoint made by one process.
"""

import os
import sys
from typing import NoReturn

import torch

CONFIG_HOOK = "--job.custom_config_module=mxfp8_titan.job_config"


def main() -> None:
    prepare_host()
    check_job(sys.argv[1:])
    import torchtitan.train

    torchtitan.train.main(torchtitan.train.Trainer)


def prepare_host() -> None:
    """What must be in place before torchtitan is imported: its arguments, defaults of a single process, the CPU."""
    # torchtitan.config binds sys.argv when it is imported.
    sys.argv[1:] = add_config_hook(sys.argv[1:])
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    if not torch.cuda.is_available():
        from mxfp8_titan import cpu_host

        cpu_host.install()


def add_config_hook(args: list[str]) -> list[str]:
    """`args` with the hook for the [mx] section, unless they name a module of their own."""
    given = any(arg.split("=")[0].replace("-", "_") == "__job.custom_config_module" for arg in args)
    return list(args) if given else [CONFIG_HOOK, *args]


def parsed_flags(args: list[str]):
    """The job's configuration. Flags or a TOML that torchtitan cannot take end here, with exit code 2."""
    from mxfp8_titan import preflight

    try:
        return preflight.parse(args)
    except (ValueError, TypeError, OSError) as error:
        refuse(error)


def check_job(args: list[str]) -> None:
    """End here, with one line and exit code 2, for a job that would fail after start-up."""
    from mxfp8_titan import preflight

    job_config = parsed_flags(args)
    try:
        preflight.check(job_config)
    except (ValueError, TypeError) as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """Print `error` on one line (on the first rank only) and exit with code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
