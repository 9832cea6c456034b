"""`python -m mxfp8_titan.train` (under torchrun for several processes): torchtitan's own main with this plugin's
hook already given, usable without a GPU, and with one clear line for a job it refuses.

On a GPU `-m torchtitan.train` with the hook on the command line or in the TOML trains the same.

Without a GPU, torch draws the same initial values on every rank, so that with two processes one half of a sharded
weight equals the other. Comparisons on a CPU start from a seed checkpoint made by one process.
"""

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

CONFIG_HOOK = "--job.custom_config_module=mxfp8_titan.job_config"


def main() -> None:
    """Check the job on the command line, then train it with torchtitan's Trainer."""
    prepare_host()
    check_or_refuse(parse_or_refuse(sys.argv[1:]))
    import torchtitan.train

    torchtitan.train.main(torchtitan.train.Trainer)


def prepare_host() -> None:
    """What must be in place before torchtitan is imported: its arguments, defaults of a single process, the CPU."""
    # torchtitan.config binds sys.argv when it is imported.
    sys.argv[1:] = add_config_hook(sys.argv[1:])
    if "RANK" not in os.environ:
        # What torchrun would set; port 0 takes a free one.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        os.environ.update(alone)
    if not torch.cuda.is_available():
        from mxfp8_titan import cpu_host

        cpu_host.install()


def add_config_hook(args: list[str]) -> list[str]:
    """`args` with the hook for the [mx] section, unless they or their TOML name a config module of their own."""
    keys = [arg.split("=")[0].replace("-", "_") for arg in args]
    if "__job.custom_config_module" in keys or _toml_names_a_config_module(args, keys):
        return list(args)
    return [CONFIG_HOOK, *args]


def _toml_names_a_config_module(args: list[str], keys: list[str]) -> bool:
    if "__job.config_file" not in keys:
        return False
    index = keys.index("__job.config_file")
    path = args[index].split("=", 1)[1] if "=" in args[index] else " ".join(args[index + 1 : index + 2])
    import tomli

    try:
        with open(path, "rb") as file:
            job = tomli.load(file).get("job", {})
    except (OSError, tomli.TOMLDecodeError):
        # torchtitan reads the file again and says what is wrong with it.
        return False
    return isinstance(job, dict) and bool(job.get("custom_config_module"))


def parse_or_refuse(args: list[str]) -> "JobConfig":
    """The job's configuration. Flags or a TOML that torchtitan cannot take end here, with exit code 2."""
    from mxfp8_titan import preflight

    try:
        return preflight.parse(args)
    except (ValueError, TypeError, OSError, ImportError) as error:
        refuse(error)


def check_or_refuse(job_config: "JobConfig") -> None:
    """End here, with one line and exit code 2, for a job that would fail after start-up."""
    from mxfp8_titan import preflight

    try:
        preflight.check(job_config)
    except (ValueError, TypeError) as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """Print `error` on one line and exit with code 2."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (rank {rank})"
    print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
